# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

import copy
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import torch.utils._device as torch_device
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode

from accelfn.bigmodel.empty import init_empty_weights, init_on_device
from accelfn.errors import ConfigurationError

OUTER = torch.arange(6.0).view(2, 3)
BIG = (600, 700)


class Marked(nn.Parameter):
    """A subclass of parameters, with an attribute."""


def marked() -> nn.Parameter:
    parameter = Marked(torch.ones(2, 3), requires_grad=False)
    vars(parameter)["_is_hf_initialized"] = True
    return parameter


def written_on_first() -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(3, 2))
    return nn.init.orthogonal_(parameter)  # pyright: ignore[reportReturnType]


PARAMETERS: dict[str, Callable[[], nn.Parameter]] = {
    "empty": lambda: nn.Parameter(torch.empty(2, 3)),
    "zeros": lambda: nn.Parameter(torch.zeros(BIG)),
    "normal": lambda: nn.Parameter(torch.empty(BIG).normal_()),
    "computed": lambda: nn.Parameter(0.02 * torch.randn(4, 2)),
    "transposed": lambda: nn.Parameter(torch.rand(3, 5).t()),
    "half": lambda: nn.Parameter(torch.ones(3, dtype=torch.float16)),
    "integers": lambda: nn.Parameter(torch.randint(0, 5, (3,)), requires_grad=False),
    "complex": lambda: nn.Parameter(torch.ones(3, dtype=torch.complex64)),
    "legacy": lambda: nn.Parameter(torch.Tensor(3, 2)),
    "list": lambda: nn.Parameter(torch.tensor([1.0, 2.0])),
    "outer": lambda: nn.Parameter(OUTER),
    "frozen": lambda: nn.Parameter(torch.ones(2), requires_grad=False),
    "marked": marked,
    "first": written_on_first,
    "nothing": lambda: nn.Parameter(),
    "named device": lambda: nn.Parameter(torch.ones(2, device="cpu")),
}


def rotary() -> torch.Tensor:
    return 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8))


BUFFERS: dict[str, Callable[[], torch.Tensor]] = {
    "rotary": rotary,
    "mask": lambda: torch.tril(torch.ones(700, 700, dtype=torch.bool)),
    "ones": lambda: torch.ones(BIG),
    "full": lambda: torch.full(BIG, 3),
    "new": lambda: torch.ones(1).new_full(BIG, 2.5),
    "like": lambda: torch.ones_like(torch.empty(BIG)),
    "filled": lambda: torch.empty(BIG).fill_(2),
    "written": lambda: torch.zeros(BIG).index_fill_(0, torch.tensor([1]), 3.0),
    "outer": lambda: OUTER,
    "legacy": lambda: torch.FloatTensor([1.0, 2.0]),
    "list": lambda: torch.tensor([[1, 2]]),
    "scalar": lambda: torch.tensor(3.0),
    "attention": lambda: nn.functional.normalize(torch.ones(BIG)),
}
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(3, 2),
    "embedding": lambda: nn.Embedding(4, 3, padding_idx=1),
    "batch norm": lambda: nn.BatchNorm1d(3),
    "lstm": lambda: nn.LSTM(2, 3, num_layers=2),
    "attention": lambda: nn.MultiheadAttention(4, 2, kdim=3),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 3, batch_first=True), 2, enable_nested_tensor=False
    ),
    "list": lambda: nn.ParameterList([torch.ones(2), nn.Parameter(torch.zeros(3))]),
    "dict": lambda: nn.ParameterDict({"a": nn.Parameter(torch.ones(2))}),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)),
    "lazy": lambda: nn.LazyLinear(3),
    "copied": lambda: copy.deepcopy(nn.Linear(3, 2)),
    "softmax": lambda: nn.AdaptiveLogSoftmaxWithLoss(16, 8, [2, 5]),
}
# What they compute from their weights has no values either.
COMPUTED = ("._u", "._v")


class Built(nn.Module):
    """The entries of a plan, and names that repeat an earlier tensor or module."""

    def __init__(self, plan: list[tuple[str, str, bool]]) -> None:
        super().__init__()
        for number, (kind, what, tied) in enumerate(plan):
            if kind == "parameter":
                made = PARAMETERS[what]()
                self.register_parameter(f"p{number}", made)
                if tied:  # once by what the module has now, and once by what was there before
                    inner = self.add(nn.Module(), f"tied{number}")
                    inner.own = getattr(self, f"p{number}")
                    inner.given = made
            elif kind == "buffer":
                self.register_buffer(f"b{number}", BUFFERS[what](), persistent=not tied)
            elif kind == "module":
                layer = self.add(LAYERS[what](), f"m{number}")
                if tied:
                    self.add(layer, f"again{number}")
            else:
                self.register_parameter(f"none{number}", None)

    def add(self, module: nn.Module, name: str) -> nn.Module:
        self.add_module(name, module)
        return module


plans = st.lists(
    st.one_of(
        st.tuples(st.just("parameter"), st.sampled_from(sorted(PARAMETERS)), st.booleans()),
        st.tuples(st.just("buffer"), st.sampled_from(sorted(BUFFERS)), st.booleans()),
        st.tuples(st.just("module"), st.sampled_from(sorted(LAYERS)), st.booleans()),
        st.just(("none", "", False)),
    ),
    max_size=6,
)


def described(module: nn.Module) -> dict[str, Any]:
    """Say all that shall not depend on where parameters are."""
    first: dict[int, str] = {}
    modules: Any = module.named_modules(remove_duplicate=False)
    found: dict[str, Any] = {"modules": [name for name, _ in modules]}
    for name, tensor in (
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ):
        lazy = nn.parameter.is_lazy(tensor)
        found[name] = (
            type(tensor),
            tensor.dtype,
            None if lazy else (tuple(tensor.shape), tensor.stride(), tensor.storage_offset()),
            tensor.requires_grad,
            tensor.is_leaf,
            vars(tensor),
            first.setdefault(id(tensor), name),
        )
    return found


@given(plans, st.booleans())
def test_a_model_differs_only_in_the_values_of_its_weights(
    plan: list[tuple[str, str, bool]], include_buffers: bool
) -> None:
    plain = Built(plan)
    with init_empty_weights(include_buffers=include_buffers):
        empty = Built(plan)
    assert described(empty) == described(plain)
    assert {tensor.device.type for tensor in empty.parameters()} <= {"meta"}
    assert torch.equal(OUTER, torch.arange(6.0).view(2, 3))
    if not include_buffers:
        values = dict(plain.named_buffers(remove_duplicate=False))
        for name, buffer in empty.named_buffers(remove_duplicate=False):
            assert buffer.device.type == "meta" if name.endswith(COMPUTED) else buffer.equal(values[name])


@given(plans)
def test_on_a_real_device_the_values_are_there_too(plan: list[tuple[str, str, bool]]) -> None:
    plan = [one for one in plan if one[1] not in ("empty", "legacy", "skipped")]
    torch.manual_seed(3)
    plain = Built(plan)
    state = torch.get_rng_state()
    torch.manual_seed(3)
    with init_on_device("cpu"):
        made = Built([*plan])
    assert described(made) == described(plain)
    for name, value in plain.state_dict().items():
        assert nn.parameter.is_lazy(value) or torch.equal(made.state_dict()[name], value), name
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("include_buffers", [False, True])
@pytest.mark.parametrize("ends_well", [False, True])
def test_global_state_is_restored(include_buffers: bool, ends_well: bool) -> None:
    before = {**vars(nn.Module)}, {**vars(nn.Parameter)}, {**vars(torch)}
    with ExitStack() as stack:
        if not ends_well:
            stack.enter_context(pytest.raises(KeyboardInterrupt, match="stop"))
        with init_empty_weights(include_buffers=include_buffers):
            assert torch_device.CURRENT_DEVICE is None
            model = nn.Linear(3, 4)
            large = torch.ones(BIG, device="cpu")
            if not ends_well:
                raise KeyboardInterrupt("stop")
    assert (vars(nn.Module), vars(nn.Parameter), vars(torch)) == before
    assert _get_current_function_mode_stack() == []
    assert _get_current_dispatch_mode() is None
    assert torch.get_default_device().type == "cpu"
    assert nn.Linear(3, 4).weight.device.type == "cpu"
    assert model.weight.is_meta
    assert large.sum() == large.numel()


def test_threads_enter_and_leave_while_others_build() -> None:
    """Torch's hooks are one table for all threads, and an error where it changes while one walks over it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:

        def build() -> list[bool]:
            found: list[bool] = []
            for _ in range(30):
                with init_empty_weights():
                    found += [nn.Linear(2, 2).weight.is_meta for _ in range(20)]
                found.append(not nn.Linear(2, 2).weight.is_meta)
            return found

        with ThreadPoolExecutor(6) as pool:
            assert all(all(one.result()) for one in [pool.submit(build) for _ in range(6)])
    finally:
        sys.setswitchinterval(before)


def test_other_threads_build_ordinary_models() -> None:
    found: dict[str, Any] = {}
    turns = [threading.Event() for _ in range(4)]

    def plainly() -> None:
        turns[0].wait(10)
        found["plain"] = nn.Linear(2, 2)
        turns[1].set()

    def overlapping() -> None:
        turns[1].wait(10)
        with init_empty_weights(include_buffers=True):
            found["inside"] = nn.BatchNorm1d(3)
            turns[2].set()
            turns[3].wait(10)  # the first context is left while this one is open
            found["later"] = nn.Linear(2, 2)
        found["after"] = nn.Linear(2, 2)

    threads = [threading.Thread(target=work) for work in (plainly, overlapping)]
    with init_empty_weights(include_buffers=True):
        for thread in threads:
            thread.start()
        turns[0].set()
        turns[2].wait(10)
        here = nn.Linear(2, 2)
    turns[3].set()
    for thread in threads:
        thread.join(10)
    found["here"] = nn.Linear(2, 2)
    assert here.weight.is_meta
    assert found["inside"].running_mean.is_meta
    assert found["later"].weight.is_meta
    assert [found[name].weight.device.type for name in ("plain", "after", "here")] == ["cpu"] * 3
    assert torch_device.CURRENT_DEVICE is None


@pytest.mark.parametrize("include_buffers", [False, True])
def test_ties_are_kept(include_buffers: bool) -> None:
    with init_empty_weights(include_buffers=include_buffers):
        first, second = nn.Linear(3, 3), nn.Linear(3, 3)
        second.weight = first.weight
        both = nn.ModuleList([first, second, first])
        held = nn.Parameter(torch.ones(3))
        both.a, both.b = held, held
    assert second.weight is first.weight
    assert both.a is both.b
    assert both.a.is_meta
    assert both[0] is both[2]


def test_existing_parameters_keep_their_values() -> None:
    owner = nn.Linear(3, 3, bias=False)
    values = owner.weight.detach().clone()
    weight = owner.weight
    vars(weight)["note"] = "kept"
    with init_empty_weights():
        first, second = nn.Linear(3, 3), nn.Linear(3, 3)
        first.weight = owner.weight
        nn.init.zeros_(first.weight)
        second.weight = owner.weight
        second.weight.data.fill_(3)
        whole = nn.Sequential(first, second, owner)
    assert owner.weight is weight
    assert torch.equal(owner.weight, values)
    assert first.weight is second.weight
    assert first.weight.is_meta
    assert vars(first.weight) == {"note": "kept"}
    assert whole[2].weight is weight


@pytest.mark.parametrize("include_buffers", [False, True])
def test_the_innermost_context_applies(include_buffers: bool) -> None:
    with init_empty_weights(include_buffers=include_buffers):
        with init_on_device("cpu", include_buffers=include_buffers):
            inner = nn.BatchNorm1d(3)
            with init_empty_weights():
                innermost = nn.BatchNorm1d(3)
        outer = nn.BatchNorm1d(3)
        with pytest.raises(ValueError, match="stop"), init_on_device("cpu"):
            raise ValueError("stop")
        after = nn.BatchNorm1d(3)
    assert inner.weight.device.type == "cpu"
    assert torch.equal(inner.weight, torch.ones(3))
    assert innermost.weight.is_meta
    assert outer.weight.is_meta
    assert after.weight.is_meta
    for norm, is_meta in ((inner, False), (innermost, False), (outer, include_buffers)):
        assert norm.running_mean is not None
        assert norm.running_mean.is_meta is is_meta


def test_with_buffers_it_is_torchs_device_context() -> None:
    def made() -> list[str]:
        default = torch.get_default_device().type
        with torch.device("cpu"):
            inside = torch.ones(2).device.type
        return [default, inside, torch.ones(2).device.type, torch.ones(2, device="cpu").device.type]

    with torch.device("meta"):
        expected = made()
    with init_empty_weights(include_buffers=True):
        assert made() == expected
    with torch.device("cpu"):
        with init_empty_weights(include_buffers=True):
            assert made() == expected
        assert torch.get_default_device().type == "cpu"
    assert _get_current_function_mode_stack() == []


class Counting(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_other_modes_of_torch_may_stand_around_it_and_inside() -> None:
    with Counting() as outer, init_empty_weights(), Counting() as inner:
        layer = nn.Linear(3, 3)
        layer.weight = nn.Parameter(OUTER)
    assert layer.weight.is_meta
    assert layer.bias.is_meta
    assert outer.count
    assert inner.count


def test_it_decorates_functions_that_build_models() -> None:
    @init_empty_weights()
    def build() -> nn.Module:
        return nn.Linear(3, 4)

    assert build().weight.is_meta
    assert build().weight.is_meta
    assert nn.Linear(3, 4).weight.device.type == "cpu"


@pytest.mark.parametrize(
    ("variables", "given", "expected"),
    [
        ({}, None, False),
        ({"ACCELERATE_INIT_INCLUDE_BUFFERS": "yes"}, None, True),
        ({"ACCELERATE_INIT_INCLUDE_BUFFERS": "1", "ACCELFN_INIT_INCLUDE_BUFFERS": "off"}, None, False),
        ({"ACCELFN_INIT_INCLUDE_BUFFERS": "on"}, None, True),
        ({"ACCELFN_INIT_INCLUDE_BUFFERS": "on"}, False, False),
        ({"ACCELFN_INIT_INCLUDE_BUFFERS": "nonsense"}, True, True),
    ],
)
def test_the_environment_may_include_buffers(
    variables: dict[str, str], given: bool | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with init_empty_weights(given):
        norm = nn.BatchNorm1d(3)
    assert norm.running_mean is not None
    assert norm.running_mean.is_meta is expected


def test_an_invalid_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELFN_INIT_INCLUDE_BUFFERS", "perhaps")
    with pytest.raises(ConfigurationError, match="ACCELFN_INIT_INCLUDE_BUFFERS"), init_empty_weights():
        pass


@pytest.mark.parametrize("device", ["disk", "nonsense", 99])
def test_unknown_devices_are_refused(device: Any) -> None:
    with pytest.raises(ValueError, match="init_on_device: "), init_on_device(device):
        pass
    assert _get_current_function_mode_stack() == []


def tied_llama(transformers: Any) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=50
    )
    config.tie_word_embeddings = True
    return transformers.LlamaForCausalLM(config)


def t5(transformers: Any) -> Any:
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=50, tie_word_embeddings=True
    )
    return transformers.T5ForConditionalGeneration(config)


@pytest.mark.parametrize("build", [tied_llama, t5])
@pytest.mark.parametrize("include_buffers", [False, True])
def test_transformers_models(build: Any, include_buffers: bool) -> None:
    transformers: Any = pytest.importorskip("transformers")
    plain: nn.Module = build(transformers)
    with init_empty_weights(include_buffers=include_buffers):
        empty: nn.Module = build(transformers)
    assert described(empty) == described(plain)
    assert all(tensor.is_meta for tensor in empty.parameters())
    if not include_buffers:
        values = dict(plain.named_buffers())
        assert all(torch.equal(buffer, values[name]) for name, buffer in empty.named_buffers())
    if build is t5:
        shared: Any = empty
        assert shared.encoder.embed_tokens.weight is shared.shared.weight is shared.lm_head.weight


@pytest.mark.filterwarnings("ignore")
def test_quantised_weights_of_bitsandbytes_keep_their_classes() -> None:
    bitsandbytes: Any = pytest.importorskip("bitsandbytes")

    def build() -> nn.Module:
        return nn.Sequential(
            bitsandbytes.nn.Linear4bit(64, 32, quant_type="nf4", compute_dtype=torch.bfloat16),
            bitsandbytes.nn.Linear8bitLt(64, 32, has_fp16_weights=False),
        )

    plain: Any = build()
    with init_empty_weights():
        empty: Any = build()
    for name, weight in plain.named_parameters():
        other = empty.get_parameter(name)
        assert other.is_meta
        assert type(other) is type(weight)
        assert other.requires_grad is weight.requires_grad
        own = {key: value for key, value in vars(weight).items() if key != "module"}
        assert {key: value for key, value in vars(other).items() if key != "module"} == own
    assert empty[0].weight.quant_type == "nf4"
    assert empty[0].weight.module is empty[0]


@pytest.mark.filterwarnings("ignore")
def test_quantised_weights_of_torchao_keep_their_classes() -> None:
    quantization: Any = pytest.importorskip("torchao.quantization")
    config = quantization.Int8WeightOnlyConfig()
    source: Any = nn.Sequential(nn.Linear(64, 32))
    quantization.quantize_(source, config)
    with init_empty_weights():
        inside: Any = nn.Sequential(nn.Linear(64, 32))
        quantization.quantize_(inside, config)
        given, again = nn.Linear(64, 32), nn.Linear(64, 32)
        given.weight = source[0].weight
        again.weight = source[0].weight
        wrapped = nn.Linear(64, 32)
        wrapped.weight = nn.Parameter(source[0].weight, requires_grad=False)
    kind = type(source[0].weight)
    assert kind is not nn.Parameter
    assert [type(one.weight) for one in (inside[0], given, wrapped)] == [kind] * 3
    assert all(one.weight.is_meta for one in (inside[0], given, wrapped))
    assert given.weight is again.weight
    assert source[0].weight.device.type == "cpu"


MEMORY = """
import torch
from torch import nn
from accelfn.bigmodel.empty import init_empty_weights

def highest():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

class Block(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.bare = nn.Parameter(torch.empty(size // 4, size))
        self.legacy = nn.Parameter(torch.Tensor(size // 4, size))
        nn.init.normal_(self.legacy)

with init_empty_weights():
    Block(1024)  # loads what torch loads on first use
before = highest()
with init_empty_weights():
    model = nn.Sequential(*(Block(8192) for _ in range(10)))
print(sum(p.nbytes for p in model.parameters()), (highest() - before) * 1024)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_a_model_of_four_gigabytes_takes_no_memory() -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    size, taken = map(int, done.stdout.split())
    assert size > 4e9
    assert taken < 8e6  # the smallest weight that isn't a bias has 67 million bytes


def test_compiled_functions_run_inside() -> None:
    compiled: Any = torch.compile(lambda x: x * 2 + 1, backend="eager")
    with init_empty_weights():
        layer = nn.Linear(2, 2)
        layer.register_buffer("b", compiled(torch.ones(BIG)))
    assert torch.equal(layer.b, torch.full(BIG, 3.0))  # pyright: ignore[reportArgumentType]
    assert layer.weight.is_meta
