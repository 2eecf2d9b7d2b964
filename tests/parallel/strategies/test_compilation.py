# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import copy
import importlib
import inspect
import pickle
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import accelfn as af
from accelfn import Context
from accelfn.config import TorchDynamoPlugin
from accelfn.parallel.strategies.compilation import CompiledForward, is_compiled
from accelfn.testing import run_ranks
from accelfn.training import MixedPrecisionForward

dynamo = cast("Any", importlib.import_module("torch._dynamo"))
dynamo_utils = cast("Any", importlib.import_module("torch._dynamo.utils"))

# The compiler looks at each input's gradient, and torch warns of that where it is another module's output.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x).relu()


class Net(nn.Module):
    """A model with repeated blocks and attributes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "net"
        self.embed = nn.Linear(3, 4)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.seen: list[torch.dtype] = []
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters(), 1):
                parameter.copy_(torch.linspace(-1, number / 8, parameter.numel()).view_as(parameter))

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        """Give one number a row."""
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return {"y": x.sum(1) * scale}


@pytest.fixture(autouse=True)
def fresh() -> None:
    """Forget what other tests have compiled."""
    dynamo.reset()
    dynamo_utils.counters.clear()


def num_graphs() -> int:
    return dynamo_utils.counters["stats"]["unique_graphs"]


def num_breaks() -> int:
    return sum(dynamo_utils.counters["graph_break"].values())


def variant(ctx: Context, regional: bool = False, **options: Any) -> Context:
    options = {"backend": "AOT_EAGER", "fullgraph": True, "use_regional_compilation": regional} | options
    return ctx.replace(dynamo_plugin=TorchDynamoPlugin(**options))


def train(ctx: Context, model: nn.Module, steps: int = 3) -> list[int]:
    """Train a prepared model, and say after each step how many graphs there are."""
    optimizer = af.prepare(ctx, torch.optim.SGD(model.parameters(), lr=0.01))
    scaler = af.init_scaler(ctx)
    generator = torch.Generator().manual_seed(ctx.rank)
    found: list[int] = []
    batches = [torch.randn(5, 3, generator=generator) for _ in range(steps)]
    for x, micro in af.microbatches(ctx, batches):
        with af.accumulate(ctx, micro, model):
            scaler = af.backward(ctx, model(x, scale=0.5)["y"].square().mean(), scaler, micro)
        if micro.sync:
            scaler = af.optimizer_step(ctx, optimizer, scaler)
        found.append(num_graphs())
    return found


@pytest.mark.parametrize(("mode", "regional"), [("no", False), ("bf16", True)], ids=["whole", "regional"])
def test_a_compiled_model_trains_as_the_plain_one_and_compiles_once(mode: str, regional: bool) -> None:
    ctx = Context().replace(mixed_precision=mode)
    plain = af.prepare(ctx, Net())
    train(ctx, plain)
    model = Net()
    keys = list(model.state_dict())
    prepared = af.prepare(variant(ctx, regional), model)
    assert prepared is model
    assert train(ctx, prepared) == [1, 1, 1]  # three equal blocks are one graph too
    assert num_breaks() == 0
    assert list(prepared.state_dict()) == keys
    assert prepared.name == "net"
    for name, value in plain.state_dict().items():
        assert torch.equal(prepared.state_dict()[name], value), name


@pytest.mark.parametrize(("mode", "regional"), [("no", False), ("bf16", True)], ids=["whole", "regional"])
def test_a_compiled_model_is_copied_pickled_and_unwrapped(mode: str, regional: bool) -> None:
    ctx = variant(Context().replace(mixed_precision=mode), regional)
    model, x = af.prepare(ctx, Net()), torch.ones(2, 3)
    expected = model(x)["y"]
    assert inspect.signature(model.forward) == inspect.signature(Net().forward)
    twin = copy.deepcopy(model)
    loaded = pickle.loads(pickle.dumps(model))
    shallow = af.unwrap_model(model, keep_fp32_wrapper=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    for other in (twin, loaded):
        assert is_compiled(other)
        assert torch.equal(other(x)["y"], expected)
        assert af.prepare(ctx, other) is other
        assert not is_compiled(af.unwrap_model(other, keep_torch_compile=False))
    assert is_compiled(shallow)
    assert not isinstance(vars(shallow).get("forward"), MixedPrecisionForward)
    assert shallow(x)["y"].abs().sum() == 0  # it shares the parameters

    before = num_graphs()
    plain = af.unwrap_model(model, keep_torch_compile=False)
    assert isinstance(plain, Net)
    assert plain.embed is model.embed
    assert not is_compiled(plain)
    assert is_compiled(model)
    assert plain(x)["y"].abs().sum() == 0
    assert num_graphs() == before
    assert isinstance(vars(plain).get("forward"), MixedPrecisionForward) == (mode == "bf16")
    bare = af.unwrap_model(model, keep_fp32_wrapper=False, keep_torch_compile=False)
    assert "forward" not in vars(bare)


def test_weights_are_saved_under_their_own_names(tmp_path: Path) -> None:
    load_file = importlib.import_module("safetensors.torch").load_file
    by_user = cast("nn.Module", cast("Any", torch).compile(Net(), backend="eager"))
    for regional in (False, True):
        ctx = variant(Context(), regional)
        for model in (af.prepare(ctx, Net()), af.prepare(ctx, copy.copy(by_user))):
            (file,) = af.save_model(ctx, model, tmp_path)
            assert sorted(load_file(file)) == sorted(Net().state_dict())
            Net().load_state_dict(load_file(file))


def test_what_the_user_has_compiled_is_not_compiled_again() -> None:
    ctx = variant(Context().replace(mixed_precision="bf16"))
    outside = cast("nn.Module", cast("Any", torch).compile(Net(), backend="aot_eager"))
    in_place, part = Net(), Net()
    cast("Any", in_place).compile(backend="aot_eager")
    cast("Any", part.blocks[1]).compile(backend="aot_eager")
    expected = af.prepare(Context().replace(mixed_precision="bf16"), Net())(torch.ones(2, 3))["y"]
    for model in (outside, in_place, part):
        before = num_graphs()
        prepared = af.prepare(ctx, model)
        forward = vars(prepared)["forward"]
        assert isinstance(forward, MixedPrecisionForward)
        assert not isinstance(forward.__wrapped__, CompiledForward)
        for _ in range(2):
            assert torch.equal(prepared(torch.ones(2, 3))["y"], expected)
        assert num_graphs() == before + 1
        assert not is_compiled(af.unwrap_model(prepared, keep_torch_compile=False))
    assert num_breaks() == 0


def test_nothing_is_compiled_where_nobody_asks_and_an_unknown_backend_is_refused() -> None:
    assert not is_compiled(af.prepare(Context(), Net()))
    assert not is_compiled(af.prepare(Context().replace(dynamo_backend="no"), Net()))
    disabled = af.prepare(variant(Context(), disable=True), Net())
    disabled(torch.ones(1, 3))
    assert num_graphs() == 0
    model = Net()
    with pytest.raises(Exception, match="tvm"):
        af.prepare(Context().replace(dynamo_backend="tvm"), model)(torch.ones(1, 3))


def test_replicated_models_are_compiled_inside_and_compared_outside() -> None:
    plain = run_ranks(lambda ctx: state_after(ctx), 2, "processes", mixed_precision="bf16")
    found = run_ranks(
        lambda ctx: state_after(variant(ctx, regional=True)), 2, "processes", mixed_precision="bf16"
    )
    threads = run_ranks(lambda ctx: state_after(variant(ctx, regional=True)), 2, mixed_precision="bf16")
    for (state, facts), (expected, _), (other, _) in zip(found, plain, threads, strict=True):
        assert facts == (True, [1, 1, 1], 0, True)
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(other[name], value, rtol=1e-6, atol=1e-6)


def state_after(ctx: Context) -> tuple[dict[str, torch.Tensor], tuple[bool, list[int], int, bool]]:
    model = af.prepare(ctx, Net())
    before = ctx.collectives.call_log.number
    graphs = train(ctx, model)
    compared = ctx.collectives.call_log.number - before >= 3  # the forward passes are agreed on
    found = {name: value.detach() for name, value in af.unwrap_model(model).state_dict().items()}
    return found, (isinstance(model, DistributedDataParallel), graphs, num_breaks(), compared)
