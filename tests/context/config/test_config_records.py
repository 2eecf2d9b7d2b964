"""Laws that hold for every configuration record."""

import copy
import dataclasses
import inspect
import pickle
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from accelfn.context import config
from accelfn.context.config import (
    AORecipeKwargs,
    AutocastKwargs,
    CanonicalReduction,
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    DynamoBackend,
    FP8Backend,
    FP8RecipeKwargs,
    FullyShardedDataParallelPlugin,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    Guard,
    GuardMode,
    InitProcessGroupKwargs,
    KwargsHandler,
    MegatronLMPlugin,
    MSAMPRecipeKwargs,
    ParallelismConfig,
    PrecisionType,
    ProfileKwargs,
    ProjectConfiguration,
    RNGType,
    Settings,
    StringEnum,
    TERecipeKwargs,
    TorchContextParallelConfig,
    TorchDynamoPlugin,
    TorchTensorParallelConfig,
)
from accelfn.errors import ConfigurationError

DEFAULTS: tuple[Any, ...] = (
    AORecipeKwargs(),
    AutocastKwargs(),
    CanonicalReduction(),
    DataLoaderConfiguration(),
    DeepSpeedPlugin(),
    DistributedDataParallelKwargs(),
    FP8RecipeKwargs(),
    FullyShardedDataParallelPlugin(),
    GradScalerKwargs(),
    GradientAccumulationPlugin(),
    Guard(),
    InitProcessGroupKwargs(),
    KwargsHandler(),
    MSAMPRecipeKwargs(),
    MegatronLMPlugin(),
    ParallelismConfig(),
    ProfileKwargs(),
    ProjectConfiguration(),
    Settings(),
    TERecipeKwargs(),
    TorchContextParallelConfig(),
    TorchDynamoPlugin(),
    TorchTensorParallelConfig(),
)
FILLED: tuple[Any, ...] = (
    FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy="bf16"),
    FullyShardedDataParallelPlugin(cpu_ram_efficient_loading=True, transformer_cls_names_to_wrap=["A", "B"]),
    DistributedDataParallelKwargs(comm_hook="power_sgd", comm_state_option={"matrix_approximation_rank": 2}),
    Guard(mode="off", timeout=timedelta(seconds=1), check_replicas_every=5, watchdog=True),
    MegatronLMPlugin(2, sequence_parallelism=True, consumed_samples=[5], recompute_activations=True),
    MegatronLMPlugin(other_megatron_args={"init_method_std": 0.01}, recompute_granularity="full"),
    ParallelismConfig(dp_shard_size=2, tp_size=2, cp_size=2),
    ParallelismConfig(sp_size=2),
    ProfileKwargs(activities=["cpu"], schedule_option={"wait": 1, "warmup": 1, "active": 2}),
    ProjectConfiguration(project_dir="runs"),
    TorchDynamoPlugin(backend="inductor", options={"epilogue_fusion": True}),
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


def test_the_records_themselves_do_not_need_torch() -> None:
    # The package around them does, so an empty one stands in for it.
    parent = str(Path(config.__file__).parents[1])
    code = (
        "import sys, types; parent = types.ModuleType('accelfn.context'); "
        f"parent.__path__ = [{parent!r}]; sys.modules['accelfn.context'] = parent; "
        "import accelfn.context.config as c; c.read_settings({}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# As Accelerate 1.15 takes them. Fields that its versions order differently, or that it lacks, go by name;
# those of a record that isn't listed all do.
POSITIONAL: dict[type, str] = {
    AORecipeKwargs: "config module_filter_func pad_inner_dim enable_fsdp_float8_all_gather",
    AutocastKwargs: "enabled cache_enabled",
    DataLoaderConfiguration: "split_batches dispatch_batches even_batches use_seedable_sampler data_seed "
    "non_blocking use_stateful_dataloader",
    DeepSpeedPlugin: "hf_ds_config gradient_accumulation_steps gradient_clipping zero_stage "
    "is_train_batch_min offload_optimizer_device offload_param_device offload_optimizer_nvme_path "
    "offload_param_nvme_path zero3_init_flag zero3_save_16bit_model transformer_moe_cls_names enable_msamp "
    "msamp_opt_level",
    DistributedDataParallelKwargs: "dim broadcast_buffers bucket_cap_mb find_unused_parameters "
    "check_reduction gradient_as_bucket_view static_graph comm_hook comm_wrapper comm_state_option",
    FullyShardedDataParallelPlugin: "fsdp_version sharding_strategy reshard_after_forward "
    "backward_prefetch mixed_precision_policy auto_wrap_policy",
    GradientAccumulationPlugin: "num_steps adjust_scheduler sync_with_dataloader sync_each_batch",
    GradScalerKwargs: "init_scale growth_factor backoff_factor growth_interval enabled",
    InitProcessGroupKwargs: "backend init_method timeout",
    MSAMPRecipeKwargs: "opt_level",
    ParallelismConfig: "dp_replicate_size dp_shard_size tp_size cp_size",
    ProfileKwargs: "activities schedule_option on_trace_ready record_shapes profile_memory with_stack "
    "with_flops with_modules output_trace_dir",
    ProjectConfiguration: "project_dir logging_dir automatic_checkpoint_naming total_limit iteration "
    "save_on_each_node",
    TERecipeKwargs: "use_autocast_during_eval margin interval fp8_format amax_history_len "
    "amax_compute_algo override_linear_precision use_mxfp8_block_scaling",
    TorchContextParallelConfig: "cp_comm_strategy",
    TorchDynamoPlugin: "backend mode fullgraph dynamic options disable use_regional_compilation",
    MegatronLMPlugin: "tp_degree pp_degree num_micro_batches gradient_clipping sequence_parallelism "
    "recompute_activations use_distributed_optimizer",
    TorchTensorParallelConfig: "enable_async_tp",
}


@pytest.mark.parametrize("record", DEFAULTS, ids=named)
def test_a_record_takes_its_first_fields_in_accelerate_s_order(record: Any) -> None:
    kind: Any = record.__class__
    parameters = inspect.signature(kind).parameters.values()
    positional = [one.name for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    assert positional == POSITIONAL.get(kind, "").split()
    assert kind(*(getattr(record, name) for name in positional)) == record


def test_first_fields_go_by_place() -> None:
    assert ProjectConfiguration("runs").project_dir == "runs"
    assert GradientAccumulationPlugin(4).num_steps == 4


INVALID: tuple[tuple[Any, dict[str, Any], type[Exception], str], ...] = (
    (AutocastKwargs, {"enabled": None}, TypeError, "AutocastKwargs.enabled must be True or False, got None"),
    (DataLoaderConfiguration, {"data_seed": -1}, ConfigurationError, "at least 0, got -1"),
    (DataLoaderConfiguration, {"custom_classes": 3}, TypeError, "a tuple of classes"),
    (DataLoaderConfiguration, {"sequence": {"ids": "1"}}, TypeError, "from keys or places to numbers"),
    (ProjectConfiguration, {"total_limit": 0}, ConfigurationError, "at least 1, got 0"),
    (ProjectConfiguration, {"project_dir": 3}, TypeError, "a path"),
    (
        DistributedDataParallelKwargs,
        {"comm_hook": "zip"},
        ConfigurationError,
        "comm_hook does not know 'zip'",
    ),
    (DistributedDataParallelKwargs, {"comm_wrapper": "fp16"}, ConfigurationError, "without a comm_hook"),
    (
        DistributedDataParallelKwargs,
        {"comm_state_option": {"a": 1}},
        ConfigurationError,
        "belongs to the hooks",
    ),
    (DistributedDataParallelKwargs, {"comm_state_option": [1]}, TypeError, "must be a mapping"),
    (GradScalerKwargs, {"growth_factor": 1.0}, ConfigurationError, "growth_factor above 1"),
    (GradScalerKwargs, {"init_scale": float("nan")}, ConfigurationError, "got nan"),
    (InitProcessGroupKwargs, {"timeout": 600}, TypeError, r"datetime.timedelta .* got 600"),
    (InitProcessGroupKwargs, {"timeout": timedelta(0)}, ConfigurationError, "longer than zero"),
    (InitProcessGroupKwargs, {"backend": " "}, ConfigurationError, "must not be empty"),
    (Guard, {"mode": "some"}, ConfigurationError, r"Guard\.mode .*'some'.* full, sampled, off"),
    (Guard, {"timeout": "5"}, TypeError, r"Guard\.timeout must be seconds .*datetime\.timedelta, got '5' of"),
    (Guard, {"timeout": True}, TypeError, r"Guard\.timeout must be seconds"),
    (Guard, {"timeout": float("inf")}, ConfigurationError, r"Guard\.timeout must be at least 0, got inf"),
    (Guard, {"long_timeout": 0}, ConfigurationError, r"Guard\.long_timeout must be longer than zero"),
    (Guard, {"check_replicas_every": 0}, ConfigurationError, r"Guard\.check_replicas_every .*0"),
    (ProfileKwargs, {"activities": "cpu"}, TypeError, "must be a list of names"),
    (ProfileKwargs, {"activities": ["tpu"]}, ConfigurationError, "does not know 'tpu'"),
    (
        TorchDynamoPlugin,
        {"mode": "max-autotune", "options": {"a": 1}},
        ConfigurationError,
        "exclude each other",
    ),
    (GradientAccumulationPlugin, {"num_steps": True}, TypeError, "must be an int, got True"),
    (TERecipeKwargs, {"fp8_format": "E3M4"}, ConfigurationError, "Use one of HYBRID, E4M3, E5M2"),
    (DeepSpeedPlugin, {"zero_stage": 4}, ConfigurationError, "at least 0 and at most 3, got 4"),
)


@pytest.mark.parametrize(("kind", "values", "error", "message"), INVALID)
def test_an_invalid_record_cannot_be_built(
    kind: Any, values: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        kind(**values)


CHANGED = (
    AutocastKwargs(enabled=False, cache_enabled=True),
    GradScalerKwargs(init_scale=2.0, growth_interval=5),
    InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=9)),
    ProfileKwargs(activities=["CPU", "cuda"], schedule_option={"wait": 0, "warmup": 0, "active": 1}),
    TorchDynamoPlugin(backend="aot_eager", fullgraph=True, dynamic=False, mode="max-autotune"),
    GradientAccumulationPlugin(num_steps=4, adjust_scheduler=False),
    FP8RecipeKwargs(backend="te", fp8_format="E4M3"),
)


@pytest.mark.parametrize("record", CHANGED, ids=named)
def test_kwargs_are_what_differs_and_rebuild_the_record(record: KwargsHandler) -> None:
    default = type(record)()
    kwargs = record.to_kwargs()
    assert kwargs
    assert type(record)(**kwargs) == record
    assert all(value != getattr(default, name) for name, value in kwargs.items())
    assert default.to_kwargs() == {}


def test_fields_of_ours_are_not_passed_on() -> None:
    given = {"start": 1}
    hook = DistributedDataParallelKwargs(comm_hook="power_sgd", comm_state_option=given, static_graph=True)
    given["start"] = 2
    assert hook.to_kwargs() == {"static_graph": True}
    assert hook.comm_state_option == {"start": 1}
    assert type(hook.to_dict()["comm_state_option"]) is dict
    regional = TorchDynamoPlugin(backend="INDUCTOR", use_regional_compilation=True)
    assert regional.to_kwargs() == {"backend": "inductor"}


@pytest.mark.parametrize("enum", [DynamoBackend, FP8Backend, GuardMode, PrecisionType, RNGType])
def test_membership_of_an_enum_is_by_value(enum: type[StringEnum]) -> None:
    for member in enum:
        assert member.value in enum
        assert member.value in {member}
        assert str(member) == f"{member}" == member.value
        assert pickle.loads(pickle.dumps(member)) is member
    assert "nonsense" not in enum
    assert 3 not in enum


def test_a_guard_takes_seconds_as_a_number_too() -> None:
    guard = Guard(timeout=1.5, long_timeout=60)
    assert guard == Guard(timeout=timedelta(seconds=1.5), long_timeout=timedelta(minutes=1))
    assert (guard.timeout_s, guard.long_timeout_s) == (1.5, 60.0)
