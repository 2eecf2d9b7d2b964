"""The plan of a model is a value that prints, and is what happens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import Context, FullyShardedDataParallelPlugin, ParallelismConfig
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.parallel import ModelPlan, plan_model, read_facts
from accelfn.testing import run_ranks
from tests.parallel import shard_models as lm
from tests.parallel.tensor_models import GPT

PLUGIN = FullyShardedDataParallelPlugin(fsdp_version=2)


def planned(model: Any = None, size: int = 2, **options: Any) -> ModelPlan:
    return run_ranks(lambda ctx: plan_model(ctx, model or lm.make()), size, **options)[0]


def test_the_plan_prints_what_was_asked_for() -> None:
    hsdp = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    plan = planned(size=4, fsdp_plugin=PLUGIN, parallelism_config=hsdp, mixed_precision="bf16")
    assert str(plan) == "\n".join(
        [
            "model       Model, 1,072 parameters, 1,072 trained",
            "mesh        dp_replicate 2 x dp_shard 2",
            "gradients   averaged over dp_replicate x dp_shard by FSDP, and sharded over 2",
            "units       blocks.0, blocks.1, the rest of the model",
            (
                "parameters  2.1 kB on each rank; the largest unit is 864 B while it computes, and freed "
                "after its forward"
            ),
            (
                "windows     until the last batch of a window each rank holds 4.3 kB, unsharded; with "
                "sync_each_batch its shard of them"
            ),
            (
                "precision   autocast, parameters gathered in bfloat16, gradients averaged in float32, "
                "outputs in float32"
            ),
            "compiled    nothing",
        ]
    )


def test_without_a_mesh_the_model_is_whole() -> None:
    plan = planned(dynamo_backend="eager")
    assert (plan.engine, plan.shard, plan.compiled) == ("ddp", None, ("",))
    assert "averaged over dp_replicate; every rank has the full model" in str(plan)
    assert planned(size=1).engine == "none"


def test_a_meta_model_and_its_facts_have_the_plan_of_a_real_one() -> None:
    with torch.device("meta"):
        model = lm.Model()
    plan = planned(fsdp_plugin=PLUGIN)
    assert planned(model, fsdp_plugin=PLUGIN) == plan
    assert planned(read_facts(model), fsdp_plugin=PLUGIN) == plan


def test_a_model_can_have_another_plan_than_the_context_says() -> None:
    def on_rank(ctx: Context) -> tuple[str, str]:
        model = lm.make()
        other = ctx.replace(
            fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="NO_WRAP")
        )
        return plan_model(ctx, model, engine="ddp").engine, str(plan_model(other, model).rows()["units"])

    assert run_ranks(on_rank, 2, fsdp_plugin=PLUGIN) == [("ddp", "the complete model")] * 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at each parameter's
def test_units_are_recomputed_compiled_and_sharded_in_this_order_and_keep_their_names() -> None:
    def on_rank(ctx: Context) -> tuple[bool, bool, list[tuple[str, ...]]]:
        model = lm.make()
        names = list(model.state_dict())
        plan = plan_model(ctx, model)
        model, optimizer = af.prepare(ctx, model, lm.sgd(model.parameters()))
        found, whole = lm.train(ctx, model, optimizer), lm.make()
        expected = lm.train(Context(), whole, lm.sgd(whole.parameters()))
        is_close = lm.is_close(found, expected)
        return is_close, list(model.state_dict()) == names, [plan.recomputed, plan.compiled]

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=True)
    for is_close, is_same, units in run_ranks(
        on_rank, 2, on="processes", fsdp_plugin=plugin, dynamo_backend="aot_eager", timeout_s=120
    ):
        assert is_close
        assert is_same
        assert units == [("blocks.0", "blocks.1")] * 2


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"state_dict_type": "LOCAL_STATE_DICT"}, NotAvailableError, "state_dict_type=LOCAL_STATE_DICT"),
        ({"param_init_fn": nn.Module.cpu}, NotAvailableError, "param_init_fn="),
        ({"limit_all_gathers": False}, NotAvailableError, "limit_all_gathers=False"),
        ({"backward_prefetch": "BACKWARD_POST"}, NotAvailableError, "backward_prefetch=BACKWARD_POST"),
        ({"sharding_strategy": "NO_SHARD"}, ConfigurationError, "Leave the plugin out"),
        ({"sharding_strategy": "HYBRID_SHARD"}, ConfigurationError, "dp_replicate_size=..."),
    ],
)
def test_what_is_asked_for_and_not_done_is_refused(
    fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        planned(fsdp_plugin=FullyShardedDataParallelPlugin(**fields))


def test_one_rank_shards_nothing_and_says_what_it_can_not_do() -> None:
    assert planned(size=1, fsdp_plugin=PLUGIN).engine == "none"
    with pytest.raises(ConfigurationError, match="cpu_offload only applies to shards"):
        planned(size=1, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True))
    with pytest.raises(ConfigurationError, match="mixed_precision_policy only applies to shards"):
        planned(size=1, fsdp_plugin=replace(PLUGIN, mixed_precision_policy="bf16"))


def stages(schedule: str, **sizes: Any) -> ParallelismConfig:
    handler = af.config.PipelineParallelConfig(schedule=schedule)
    return ParallelismConfig(pp_size=2, pp_handler=handler, **sizes)


def wraps_all(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    return True


SHARDED = ParallelismConfig(dp_shard_size=4)


@pytest.mark.parametrize(
    ("config", "engine", "options", "message"),
    [
        (stages("gpipe", tp_size=2), "ddp", {}, 'engine="ddp" keeps the full .* along pp have parts'),
        (None, "shard", {"reduction": "canonical"}, "needs the full model on every rank"),
        (SHARDED, None, {"auto_wrap_policy": wraps_all}, "auto_wrap_policy needs the model's modules"),
        (SHARDED, None, {"ignored_modules": "out"}, "ignored_modules needs the model's modules"),
    ],
)
def test_what_does_not_go_together_is_refused(
    config: ParallelismConfig | None,
    engine: Literal["ddp", "shard"] | None,
    options: dict[str, Any],
    message: str,
) -> None:
    if config is SHARDED:
        options = {"fsdp_plugin": replace(PLUGIN, **options)}
    ctx = af.plan_context(4, parallelism_config=config, **options)
    with pytest.raises(ConfigurationError, match=message):
        plan_model(ctx, read_facts(GPT(num_blocks=4)), engine=engine)


def test_parts_of_a_model_need_ranks_that_are_processes() -> None:
    def on_rank(ctx: Context) -> None:
        with pytest.raises(NotAvailableError, match="these are threads"):
            af.prepare_model(ctx, GPT())

    for axis in ("cp", "sp", "dp_shard"):
        sizes: dict[str, Any] = {f"{axis}_size": 2}
        run_ranks(on_rank, 2, parallelism_config=ParallelismConfig(**sizes))


def test_parameters_that_can_not_be_sharded_are_named() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

    with pytest.raises(ConfigurationError, match="scale is a scalar"):
        planned(Scaled(), fsdp_plugin=PLUGIN)
    mixed = lm.make()
    mixed.blocks[0].down.to(torch.bfloat16)
    with pytest.raises(
        ConfigurationError, match=r"the unit blocks\.0 has trained parameters of several dtypes"
    ):
        planned(mixed, fsdp_plugin=PLUGIN)
