"""Training with 8-bit matrix products by torchao, emulated on the CPU."""

# torch leaves backward and manual_seed partly untyped, and torchao has no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import Context, FullyShardedDataParallelPlugin
from accelfn.config import AORecipeKwargs, TERecipeKwargs, choose_fp8
from accelfn.context import DeviceFacts
from accelfn.errors import ConfigurationError
from accelfn.parallel import plan_model, read_facts
from accelfn.parallel.strategies.fp8 import plan_fp8
from accelfn.testing import run_ranks
from accelfn.tree import local_of
from tests.parallel import tensor_models
from tests.parallel.fp8_models import CONVERTED, batches, loss_of, make, train
from tests.parallel.layouts import LAYOUTS
from tests.parallel.test_layouts import Case, by_functions
from tests.parallel.test_layouts import train as run_layout

pytestmark = pytest.mark.slow

# Losses of 50 steps in fp8 stay this near those in bf16.
DISTANCE = 0.05
SHARDED: dict[str, Any] = {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}


def fp8_context(**options: Any) -> Context:
    return Context().replace(mixed_precision="fp8", **options)


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import torchao here once, and not for seconds in each forked rank."""
    importlib.import_module("torchao.float8")


def run(ctx: Context, mode: str, steps: int, **options: Any) -> list[float]:
    """Train a GPT; the optimizer is made before it is prepared."""
    ctx = ctx.replace(mixed_precision=mode, **options)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = af.prepare(ctx, model, optimizer)
    return train(ctx, model, optimizer, batches(steps))


@pytest.mark.parametrize("options", [{}, SHARDED], ids=["ddp", "fsdp2"])
def test_fifty_steps_stay_near_bf16(options: dict[str, Any]) -> None:
    def both(ctx: Context) -> tuple[list[float], list[float]]:
        return run(ctx, "bf16", 50), run(ctx, "fp8", 50)

    expected, found = run_ranks(both, 2, "processes", timeout_s=120, **options)[0]
    assert expected[-1] < 0.5 < 3 < expected[0]
    assert 0 < max(abs(one - other) for one, other in zip(expected, found, strict=True)) < DISTANCE


def test_compiled_and_recomputed_shards_train_alike() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=True)

    def all_ways(ctx: Context) -> list[list[float]]:
        # Tracing looks at the gradients of gathered weights, which torchao has made of others.
        warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
        ways: list[dict[str, Any]] = [{}, {"fsdp_plugin": plugin}, {"dynamo_backend": "aot_eager"}]
        return [run(ctx, "fp8", 3, **options) for options in ways]

    plain, recomputed, compiled = run_ranks(all_ways, 2, "processes", timeout_s=120, **SHARDED)[0]
    assert recomputed == plain
    assert compiled == pytest.approx(plain, abs=1e-5)


def test_weights_that_are_written_by_hand_are_scaled_anew() -> None:
    def work(ctx: Context) -> list[float]:
        models = [af.prepare(ctx.replace(mixed_precision=mode), make()) for mode in ("bf16", "fp8")]
        found: list[float] = []
        for factor in (1.0, 50.0, 0.001):  # with an old scale they would be cut off, or all zeros
            for model in models:
                for parameter in model.parameters():
                    local_of(parameter.data).mul_(factor)
            with torch.no_grad():
                expected, outputs = (model(batches(1)[0][:, :-1]) for model in models)
            found.append(float((outputs - expected).norm() / expected.norm()))
        return found

    for found in run_ranks(work, 2, "processes", **SHARDED):
        assert max(found) < 0.5


def test_layers_compute_in_8_bits_and_keep_names_and_parameters() -> None:
    model = make()
    before, names = dict(model.named_parameters()), list(model.state_dict())
    prepared = af.prepare(fp8_context(), model)
    assert list(prepared.state_dict()) == names
    assert all(parameter is before[name] for name, parameter in prepared.named_parameters())
    kinds = {name: type(module).__name__ for name, module in prepared.named_modules()}
    assert tuple(name for name, kind in kinds.items() if kind == "Float8Linear") == CONVERTED
    layer, x = cast("nn.Linear", prepared.get_submodule("blocks.0.up")), torch.randn(4, 32)
    exact = nn.functional.linear(x, layer.weight, layer.bias)
    error = (layer(x) - exact).abs().max() / exact.abs().max()
    assert 1e-3 < error < 0.1  # float8_e4m3fn has 3 bits behind the point; bf16 would be off by 4e-3


def test_the_plan_prints_what_computes_in_8_bits_and_why() -> None:
    rows = plan_model(fp8_context(), make()).rows()
    assert rows["precision"] == "bf16 by autocast, outputs in float32"
    assert rows["fp8"].splitlines() == [
        "by torchao, the first of torchao, transformer_engine and msamp that is installed",
        "emulated: rounded to 8 bits, multiplied in float32",
        "7 layers: blocks.0.out, blocks.0.up, ..., blocks.1.down",
        "not blocks.0.qkv: the first linear layer",
        "not head: the last linear layer",
    ]
    assert plan_model(Context().replace(mixed_precision="bf16"), make()).fp8 is None


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
    plan = plan_model(fp8_context(), Odd()).fp8
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
    filtered = plan_model(fp8_context(kwargs_handlers=[recipe]), Odd()).fp8
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
    ctx = fp8_context() if recipe is None else fp8_context(kwargs_handlers=[recipe])
    with pytest.raises(ConfigurationError, match=message):
        af.prepare(ctx, model())
    with pytest.raises(ConfigurationError, match=message):
        af.prepare_model(ctx, model(), evaluation_mode=True)


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
    [("bf16", "fp8", (2, 2), (SHARDED, SHARDED)), ("fp8", "fp8", (2, 1), (SHARDED, {}))],
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


@pytest.mark.parametrize("name", ["hsdp2x2", "cp2", "ep2", "pp2xfsdp2"])
def test_every_mesh_without_tp_trains_as_one_process_in_bf16(name: str) -> None:
    layout, case = LAYOUTS[name], Case(1, "AdamW", weighted=True, sparse=name == "ep2")

    def norms(ctx: Context) -> list[float]:
        return run_layout(ctx, case, by_functions).norms

    one = norms(Context().replace(mixed_precision="bf16"))
    for found in run_ranks(
        norms,
        layout.size,
        "processes",
        mixed_precision="fp8",
        parallelism_config=layout.config(),
        dataloader_config=af.DataLoaderConfiguration(sequence={0: 1, 1: 1, 2: 1}),
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


def test_blocks_and_a_history_are_two_ways() -> None:
    choice = choose_fp8(
        TERecipeKwargs(use_mxfp8_block_scaling=True, amax_history_len=4), {"transformer_engine"}
    )
    with pytest.raises(ConfigurationError, match="amax_history_len=4 configures scales from the past"):
        plan_fp8(choice, read_facts(make()), DeviceFacts(type="cpu"))
