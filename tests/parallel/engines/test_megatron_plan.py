"""The plan of Megatron-LM, and its options."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn import Context
from accelfn.config import MegatronLMPlugin
from accelfn.context import plan_context
from accelfn.engines import MegatronPlan, plan_megatron
from accelfn.errors import ConfigurationError, NotAvailableError


def planned(size: int, *, precision: str = "no", num_layers: int = 12, **options: Any) -> MegatronPlan:
    return plan_megatron(
        MegatronLMPlugin(**options), size, precision=precision, optimizer="AdamW", num_layers=num_layers
    )


def test_a_plan_prints_what_will_be_done() -> None:
    plan = planned(
        16,
        tp_degree=2,
        pp_degree=2,
        num_micro_batches=4,
        num_layers_per_virtual_pipeline_stage=3,
        use_distributed_optimizer=True,
        gradient_clipping=0.0,
        precision="bf16",
    )
    assert str(plan).splitlines() == [
        "engine     Megatron-LM",
        "ranks      tp 2 x pp 2 x dp 4",
        "schedule   interleaved1f1b, 4 microbatches",
        "optimizer  adam, sharded over replicas",
        "precision  bfloat16",
        "clipping   only where the step asks for it",
    ]


@given(
    tp=st.integers(1, 5), pp=st.integers(1, 5), size=st.integers(1, 24), part=st.none() | st.integers(1, 6)
)
def test_what_is_planned_covers_every_rank_and_layer_and_the_rest_is_refused(
    tp: int, pp: int, size: int, part: int | None
) -> None:
    fits = size % (tp * pp) == 0 and (part is None or (pp > 1 and 12 % (pp * part) == 0))
    options: dict[str, Any] = {"num_layers_per_virtual_pipeline_stage": part, "num_micro_batches": pp}
    if not fits:
        with pytest.raises(ConfigurationError, match=r"^Megatron-LM: "):
            planned(size, tp_degree=tp, pp_degree=pp, **options)
        return
    plan = planned(size, tp_degree=tp, pp_degree=pp, **options)
    assert plan.tp * plan.pp * plan.dp == size
    assert part is None or plan.pp * plan.num_chunks * part == 12


REFUSED: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"tp_degree": 3}, ConfigurationError, r"= 3 must divide the number of ranks, which is 8"),
    ({"num_layers_per_virtual_pipeline_stage": 2}, ConfigurationError, "needs a pipeline"),
    ({"decoder_last_pipeline_num_layers": 2}, ConfigurationError, "needs a pipeline"),
    (
        {"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 4},
        ConfigurationError,
        r"=4 x pp_degree=2 must divide the number of layers, .* num_hidden_layers=12",
    ),
    (
        {"pp_degree": 4, "num_layers_per_virtual_pipeline_stage": 1, "num_micro_batches": 2},
        ConfigurationError,
        "multiple of pp_degree=4 microbatches",
    ),
    ({"context_parallel_size": 2}, NotAvailableError, r"needs TransformerEngine.*ParallelismConfig\(cp_size"),
    ({"attention_backend": "flash"}, NotAvailableError, "attention_backend='flash' needs Transf"),
    ({"optimizer_cpu_offload": True}, NotAvailableError, "use_distributed_optimizer"),
    ({"pipeline_model_parallel_split_rank": 1}, NotAvailableError, "no longer in megatron-core"),
    ({"encoder_seq_length": 8}, NotAvailableError, "which aren't supported. Use seq_length"),
    ({"tensorboard_dir": "logs"}, NotAvailableError, "log_with"),
    ({"precision": "fp8"}, NotAvailableError, "needs TransformerEngine"),
)


@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        planned(8, **options)


@pytest.mark.parametrize("name", ["Adagrad", "AdamW8bit", "Lion"])
def test_an_optimizer_that_megatron_would_replace_is_refused(name: str) -> None:
    with pytest.raises(NotAvailableError, match=f"would replace the {name}"):
        plan_megatron(MegatronLMPlugin(), 1, optimizer=name)


@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_replicas_shard_the_state_of_adamw_alone(name: str) -> None:
    with pytest.raises(NotAvailableError, match=f"of AdamW alone, got {name}"):
        plan_megatron(MegatronLMPlugin(use_distributed_optimizer=True), 1, optimizer=name)


def test_one_side_accumulates() -> None:
    with pytest.raises(ConfigurationError, match="Use num_micro_batches=6 alone"):
        plan_megatron(MegatronLMPlugin(num_micro_batches=2), 1, accumulation=3)


def test_a_context_has_the_axes_of_the_plugin() -> None:
    ctx = plan_context(16, megatron_lm_plugin=MegatronLMPlugin(tp_degree=2, pp_degree=4))
    assert [ctx.axis_size(axis) for axis in ("tp", "pp", "dp_replicate")] == [2, 4, 2]
    assert str(ctx.distributed_type) == "MEGATRON_LM"
    assert ctx.replace(mixed_precision="bf16").axis_size("tp") == 2
    with pytest.raises(ConfigurationError, match="2 x 4 must divide the number of ranks, which is 12"):
        plan_context(12, megatron_lm_plugin=MegatronLMPlugin(tp_degree=2, pp_degree=4))
    with pytest.raises(ConfigurationError, match="reduction"):
        plan_context(8, megatron_lm_plugin=MegatronLMPlugin(), reduction="canonical")
    wrong: Any = {"tp_degree": 2}
    with pytest.raises(TypeError, match="megatron_lm_plugin must be a MegatronLMPlugin"):
        Context().replace(megatron_lm_plugin=wrong)


INVALID: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"tp_degree": 0}, ConfigurationError, "tp_degree must be at least 1"),
    ({"recompute_granularity": "some"}, ConfigurationError, "must be one of full, selective"),
    ({"recompute_method": "block"}, ConfigurationError, 'belongs to recompute_granularity="full"'),
    ({"attention_backend": False}, TypeError, "attention_backend must be"),
    ({"train_iters": 5, "train_samples": 5}, ConfigurationError, "train_iters and train_samples exclude"),
    ({"lr_warmup_fraction": 2}, ConfigurationError, "lr_warmup_fraction"),
    ({"lr_mult": 2.0}, ConfigurationError, "scale_lr_cond"),
    ({"consumed_samples": [1, 2, 3, 4]}, ConfigurationError, "at most three numbers"),
    ({"custom_prepare_model_function": print}, ConfigurationError, "pass custom_model_provider_function too"),
    ({"custom_loss_function": 3}, TypeError, "must be callable"),
)


@pytest.mark.parametrize(("values", "error", "message"), INVALID)
def test_a_plugin_that_contradicts_itself_cannot_be_built(
    values: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        MegatronLMPlugin(**values)
