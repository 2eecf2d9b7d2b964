"""What the environment says, as one record.

This is the only module of the package that knows the names of variables, and even here the environment is
an argument. Every name is looked for with the prefix ``ACCELFN_`` first, and then as Accelerate's launcher
writes it. A variable that is empty counts as not set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from accelfn.context.config.deepspeed import DeepSpeedPlugin
from accelfn.context.config.dynamo import TorchDynamoPlugin
from accelfn.context.config.enums import (
    AutoWrapPolicy,
    BackwardPrefetch,
    ContextParallelStrategy,
    DynamoBackend,
    DynamoMode,
    FP8AmaxAlgorithm,
    FP8Backend,
    FP8Format,
    FP8OptLevel,
    GuardMode,
    LogLevel,
    OffloadDevice,
    PrecisionType,
    ShardingStrategy,
    StateDictType,
)
from accelfn.context.config.fp8 import AORecipeKwargs, FP8RecipeKwargs, MSAMPRecipeKwargs, TERecipeKwargs
from accelfn.context.config.fsdp import FullyShardedDataParallelPlugin
from accelfn.context.config.megatron import MegatronLMPlugin
from accelfn.context.config.parallelism import (
    DeepSpeedSequenceParallelConfig,
    ParallelismConfig,
    TorchContextParallelConfig,
)
from accelfn.context.config.parse import (
    BOOL,
    DEVICE,
    NAMES,
    SIZE,
    TEXT,
    Form,
    choice,
    int_at_least,
    one_of,
    optional,
    or_auto,
    real_at_least,
)
from accelfn.errors import AccelfnError, ConfigurationError

__all__ = ("VARIABLES", "Settings", "Variable", "read_settings")

R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Variable:
    """One row of the table of variables.

    Attributes:
        record: Name of the record that the value goes to.
        field: Its field; "" for a variable that says something about the record as a whole, such as the
            switch that decides whether it is made.
        names: Spellings, in the order in which they are looked for.
        form: How the value is written; ``form.accepts`` says it in words.
    """

    record: str
    field: str
    names: tuple[str, ...]
    form: Form[object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Defaults that the environment gives to ``init_context``; ``None`` where it says nothing.

    Attributes:
        cpu: Whether the CPU is used even where there is an accelerator. Default False.
        device: Name of the torch device, such as "cuda:1". Default None.
        mixed_precision: "no", "fp16", "bf16" or "fp8". Default None.
        gradient_accumulation_steps: Micro-batches per step; "auto" reads as ``None``. Default None.
        debug: Whether every operation across ranks is checked, in worlds of any size. Default False.
        guard: Mode of the guard: "full", "sampled" or "off". Default None.
        reduction: How gradients of ranks are combined: "mean" or "canonical". Default None.
        bypass_device_map: Whether models spread over devices may be prepared. Default False.
        allow_cp_standalone: Whether context parallelism may run without FSDP2. Default False.
        cpu_affinity: Whether a process is bound to the cores next to its accelerator. Default False.
        downcast_bf16: Whether float means bf16 and double means fp32 on a TPU. Default False.
        init_include_buffers: Whether empty initialisation covers buffers. Default None.
        log_level: Name of a standard logging level. Default None.
        dynamo_plugin: Made if any of its variables is set. Default None.
        fsdp_plugin: Made if its switch is true. Default None.
        deepspeed_plugin: Made if its switch is true. Default None.
        megatron_lm_plugin: Made if its switch is true. Default None.
        parallelism_config: Made if its switch is true. Default None.
        fp8_recipe: Made if any of its variables is set; the recipe of the engine if one is named.
            Default None.
    """

    cpu: bool = False
    device: str | None = None
    mixed_precision: str | None = None
    gradient_accumulation_steps: int | None = None
    debug: bool = False
    guard: str | None = None
    reduction: str | None = None
    bypass_device_map: bool = False
    allow_cp_standalone: bool = False
    cpu_affinity: bool = False
    downcast_bf16: bool = False
    init_include_buffers: bool | None = None
    log_level: str | None = None
    dynamo_plugin: TorchDynamoPlugin | None = None
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None
    deepspeed_plugin: DeepSpeedPlugin | None = None
    megatron_lm_plugin: MegatronLMPlugin | None = None
    parallelism_config: ParallelismConfig | None = None
    fp8_recipe: FP8RecipeKwargs | TERecipeKwargs | AORecipeKwargs | MSAMPRecipeKwargs | None = None


def _accelerate(record: type, field: str, name: str, form: Form[object]) -> Variable:
    return Variable(record.__name__, field, (f"ACCELFN_{name}", f"ACCELERATE_{name}"), form)


def _plain(record: type, field: str, name: str, form: Form[object]) -> Variable:
    return Variable(record.__name__, field, (f"ACCELFN_{name}", name), form)


def _fsdp(field: str, name: str, form: Form[object]) -> Variable:
    return _plain(FullyShardedDataParallelPlugin, field, f"FSDP_{name}", form)


def _deepspeed(field: str, name: str, form: Form[object]) -> Variable:
    return _accelerate(DeepSpeedPlugin, field, name, form)


def _megatron(field: str, form: Form[object]) -> Variable:
    return _plain(MegatronLMPlugin, field, f"MEGATRON_LM_{field.upper()}", form)


def _fp8(field: str, name: str, form: Form[object]) -> Variable:
    return _accelerate(FP8RecipeKwargs, field, f"FP8_{name}", form)


_POSITIVE = int_at_least(1)

_SETTINGS = (
    _accelerate(Settings, "cpu", "USE_CPU", BOOL),
    _accelerate(Settings, "device", "TORCH_DEVICE", DEVICE),
    _accelerate(Settings, "mixed_precision", "MIXED_PRECISION", choice(PrecisionType)),
    _accelerate(Settings, "gradient_accumulation_steps", "GRADIENT_ACCUMULATION_STEPS", or_auto(_POSITIVE)),
    Variable("Settings", "debug", ("ACCELFN_DEBUG", "ACCELFN_DEBUG_MODE", "ACCELERATE_DEBUG_MODE"), BOOL),
    Variable("Settings", "guard", ("ACCELFN_GUARD",), choice(GuardMode)),
    Variable("Settings", "reduction", ("ACCELFN_REDUCTION",), one_of("mean", "canonical")),
    _accelerate(Settings, "bypass_device_map", "BYPASS_DEVICE_MAP", BOOL),
    _accelerate(Settings, "allow_cp_standalone", "ALLOW_CP_STANDALONE", BOOL),
    _accelerate(Settings, "cpu_affinity", "CPU_AFFINITY", BOOL),
    _accelerate(Settings, "downcast_bf16", "DOWNCAST_BF16", BOOL),
    _accelerate(Settings, "init_include_buffers", "INIT_INCLUDE_BUFFERS", BOOL),
    _accelerate(Settings, "log_level", "LOG_LEVEL", choice(LogLevel)),
)

_DYNAMO = (
    _accelerate(TorchDynamoPlugin, "backend", "DYNAMO_BACKEND", choice(DynamoBackend)),
    _accelerate(TorchDynamoPlugin, "mode", "DYNAMO_MODE", choice(DynamoMode)),
    _accelerate(TorchDynamoPlugin, "fullgraph", "DYNAMO_USE_FULLGRAPH", BOOL),
    _accelerate(TorchDynamoPlugin, "dynamic", "DYNAMO_USE_DYNAMIC", optional(BOOL)),
    _accelerate(TorchDynamoPlugin, "use_regional_compilation", "DYNAMO_USE_REGIONAL_COMPILATION", BOOL),
)

_FSDP_SWITCH = _accelerate(FullyShardedDataParallelPlugin, "", "USE_FSDP", BOOL)
_FSDP_BOTH = (
    _fsdp("fsdp_version", "VERSION", int_at_least(1, 2)),
    _fsdp("auto_wrap_policy", "AUTO_WRAP_POLICY", optional(choice(AutoWrapPolicy))),
    _fsdp("transformer_cls_names_to_wrap", "TRANSFORMER_CLS_TO_WRAP", NAMES),
    _fsdp("min_num_params", "MIN_NUM_PARAMS", SIZE),
    _fsdp("cpu_offload", "OFFLOAD_PARAMS", BOOL),
    _fsdp("ignored_modules", "IGNORED_MODULES", TEXT),
    _fsdp("state_dict_type", "STATE_DICT_TYPE", choice(StateDictType, numbered=True)),
    _fsdp("activation_checkpointing", "ACTIVATION_CHECKPOINTING", BOOL),
    _fsdp("cpu_ram_efficient_loading", "CPU_RAM_EFFICIENT_LOADING", BOOL),
)
_FSDP_1 = (
    _fsdp("sharding_strategy", "SHARDING_STRATEGY", choice(ShardingStrategy, numbered=True)),
    _fsdp("backward_prefetch", "BACKWARD_PREFETCH", optional(choice(BackwardPrefetch, numbered=True))),
    _fsdp("use_orig_params", "USE_ORIG_PARAMS", BOOL),
    _fsdp("sync_module_states", "SYNC_MODULE_STATES", BOOL),
    _fsdp("forward_prefetch", "FORWARD_PREFETCH", BOOL),
)
_FSDP_2 = (_fsdp("reshard_after_forward", "RESHARD_AFTER_FORWARD", BOOL),)

_DEEPSPEED_SWITCH = _accelerate(DeepSpeedPlugin, "", "USE_DEEPSPEED", BOOL)
_DEEPSPEED_FILE_FIELDS = _accelerate(DeepSpeedPlugin, "", "CONFIG_DS_FIELDS", NAMES)
_DEEPSPEED = (
    _deepspeed("hf_ds_config", "DEEPSPEED_CONFIG_FILE", optional(TEXT)),
    _deepspeed("gradient_accumulation_steps", "GRADIENT_ACCUMULATION_STEPS", or_auto(_POSITIVE)),
    _deepspeed("gradient_clipping", "GRADIENT_CLIPPING", or_auto(real_at_least(0.0))),
    _deepspeed("zero_stage", "DEEPSPEED_ZERO_STAGE", int_at_least(0, 3)),
    _deepspeed("offload_optimizer_device", "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", choice(OffloadDevice)),
    _deepspeed("offload_param_device", "DEEPSPEED_OFFLOAD_PARAM_DEVICE", choice(OffloadDevice)),
    _deepspeed("offload_optimizer_nvme_path", "DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH", TEXT),
    _deepspeed("offload_param_nvme_path", "DEEPSPEED_OFFLOAD_PARAM_NVME_PATH", TEXT),
    _deepspeed("zero3_init_flag", "DEEPSPEED_ZERO3_INIT", optional(BOOL)),
    _deepspeed("zero3_save_16bit_model", "DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", BOOL),
    _deepspeed("transformer_moe_cls_names", "DEEPSPEED_MOE_LAYER_CLS_NAMES", optional(NAMES)),
)
# Fields that a DeepSpeed configuration file answers for; asking for one of them twice is refused.
_ANSWERED_BY_FILE = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
    "zero3_save_16bit_model",
    "mixed_precision",
)

_MEGATRON_SWITCH = _accelerate(MegatronLMPlugin, "", "USE_MEGATRON_LM", BOOL)
_MEGATRON = (
    *(
        _megatron(field, _POSITIVE)
        for field in (
            "tp_degree",
            "pp_degree",
            "num_micro_batches",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "context_parallel_size",
        )
    ),
    *(
        _megatron(field, BOOL)
        for field in (
            "sequence_parallelism",
            "recompute_activations",
            "use_distributed_optimizer",
            "use_custom_fsdp",
            "no_load_optim",
            "no_save_optim",
            "eod_mask_loss",
            "optimizer_cpu_offload",
            "overlap_cpu_optimizer_d2h_h2d",
            "use_precision_aware_optimizer",
            "attention_softmax_in_fp32",
            "calculate_per_token_loss",
            "use_rotary_position_embeddings",
        )
    ),
    _megatron("gradient_clipping", optional(real_at_least(0.0))),
    _megatron("decoder_last_pipeline_num_layers", optional(_POSITIVE)),
    _megatron("recompute_granularity", optional(one_of("full", "selective"))),
    _megatron("recompute_method", optional(one_of("uniform", "block"))),
    _megatron("recompute_num_layers", optional(_POSITIVE)),
    # "true" is what the peer's launcher writes for its default.
    _megatron("attention_backend", one_of("auto", "flash", "fused", "unfused", "local", "true")),
    _megatron("attention_dropout", real_at_least(0.0, 1.0)),
    _megatron("hidden_dropout", real_at_least(0.0, 1.0)),
)

_PARALLELISM_SWITCH = _accelerate(ParallelismConfig, "", "USE_PARALLELISM_CONFIG", BOOL)
_PARALLELISM = (
    *(
        _plain(ParallelismConfig, f"{axis}_size", f"PARALLELISM_CONFIG_{axis.upper()}_SIZE", _POSITIVE)
        for axis in ("dp_replicate", "dp_shard", "tp", "cp", "sp", "pp", "ep")
    ),
    _plain(ParallelismConfig, "cp_backend", "PARALLELISM_CONFIG_CP_BACKEND", one_of("torch")),
    _plain(ParallelismConfig, "sp_backend", "PARALLELISM_CONFIG_SP_BACKEND", one_of("torch", "deepspeed")),
)
_CONTEXT_PARALLEL = (
    _plain(
        TorchContextParallelConfig,
        "cp_comm_strategy",
        "PARALLELISM_CONFIG_CP_COMM_STRATEGY",
        choice(ContextParallelStrategy),
    ),
)
_SEQUENCE_PARALLEL = (
    _plain(
        DeepSpeedSequenceParallelConfig,
        "sp_seq_length",
        "PARALLELISM_CONFIG_SP_SEQ_LENGTH",
        optional(_POSITIVE),
    ),
    _plain(
        DeepSpeedSequenceParallelConfig,
        "sp_seq_length_is_variable",
        "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE",
        BOOL,
    ),
    _plain(
        DeepSpeedSequenceParallelConfig,
        "sp_attn_implementation",
        "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION",
        optional(TEXT),
    ),
)

_OVERRIDES = ("override_fprop", "override_dgrad", "override_wgrad")
_FP8_BACKEND = _fp8("backend", "BACKEND", choice(FP8Backend))
_FP8_OPT_LEVEL = _fp8("opt_level", "OPT_LEVEL", choice(FP8OptLevel))
_FP8 = (
    _FP8_BACKEND,
    _FP8_OPT_LEVEL,
    _fp8("margin", "MARGIN", int_at_least(0)),
    _fp8("interval", "INTERVAL", _POSITIVE),
    _fp8("fp8_format", "FORMAT", choice(FP8Format)),
    _fp8("amax_history_len", "AMAX_HISTORY_LEN", _POSITIVE),
    _fp8("amax_compute_algo", "AMAX_COMPUTE_ALGO", choice(FP8AmaxAlgorithm)),
    _fp8("use_autocast_during_eval", "USE_AUTOCAST_DURING_EVAL", BOOL),
    _fp8("use_mxfp8_block_scaling", "USE_MXFP8_BLOCK_SCALING", BOOL),
    _fp8("pad_inner_dim", "PAD_INNER_DIM", BOOL),
    _fp8("enable_fsdp_float8_all_gather", "ENABLE_FSDP_FLOAT8_ALL_GATHER", BOOL),
)
# Three variables make one field, in this order.
_FP8_OVERRIDES = tuple(_fp8("override_linear_precision", name.upper(), BOOL) for name in _OVERRIDES)

#: Every variable that :func:`read_settings` looks at.
VARIABLES: tuple[Variable, ...] = (
    *_SETTINGS,
    *_DYNAMO,
    _FSDP_SWITCH,
    *_FSDP_BOTH,
    *_FSDP_1,
    *_FSDP_2,
    _DEEPSPEED_SWITCH,
    *_DEEPSPEED,
    _DEEPSPEED_FILE_FIELDS,
    _MEGATRON_SWITCH,
    *_MEGATRON,
    _PARALLELISM_SWITCH,
    *_PARALLELISM,
    *_CONTEXT_PARALLEL,
    *_SEQUENCE_PARALLEL,
    *_FP8,
    *_FP8_OVERRIDES,
)


def read_settings(env: Mapping[str, str]) -> Settings:
    """Read the defaults for ``init_context`` from an environment. Pure: ``os.environ`` is not touched.

    Args:
        env: Names and texts, usually a copy of ``os.environ``.

    Returns:
        The settings; plugins behind a switch that is not true are ``None``, and their variables are not read.

    Raises:
        ConfigurationError: A value is not understood, or values contradict each other; the message names the
            variables.

    >>> read_settings({"ACCELERATE_MIXED_PRECISION": "bf16"}).mixed_precision
    'bf16'
    >>> read_settings({"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELFN_MIXED_PRECISION": "no"}).mixed_precision
    'no'
    """
    simple = _values(env, _SETTINGS)
    if simple.get("gradient_accumulation_steps") == "auto":
        del simple["gradient_accumulation_steps"]
    for name in ("mixed_precision", "log_level"):
        if name in simple:
            simple[name] = str(simple[name])
    return Settings(
        **simple,
        dynamo_plugin=_read_dynamo(env),
        fsdp_plugin=_read_fsdp(env),
        deepspeed_plugin=_read_deepspeed(env),
        megatron_lm_plugin=_read_megatron(env),
        parallelism_config=_read_parallelism(env),
        fp8_recipe=_read_fp8(env),
    )


def _spelling(env: Mapping[str, str], variable: Variable) -> str | None:
    """Return the name under which a variable is set."""
    return next((name for name in variable.names if env.get(name, "").strip()), None)


def _value(env: Mapping[str, str], variable: Variable) -> Any:
    name = _spelling(env, variable)
    return None if name is None else variable.form.parse(name, env[name])


def _values(env: Mapping[str, str], variables: tuple[Variable, ...]) -> dict[str, Any]:
    """Return the values of the variables that are set, by field."""
    return {item.field: _value(env, item) for item in variables if _spelling(env, item) is not None}


def _build(
    record: type[R], values: Mapping[str, Any], env: Mapping[str, str], variables: tuple[Variable, ...]
) -> R:
    """Build a record; what it refuses is reported with the names of the variables."""
    try:
        return record(**values)
    except AccelfnError as error:
        names = [name for name in (_spelling(env, item) for item in variables) if name is not None]
        raise ConfigurationError(
            f"The environment variables {', '.join(f'{name}={env[name]}' for name in names)} do not make a "
            f"{record.__name__}: {error}"
        ) from error


def _read_dynamo(env: Mapping[str, str]) -> TorchDynamoPlugin | None:
    values = _values(env, _DYNAMO)
    if not values:
        return None
    dynamic = next(item for item in _DYNAMO if item.field == "dynamic")
    if _spelling(env, dynamic) == dynamic.names[-1] and values["dynamic"] is False:
        # Accelerate's launcher writes False for "flag not given"; taken at its word, that compiles anew
        # for every shape. Our own spelling means what it says.
        values["dynamic"] = None
    return _build(TorchDynamoPlugin, values, env, _DYNAMO)


def _read_fsdp(env: Mapping[str, str]) -> FullyShardedDataParallelPlugin | None:
    if not _value(env, _FSDP_SWITCH):
        return None
    both = _values(env, _FSDP_BOTH)
    # Accelerate's launcher writes the variables of both versions, whichever is chosen: those of the other
    # version are defaults that nobody asked for.
    of_version = _FSDP_2 if both.get("fsdp_version") == 2 else _FSDP_1
    values = {**both, **_values(env, of_version)}
    return _build(FullyShardedDataParallelPlugin, values, env, _FSDP_BOTH + of_version)


def _read_deepspeed(env: Mapping[str, str]) -> DeepSpeedPlugin | None:
    if not _value(env, _DEEPSPEED_SWITCH):
        return None
    values = _values(env, _DEEPSPEED)
    if values.get("hf_ds_config") is not None:
        named: tuple[str, ...] = _value(env, _DEEPSPEED_FILE_FIELDS) or ()
        twice = [field for field in _ANSWERED_BY_FILE if field in named]
        if twice:
            raise ConfigurationError(
                f"The environment variable {_spelling(env, _DEEPSPEED_FILE_FIELDS)} names "
                f"{', '.join(twice)}, which {_spelling(env, _DEEPSPEED[0])} answers for. "
                "Set each of them in that configuration only."
            )
    if _value(env, _FP8_BACKEND) == FP8Backend.MSAMP:
        values["enable_msamp"] = True
        level = _value(env, _FP8_OPT_LEVEL)
        if level is not None:
            values["msamp_opt_level"] = level
    return _build(DeepSpeedPlugin, values, env, (*_DEEPSPEED, _FP8_BACKEND, _FP8_OPT_LEVEL))


def _read_megatron(env: Mapping[str, str]) -> MegatronLMPlugin | None:
    if not _value(env, _MEGATRON_SWITCH):
        return None
    values = _values(env, _MEGATRON)
    if values.get("attention_backend") == "true":
        values["attention_backend"] = True
    return _build(MegatronLMPlugin, values, env, _MEGATRON)


def _read_parallelism(env: Mapping[str, str]) -> ParallelismConfig | None:
    if not _value(env, _PARALLELISM_SWITCH):
        return None
    values = _values(env, _PARALLELISM)
    # The options of an axis that is not in use are left alone, as the launcher may write them anyway.
    if values.get("cp_size", 1) > 1:
        options = _values(env, _CONTEXT_PARALLEL)
        values["cp_handler"] = _build(TorchContextParallelConfig, options, env, _CONTEXT_PARALLEL)
    if values.get("sp_size", 1) > 1:
        options = _values(env, _SEQUENCE_PARALLEL)
        values["sp_handler"] = _build(DeepSpeedSequenceParallelConfig, options, env, _SEQUENCE_PARALLEL)
    return _build(ParallelismConfig, values, env, _PARALLELISM)


def _read_fp8(
    env: Mapping[str, str],
) -> FP8RecipeKwargs | TERecipeKwargs | AORecipeKwargs | MSAMPRecipeKwargs | None:
    values = _values(env, _FP8)
    overrides = [_value(env, item) for item in _FP8_OVERRIDES]
    if any(override is not None for override in overrides):
        values["override_linear_precision"] = tuple(bool(override) for override in overrides)
    if not values:
        return None
    recipe = _build(FP8RecipeKwargs, values, env, _FP8 + _FP8_OVERRIDES)
    return recipe if recipe.backend is None else recipe.for_backend()
