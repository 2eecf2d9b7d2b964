"""The plan of Megatron-LM, and the pure functions that carry weights over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn import Context, MegatronLMPlugin, MegatronPlan, ModelShape, plan_megatron, read_shape
from accelfn.context import plan_context
from accelfn.errors import ConfigurationError, NotAvailableError

GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_layer": 12,
    "n_embd": 24,
    "n_head": 12,
    "n_inner": None,
    "vocab_size": 61,
    "n_positions": 32,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
    "attn_pdrop": 0.1,
    "resid_pdrop": 0.2,
    "embd_pdrop": 0.2,
}
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 12,
    "hidden_size": 24,
    "num_attention_heads": 12,
    "num_key_value_heads": 6,
    "head_dim": 4,
    "intermediate_size": 36,
    "vocab_size": 61,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def shape_of(config: dict[str, Any], **changes: Any) -> ModelShape:
    return read_shape(SimpleNamespace(**{**config, **changes}))


def planned(
    size: int, *, shape: ModelShape | None = None, precision: str = "no", **options: Any
) -> MegatronPlan:
    return plan_megatron(
        MegatronLMPlugin(**options), shape or shape_of(GPT2), size, precision=precision, optimizer="AdamW"
    )


def test_a_plan_prints_what_will_be_done() -> None:
    plan = planned(
        16,
        tp_degree=2,
        pp_degree=2,
        num_micro_batches=4,
        num_layers_per_virtual_pipeline_stage=3,
        use_distributed_optimizer=True,
        recompute_granularity="full",
        gradient_clipping=0.0,
        precision="bf16",
    )
    assert str(plan).splitlines() == [
        "engine     Megatron-LM",
        "model      gpt2",
        "ranks      tp 2 x pp 2 x dp 4",
        "layers     3+3 | 3+3",
        "schedule   interleaved1f1b, 4 microbatches",
        "recompute  full uniform 1",
        "optimizer  adam, sharded over replicas",
        "precision  bfloat16",
        "dropout    attention 0.1, hidden 0.2",
        "clipping   only where the step asks for it",
    ]
    assert planned(3, pp_degree=3, decoder_last_pipeline_num_layers=2).layers == ((5,), (5,), (2,))


@given(
    tp=st.integers(1, 5), pp=st.integers(1, 5), size=st.integers(1, 24), part=st.none() | st.integers(1, 6)
)
def test_what_is_planned_covers_every_rank_and_layer_and_the_rest_is_refused(
    tp: int, pp: int, size: int, part: int | None
) -> None:
    shape = shape_of(LLAMA)
    fits = size % (tp * pp) == 0 and 6 % tp == 0 and 36 % tp == 0 and 12 % pp == 0
    fits = fits and (part is None or (pp > 1 and (12 // pp) % part == 0))
    options: dict[str, Any] = {"num_layers_per_virtual_pipeline_stage": part, "num_micro_batches": pp}
    if not fits:
        with pytest.raises(ConfigurationError, match=r"^Megatron-LM: "):
            planned(size, shape=shape, tp_degree=tp, pp_degree=pp, **options)
        return
    plan = planned(size, shape=shape, tp_degree=tp, pp_degree=pp, **options)
    assert plan.tp * plan.pp * plan.dp == size
    assert sum(sum(stage) for stage in plan.layers) == 12
    assert len(plan.layers) == pp


REFUSED: tuple[tuple[dict[str, Any], type[Exception], str], ...] = (
    ({"tp_degree": 3}, ConfigurationError, r"= 3 must divide the number of ranks, which is 8"),
    (
        {"tp_degree": 8},
        ConfigurationError,
        r"tp_degree=8 must divide the model's 12 heads. Use one of 1, 2, 3",
    ),
    (
        {"pp_degree": 8},
        ConfigurationError,
        "12 layers can't be split into pp_degree=8 .* one of 1, 2, 3, 4, 6, 12",
    ),
    ({"num_layers_per_virtual_pipeline_stage": 2}, ConfigurationError, "needs a pipeline"),
    ({"decoder_last_pipeline_num_layers": 2}, ConfigurationError, "needs a pipeline"),
    ({"pp_degree": 4, "decoder_last_pipeline_num_layers": 2}, ConfigurationError, "leaves 10 of 12 layers"),
    (
        {"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 4},
        ConfigurationError,
        r"=4 must divide the 6 layers",
    ),
    (
        {"pp_degree": 4, "num_layers_per_virtual_pipeline_stage": 1, "num_micro_batches": 2},
        ConfigurationError,
        "multiple of pp_degree=4 microbatches",
    ),
    ({"use_rotary_position_embeddings": True}, ConfigurationError, "the gpt2 model has learned positions"),
    ({"seq_length": 64}, ConfigurationError, "seq_length=64 is above the model's 32"),
    ({"sequence_parallelism": True}, NotAvailableError, "needs a norm of TransformerEngine or Apex"),
    ({"context_parallel_size": 2}, NotAvailableError, r"needs TransformerEngine.*ParallelismConfig\(cp_size"),
    ({"optimizer_cpu_offload": True}, NotAvailableError, "use_distributed_optimizer"),
    ({"pipeline_model_parallel_split_rank": 1}, NotAvailableError, "no longer in megatron-core"),
    ({"encoder_seq_length": 8}, NotAvailableError, "which aren't supported. Use seq_length"),
    ({"decoder_seq_length": 8}, NotAvailableError, "which aren't supported. Use seq_length"),
    ({"tensorboard_dir": "logs"}, NotAvailableError, "log_with"),
    ({"precision": "fp8"}, NotAvailableError, "needs TransformerEngine"),
)


@pytest.mark.parametrize(("options", "error", "message"), REFUSED)
def test_what_does_not_fit_is_refused_by_name(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        planned(8, **options)


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (
            GPT2,
            {"model_type": "bert"},
            "model_type 'bert' has no counterpart.*gpt2, llama.*custom_model_provider",
        ),
        (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        (GPT2, {"activation_function": "swish"}, "activation 'swish'"),
        (LLAMA, {"attention_bias": True}, "attention_bias=True differs from its mlp_bias"),
        (LLAMA, {"rope_parameters": {"rope_type": "yarn"}}, "rotary positions by .*yarn"),
    ],
)
def test_a_model_that_megatron_computes_otherwise_is_refused(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(NotAvailableError, match=message):
        shape_of(config, **changes)


@pytest.mark.parametrize("name", ["Adagrad", "AdamW8bit", "Lion"])
def test_an_optimizer_that_megatron_would_replace_is_refused(name: str) -> None:
    with pytest.raises(NotAvailableError, match=f"would replace the {name}"):
        plan_megatron(MegatronLMPlugin(), shape_of(GPT2), 1, optimizer=name)


@pytest.mark.parametrize("name", ["Adam", "SGD"])
def test_replicas_shard_the_state_of_adamw_alone(name: str) -> None:
    with pytest.raises(NotAvailableError, match=f"of AdamW alone, got {name}"):
        plan_megatron(MegatronLMPlugin(use_distributed_optimizer=True), shape_of(GPT2), 1, optimizer=name)


def test_dropout_is_the_model_s_unless_the_plugin_sets_it() -> None:
    uneven = shape_of(GPT2, embd_pdrop=0.0)
    with pytest.raises(ConfigurationError, match=r"the model has 0\.2 and 0\.0\. Set hidden_dropout"):
        planned(1, shape=uneven)
    plan = planned(1, shape=uneven, hidden_dropout=0.3)
    assert (plan.attention_dropout, plan.hidden_dropout) == (0.1, 0.3)


def test_one_side_accumulates() -> None:
    with pytest.raises(ConfigurationError, match="Use num_micro_batches=6 alone"):
        plan_megatron(MegatronLMPlugin(num_micro_batches=2), shape_of(GPT2), 1, accumulation=3)


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
