# pyright: reportUnknownMemberType=false, reportUnknownLambdaType=false, reportUnknownArgumentType=false

import copy
import functools
import importlib
import inspect
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

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

    def post_forward(self, module: nn.Module, output: torch.Tensor) -> torch.Tensor:
        assert torch.is_grad_enabled()  # it is forward alone that runs without
        return output


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


def test_hooks_of_all_modules_are_removed() -> None:
    model = nn.Sequential(Scale(), nn.Sequential(Scale(), nn.Identity()))
    for remove in (remove_hook_from_submodules, functools.partial(remove_hook_from_module, recurse=True)):
        for module in model.modules():
            add_hook_to_module(module, ModelHook())
        remove(model)
        assert not any(hasattr(module, "_hf_hook") for module in model.modules())
    for module in (model, model[0]):
        add_hook_to_module(module, ModelHook())
    remove_hook_from_module(model)
    assert [hasattr(module, "_hf_hook") for module in model.modules()] == [False, True, False, False, False]


# --- several hooks ------------------------------------------------------------------------------


def recorded(names: str, module: nn.Module, fail_in: str = "") -> tuple[Any, list[str]]:
    """A module with hooks that write down what happens to them. The second may fail."""
    events: list[str] = []
    for name in names:
        add_hook_to_module(module, Recorder(name, events, fail_in if name == "b" else ""), append=True)
    assert events == [f"{name}.init" for name in names]
    events.clear()
    return module, events


def test_a_replaced_hook_is_detached() -> None:
    module, events = recorded("a", nn.Identity())
    add_hook_to_module(module, Recorder("b", events))
    module(X)
    assert events == ["a.detach", "b.init", "b.pre", "b.post"]


def test_an_appended_hook_leaves_the_first_one_alone() -> None:
    module, events = recorded("abc", nn.Identity())
    module(X)
    remove_hook_from_module(module)
    assert events == [
        *("a.pre", "b.pre", "c.pre", "c.post", "b.post", "a.post"),
        *("c.detach", "b.detach", "a.detach"),
    ]


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


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_exceptions_call_after_error(error: BaseException) -> None:
    module, events = recorded("ab", Failing(error))
    for _ in range(2):
        with pytest.raises(type(error)):
            module(X)
    module.error = None
    assert module(X) is None  # an output like any other
    # torch runs no hooks after an interrupt: such a call ends before the next one begins.
    failed = ["a.pre", "b.pre", "b.error", "a.error"]
    assert events == [*failed, *failed, "a.pre", "b.pre", "b.post", "a.post"]


def test_a_forward_inside_of_an_except_clause_has_succeeded() -> None:
    module, events = recorded("a", Failing())
    try:
        raise MemoryError
    except MemoryError:
        assert module(X) is None
        module.error = ValueError("no")
        with pytest.raises(ValueError, match="no"):
            module(X)
    assert events == ["a.pre", "a.post", "a.pre", "a.error"]


@pytest.mark.parametrize(
    ("fail_in", "expected"),
    [
        ("pre", ["a.pre", "b.pre", "b.error", "a.error"]),
        ("post", ["a.pre", "b.pre", "c.pre", "c.post", "b.post", "a.error"]),
    ],
)
def test_started_members_get_after_error_if_another_fails(fail_in: str, expected: list[str]) -> None:
    module, events = recorded("abc", nn.Identity(), fail_in)
    with pytest.raises(RuntimeError, match=f"b fails in {fail_in}"):
        module(X)
    assert events == expected


@pytest.mark.parametrize(("prepend", "expected"), [(True, []), (False, ["a.pre", "a.error"])])
def test_a_hook_that_was_not_started_gets_no_after_error(prepend: bool, expected: list[str]) -> None:
    def fail(module: nn.Module, args: tuple[Any, ...]) -> None:
        raise ValueError("too early")

    module, events = recorded("a", nn.Identity())
    module.register_forward_pre_hook(fail, prepend=prepend)
    with pytest.raises(ValueError, match="too early"):
        module(X)
    assert events == expected


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
    assert torch.equal(module.forward(X), X)  # called directly it passes the hook by
    remove_hook_from_module(module)
    assert (len(module._forward_pre_hooks), len(module._forward_hooks)) == (1, 1)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_take_the_hook_along(again: Callable[[nn.Module], nn.Module]) -> None:
    module = add_hook_to_module(Scale(), Affine())
    add_hook_to_module(module, WithoutGradient(), append=True)
    expected = module(X)
    twin = again(module)
    assert hook_of(twin) is not hook_of(module)
    assert torch.equal(twin(X), expected)
    assert not twin(X).requires_grad
    for _ in range(40):  # torch numbers its hooks, and must not give the number of ours away again
        twin.register_forward_pre_hook(lambda module, args: None)
        twin.register_forward_hook(lambda module, args, output: None)
    assert torch.equal(twin(X), expected)
    with torch.no_grad():
        cast("Scale", twin).weight.fill_(5)
    assert torch.equal(module(X), expected)
    remove_hook_from_module(twin)
    assert torch.equal(twin(X), X * 5)
    assert torch.equal(module(X), expected)


@pytest.fixture
def clean_compiler() -> Any:
    dynamo: Any = importlib.import_module("torch._dynamo")
    dynamo.reset()
    yield
    dynamo.reset()


@pytest.mark.slow
@pytest.mark.usefixtures("clean_compiler")
def test_modules_compile() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2))
    bare = model(X)
    for index in (0, 2):
        add_hook_to_module(model[index], Affine())
    expected = model(X)
    compiled: Any = torch.compile(model, backend="eager")
    assert torch.equal(compiled(X), expected)
    # A forward is one graph, without the hooks.
    first = model[0]
    vars(first)["forward"] = torch.compile(first.forward, backend="eager", fullgraph=True)
    assert torch.equal(model(X), expected)
    del vars(first)["forward"]
    first.compile(backend="eager")
    assert torch.equal(model(X), expected)
    remove_hook_from_submodules(model)
    assert torch.equal(model(X), bare)


def test_threads_are_independent() -> None:
    class Picky(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            together.wait(10)
            if x < 0:
                raise ValueError("negative")
            return x

    together = threading.Barrier(2)
    module, events = recorded("ab", Picky())
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(module, torch.tensor(value)) for value in (1.0, -1.0)]
    assert [type(call.exception()) for call in calls] == [type(None), ValueError]
    assert sorted(events) == sorted(["a.pre", "b.pre"] * 2 + ["a.post", "b.post", "a.error", "b.error"])


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
