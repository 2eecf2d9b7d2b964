"""Laws that hold for every configuration record."""

import copy
import dataclasses
import inspect
import pickle
from datetime import timedelta
from typing import Any

import pytest

from accelfn import config
from accelfn.context import Precision
from accelfn.errors import ConfigurationError

# All records that can be made without saying anything.
MADE = (config.Variable, config.Config, config.Strategy, config.Precision)  # by the library, from these
KINDS: list[Any] = [kind for kind in vars(config).values() if dataclasses.is_dataclass(kind)]
DEFAULTS: tuple[Any, ...] = tuple(kind() for kind in KINDS if kind not in MADE)
FILLED: tuple[Any, ...] = (
    config.FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy="bf16"),
    config.FullyShardedDataParallelPlugin(
        cpu_ram_efficient_loading=True, transformer_cls_names_to_wrap=["A", "B"]
    ),
    config.DistributedDataParallelKwargs(
        comm_hook="power_sgd", comm_state_option={"matrix_approximation_rank": 2}
    ),
    config.Guard(mode="off", timeout=timedelta(seconds=1), check_replicas_every=5, watchdog=True),
    config.MegatronLMPlugin(2, sequence_parallelism=True, consumed_samples=[5], recompute_activations=True),
    config.MegatronLMPlugin(other_megatron_args={"init_method_std": 0.01}, recompute_granularity="full"),
    config.ParallelismConfig(dp_shard_size=2, tp_size=2, cp_size=2),
    config.ParallelismConfig(sp_size=2),
    config.ProfileKwargs(activities=["cpu"], schedule_option={"wait": 1, "warmup": 1, "active": 2}),
    config.ProjectConfiguration(project_dir="runs"),
    config.TorchDynamoPlugin(backend="inductor", options={"epilogue_fusion": True}),
)
RECORDS = DEFAULTS + FILLED


def named(record: object) -> str:
    return type(record).__name__


@pytest.mark.parametrize("record", RECORDS, ids=named)
def test_replace_pickle_and_deepcopy_give_an_equal_record(record: Any) -> None:
    assert dataclasses.replace(record) == record
    assert dataclasses.replace(dataclasses.replace(record)) == record
    assert pickle.loads(pickle.dumps(record)) == record
    assert copy.deepcopy(record) == record
    assert hash(record) == hash(copy.deepcopy(record))


@pytest.mark.parametrize("record", DEFAULTS, ids=named)
def test_records_are_frozen_and_have_no_dict(record: Any) -> None:
    for field in dataclasses.fields(record):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, field.name, None)
        assert f"{field.name}:" in (type(record).__doc__ or "")
    assert not hasattr(record, "__dict__")
    with pytest.raises(TypeError):
        type(record)(no_such_field=1)


@pytest.mark.parametrize("record", DEFAULTS, ids=named)
def test_every_flag_is_a_bool_and_nothing_else(record: Any) -> None:
    for field in dataclasses.fields(record):
        if field.type in ("bool", bool):
            with pytest.raises(TypeError, match=field.name):
                dataclasses.replace(record, **{field.name: "yes"})
        if field.type in ("int", int):
            with pytest.raises(TypeError, match=field.name):
                dataclasses.replace(record, **{field.name: True})


# As Accelerate 1.15 takes them. Fields that its versions order differently, or that it lacks, go by name;
# those of a record that isn't listed all do.
POSITIONAL: dict[type, str] = {
    config.AORecipeKwargs: "config module_filter_func pad_inner_dim enable_fsdp_float8_all_gather",
    config.AutocastKwargs: "enabled cache_enabled",
    config.DataLoaderConfiguration: "split_batches dispatch_batches even_batches use_seedable_sampler "
    "data_seed non_blocking use_stateful_dataloader",
    config.DeepSpeedPlugin: "hf_ds_config gradient_accumulation_steps gradient_clipping zero_stage "
    "is_train_batch_min offload_optimizer_device offload_param_device offload_optimizer_nvme_path "
    "offload_param_nvme_path zero3_init_flag zero3_save_16bit_model transformer_moe_cls_names enable_msamp "
    "msamp_opt_level",
    config.DistributedDataParallelKwargs: "dim broadcast_buffers bucket_cap_mb find_unused_parameters "
    "check_reduction gradient_as_bucket_view static_graph comm_hook comm_wrapper comm_state_option",
    config.FullyShardedDataParallelPlugin: "fsdp_version sharding_strategy reshard_after_forward "
    "backward_prefetch mixed_precision_policy auto_wrap_policy",
    config.GradientAccumulationPlugin: "num_steps adjust_scheduler sync_with_dataloader sync_each_batch",
    config.GradScalerKwargs: "init_scale growth_factor backoff_factor growth_interval enabled",
    config.InitProcessGroupKwargs: "backend init_method timeout",
    config.MSAMPRecipeKwargs: "opt_level",
    config.ParallelismConfig: "dp_replicate_size dp_shard_size tp_size cp_size",
    config.ProfileKwargs: "activities schedule_option on_trace_ready record_shapes profile_memory with_stack "
    "with_flops with_modules output_trace_dir",
    config.ProjectConfiguration: "project_dir logging_dir automatic_checkpoint_naming total_limit iteration "
    "save_on_each_node",
    config.TERecipeKwargs: "use_autocast_during_eval margin interval fp8_format amax_history_len "
    "amax_compute_algo override_linear_precision use_mxfp8_block_scaling",
    config.TorchContextParallelConfig: "cp_comm_strategy",
    config.TorchDynamoPlugin: "backend mode fullgraph dynamic options disable use_regional_compilation",
    config.MegatronLMPlugin: "tp_degree pp_degree num_micro_batches gradient_clipping sequence_parallelism "
    "recompute_activations use_distributed_optimizer",
    config.TorchTensorParallelConfig: "enable_async_tp",
    # Of accelfn alone.
    config.ExpertParallelConfig: "experts",
    config.PipelineParallelConfig: "num_microbatches schedule split",
}


@pytest.mark.parametrize("record", DEFAULTS, ids=named)
def test_a_record_takes_its_first_fields_in_accelerate_s_order(record: Any) -> None:
    kind: Any = record.__class__
    parameters = inspect.signature(kind).parameters.values()
    positional = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert positional == POSITIONAL.get(kind, "").split()
    assert kind(*(getattr(record, name) for name in positional)) == record


INVALID: tuple[tuple[Any, dict[str, Any], type[Exception], str], ...] = (
    (config.AutocastKwargs, {"enabled": None}, TypeError, "enabled must be True or False, got None"),
    (config.DataLoaderConfiguration, {"data_seed": -1}, ConfigurationError, "at least 0, got -1"),
    (config.DataLoaderConfiguration, {"custom_classes": 3}, TypeError, "a tuple of classes"),
    (config.DataLoaderConfiguration, {"sequence": {"ids": "1"}}, TypeError, "from keys or places to numbers"),
    (config.ProjectConfiguration, {"total_limit": 0}, ConfigurationError, "at least 1, got 0"),
    (config.ProjectConfiguration, {"project_dir": 3}, TypeError, "a path"),
    (config.DistributedDataParallelKwargs, {"comm_hook": "zip"}, ConfigurationError, "not know 'zip'"),
    (config.DistributedDataParallelKwargs, {"comm_wrapper": "fp16"}, ConfigurationError, "without a comm"),
    (config.DistributedDataParallelKwargs, {"comm_state_option": {"a": 1}}, ConfigurationError, "the hooks"),
    (config.DistributedDataParallelKwargs, {"comm_state_option": [1]}, TypeError, "must be a mapping"),
    (config.GradScalerKwargs, {"growth_factor": 1.0}, ConfigurationError, "growth_factor above 1"),
    (config.GradScalerKwargs, {"init_scale": float("nan")}, ConfigurationError, "got nan"),
    (config.InitProcessGroupKwargs, {"timeout": 600}, TypeError, r"datetime.timedelta .* got 600"),
    (config.InitProcessGroupKwargs, {"timeout": timedelta(0)}, ConfigurationError, "longer than zero"),
    (config.InitProcessGroupKwargs, {"backend": " "}, ConfigurationError, "must not be empty"),
    (config.Guard, {"mode": "some"}, ConfigurationError, r"Guard\.mode .*'some'.* full, sampled, off"),
    (config.Guard, {"timeout": "5"}, TypeError, r"must be seconds .*datetime\.timedelta, got '5' of"),
    (config.Guard, {"timeout": True}, TypeError, r"Guard\.timeout must be seconds"),
    (config.Guard, {"timeout": float("inf")}, ConfigurationError, r"timeout must be at least 0, got inf"),
    (config.Guard, {"long_timeout": 0}, ConfigurationError, r"Guard\.long_timeout must be longer than zero"),
    (config.Guard, {"check_replicas_every": 0}, ConfigurationError, r"Guard\.check_replicas_every .*0"),
    (Precision, {"mode": "fp32"}, ConfigurationError, r"got 'fp32'\. That is 'no'"),
    (config.Guard, {"mode": "sample"}, ConfigurationError, r"'sample'\. Did you mean 'sampled'\? Use one"),
    (
        config.Guard,
        {"time_out": 1.0},
        TypeError,
        r"no field 'time_out'\. Did you mean 'timeout'\? Its fields",
    ),
    (config.DataLoaderConfiguration, {"even_batch": True}, TypeError, r"Did you mean 'even_batches'\?"),
    (
        config.ParallelismConfig,
        {"dp_size": 2},
        TypeError,
        r"no field 'dp_size'\. Did you mean 'dp_replicate_size' or 'dp_shard_size'\?",
    ),
    (config.ProfileKwargs, {"activities": "cpu"}, TypeError, "must be a list of names"),
    (config.ProfileKwargs, {"activities": ["tpu"]}, ConfigurationError, "does not know 'tpu'"),
    (config.TorchDynamoPlugin, {"mode": "max-autotune", "options": {"a": 1}}, ConfigurationError, "exclude"),
    (config.GradientAccumulationPlugin, {"num_steps": True}, TypeError, "must be an int, got True"),
    (config.TERecipeKwargs, {"fp8_format": "E3M4"}, ConfigurationError, "Use one of HYBRID, E4M3, E5M2"),
    (config.DeepSpeedPlugin, {"zero_stage": 4}, ConfigurationError, "at least 0 and at most 3, got 4"),
)


@pytest.mark.parametrize(("kind", "values", "error", "message"), INVALID)
def test_an_invalid_record_cannot_be_built(
    kind: Any, values: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        kind(**values)


CHANGED = (
    config.AutocastKwargs(enabled=False, cache_enabled=True),
    config.GradScalerKwargs(init_scale=2.0, growth_interval=5),
    config.InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=9)),
    config.ProfileKwargs(activities=["CPU", "cuda"], schedule_option={"wait": 0, "warmup": 0, "active": 1}),
    config.TorchDynamoPlugin(backend="aot_eager", fullgraph=True, dynamic=False, mode="max-autotune"),
    config.GradientAccumulationPlugin(num_steps=4, adjust_scheduler=False),
    config.FP8RecipeKwargs(backend="te", fp8_format="E4M3"),
)


@pytest.mark.parametrize("record", CHANGED, ids=named)
def test_kwargs_are_what_differs_and_rebuild_the_record(record: config.KwargsHandler) -> None:
    default = type(record)()
    kwargs = record.to_kwargs()
    assert kwargs
    assert type(record)(**kwargs) == record
    assert all(value != getattr(default, name) for name, value in kwargs.items())
    assert default.to_kwargs() == {}


def test_fields_of_ours_are_not_passed_on() -> None:
    given = {"start": 1}
    hook = config.DistributedDataParallelKwargs(
        comm_hook="power_sgd", comm_state_option=given, static_graph=True
    )
    given["start"] = 2
    assert hook.to_kwargs() == {"static_graph": True}
    assert hook.comm_state_option == {"start": 1}
    assert type(hook.to_dict()["comm_state_option"]) is dict
    regional = config.TorchDynamoPlugin(backend="INDUCTOR", use_regional_compilation=True)
    assert regional.to_kwargs() == {"backend": "inductor"}


@pytest.mark.parametrize(
    "enum", [config.DynamoBackend, config.FP8Backend, config.GuardMode, config.PrecisionType, config.RNGType]
)
def test_membership_of_an_enum_is_by_value(enum: type[config.StringEnum]) -> None:
    for member in enum:
        assert member.value in enum
        assert member.value in {member}
        assert str(member) == f"{member}" == member.value
        assert pickle.loads(pickle.dumps(member)) is member
    assert "nonsense" not in enum
    assert 3 not in enum


def test_a_guard_takes_seconds_as_a_number_too() -> None:
    guard = config.Guard(timeout=1.5, long_timeout=60)
    assert guard == config.Guard(timeout=timedelta(seconds=1.5), long_timeout=timedelta(minutes=1))
    assert (guard.timeout_s, guard.long_timeout_s) == (1.5, 60.0)
