# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownLambdaType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

import importlib
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils._device as torch_device
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.overrides import _get_current_function_mode_stack
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
    "normal": lambda: nn.Parameter(torch.empty(BIG).normal_()),
    "computed": lambda: nn.Parameter(0.02 * torch.randn(4, 2)),
    "transposed": lambda: nn.Parameter(torch.rand(3, 5).t()),
    "legacy": lambda: nn.Parameter(torch.Tensor(3, 2)),
    "outer": lambda: nn.Parameter(OUTER),
    "frozen": lambda: nn.Parameter(torch.ones(2), requires_grad=False),
    "marked": marked,
    "first": written_on_first,
}


def rotary() -> torch.Tensor:
    return 1.0 / (10000 ** (torch.arange(0, 8, 2).float() / 8))


BUFFERS: dict[str, Callable[[], torch.Tensor]] = {
    "rotary": rotary,
    "mask": lambda: torch.tril(torch.ones(700, 700, dtype=torch.bool)),
    "ones": lambda: torch.ones(BIG),
    "filled": lambda: torch.empty(BIG).fill_(2),
    "written": lambda: torch.zeros(BIG).index_fill_(0, torch.tensor([1]), 3.0),
    "outer": lambda: OUTER,
    "list": lambda: torch.tensor([[1, 2]]),
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
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 2)),
    "lazy": lambda: nn.LazyLinear(3),
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
            for _ in range(10):
                with init_empty_weights():
                    found += [nn.Linear(2, 2).weight.is_meta for _ in range(20)]
                found.append(not nn.Linear(2, 2).weight.is_meta)
            return found

        with ThreadPoolExecutor(6) as pool:
            assert all(all(one.result()) for one in [pool.submit(build) for _ in range(6)])
    finally:
        sys.setswitchinterval(before)


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


@pytest.mark.parametrize(
    ("variables", "given", "expected"),
    [
        ({}, None, False),
        ({"ACCELERATE_INIT_INCLUDE_BUFFERS": "yes"}, None, True),
        ({"ACCELERATE_INIT_INCLUDE_BUFFERS": "1", "ACCELFN_INIT_INCLUDE_BUFFERS": "off"}, None, False),
        ({"ACCELFN_INIT_INCLUDE_BUFFERS": "on"}, None, True),
        ({"ACCELFN_INIT_INCLUDE_BUFFERS": "on"}, False, False),
        ({"ACCELFN_INIT_INCLUDE_BUFFERS": "nonsense"}, True, True),
        ({"ACCELFN_INIT_INCLUDE_BUFFERS": "nonsense"}, None, None),
    ],
)
def test_the_environment_may_include_buffers(
    variables: dict[str, str], given: bool | None, expected: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if expected is None:
        with pytest.raises(ConfigurationError, match="ACCELFN_INIT_INCLUDE_BUFFERS"), init_empty_weights():
            pass
        return
    with init_empty_weights(given):
        norm = nn.BatchNorm1d(3)
    assert norm.running_mean is not None
    assert norm.running_mean.is_meta is expected


@pytest.mark.parametrize("device", ["disk", "nonsense", 99])
def test_unknown_devices_are_refused(device: Any) -> None:
    with pytest.raises(ValueError, match="init_on_device: "), init_on_device(device):
        pass
    assert _get_current_function_mode_stack() == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_quantised_weights_keep_their_classes() -> None:
    quantization: Any = importlib.import_module("torchao.quantization")
    bitsandbytes: Any = importlib.import_module("bitsandbytes")
    config = quantization.Int8WeightOnlyConfig()
    source: Any = nn.Sequential(nn.Linear(64, 32))
    quantization.quantize_(source, config)
    with init_empty_weights():
        inside: Any = nn.Sequential(nn.Linear(64, 32))
        quantization.quantize_(inside, config)
        given, again = nn.Linear(64, 32), nn.Linear(64, 32)
        given.weight = source[0].weight
        again.weight = source[0].weight
        four = bitsandbytes.nn.Linear4bit(64, 32, quant_type="nf4", compute_dtype=torch.bfloat16)
        wrapped = nn.Linear(64, 32)
        wrapped.weight = nn.Parameter(source[0].weight, requires_grad=False)
    kind = type(source[0].weight)
    assert kind is not nn.Parameter
    assert [type(one.weight) for one in (inside[0], given, wrapped)] == [kind] * 3
    assert all(one.weight.is_meta for one in (inside[0], given, wrapped))
    assert given.weight is again.weight
    assert source[0].weight.device.type == "cpu"
    assert (type(four.weight).__name__, four.weight.quant_type, four.weight.is_meta) == (
        "Params4bit",
        "nf4",
        True,
    )
    assert four.weight.module is four


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_a_model_of_four_gigabytes_takes_no_memory() -> None:
    def memory(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))

    def build(size: int) -> nn.Module:
        linear: Any = nn.Linear(size, size)
        linear.bare = nn.Parameter(torch.empty(size // 4, size))
        linear.legacy = nn.Parameter(torch.Tensor(size // 4, size))
        nn.init.normal_(linear.legacy)
        return linear

    with init_empty_weights():
        build(1024)  # loads what torch loads on first use
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        model = nn.Sequential(*(build(8192) for _ in range(10)))
    assert sum(one.nbytes for one in model.parameters()) > 4e9
    assert memory("VmHWM") - before < 32e6  # the smallest weight that isn't a bias has 67 million bytes
