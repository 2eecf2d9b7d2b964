"""What the environment says, as one record.

This is the only module of the package that knows the names of variables, and even here the environment is
an argument. Every name is looked for with the prefix ``ACCELFN_`` first, and then as Accelerate's launcher
writes it. A variable that is empty counts as not set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType, NoneType
from typing import Any, TypeVar, cast

from accelfn.config.checks import POSITIVE, Record, choices_of, kinds_of
from accelfn.config.deepspeed import DeepSpeedPlugin
from accelfn.config.enums import GuardMode, LogLevel, PrecisionType
from accelfn.config.fsdp import FullyShardedDataParallelPlugin
from accelfn.config.handlers import FP8RecipeKwargs, TorchDynamoPlugin
from accelfn.config.megatron import MegatronLMPlugin
from accelfn.config.parallelism import ParallelismConfig, TorchContextParallelConfig
from accelfn.errors import AccelfnError, ConfigurationError

R = TypeVar("R")

_TRUE = ("y", "yes", "t", "true", "on", "1")
_FALSE = ("n", "no", "f", "false", "off", "0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Record):
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
        cpu_affinity: Whether a process is bound to the cores next to its accelerator. Default False.
        downcast_bf16: Whether float means bf16 and double means fp32 on a TPU. Default False.
        init_include_buffers: Whether empty initialisation covers buffers. Default None.
        log_level: Name of a standard logging level. Default None.
        use_sagemaker: Whether the process belongs to a job of Amazon SageMaker. Default False.
        sagemaker_distributed_type: "NO", "DATA_PARALLEL" or "MODEL_PARALLEL". Default None.
        dynamo_plugin: Made if any of its variables is set. Default None.
        fp8_recipe: The same; used with mixed_precision "fp8". Default None.
        deepspeed_plugin: Made if its switch is true. Default None.
        fsdp_plugin: Made if its switch is true. Default None.
        megatron_lm_plugin: Made if its switch is true. Default None.
        parallelism_config: Made if its switch is true. Default None.
    """

    cpu: bool = False
    device: str | None = None
    mixed_precision: PrecisionType | str | None = None
    gradient_accumulation_steps: int | None = field(default=None, metadata=POSITIVE)
    debug: bool = False
    guard: GuardMode | str | None = None
    reduction: str | None = None
    bypass_device_map: bool = False
    cpu_affinity: bool = False
    downcast_bf16: bool = False
    init_include_buffers: bool | None = None
    log_level: LogLevel | str | None = None
    use_sagemaker: bool = False
    sagemaker_distributed_type: str | None = None
    dynamo_plugin: TorchDynamoPlugin | None = None
    fp8_recipe: FP8RecipeKwargs | None = None
    deepspeed_plugin: DeepSpeedPlugin | None = None
    fsdp_plugin: FullyShardedDataParallelPlugin | None = None
    megatron_lm_plugin: MegatronLMPlugin | None = None
    parallelism_config: ParallelismConfig | None = None


@dataclass(frozen=True, slots=True)
class Variable:
    """One row of the table of variables.

    Attributes:
        record: The record that the value goes to.
        field: Its field; "" for the switch that decides whether the record is made.
        names: Spellings, in the order in which they are looked for.
    """

    record: type
    field: str
    names: tuple[str, ...]

    @property
    def accepts(self) -> str:
        """What the variable may be set to, in words."""
        kinds = self._kinds()
        choices = choices_of(kinds)
        if choices is not None:
            numbered = f", or its position from 1 to {len(choices)}" if int in kinds else ""
            text = f"one of {', '.join(choices.values())} (any case){numbered}"
        elif kinds[0] is bool:
            text = f"{'/'.join(_TRUE)} or {'/'.join(_FALSE)} (any case)"
        else:
            names = {int: "a whole number", float: "a number", Iterable[str]: "names separated by commas"}
            text = names.get(kinds[0], "a text") + (", or auto" if kinds[:2] == (float, str) else "")
        return f"{text}, or none" if NoneType in kinds else text

    def read(self, name: str, text: str) -> Any:
        """Return the value that ``text``, which the variable ``name`` is set to, stands for.

        Raises:
            ConfigurationError: It isn't understood. Ranges and names are left to the record.
        """
        kinds, word = self._kinds(), text.strip().lower()
        if word in ("none", "auto") and NoneType in kinds:
            return None
        try:
            if kinds[0] is bool:
                if word in (*_TRUE, *_FALSE):
                    return word in _TRUE
                if str not in kinds:
                    raise ValueError(text)
            if kinds[0] is int:
                number = float(word)  # launchers write counts as 1e8 or 100000000.0
                if not number.is_integer():
                    raise ValueError(text)
                return int(number)
            if kinds[0] is float:
                return word if word == "auto" and str in kinds else float(word)
        except ValueError as error:
            raise ConfigurationError(
                f"The environment variable {name} is set to {text!r}, which is not understood. "
                f"Use {self.accepts}, or unset it."
            ) from error
        return text.strip()

    def _kinds(self) -> tuple[Any, ...]:
        default = next((one.default for one in fields(self.record) if one.name == self.field), False)
        kinds = kinds_of(self.record).get(self.field, (Any,))
        return kinds if kinds != (Any,) else (bool,) if default is False else (str, NoneType)


def _rows(record: type, fields: str, *prefixes: str) -> tuple[Variable, ...]:
    """Return a row for each word: a field, or ``field=NAME`` where the variable has another name."""
    pairs = [word.partition("=") for word in fields.split()]
    return tuple(
        Variable(record, field, tuple(prefix + (name or field.upper()) for prefix in prefixes))
        for field, _, name in pairs
    )


_BOTH = ("ACCELFN_", "ACCELERATE_")
_SETTINGS = (
    *_rows(Settings, "cpu=USE_CPU device=TORCH_DEVICE mixed_precision gradient_accumulation_steps", *_BOTH),
    Variable(Settings, "debug", ("ACCELFN_DEBUG", "ACCELFN_DEBUG_MODE", "ACCELERATE_DEBUG_MODE")),
    *_rows(Settings, "guard reduction", "ACCELFN_"),
    *_rows(Settings, "bypass_device_map cpu_affinity downcast_bf16 init_include_buffers log_level", *_BOTH),
    *_rows(Settings, "use_sagemaker sagemaker_distributed_type", *_BOTH),
)
_DYNAMO = _rows(
    TorchDynamoPlugin,
    "backend mode fullgraph=USE_FULLGRAPH dynamic=USE_DYNAMIC "
    "use_regional_compilation=USE_REGIONAL_COMPILATION",
    "ACCELFN_DYNAMO_",
    "ACCELERATE_DYNAMO_",
)
_FP8 = _rows(
    FP8RecipeKwargs,
    """backend opt_level use_autocast_during_eval margin interval fp8_format=FORMAT amax_history_len
    amax_compute_algo use_mxfp8_block_scaling pad_inner_dim enable_fsdp_float8_all_gather""",
    "ACCELFN_FP8_",
    "ACCELERATE_FP8_",
)
# The three parts of `override_linear_precision`.
_FP8_OVERRIDES = tuple(
    Variable(FP8RecipeKwargs, "", (f"ACCELFN_FP8_OVERRIDE_{part}", f"ACCELERATE_FP8_OVERRIDE_{part}"))
    for part in ("FPROP", "DGRAD", "WGRAD")
)
_DEEPSPEED_SWITCH = Variable(DeepSpeedPlugin, "", ("ACCELFN_USE_DEEPSPEED", "ACCELERATE_USE_DEEPSPEED"))
_DEEPSPEED = (
    *_rows(
        DeepSpeedPlugin,
        """hf_ds_config=CONFIG_FILE zero_stage offload_optimizer_device offload_param_device
        offload_optimizer_nvme_path offload_param_nvme_path zero3_init_flag=ZERO3_INIT zero3_save_16bit_model
        transformer_moe_cls_names=MOE_LAYER_CLS_NAMES""",
        "ACCELFN_DEEPSPEED_",
        "ACCELERATE_DEEPSPEED_",
    ),
    *_rows(DeepSpeedPlugin, "gradient_clipping", *_BOTH),
)
# Where DeepSpeed's configuration has what a variable may set too, and what it means to leave that out.
_CONFIG_KEYS: Mapping[str, tuple[str, object]] = MappingProxyType(
    {
        "gradient_clipping": ("gradient_clipping", 0.0),
        "zero_stage": ("zero_optimization.stage", "auto"),
        "offload_optimizer_device": ("zero_optimization.offload_optimizer.device", "none"),
        "offload_param_device": ("zero_optimization.offload_param.device", "none"),
        "offload_optimizer_nvme_path": ("zero_optimization.offload_optimizer.nvme_path", "none"),
        "offload_param_nvme_path": ("zero_optimization.offload_param.nvme_path", "none"),
        "zero3_save_16bit_model": (
            "zero_optimization.stage3_gather_16bit_weights_on_model_save",
            False,
        ),
    }
)
_FSDP_SWITCH = Variable(FullyShardedDataParallelPlugin, "", ("ACCELFN_USE_FSDP", "ACCELERATE_USE_FSDP"))
_FSDP = _rows(
    FullyShardedDataParallelPlugin,
    """fsdp_version=VERSION auto_wrap_policy transformer_cls_names_to_wrap=TRANSFORMER_CLS_TO_WRAP
    min_num_params cpu_offload=OFFLOAD_PARAMS ignored_modules state_dict_type activation_checkpointing
    activation_checkpointing_offload cpu_ram_efficient_loading sharding_strategy backward_prefetch
    use_orig_params sync_module_states forward_prefetch reshard_after_forward""",
    "ACCELFN_FSDP_",
    "FSDP_",
)
# Accelerate's launcher writes the variables of both versions, whichever is chosen: those of the other version
# are defaults that nobody asked for.
_OTHER_VERSION: Mapping[int, tuple[str, ...]] = MappingProxyType(
    {
        1: ("reshard_after_forward",),
        2: (
            "sharding_strategy",
            "backward_prefetch",
            "use_orig_params",
            "sync_module_states",
            "forward_prefetch",
        ),
    }
)
_MEGATRON_SWITCH = Variable(MegatronLMPlugin, "", ("ACCELFN_USE_MEGATRON_LM", "ACCELERATE_USE_MEGATRON_LM"))
_MEGATRON = _rows(
    MegatronLMPlugin,
    """tp_degree pp_degree num_micro_batches gradient_clipping sequence_parallelism recompute_activations
    use_distributed_optimizer use_custom_fsdp no_load_optim no_save_optim eod_mask_loss optimizer_cpu_offload
    overlap_cpu_optimizer_d2h_h2d use_precision_aware_optimizer decoder_last_pipeline_num_layers
    recompute_granularity recompute_method recompute_num_layers attention_backend
    expert_model_parallel_size context_parallel_size attention_dropout hidden_dropout
    attention_softmax_in_fp32 expert_tensor_parallel_size calculate_per_token_loss
    use_rotary_position_embeddings""",
    "ACCELFN_MEGATRON_LM_",
    "MEGATRON_LM_",
)
_PARALLELISM_SWITCH = Variable(
    ParallelismConfig, "", ("ACCELFN_USE_PARALLELISM_CONFIG", "ACCELERATE_USE_PARALLELISM_CONFIG")
)
_PARALLELISM = _rows(
    ParallelismConfig,
    "dp_replicate_size dp_shard_size tp_size cp_size sp_size pp_size ep_size cp_backend sp_backend",
    "ACCELFN_PARALLELISM_CONFIG_",
    "PARALLELISM_CONFIG_",
)
_CONTEXT_PARALLEL = _rows(
    TorchContextParallelConfig, "cp_comm_strategy", "ACCELFN_PARALLELISM_CONFIG_", "PARALLELISM_CONFIG_"
)

#: Every variable that :func:`read_settings` looks at.
VARIABLES: tuple[Variable, ...] = (
    *_SETTINGS,
    *_DYNAMO,
    *_FP8,
    *_FP8_OVERRIDES,
    _DEEPSPEED_SWITCH,
    *_DEEPSPEED,
    _FSDP_SWITCH,
    *_FSDP,
    _MEGATRON_SWITCH,
    *_MEGATRON,
    _PARALLELISM_SWITCH,
    *_PARALLELISM,
    *_CONTEXT_PARALLEL,
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

    >>> print(read_settings({"ACCELERATE_MIXED_PRECISION": "bf16"}).mixed_precision)
    bf16
    >>> both = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELFN_MIXED_PRECISION": "no"}
    >>> print(read_settings(both).mixed_precision)
    no
    """
    simple = _values(env, _SETTINGS)
    plugins: dict[str, Any] = {}
    dynamo = _values(env, _DYNAMO)
    if dynamo:
        if dynamo.get("dynamic") is False and _is_from_accelerate(env, TorchDynamoPlugin, "dynamic"):
            # Accelerate's launcher writes False for "flag not given"; taken at its word, that compiles anew
            # for every shape. Our own spelling means what it says.
            dynamo["dynamic"] = None
        plugins["dynamo_plugin"] = _build(TorchDynamoPlugin, dynamo, env, _DYNAMO)
    fp8 = _values(env, _FP8)
    overrides = tuple([_values(env, (row,)).get("", False) for row in _FP8_OVERRIDES])
    if any(overrides):
        fp8["override_linear_precision"] = overrides
    if fp8:
        plugins["fp8_recipe"] = _build(FP8RecipeKwargs, fp8, env, (*_FP8, *_FP8_OVERRIDES))
    if _values(env, (_DEEPSPEED_SWITCH,)).get(""):
        plugin = plugins["deepspeed_plugin"] = _deepspeed_plugin(env)
        is_default = str(simple.get("mixed_precision")).lower() == "no"
        if is_default and plugin.mixed_precision and _is_from_accelerate(env, Settings, "mixed_precision"):
            # Accelerate's launcher writes "no" for "flag not given"; there the configuration decides.
            del simple["mixed_precision"]
    if _values(env, (_FSDP_SWITCH,)).get(""):
        named = _row(FullyShardedDataParallelPlugin, "fsdp_version")
        version = _values(env, (named,)).get("fsdp_version", 1)
        rows = tuple(row for row in _FSDP if row.field not in _OTHER_VERSION.get(version, ()))
        plugins["fsdp_plugin"] = _build(FullyShardedDataParallelPlugin, _values(env, rows), env, rows)
    if _values(env, (_MEGATRON_SWITCH,)).get(""):
        plugins["megatron_lm_plugin"] = _build(MegatronLMPlugin, _values(env, _MEGATRON), env, _MEGATRON)
    if _values(env, (_PARALLELISM_SWITCH,)).get(""):
        sizes = _values(env, _PARALLELISM)
        # The options of an axis that is not in use are left alone, as the launcher may write them anyway.
        if sizes.get("cp_size", 1) > 1:
            options = _values(env, _CONTEXT_PARALLEL)
            sizes["cp_handler"] = _build(TorchContextParallelConfig, options, env, _CONTEXT_PARALLEL)
        plugins["parallelism_config"] = _build(ParallelismConfig, sizes, env, _PARALLELISM)
    return _build(Settings, {**simple, **plugins}, env, _SETTINGS)


def _deepspeed_plugin(env: Mapping[str, str]) -> DeepSpeedPlugin:
    """Build the plugin, and refuse a variable that contradicts the configuration that another one names."""
    values = _values(env, _DEEPSPEED)
    plugin = _build(DeepSpeedPlugin, values, env, _DEEPSPEED)
    for variable in _DEEPSPEED if plugin.hf_ds_config is not None else ():
        if variable.field not in values or variable.field not in _CONFIG_KEYS:
            continue
        path, missing = _CONFIG_KEYS[variable.field]
        found: Any = plugin.hf_ds_config
        for key in path.split("."):
            found = cast("Mapping[str, Any]", found).get(key) if isinstance(found, Mapping) else None
        if (missing if found is None else found) not in ("auto", getattr(plugin, variable.field)):
            name, source = (
                _spelling(env, _row(DeepSpeedPlugin, one)) for one in (variable.field, "hf_ds_config")
            )
            raise ConfigurationError(
                f"{name}={env[str(name)]} contradicts the configuration of DeepSpeed that {source} names, "
                f"where {path} is {'left out' if found is None else repr(found)}. Set one of the two, or "
                'write "auto" there.'
            )
    return plugin


def _row(record: type, field: str) -> Variable:
    return next(row for row in VARIABLES if row.record is record and row.field == field)


def _is_from_accelerate(env: Mapping[str, str], record: type, field: str) -> bool:
    """Return whether a variable is set under the name that Accelerate's launcher writes."""
    row = _row(record, field)
    return _spelling(env, row) == row.names[-1]


def _spelling(env: Mapping[str, str], variable: Variable) -> str | None:
    """Return the name under which a variable is set."""
    return next((name for name in variable.names if env.get(name, "").strip()), None)


def _values(env: Mapping[str, str], variables: tuple[Variable, ...]) -> dict[str, Any]:
    """Return the values of the variables that are set, by field."""
    named = {item: name for item in variables if (name := _spelling(env, item)) is not None}
    return {item.field: item.read(name, env[name]) for item, name in named.items()}


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
