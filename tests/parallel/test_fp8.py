"""Training with 8-bit matrix products by torchao, emulated on the CPU."""

# torch leaves backward and manual_seed partly untyped, and torchao has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import copy
import importlib
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn import AORecipeKwargs, Context, FullyShardedDataParallelPlugin
from accelfn.context import DeviceFacts
from accelfn.context.config import FP8Backend, TERecipeKwargs, choose_fp8
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.parallel import plan_model, read_facts
from accelfn.parallel.fp8 import plan_fp8
from accelfn.testing import run_ranks
from accelfn.tree import local_of
from tests.parallel import tensor_models
from tests.parallel.expert_models import SparseGPT
from tests.parallel.fp8_models import CONVERTED, GPT, batches, loss_of, make, train
from tests.parallel.layouts import LAYOUTS

pytest.importorskip("torchao")

# Losses of 50 steps in fp8 stay this near those in bf16.
DISTANCE = 0.05
SHARDED: dict[str, Any] = {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}
FP8 = Context().replace(mixed_precision="fp8")


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import torchao here once, and not for seconds in each forked rank."""
    importlib.import_module("torchao.float8")


def run(
    ctx: Context, mode: str, steps: int, *, recipe: AORecipeKwargs | None = None, **options: Any
) -> list[float]:
    """Train a GPT; the optimizer is made before it is prepared."""
    handlers: dict[str, Any] = {"kwargs_handlers": [recipe]} if recipe is not None else {}
    ctx = ctx.replace(mixed_precision=mode, **handlers, **options)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = af.prepare(ctx, model, optimizer)
    return train(ctx, model, optimizer, batches(steps))


@pytest.mark.parametrize(
    ("size", "options"), [(1, {}), (2, {}), (2, SHARDED)], ids=["one process", "ddp", "fsdp2"]
)
def test_fifty_steps_stay_near_bf16(size: int, options: dict[str, Any]) -> None:
    found = {
        mode: run_ranks(lambda ctx: run(ctx, mode, 50), size, "processes", timeout_s=120, **options)[0]  # noqa: B023
        for mode in ("bf16", "fp8")
    }
    assert found["bf16"][-1] < 0.5 < 3 < found["bf16"][0]
    distances = [abs(one - other) for one, other in zip(found["bf16"], found["fp8"], strict=True)]
    assert 0 < max(distances) < DISTANCE


def test_compiled_layers_train_alike() -> None:
    assert run(FP8, "fp8", 3, dynamo_backend="aot_eager") == pytest.approx(run(FP8, "fp8", 3), abs=1e-5)


@pytest.mark.slow
def test_compiled_and_recomputed_shards_train_alike() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=True)
    plain = run_ranks(lambda ctx: run(ctx, "fp8", 3), 2, "processes", **SHARDED)[0]
    recomputed = run_ranks(lambda ctx: run(ctx, "fp8", 3), 2, "processes", fsdp_plugin=plugin)[0]
    assert recomputed == plain

    def run_compiled(ctx: Context) -> list[float]:
        # Tracing looks at the gradients of gathered weights, which torchao has made of others.
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
        return run(ctx, "fp8", 3, dynamo_backend="aot_eager")

    compiled = run_ranks(run_compiled, 2, "processes", timeout_s=120, **SHARDED)[0]
    assert compiled == pytest.approx(plain, abs=1e-5)


def test_layers_compute_in_8_bits_and_keep_names_and_parameters() -> None:
    model = make()
    before, names = dict(model.named_parameters()), list(model.state_dict())
    prepared = af.prepare(FP8, model)
    assert list(prepared.state_dict()) == names
    assert all(parameter is before[name] for name, parameter in prepared.named_parameters())
    kinds = {name: type(module).__name__ for name, module in prepared.named_modules()}
    assert tuple(name for name, kind in kinds.items() if kind == "Float8Linear") == CONVERTED
    layer, x = cast("nn.Linear", prepared.get_submodule("blocks.0.up")), torch.randn(4, 32)
    exact = nn.functional.linear(x, layer.weight, layer.bias)
    error = (layer(x) - exact).abs().max() / exact.abs().max()
    assert 1e-3 < error < 0.1  # float8_e4m3fn has 3 bits behind the point; bf16 would be off by 4e-3


def test_the_plan_prints_what_computes_in_8_bits_and_why() -> None:
    rows = plan_model(FP8, make()).rows()
    assert rows["precision"] == "bf16 by autocast, outputs in float32"
    assert rows["fp8"].splitlines() == [
        "by torchao, the first of torchao, transformer_engine and msamp that is installed",
        "emulated: rounded to 8 bits, multiplied in float32",
        "7 layers: blocks.0.out, blocks.0.up, ..., blocks.1.down",
        "not blocks.0.qkv: the first linear layer",
        "not head: the last linear layer",
    ]
    assert plan_model(FP8.replace(mixed_precision="bf16"), make()).fp8 is None


class Odd(nn.Module):
    """Linear layers that can't, or shouldn't, all compute in fp8."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.odd, self.even = nn.Linear(16, 24), nn.Linear(24, 32), nn.Linear(32, 16)
        self.embed = nn.Embedding(32, 16)
        self.tied = nn.Linear(16, 32, bias=False)
        self.tied.weight = self.embed.weight
        self.twice = self.again = nn.Linear(32, 32)
        self.attention = nn.MultiheadAttention(32, 2)
        self.last = nn.Linear(32, 16)


def test_layers_are_left_out_for_a_reason_and_a_filter_replaces_the_rule() -> None:
    plan = plan_model(FP8, Odd()).fp8
    assert plan is not None
    assert plan.converted == ("even",)
    assert plan.kept == {
        "first": "the first linear layer",
        "odd": "size 24 is not a multiple of 16",
        "tied": "shared with another layer",
        "twice": "shared with another layer",
        "attention.out_proj": "a NonDynamicallyQuantizableLinear, which may be more than a linear layer",
        "last": "the last linear layer",
    }
    recipe = AORecipeKwargs(module_filter_func=lambda module, name: "last" in name or "tied" in name)
    filtered = plan_model(FP8.replace(kwargs_handlers=[recipe]), Odd()).fp8
    assert filtered is not None
    assert filtered.converted == ("last",)
    assert filtered.kept["even"] == "module_filter_func leaves it out"
    assert filtered.kept["tied"] == "shared with another layer"


def nothing(module: nn.Module, name: str) -> bool:
    return False


@pytest.mark.parametrize(
    ("model", "recipe", "message"),
    [
        (
            make,
            AORecipeKwargs(module_filter_func=nothing),
            r"(?s)blocks\.0\.qkv: module_filter_func.*and 1 more",
        ),
        (lambda: nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), None, r"1: the last linear layer"),
        (
            lambda: nn.Conv2d(16, 16, 1),
            None,
            "of the Conv2d would compute in fp8, since it has no linear layer",
        ),
        (
            lambda: nn.Linear(16, 16),
            AORecipeKwargs(module_filter_func=lambda module, name: True),
            "the model: the model itself, which can't be replaced",
        ),
    ],
)
def test_a_model_without_8_bit_layers_is_refused_with_the_reasons(
    model: Callable[[], nn.Module], recipe: AORecipeKwargs | None, message: str
) -> None:
    ctx = FP8 if recipe is None else FP8.replace(kwargs_handlers=[recipe])
    with pytest.raises(ConfigurationError, match=message):
        af.prepare(ctx, model())
    with pytest.raises(ConfigurationError, match=message):
        af.prepare_model(ctx, model(), evaluation_mode=True)


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 64)), min_size=1, max_size=8))
def test_each_linear_layer_is_either_converted_or_kept_for_a_reason(sizes: list[tuple[int, int]]) -> None:
    model = nn.Sequential(*(nn.Linear(rows, columns) for rows, columns in sizes))
    facts, device = read_facts(model), DeviceFacts(type="cpu")
    expected = [
        str(place)
        for place, (rows, columns) in enumerate(sizes)
        if 0 < place < len(sizes) - 1 and rows % 16 == columns % 16 == 0
    ]
    choice = choose_fp8(None, {"torchao"})
    if not expected:
        with pytest.raises(ConfigurationError, match="no layer of the Sequential would compute in fp8"):
            plan_fp8(choice, facts, device)
        return
    plan = plan_fp8(choice, facts, device)
    assert list(plan.converted) == expected
    assert plan.converted == tuple(sorted(plan.converted, key=int))
    assert {*plan.converted, *plan.kept} == {*map(str, range(len(sizes)))}


def test_only_shards_are_gathered_in_8_bits() -> None:
    facts, device = read_facts(make()), DeviceFacts(type="cpu")

    def gathers(recipe: AORecipeKwargs, is_sharded: bool) -> bool:
        return plan_fp8(choose_fp8(recipe, {"torchao"}), facts, device, is_sharded=is_sharded).gathers

    float8 = importlib.import_module("torchao.float8")
    on = AORecipeKwargs(config=float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True))
    off = AORecipeKwargs(config=float8.Float8LinearConfig())
    assert [gathers(recipe, True) for recipe in (AORecipeKwargs(), on, off)] == [True, True, False]
    assert not any(gathers(recipe, False) for recipe in (AORecipeKwargs(), on, off))
    assert not gathers(AORecipeKwargs(enable_fsdp_float8_all_gather=False), True)


def test_a_config_of_torchao_is_used_as_it_is() -> None:
    float8 = importlib.import_module("torchao.float8")
    config = float8.Float8LinearConfig.from_recipe_name("rowwise")
    model = af.prepare(FP8.replace(kwargs_handlers=[AORecipeKwargs(config=config)]), make())
    assert cast("Any", model.blocks[0].up).config == config
    assert loss_of(model, batches(1)[0]).isfinite()


def scales_of(ctx: Context) -> dict[str, list[tuple[float, float]]]:
    """Return the scale of each weight in the forward pass after a write, and the scale that it needs."""
    ctx = ctx.replace(mixed_precision="fp8")
    model = make()
    model, other = af.prepare(ctx, model, copy.deepcopy(make(1)))  # every model has its own scales
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step() -> None:
        train(ctx, model, optimizer, batches(1))

    def by_data() -> None:
        for parameter in model.parameters():
            local_of(parameter.data).mul_(3.0)

    def load() -> None:
        state = {name: local_of(value).clone() for name, value in other.state_dict().items()}
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                local_of(parameter).copy_(state[name])

    found: dict[str, list[tuple[float, float]]] = {}
    for name, write in (("step", step), ("step again", step), ("data", by_data), ("load", load)):
        write()
        for one in (model, other):
            with torch.no_grad():
                one(batches(1)[0][:, :-1])
        found[name] = []
        for one in (model, other):
            for layer in CONVERTED:
                weight: Any = one.get_submodule(layer).weight
                largest = af.gather(ctx, local_of(weight).abs().max().reshape(1)).max()
                found[name].append((float(weight._local_tensor._precomputed_scale), 448.0 / float(largest)))
    return found


def test_scales_are_those_of_the_present_weights_whoever_wrote_them() -> None:
    for rank in run_ranks(scales_of, 2, "processes", **SHARDED):
        for name, pairs in rank.items():
            assert len(pairs) == 2 * len(CONVERTED)
            for used, needed in pairs:
                assert used == pytest.approx(needed, rel=1e-5), name


def resumed(ctx: Context, mode: str, folder: str, is_second: bool) -> list[float]:
    ctx = ctx.replace(mixed_precision=mode)
    model = make(3 if is_second else 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = af.prepare(ctx, model, optimizer)
    if is_second:
        train(ctx, model, optimizer, batches(1, seed=9))
        af.load_state(ctx, folder, {"model": model, "optimizer": optimizer})
        return train(ctx, model, optimizer, batches(3, seed=2))
    train(ctx, model, optimizer, batches(2))
    af.save_state(ctx, folder, {"model": model, "optimizer": optimizer})
    return train(ctx, model, optimizer, batches(3, seed=2))


@pytest.mark.parametrize(
    ("first", "second", "sizes", "options"),
    [
        ("bf16", "fp8", (2, 2), (SHARDED, SHARDED)),
        ("fp8", "bf16", (2, 2), (SHARDED, SHARDED)),
        ("fp8", "fp8", (2, 1), (SHARDED, {})),
        ("fp8", "fp8", (1, 2), ({}, SHARDED)),
    ],
)
def test_checkpoints_go_from_bf16_to_fp8_and_between_layouts(
    tmp_path: Path,
    first: str,
    second: str,
    sizes: tuple[int, int],
    options: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    folder = str(tmp_path / "state")
    went_on = run_ranks(lambda ctx: resumed(ctx, first, folder, False), sizes[0], "processes", **options[0])[
        0
    ]
    loaded = run_ranks(lambda ctx: resumed(ctx, second, folder, True), sizes[1], "processes", **options[1])[0]
    assert loaded == pytest.approx(went_on, abs=DISTANCE)


def exact(ctx: Context) -> list[float]:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = torch.cat(batches(4))
    loader = torch.utils.data.DataLoader(cast("Any", rows), batch_size=4)
    model, optimizer, loader = af.prepare(ctx, model, optimizer, loader)
    scaler = af.init_scaler(ctx)
    for batch, micro in af.microbatches(ctx, loader):
        with af.accumulate(ctx, micro, model):
            scaler = af.backward(ctx, loss_of(model, batch), scaler, micro)
        if micro.sync:
            scaler = af.optimizer_step(ctx, optimizer, scaler)
    return [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()[:3]]


def test_exact_mode_gives_the_same_bits_at_any_number_of_ranks() -> None:
    options: dict[str, Any] = {
        "mixed_precision": "fp8",
        "reduction": af.CanonicalReduction(num_microbatches=4),
        "dataloader_config": af.DataLoaderConfiguration(data_seed=7),
    }
    one, two = (run_ranks(exact, size, "memory", **options)[0] for size in (1, 2))
    assert one == two


def test_copies_and_pickles_are_converted_once() -> None:
    prepared = af.prepare(FP8, make())
    twin = copy.deepcopy(prepared)
    loaded: GPT = pickle.loads(pickle.dumps(prepared))
    again = af.prepare(FP8, loaded)
    ids = batches(1)[0]
    assert loss_of(prepared, ids) == loss_of(twin, ids) == loss_of(again, ids)


def test_layers_that_ranks_share_are_refused() -> None:
    def refused(ctx: Context) -> str:
        whole = af.prepare_model(ctx, make(), evaluation_mode=True)
        assert loss_of(whole, batches(1)[0]).isfinite()
        with pytest.raises(ConfigurationError) as caught:
            af.prepare(ctx, tensor_models.GPT())
        return str(caught.value)

    mesh = LAYOUTS["tp2"].config()
    for text in run_ranks(refused, 2, "processes", mixed_precision="fp8", parallelism_config=mesh):
        assert "torchao can't be combined with tp_size" in text


def norms(ctx: Context, is_sparse: bool) -> list[float]:
    """Return the norms of gradients of a few steps, on any mesh."""
    model = SparseGPT() if is_sparse else tensor_models.GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = [row for seed in range(3) for row in zip(*tensor_models.make_batch(seed, 8), strict=True)]
    loader = torch.utils.data.DataLoader(cast("Any", rows), batch_size=8 // ctx.axis_size("dp"))
    model, optimizer, loader = af.prepare(ctx, model, optimizer, loader)
    scaler = af.init_scaler(ctx)
    found: list[float] = []

    def loss_fn(model: nn.Module, batch: Any) -> af.Loss:
        total, count = tensor_models.summed_loss(model, batch)
        return af.Loss(total, count)

    for batch, micro in af.microbatches(ctx, loader):
        scaler, _ = af.forward_backward(ctx, model, loss_fn, batch, scaler, micro)
        scaler = af.unscale_gradients(ctx, optimizer, scaler)
        found.append(float(af.clip_grad_norm_(ctx, model.parameters(), 1e3, scaler_state=scaler)))
        scaler = af.optimizer_step(ctx, optimizer, scaler)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hsdp2x2", "cp2", "sp2", "ep2", "pp2", "pp2xfsdp2"])
def test_every_mesh_without_tp_trains_as_one_process_in_bf16(name: str) -> None:
    layout, is_sparse = LAYOUTS[name], name == "ep2"
    one = run_ranks(lambda ctx: norms(ctx, is_sparse), 1, "processes", mixed_precision="bf16")[0]
    options = af.DataLoaderConfiguration(sequence={0: 1, 1: 1} if layout.cp * layout.sp > 1 else None)
    for found in run_ranks(
        lambda ctx: norms(ctx, is_sparse),
        layout.size,
        "processes",
        mixed_precision="fp8",
        parallelism_config=layout.config(),
        dataloader_config=options,
    ):
        assert found == pytest.approx(one, rel=0.1)
        assert found != one


def test_a_policy_of_fp8_needs_products_in_fp8() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy="fp8")

    def dtypes(ctx: Context) -> tuple[object, str]:
        shard = plan_model(ctx.replace(mixed_precision="fp8"), make()).shard
        assert shard is not None
        with pytest.raises(ConfigurationError, match="contradicts mixed_precision='bf16'") as caught:
            plan_model(ctx.replace(mixed_precision="bf16"), make())
        return (shard.param_dtype, shard.reduce_dtype), str(caught.value)

    assert run_ranks(dtypes, 2, "processes", fsdp_plugin=plugin)[0][0] == (torch.bfloat16, torch.bfloat16)


def test_engines_that_own_the_step_are_refused() -> None:
    with pytest.raises(NotAvailableError, match="fp8' can't be combined yet with DeepSpeed"):
        FP8.replace(deepspeed_plugin=af.DeepSpeedPlugin())


def test_the_shim_names_the_engine() -> None:
    accelerator = af.Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[AORecipeKwargs()])
    assert accelerator.fp8_backend is FP8Backend.AO
    assert af.Accelerator(cpu=True, mixed_precision="bf16").fp8_backend is None


def test_blocks_and_a_history_are_two_ways() -> None:
    choice = choose_fp8(
        TERecipeKwargs(use_mxfp8_block_scaling=True, amax_history_len=4), {"transformer_engine"}
    )
    with pytest.raises(ConfigurationError, match="amax_history_len=4 configures scales from the past"):
        plan_fp8(choice, read_facts(make()), DeviceFacts(type="cpu"))
