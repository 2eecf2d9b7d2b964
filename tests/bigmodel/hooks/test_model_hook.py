# pyright: reportUnknownMemberType=false

import copy
import importlib
import inspect
import io
import pickle
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accelfn.bigmodel import hooks as model_hook
from accelfn.bigmodel.hooks import (
    ModelHook,
    SequentialHook,
    add_hook_to_module,
    hook_of,
    remove_hook_from_module,
    remove_hook_from_submodules,
)

# The compiler looks at each input's gradient, and torch warns of that where it is another module's output.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


class Affine(ModelHook):
    """Adds to the first argument, and multiplies the output."""

    def __init__(self, add: float = 1.0, times: float = 2.0) -> None:
        self.add = add
        self.times = times

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (args[0] + self.add, *args[1:]), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output * self.times


class Recorder(ModelHook):
    """Writes down what happens to it."""

    def __init__(self, name: str, events: list[str], fail_in: str = "") -> None:
        self.name = name
        self.events = events
        self.fail_in = fail_in

    def _note(self, event: str) -> None:
        self.events.append(f"{self.name}.{event}")
        if event == self.fail_in:
            raise RuntimeError(f"{self.name} fails in {event}")

    def init_hook(self, module: nn.Module) -> nn.Module:
        self._note("init")
        return module

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        self._note("pre")
        return args, kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        self._note("post")
        return output

    def after_error(self, module: nn.Module) -> None:
        self._note("error")

    def detach_hook(self, module: nn.Module) -> nn.Module:
        self._note("detach")
        return module


class WithoutGradient(ModelHook):
    no_grad = True


class Scale(nn.Module):
    """A module with arguments of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: torch.Tensor, power: int = 1, *, negative: bool = False) -> torch.Tensor:
        """Multiply."""
        value = (x * self.weight) ** power
        return -value if negative else value


class Failing(nn.Module):
    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: torch.Tensor) -> torch.Tensor | None:
        if self.error is not None:
            raise self.error
        return None


X = torch.tensor([1.0, -2.0, 0.5])


# --- as in Accelerate ----------------------------------------------------------------


def ours() -> Any:
    return model_hook


def theirs() -> Any:
    return pytest.importorskip("accelerate.hooks")


LIBRARIES = pytest.mark.parametrize("library", [ours, theirs], ids=["ours", "accelerate"])


@LIBRARIES
@pytest.mark.parametrize("append", [False, True])
def test_a_second_hook_replaces_or_joins_the_first(library: Callable[[], Any], append: bool) -> None:
    hooks = library()

    class Plus(hooks.ModelHook):
        def __init__(self, number: float) -> None:
            self.number = number

        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return (args[0] * 10 + self.number,), kwargs

    module = nn.Identity()
    hooks.add_hook_to_module(module, Plus(1))
    hooks.add_hook_to_module(module, Plus(2), append=append)
    assert module(torch.tensor(0.0)).item() == (12.0 if append else 2.0)
    assert isinstance(cast("Any", module)._hf_hook, hooks.SequentialHook) is append


@LIBRARIES
def test_forward_without_gradients(library: Callable[[], Any]) -> None:
    hooks = library()

    class Without(hooks.ModelHook):
        no_grad = True

        def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
            assert torch.is_grad_enabled()  # it is forward alone that runs without
            return output

    module = hooks.add_hook_to_module(Scale(), Without())
    assert not module(X).requires_grad
    hooks.remove_hook_from_module(module)
    assert module(X).requires_grad


@LIBRARIES
def test_hooks_of_all_modules_are_removed(library: Callable[[], Any]) -> None:
    hooks = library()
    model = nn.Sequential(Scale(), nn.Sequential(Scale(), nn.Identity()))
    for recurse in (False, True):
        for module in model.modules():
            hooks.add_hook_to_module(module, hooks.ModelHook())
        if recurse:
            hooks.remove_hook_from_module(model, recurse=True)
        else:
            hooks.remove_hook_from_submodules(model)
        assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    hooks.add_hook_to_module(model, hooks.ModelHook())
    hooks.add_hook_to_module(model[0], hooks.ModelHook())
    hooks.remove_hook_from_module(model)
    assert [hasattr(module, "_hf_hook") for module in model.modules()] == [False, True, False, False, False]


# --- several hooks ------------------------------------------------------------------------------


def test_a_replaced_hook_is_detached() -> None:
    events: list[str] = []
    module = add_hook_to_module(nn.Identity(), Recorder("a", events))
    add_hook_to_module(module, Recorder("b", events))
    assert events == ["a.init", "a.detach", "b.init"]
    module(X)
    assert events[3:] == ["b.pre", "b.post"]


def test_an_appended_hook_leaves_the_first_one_alone() -> None:
    events: list[str] = []
    module = nn.Identity()
    for name in "abc":
        add_hook_to_module(module, Recorder(name, events), append=True)
    assert events == ["a.init", "b.init", "c.init"]
    hook = hook_of(module)
    assert isinstance(hook, SequentialHook)
    assert [cast("Recorder", member).name for member in hook.hooks] == ["a", "b", "c"]
    module(X)
    assert events[3:] == ["a.pre", "b.pre", "c.pre", "c.post", "b.post", "a.post"]
    remove_hook_from_module(module)
    assert events[9:] == ["c.detach", "b.detach", "a.detach"]


def test_a_sequence_has_no_grad_if_a_member_has() -> None:
    module = add_hook_to_module(Scale(), SequentialHook(ModelHook(), WithoutGradient()))
    assert not module(X).requires_grad
    module = add_hook_to_module(Scale(), ModelHook())
    assert module(X).requires_grad
    add_hook_to_module(module, WithoutGradient(), append=True)
    add_hook_to_module(module, WithoutGradient(), append=True)
    assert not module(X).requires_grad
    assert inspect.signature(module.forward) == inspect.signature(Scale().forward)
    add_hook_to_module(module, ModelHook())
    assert module(X).requires_grad
    assert "forward" not in vars(module)


def test_an_instance_forward_is_restored() -> None:
    def own(x: torch.Tensor, offset: float = 1.0) -> torch.Tensor:
        return x * module.weight + offset

    module = Scale()
    vars(module)["forward"] = own
    add_hook_to_module(module, WithoutGradient())
    assert torch.equal(module(X), X * 3 + 1)
    assert not module(X).requires_grad
    assert inspect.signature(module.forward) == inspect.signature(own)
    remove_hook_from_module(module)
    assert vars(module)["forward"] is own


# --- exceptions ----------------------------------------------------------------------------------


def test_exceptions_call_after_error() -> None:
    events: list[str] = []
    module: Any = Failing(ValueError("no"))
    for name in "ab":
        add_hook_to_module(module, Recorder(name, events), append=True)
    with pytest.raises(ValueError, match="no"):
        module(X)
    assert events[2:] == ["a.pre", "b.pre", "b.error", "a.error"]
    module.error = None
    assert module(X) is None  # an output like any other
    assert events[6:] == ["a.pre", "b.pre", "b.post", "a.post"]


def test_a_forward_inside_of_an_except_clause_has_succeeded() -> None:
    events: list[str] = []
    module = add_hook_to_module(Failing(), Recorder("a", events))
    try:
        raise MemoryError
    except MemoryError:
        assert module(X) is None
        assert events[1:] == ["a.pre", "a.post"]
        vars(module)["error"] = ValueError("no")
        with pytest.raises(ValueError, match="no"):
            module(X)
    assert events[3:] == ["a.pre", "a.error"]


@pytest.mark.parametrize(
    ("fail_in", "expected"),
    [
        ("pre", ["a.pre", "b.pre", "b.error", "a.error"]),
        ("post", ["a.pre", "b.pre", "c.pre", "c.post", "b.post", "a.error"]),
    ],
)
def test_started_members_get_after_error_if_another_fails(fail_in: str, expected: list[str]) -> None:
    events: list[str] = []
    module = nn.Identity()
    for name in "abc":
        hook = Recorder(name, events, fail_in if name == "b" else "")
        add_hook_to_module(module, hook, append=True)
    with pytest.raises(RuntimeError, match=f"b fails in {fail_in}"):
        module(X)
    assert events[3:] == expected


def test_a_hook_that_was_not_started_gets_no_after_error() -> None:
    def first(module: nn.Module, args: tuple[Any, ...]) -> None:
        raise ValueError("too early")

    events: list[str] = []
    module = add_hook_to_module(nn.Identity(), Recorder("a", events))
    handle = module.register_forward_pre_hook(first, prepend=True)
    with pytest.raises(ValueError, match="too early"):
        module(X)
    assert events == ["a.init"]
    handle.remove()
    module.register_forward_pre_hook(first)
    with pytest.raises(ValueError, match="too early"):
        module(X)
    assert events == ["a.init", "a.pre", "a.error"]


def test_an_interrupted_call_ends_before_the_next_one_begins() -> None:
    # torch runs no hooks then
    events: list[str] = []
    module = add_hook_to_module(Failing(KeyboardInterrupt()), Recorder("a", events))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            module(X)
    vars(module)["error"] = None
    module(X)
    assert events[1:] == ["a.pre", "a.error", "a.pre", "a.error", "a.pre", "a.post"]


def test_a_module_may_call_itself() -> None:
    class Halving(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self(x / 2) if x > 1 else x

    events: list[str] = []
    module = add_hook_to_module(Halving(), Recorder("a", events))
    assert module(torch.tensor(4.0)) == 1
    assert events[1:] == ["a.pre"] * 3 + ["a.post"] * 3


# --- bad hooks -----------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", [None, ModelHook, print])
def test_other_objects_are_refused(hook: Any) -> None:
    module = add_hook_to_module(nn.Identity(), Affine())
    with pytest.raises(TypeError, match="add_hook_to_module: hook must be a ModelHook"):
        add_hook_to_module(module, hook)
    with pytest.raises(TypeError, match="SequentialHook: hook must be"):
        SequentialHook(ModelHook(), hook)
    assert isinstance(hook_of(module), Affine)


@pytest.mark.parametrize("returned", [None, (X,), (X, X), ((X,), X)])
def test_pre_forward_must_return_arguments(returned: Any) -> None:
    class Own(ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return returned

    module = add_hook_to_module(nn.Identity(), Own())
    with pytest.raises(TypeError, match=r"Own\.pre_forward must return \(args, kwargs\)"):
        module(X)


def test_a_hook_that_returns_none_keeps_the_output() -> None:
    class Silent(ModelHook):
        def post_forward(self, module: nn.Module, output: Any) -> Any: ...

    module = add_hook_to_module(nn.Identity(), Silent())
    assert module(X) is X
    add_hook_to_module(module, Affine(add=0, times=2), append=True)
    add_hook_to_module(module, Silent(), append=True)
    assert torch.equal(module(X), X * 2)


# --- beside torch --------------------------------------------------------------------------------


def test_torch_hooks_see_the_arguments_of_the_hook() -> None:
    seen: list[torch.Tensor] = []

    def before(module: nn.Module, args: Any) -> None:
        seen.append(args[0])

    def after(module: nn.Module, args: Any, output: Any) -> None:
        seen.append(output)

    module: Any = nn.Identity()
    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)
    add_hook_to_module(module, Affine())
    assert torch.equal(module(X), (X + 1) * 2)
    assert torch.equal(torch.stack(seen), torch.stack([X + 1, X + 1]))
    remove_hook_from_module(module)
    assert (len(module._forward_pre_hooks), len(module._forward_hooks)) == (1, 1)


def test_forward_called_directly_passes_the_hook_by() -> None:
    module = add_hook_to_module(nn.Identity(), Affine())
    assert torch.equal(module.forward(X), X)


def copied(module: nn.Module) -> nn.Module:
    return copy.deepcopy(module)


def pickled(module: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(module))


def saved(module: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("again", [copied, pickled, saved])
def test_copies_take_the_hook_along(again: Callable[[nn.Module], nn.Module]) -> None:
    module = add_hook_to_module(Scale(), Affine())
    add_hook_to_module(module, WithoutGradient(), append=True)
    expected = module(X)
    twin = again(module)
    assert hook_of(twin) is not hook_of(module)
    assert torch.equal(twin(X), expected)
    assert not twin(X).requires_grad
    with torch.no_grad():
        cast("Scale", twin).weight.fill_(5)
    assert torch.equal(module(X), expected)
    remove_hook_from_module(twin)
    assert torch.equal(twin(X), X * 5)
    assert torch.equal(module(X), expected)


NEW_PROCESS = """
import pickle, sys, torch
module = pickle.load(open(sys.argv[1], "rb"))
for _ in range(40):  # torch numbers its hooks, and must not give the number of ours away again
    module.register_forward_pre_hook(lambda module, args: None)
    module.register_forward_hook(lambda module, args, output: None)
print(module(torch.tensor([1.0])).item())
"""


def test_a_hook_reaches_a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A new process has no classes of this file.
    module = nn.Identity()
    for _ in range(20):
        module.register_forward_hook(lambda module, args, output: None).remove()
    add_hook_to_module(module, SequentialHook(ModelHook(), importable("Tripling", monkeypatch)))
    path = tmp_path / "module.pickle"
    path.write_bytes(pickle.dumps(module))
    (tmp_path / "importable_hooks.py").write_text(IMPORTABLE)
    done = subprocess.run(
        [sys.executable, "-c", NEW_PROCESS, str(path)],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parents[3]}"},
    )
    assert done.stdout == "3.0\n", done.stderr


IMPORTABLE = """
from accelfn.bigmodel.hooks import ModelHook

class Tripling(ModelHook):
    def post_forward(self, module, output):
        return output * 3
"""


def importable(name: str, monkeypatch: pytest.MonkeyPatch) -> ModelHook:
    module = types.ModuleType("importable_hooks")
    exec(IMPORTABLE, vars(module))
    monkeypatch.setitem(sys.modules, "importable_hooks", module)
    return vars(module)[name]()


@pytest.fixture
def clean_compiler() -> Any:
    dynamo: Any = importlib.import_module("torch._dynamo")
    dynamo.reset()
    yield
    dynamo.reset()


@pytest.mark.usefixtures("clean_compiler")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_modules_compile(backend: str) -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    bare = model(X)
    for index in (0, 2):
        add_hook_to_module(model[index], Affine())
    expected = model(X)
    compiled: Any = torch.compile(model, backend=backend)
    assert torch.equal(compiled(X), expected)
    # A forward is one graph, without the hooks.
    first = model[0]
    vars(first)["forward"] = torch.compile(first.forward, backend=backend, fullgraph=True)
    assert torch.equal(model(X), expected)
    del vars(first)["forward"]
    first.compile(backend=backend)
    assert torch.equal(model(X), expected)
    remove_hook_from_submodules(model)
    assert torch.equal(model(X), bare)


def test_threads_are_independent() -> None:
    class Meeting(ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            together.wait()
            return args, kwargs

        def post_forward(self, module: nn.Module, output: Any) -> Any:
            ended.append(f"post {float(output)}")

        def after_error(self, module: nn.Module) -> None:
            ended.append("error")

    class Picky(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x < 0:
                raise ValueError("negative")
            return x

    def run(value: float) -> None:
        try:
            module(torch.tensor(value))
        except ValueError:
            ended.append("raised")

    together = threading.Barrier(2)
    ended: list[str] = []
    module = add_hook_to_module(Picky(), SequentialHook(ModelHook(), Meeting()))
    threads = [threading.Thread(target=run, args=(value,)) for value in (1.0, -1.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(ended) == ["error", "post 1.0", "raised"]


# --- laws ----------------------------------------------------------------------------------------

NUMBERS = st.integers(-3, 3).map(float)
HOOKS = st.builds(Affine, NUMBERS, NUMBERS)
STEPS = st.lists(st.tuples(st.sampled_from(["append", "replace", "remove", "copy"]), HOOKS), max_size=8)


@given(steps=STEPS)
def test_hooks_are_functions_around_a_function(steps: list[tuple[str, Affine]]) -> None:
    module = nn.Identity()
    around: list[Affine] = []
    for what, hook in steps:
        match what:
            case "append":
                add_hook_to_module(module, hook, append=True)
                around.append(hook)
            case "replace":
                add_hook_to_module(module, hook)
                around = [hook]
            case "remove":
                remove_hook_from_module(module)
                around = []
            case _:
                module = copy.deepcopy(module)
        value = X
        for one in around:
            value = value + one.add
        for one in reversed(around):
            value = value * one.times
        assert torch.equal(module(X), value)
