import base64
import json
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from accelfn.context.config import (
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    MegatronLMPlugin,
    ProjectConfiguration,
)
from accelfn.errors import ConfigurationError

CONFIG: dict[str, Any] = {"zero_optimization": {"stage": 3}, "optimizer": {"betas": [0.9, 0.95]}}

DEFAULTS: tuple[tuple[type, dict[str, Any]], ...] = (
    (
        DeepSpeedPlugin,
        {
            "hf_ds_config": None,
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_stage": 2,
            "is_train_batch_min": True,
            "offload_optimizer_device": "none",
            "offload_param_device": "none",
            "offload_optimizer_nvme_path": "none",
            "offload_param_nvme_path": "none",
            "zero3_init_flag": False,
            "zero3_save_16bit_model": False,
            "transformer_moe_cls_names": None,
            "enable_msamp": False,
            "msamp_opt_level": "O1",
        },
    ),
    (
        DataLoaderConfiguration,
        {
            "split_batches": False,
            "dispatch_batches": None,
            "even_batches": True,
            "use_seedable_sampler": False,
            "data_seed": None,
            "non_blocking": False,
            "use_stateful_dataloader": False,
            "custom_classes": (),
            "sequence": None,
            "sequence_padding": None,
        },
    ),
    (
        ProjectConfiguration,
        {
            "project_dir": None,
            "logging_dir": None,
            "automatic_checkpoint_naming": False,
            "total_limit": None,
            "iteration": 0,
            "save_on_each_node": False,
        },
    ),
)
# Where the value differs from the peer's, the source says why.
MEGATRON_NOT_NEUTRAL: dict[str, Any] = {
    "tp_degree": 1,
    "pp_degree": 1,
    "num_micro_batches": 1,
    "gradient_clipping": 1.0,
    "attention_backend": "auto",
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "context_parallel_size": 1,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "calculate_per_token_loss": True,
    "use_rotary_position_embeddings": True,
    "is_train_batch_min": True,
    "weight_decay_incr_style": "constant",
    "lr_decay_style": "linear",
    "min_lr": 0.0,
    "lr_mult": 1.0,
    "eval_iters": 100,
    "eval_interval": 1000,
}


@pytest.mark.parametrize(("kind", "defaults"), DEFAULTS)
def test_defaults(kind: type, defaults: dict[str, Any]) -> None:
    record = kind()
    assert {field.name: getattr(record, field.name) for field in fields(record)} == defaults


def test_defaults_of_megatron_are_neutral_but_for_these() -> None:
    plugin = MegatronLMPlugin()
    values = {field.name: getattr(plugin, field.name) for field in fields(plugin)}
    neutral = {name: value for name, value in values.items() if name not in MEGATRON_NOT_NEUTRAL}
    assert {name: values[name] for name in MEGATRON_NOT_NEUTRAL} == MEGATRON_NOT_NEUTRAL
    assert all(value is None or value is False for value in neutral.values())


@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        json.dumps(CONFIG),
        base64.urlsafe_b64encode(json.dumps(CONFIG).encode()).decode(),
        SimpleNamespace(config=CONFIG),
    ],
    ids=["mapping", "json", "base64", "object"],
)
def test_a_configuration_in_every_form(config: object) -> None:
    stored = DeepSpeedPlugin(hf_ds_config=config).hf_ds_config
    assert stored == {"zero_optimization": {"stage": 3}, "optimizer": {"betas": (0.9, 0.95)}}


def test_a_configuration_file_is_kept_as_a_path() -> None:
    assert DeepSpeedPlugin(hf_ds_config=Path("a/ds.json")).hf_ds_config == "a/ds.json"
    assert DeepSpeedPlugin(hf_ds_config="none") == DeepSpeedPlugin()


def test_models_are_born_sharded_at_stage_3_only() -> None:
    assert DeepSpeedPlugin(zero_stage=3).zero3_init_flag is True
    assert DeepSpeedPlugin(zero_stage=3, zero3_init_flag=False).zero3_init_flag is False
    assert DeepSpeedPlugin(zero_stage=2, zero3_init_flag=True).zero3_init_flag is False
    assert replace(DeepSpeedPlugin(zero_stage=3), zero_stage=1).zero3_init_flag is False


def test_consumed_samples_are_filled_up() -> None:
    assert MegatronLMPlugin(consumed_samples=[5]).consumed_samples == (5, 0, 0)


def test_megatron_knows_how_many_ranks_hold_a_model() -> None:
    plugin = MegatronLMPlugin(tp_degree=2, pp_degree=3, context_parallel_size=5)
    assert plugin.model_parallel_size == 30


def test_attention_backend_true_is_auto() -> None:
    assert MegatronLMPlugin(attention_backend=True) == MegatronLMPlugin()


def test_logs_go_to_the_project_unless_told_otherwise() -> None:
    assert ProjectConfiguration(project_dir=Path("runs")).logging_dir == "runs"
    assert ProjectConfiguration(project_dir="runs", logging_dir="logs").logging_dir == "logs"


INVALID: tuple[tuple[type, dict[str, Any], type[Exception], str], ...] = (
    (DeepSpeedPlugin, {"zero_stage": 4}, ConfigurationError, "from 0 to 3, got 4"),
    (DeepSpeedPlugin, {"gradient_accumulation_steps": "some"}, TypeError, "must be an int, got 'some'"),
    (DeepSpeedPlugin, {"gradient_clipping": -1.0}, ConfigurationError, "at least 0.0, got -1.0"),
    (DeepSpeedPlugin, {"offload_param_device": "disk"}, ConfigurationError, "Use one of none, cpu, nvme"),
    (
        DeepSpeedPlugin,
        {"offload_param_device": "nvme"},
        ConfigurationError,
        "offload_param_nvme_path is needed",
    ),
    (DeepSpeedPlugin, {"enable_msamp": True, "zero_stage": 3}, ConfigurationError, "zero_stage=3, got both"),
    (DeepSpeedPlugin, {"msamp_opt_level": "O3"}, ConfigurationError, "Use one of O1, O2"),
    (DeepSpeedPlugin, {"hf_ds_config": {}}, ConfigurationError, "must have a zero_optimization section"),
    (DeepSpeedPlugin, {"hf_ds_config": "{"}, ConfigurationError, "looks like JSON but is not"),
    (DeepSpeedPlugin, {"hf_ds_config": " "}, ConfigurationError, "must not be empty"),
    (DeepSpeedPlugin, {"hf_ds_config": 3}, TypeError, "a mapping, a path, JSON text"),
    (DataLoaderConfiguration, {"data_seed": -1}, ConfigurationError, "at least 0, got -1"),
    (DataLoaderConfiguration, {"dispatch_batches": "no"}, TypeError, "True, False or None"),
    (ProjectConfiguration, {"total_limit": 0}, ConfigurationError, "at least 1, got 0"),
    (ProjectConfiguration, {"iteration": -1}, ConfigurationError, "at least 0, got -1"),
    (ProjectConfiguration, {"project_dir": 3}, TypeError, "a path"),
    (ProjectConfiguration, {"project_dir": ""}, ConfigurationError, "must not be empty"),
    (MegatronLMPlugin, {"tp_degree": 0}, ConfigurationError, "tp_degree must be at least 1, got 0"),
    (MegatronLMPlugin, {"train_iters": 0}, ConfigurationError, "train_iters must be at least 1, got 0"),
    (MegatronLMPlugin, {"attention_dropout": 1.5}, ConfigurationError, "at most 1.0, got 1.5"),
    (
        MegatronLMPlugin,
        {"attention_backend": False},
        ConfigurationError,
        "attention_backend does not know False",
    ),
    (MegatronLMPlugin, {"lr_decay_style": "step"}, ConfigurationError, "lr_decay_style does not know 'step'"),
    (MegatronLMPlugin, {"consumed_samples": 3}, TypeError, "one to three counts"),
    (MegatronLMPlugin, {"custom_loss_function": 3}, TypeError, "custom_loss_function must be a callable"),
    (MegatronLMPlugin, {"custom_prepare_model_function": print}, ConfigurationError, "Pass both"),
    (MegatronLMPlugin, {"other_megatron_args": [1]}, TypeError, "must be a mapping or None"),
)


@pytest.mark.parametrize(("kind", "values", "error", "message"), INVALID)
def test_an_invalid_record_cannot_be_built(
    kind: type, values: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        kind(**values)
