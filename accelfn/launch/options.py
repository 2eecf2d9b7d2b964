"""The table of launch options, from which flags, variables, config keys, help and questions come.

A field has its type, its section, its kind of value, its help and, unless that is None, its default.
:class:`~accelfn.launch.config.LaunchConfig` is the record of them with their checks.
"""

# ruff: noqa: RUF009 -- the calls in the record are its fields
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeVar, overload

from accelfn.errors import ConfigurationError
from accelfn.launch.accelerate_names import FSDP_STRATEGIES
from accelfn.launch.kinds import (
    BOOL,
    COUNT,
    DEVICES,
    ENDPOINT,
    FILE,
    FLAGS_3,
    HOST,
    NAMES,
    PAIRS,
    PORT,
    SIZE,
    STREAMS,
    TEXT,
    TEXTS,
    Kind,
    choice,
    integer,
    real,
    suggest,
)

T = TypeVar("T")
Names = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Section:
    """A group of options in the help and, if it has a name, a section of the config file.

    Attributes:
        title: Heading in the help.
        name: Key in a config file; empty for top-level options.
        prefix: Prefix of the options' names that their keys in the file omit.
        switch: Option that activates the section; empty if it is always active.
        on: The switch's value that activates it; None for any value except ``no``.
        exports: Prefix of the options' variables in Accelerate; empty if there are none.
    """

    title: str
    name: str = ""
    prefix: str = ""
    switch: str = ""
    on: object = True
    exports: str = ""

    @property
    def needs(self) -> str:
        """The flag that activates it."""
        return f"--{self.switch}" if self.on is True else f"--{self.switch} {self.on or 'NAME'}"

    @overload
    def __call__(self, kind: Kind[T], about: str, *, alias: str = ..., file_key: str = ...) -> T | None: ...
    @overload
    def __call__(
        self, kind: Kind[T], about: str, default: T, *, alias: str = "", file_key: str = ""
    ) -> T: ...
    def __call__(
        self, kind: Kind[Any], about: str, default: Any = None, *, alias: str = "", file_key: str = ""
    ) -> Any:
        """Return the field of an option of this section; the arguments are the attributes of Option."""
        row = Option("", kind, default, about, alias, file_key, self)
        return dataclasses.field(default=default, metadata={"option": row})


@dataclass(frozen=True, slots=True)
class Option:
    """A launch option under all its names.

    Attributes:
        name: Name of the flag without dashes, such as ``fsdp_version``.
        kind: Kind of its value.
        default: Value if no source sets it.
        about: One-line help.
        alias: Short form of the flag, such as ``-m``.
        file_key: Key in a config file, if it isn't the name without the section's prefix.
        section: Its section.
    """

    name: str
    kind: Kind[Any]
    default: object
    about: str
    alias: str = ""
    file_key: str = ""
    section: Section = Section("")

    @property
    def key(self) -> str:
        """Key within its section of a config file, such as ``version``."""
        return self.file_key or self.name.removeprefix(self.section.prefix)

    @property
    def path(self) -> str:
        """Path of its key in a config file, such as ``fsdp.version``."""
        return f"{self.section.name}.{self.key}" if self.section.name else self.key

    @property
    def flags(self) -> tuple[str, ...]:
        """Its flags, the long form first."""
        return (f"--{self.name}", self.alias) if self.alias else (f"--{self.name}",)

    @property
    def no_flag(self) -> str:
        """Flag that sets it to false; empty if it isn't boolean."""
        return f"--no_{self.name}" if self.kind.is_bool else ""

    @property
    def exports(self) -> tuple[str, ...]:
        """Variables by which processes receive it: accelfn's name and Accelerate's."""
        by_rule = f"{self.section.exports}{self.key.upper()}" if self.section.exports else ""
        theirs = _EXPORTED.get(self.name, by_rule)
        if not theirs:
            return ()
        ours = "ACCELFN_DEBUG" if self.name == "debug" else f"ACCELFN_{theirs.removeprefix('ACCELERATE_')}"
        return ours, theirs

    @property
    def variables(self) -> tuple[str, ...]:
        """Variables that set it for the launcher, in order of precedence."""
        return tuple(dict.fromkeys((f"ACCELFN_{self.name.upper()}", *self.exports[:1])))

    @property
    def help(self) -> str:
        """Its help text."""
        choices = f": {self.kind.accepts}" if self.kind.metavar == "NAME" else ""
        return f"{self.about}{choices}"


#: Groups of mutually exclusive options; the source with higher precedence wins.
EXCLUSIVE: tuple[tuple[str, ...], ...] = (
    ("cpu", "multi_gpu", "tpu"),
    ("module", "no_python"),
    ("compat", "no_python"),
    ("use_deepspeed", "use_fsdp", "use_megatron_lm"),
    ("use_deepspeed", "tpu"),
)

# Variables of Accelerate that the section's rule doesn't make of the key; empty where there is none.
_EXPORTED: Mapping[str, str] = MappingProxyType(
    {
        "debug": "ACCELERATE_DEBUG_MODE",
        "cpu": "ACCELERATE_USE_CPU",
        "mixed_precision": "ACCELERATE_MIXED_PRECISION",
        "gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        "downcast_bf16": "ACCELERATE_DOWNCAST_BF16",
        "sagemaker_distributed_type": "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE",
        "fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
        "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
        "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
        "fp8_override_linear_precision": "",
    }
)
_general = Section("General")
_hardware = Section("Hardware")
_resources = Section("Resources")
_paradigm = Section("Paradigm", exports="ACCELERATE_")
_machines = Section("Machines")
_restarts = Section("Elastic")
_elastic = Section("Elastic training", switch="elastic")
_tpu = Section("TPU", switch="tpu")
_fsdp = Section("FSDP", "fsdp", "fsdp_", "use_fsdp", exports="FSDP_")
_zero = Section("DeepSpeed", "deepspeed", "deepspeed_", "use_deepspeed", True, "ACCELERATE_DEEPSPEED_")
_lm = Section("Megatron-LM", "megatron_lm", "megatron_lm_", "use_megatron_lm", exports="MEGATRON_LM_")
_mesh = Section(
    *("Parallelism", "parallelism", "parallelism_config_"),
    *("use_parallelism_config", True, "PARALLELISM_CONFIG_"),
)
_dynamo = Section("torch.compile", "dynamo", "dynamo_", "dynamo_backend", None, "ACCELERATE_DYNAMO_")
_fp8 = Section("FP8", "fp8", "fp8_", "mixed_precision", "fp8", "ACCELERATE_FP8_")
_pod = Section("TPU", "tpu_options", "tpu_", "tpu")
_sagemaker = Section("SageMaker", "sagemaker", "sagemaker_", "compute_environment", "AMAZON_SAGEMAKER")
_PLACE = choice("LOCAL_MACHINE", "AMAZON_SAGEMAKER")
_PRECISION = choice("no", "fp16", "bf16", "fp8")
_RENDEZVOUS = choice("static", "c10d")
_STRATEGY = choice(*FSDP_STRATEGIES, numbered=True)
_WRAP = choice("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_PREFETCH = choice("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH", numbered=True)
_STATE_DICT = choice("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT", numbered=True)
_OFFLOAD = choice("none", "cpu", "nvme")
_GRANULARITY = choice("full", "selective")
_METHOD = choice("uniform", "block")
_ATTENTION = choice("auto", "flash", "fused", "unfused", "local", "true")
_CP_STRATEGY = choice("allgather", "alltoall")
_DYNAMO_BACKEND = choice(
    *("no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi"),
    *("fx2trt", "onnxrt", "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "tvm"),
)
_DYNAMO_MODE = choice("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_FP8_BACKEND = choice("ao", "te", "msamp")
_FP8_FORMAT = choice("HYBRID", "E4M3", "E5M2")
_AMAX = choice("max", "most_recent")
_SAGEMAKER_TYPE = choice("NO", "DATA_PARALLEL")


@dataclass(frozen=True, kw_only=True, repr=False)
class LaunchOptions:
    """One attribute per flag; ``None`` means unset. LaunchConfig also checks that they fit together."""

    module: bool = _general(BOOL, "run the script as a module, as python -m does", False, alias="-m")
    no_python: bool = _general(BOOL, "run the script directly, without Python", False)
    compat: bool = _general(BOOL, "run a program written for Accelerate, as python -m accelfn.compat", False)
    debug: bool = _general(BOOL, "check the arguments of every collective on all ranks", False)
    quiet: bool = _general(BOOL, "print neither the start line nor the failure report", False, alias="-q")
    compute_environment: str = _general(_PLACE, "where the script runs", "LOCAL_MACHINE")
    cpu: bool = _hardware(BOOL, "use the CPU even if there is an accelerator", False)
    multi_gpu: bool = _hardware(BOOL, "use several accelerators", False)
    tpu: bool = _hardware(BOOL, "use TPUs, with torch_xla", False)
    mixed_precision: str | None = _resources(_PRECISION, "default precision of contexts")
    gradient_accumulation_steps: int | None = _resources(COUNT, "default accumulation steps of contexts")
    num_processes: int | None = _resources(COUNT, "processes on all machines (one per device)", alias="-n")
    num_machines: int = _resources(COUNT, "number of machines", 1)
    num_cpu_threads_per_process: int | None = _resources(COUNT, "OMP_NUM_THREADS (cores / processes)")
    enable_cpu_affinity: bool = _resources(BOOL, "bind each process to the NUMA node of its GPU", False)
    use_deepspeed: bool = _paradigm(BOOL, "train with DeepSpeed", False)
    use_fsdp: bool = _paradigm(BOOL, "train with FSDP", False)
    use_megatron_lm: bool = _paradigm(BOOL, "train with Megatron-LM", False)
    use_parallelism_config: bool = _paradigm(BOOL, "arrange the processes in a device mesh", False)
    gpu_ids: str = _machines(DEVICES, "IDs of the accelerators to use on this machine", "all")
    machine_rank: int | None = _machines(integer(0), "rank of this machine, from 0")
    main_process_ip: str | None = _machines(HOST, "address of machine 0")
    main_process_port: int | None = _machines(PORT, "port on machine 0 (29500; on one machine any free port)")
    same_network: bool = _machines(BOOL, "accepted for compatibility; has no effect", True)
    rdzv_backend: str | None = _machines(_RENDEZVOUS, "static: by machine_rank; c10d assigns ranks")
    rdzv_endpoint: str | None = _machines(ENDPOINT, "instead of main_process_ip and main_process_port")
    rdzv_id: str | None = _machines(TEXT, "rendezvous ID, the same on every machine")
    rdzv_conf: str | None = _machines(PAIRS, "further rendezvous options")
    preflight: bool = _machines(BOOL, "compare the machines first, and share failures between them", True)
    preflight_timeout: float = _machines(real(0, above=True), "seconds to wait for other machines", 60.0)
    max_restarts: int = _restarts(
        integer(0), "restarts of all processes after a failure (--elastic: of one)", 0
    )
    monitor_interval: float = _restarts(real(0, above=True), "seconds between checks of the processes", 0.1)
    shutdown_timeout: int | None = _restarts(COUNT, "seconds between a stop signal and SIGKILL (30)")
    role: str = _restarts(TEXT, "role of the processes in torchrun's messages", "default")
    log_dir: str | None = _restarts(TEXT, "directory for the logs of each process")
    tee: str = _restarts(
        STREAMS, "streams to show and log: 3 for both, or 0:1,1:2 per process", "0", alias="-t"
    )
    redirects: str = _restarts(STREAMS, "streams to log only; same format as tee", "0", alias="-r")
    elastic: bool = _elastic(BOOL, "when a process fails, restart only that one, and keep the others", False)
    heartbeat_timeout: float = _elastic(real(1), "seconds of silence before a process is killed", 10.0)
    main_training_function: str = _tpu(TEXT, "function of the script to run on each TPU core", "main")
    downcast_bf16: bool = _tpu(BOOL, "with bf16 on a TPU, use fp32 for double", False)
    fsdp_version: int = _fsdp(integer(1, 2), "FSDP version of the options; both run on fully_shard", 1)
    fsdp_offload_params: bool = _fsdp(BOOL, "offload parameters to host memory", False)
    fsdp_min_num_params: int = _fsdp(SIZE, "minimum parameters of a module to wrap (SIZE_BASED_WRAP)", 10**8)
    fsdp_sharding_strategy: str = _fsdp(_STRATEGY, "what to shard (version 1)", "FULL_SHARD")
    fsdp_reshard_after_forward: bool = _fsdp(BOOL, "reshard after the forward pass (version 2)", True)
    fsdp_auto_wrap_policy: str | None = _fsdp(_WRAP, "which modules to wrap")
    fsdp_transformer_layer_cls_to_wrap: Names | None = _fsdp(NAMES, "classes (TRANSFORMER_BASED_WRAP)")
    fsdp_backward_prefetch: str | None = _fsdp(_PREFETCH, "backward prefetching (version 1)")
    fsdp_state_dict_type: str | None = _fsdp(_STATE_DICT, "format of saved weights")
    fsdp_forward_prefetch: bool = _fsdp(BOOL, "prefetch in the forward pass (version 1)", False)
    fsdp_use_orig_params: bool = _fsdp(BOOL, "keep the original parameters (version 1)", True)
    fsdp_cpu_ram_efficient_loading: bool = _fsdp(BOOL, "load the weights on the main process only", False)
    fsdp_sync_module_states: bool = _fsdp(BOOL, "broadcast the weights from rank 0 (version 1)", True)
    fsdp_activation_checkpointing: bool = _fsdp(BOOL, "recompute activations in the backward pass", False)
    fsdp_activation_checkpointing_offload: bool = _fsdp(BOOL, "offload those to the host (version 2)", False)
    fsdp_ignored_modules: str | None = _fsdp(TEXT, "regular expression of module names not to shard")
    deepspeed_config_file: str | None = _zero(FILE, "DeepSpeed's JSON config file")
    zero_stage: int | None = _zero(integer(0, 3), "ZeRO stage (0 to 3)")
    offload_optimizer_device: str | None = _zero(_OFFLOAD, "where to keep optimizer states")
    offload_param_device: str | None = _zero(_OFFLOAD, "where to keep parameters")
    offload_optimizer_nvme_path: str | None = _zero(TEXT, "NVMe directory for optimizer states")
    offload_param_nvme_path: str | None = _zero(TEXT, "NVMe directory for parameters")
    gradient_clipping: float | None = _zero(real(0), "maximum gradient norm")
    zero3_init_flag: bool | None = _zero(BOOL, "construct models already sharded (zero.Init)")
    zero3_save_16bit_model: bool | None = _zero(BOOL, "save unsharded 16-bit weights in stage 3")
    deepspeed_moe_layer_cls_names: Names | None = _zero(NAMES, "classes of mixture-of-experts layers")
    megatron_lm_tp_degree: int = _lm(COUNT, "tensor-parallel size", 1)
    megatron_lm_pp_degree: int = _lm(COUNT, "pipeline-parallel size", 1)
    megatron_lm_num_micro_batches: int | None = _lm(COUNT, "micro-batches per pipeline step")
    megatron_lm_sequence_parallelism: bool | None = _lm(BOOL, "shard activations along the sequence")
    megatron_lm_recompute_activations: bool | None = _lm(BOOL, "recompute activations in backward")
    megatron_lm_use_distributed_optimizer: bool | None = _lm(BOOL, "shard optimizer states")
    megatron_lm_gradient_clipping: float = _lm(real(0), "maximum gradient norm", 1.0)
    megatron_lm_recompute_granularity: str | None = _lm(_GRANULARITY, "what to recompute")
    megatron_lm_recompute_method: str | None = _lm(_METHOD, "which layers to recompute")
    megatron_lm_recompute_num_layers: int | None = _lm(COUNT, "layers per recomputed unit")
    megatron_lm_attention_backend: str | None = _lm(_ATTENTION, "attention implementation")
    megatron_lm_expert_model_parallel_size: int | None = _lm(COUNT, "expert-parallel size")
    megatron_lm_context_parallel_size: int | None = _lm(COUNT, "context-parallel size")
    megatron_lm_attention_dropout: float | None = _lm(real(0, 1), "dropout rate of attention")
    megatron_lm_hidden_dropout: float | None = _lm(real(0, 1), "dropout rate of hidden states")
    megatron_lm_attention_softmax_in_fp32: bool | None = _lm(BOOL, "attention softmax in fp32")
    megatron_lm_expert_tensor_parallel_size: int | None = _lm(COUNT, "tensor-parallel size of experts")
    megatron_lm_calculate_per_token_loss: bool | None = _lm(BOOL, "scale the loss by its tokens")
    megatron_lm_use_rotary_position_embeddings: bool | None = _lm(BOOL, "use rotary position embeddings")
    megatron_lm_decoder_last_pipeline_num_layers: int | None = _lm(COUNT, "layers of the last stage")
    megatron_lm_use_custom_fsdp: bool = _lm(BOOL, "use Megatron's own FSDP", False)
    megatron_lm_no_load_optim: bool = _lm(BOOL, "don't load the optimizer", False)
    megatron_lm_eod_mask_loss: bool = _lm(BOOL, "mask the loss at ends of documents", False)
    megatron_lm_overlap_cpu_optimizer_d2h_h2d: bool = _lm(BOOL, "overlap the copies", False)
    megatron_lm_no_save_optim: bool = _lm(BOOL, "don't save the optimizer", False)
    megatron_lm_optimizer_cpu_offload: bool = _lm(BOOL, "run the optimizer on the CPU", False)
    megatron_lm_use_precision_aware_optimizer: bool = _lm(BOOL, "low-precision optimizer states", False)
    parallelism_config_dp_replicate_size: int = _mesh(COUNT, "data-parallel replicas", 1)
    parallelism_config_dp_shard_size: int = _mesh(COUNT, "data-parallel shards", 1)
    parallelism_config_tp_size: int = _mesh(COUNT, "tensor-parallel size", 1)
    parallelism_config_cp_size: int = _mesh(COUNT, "context-parallel size", 1)
    parallelism_config_sp_size: int = _mesh(COUNT, "sequence-parallel size (by heads)", 1)
    parallelism_config_pp_size: int = _mesh(COUNT, "pipeline-parallel size", 1)
    parallelism_config_ep_size: int = _mesh(COUNT, "expert-parallel size", 1)
    parallelism_config_cp_backend: str = _mesh(choice("torch"), "backend of cp", "torch")
    parallelism_config_cp_comm_strategy: str = _mesh(_CP_STRATEGY, "communication of cp", "allgather")
    parallelism_config_sp_backend: str = _mesh(choice("torch", "deepspeed"), "backend of sp", "torch")
    parallelism_config_sp_seq_length: int | None = _mesh(COUNT, "sequence length for sp")
    parallelism_config_sp_seq_length_is_variable: bool = _mesh(BOOL, "allow different sequence lengths", True)
    parallelism_config_sp_attn_implementation: str = _mesh(choice("sdpa"), "attention for sp", "sdpa")
    dynamo_backend: str | None = _dynamo(_DYNAMO_BACKEND, "torch.compile backend for models")
    dynamo_mode: str = _dynamo(_DYNAMO_MODE, "torch.compile mode", "default")
    dynamo_use_fullgraph: bool = _dynamo(BOOL, "require one graph per model", False)
    dynamo_use_dynamic: bool | None = _dynamo(BOOL, "compile with dynamic shapes")
    dynamo_use_regional_compilation: bool = _dynamo(BOOL, "compile repeated blocks once", False)
    fp8_backend: str | None = _fp8(_FP8_BACKEND, "torchao, Transformer Engine or MS-AMP")
    fp8_use_autocast_during_eval: bool = _fp8(BOOL, "use fp8 in evaluation too (te)", False)
    fp8_margin: int = _fp8(integer(0), "margin of the scaling factor (te)", 0)
    fp8_interval: int = _fp8(COUNT, "steps between updates of the scaling factor (te)", 1)
    fp8_format: str = _fp8(_FP8_FORMAT, "fp8 format (te)", "HYBRID")
    fp8_amax_history_len: int = _fp8(COUNT, "length of the amax history (te)", 1024)
    fp8_amax_compute_algo: str = _fp8(_AMAX, "reduction of the history (te)", "most_recent")
    fp8_override_linear_precision: tuple[bool, ...] = _fp8(
        FLAGS_3, "not fp8: fprop, dgrad, wgrad", (False,) * 3
    )
    fp8_opt_level: str = _fp8(choice("O1", "O2"), "optimization level (msamp)", "O2")
    fp8_enable_fsdp_float8_all_gather: bool = _fp8(BOOL, "all-gather FSDP parameters in fp8 (ao)", True)
    fp8_pad_inner_dim: bool = _fp8(BOOL, "pad matrices to the sizes that the kernels need (ao)", True)
    tpu_cluster: bool = _pod(BOOL, "start all machines of the pod with gcloud", False, file_key="use_cluster")
    tpu_use_sudo: bool = _pod(BOOL, "use sudo on the TPU machines", False)
    tpu_name: str | None = _pod(TEXT, "name of the TPU")
    tpu_zone: str | None = _pod(TEXT, "zone of the TPU")
    vm: Names | None = _pod(TEXTS, "TPU machine to start on; repeatable")
    env: Names | None = _pod(TEXTS, "NAME=VALUE to set on the TPU machines; repeatable")
    command_file: str | None = _pod(FILE, "file of shell commands for accelfn tpu-config")
    commands: Names | None = _pod(TEXTS, "shell command for accelfn tpu-config; repeatable")
    ec2_instance_type: str | None = _sagemaker(TEXT, "type of the machines, such as ml.p4d.24xlarge")
    iam_role_name: str | None = _sagemaker(TEXT, "role of the job, by name or ARN")
    profile: str | None = _sagemaker(TEXT, "AWS profile with the credentials (those that boto3 finds)")
    region: str = _sagemaker(TEXT, "AWS region", "us-east-1")
    image_uri: str | None = _sagemaker(TEXT, "image to run in, instead of one by its versions")
    py_version: str | None = _sagemaker(TEXT, "Python of the image, such as py312")
    pytorch_version: str | None = _sagemaker(TEXT, "torch of the image")
    transformers_version: str | None = _sagemaker(TEXT, "transformers of the image")
    base_job_name: str = _sagemaker(TEXT, "first part of the job's name", "accelfn-sagemaker-1")
    sagemaker_distributed_type: str = _sagemaker(_SAGEMAKER_TYPE, "how the processes communicate", "NO")
    sagemaker_inputs_file: str | None = _sagemaker(FILE, "table of inputs: name, tab, location")
    sagemaker_metrics_file: str | None = _sagemaker(FILE, "table of metrics: name, tab, regular expression")
    additional_args: Names | None = _sagemaker(TEXTS, "NAME=VALUE (or JSON) for the estimator; repeatable")

    def __post_init__(self) -> None:
        """Check that each value is of its kind."""
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            if value is not option.default and not option.kind.holds(value):
                raise ConfigurationError(f"LaunchConfig.{name} must be {option.kind.accepts}, got {value!r}.")


def _read_table() -> dict[str, Option]:
    rows = {row.name: row.metadata["option"] for row in dataclasses.fields(LaunchOptions)}
    return {name: dataclasses.replace(option, name=name) for name, option in rows.items()}


#: Every option by its name, in the order of the help.
OPTIONS: Mapping[str, Option] = MappingProxyType(_read_table())
#: Names of the sections of a config file.
SECTIONS: tuple[str, ...] = tuple(
    dict.fromkeys(option.section.name for option in OPTIONS.values() if option.section.name)
)


def read_value(option: Option, text: str) -> object:
    """Parse an option's value. ``none`` is None if that is the option's default.

    Raises:
        ValueError: The text is invalid; the message describes what is accepted.

    >>> read_value(OPTIONS["num_processes"], "4"), read_value(OPTIONS["fsdp_offload_params"], "yes")
    (4, True)
    """
    if option.default is None and text.strip().lower() == "none" and "none" not in option.kind.choices:
        return None
    try:
        return option.kind.read(text)
    except ValueError:
        close = suggest(text, option.kind.choices)
        hint = f" Did you mean {close}?" if close else ""
        raise ValueError(f"it must be {option.kind.accepts}, got {text!r}.{hint}") from None


def read_entry(option: Option, text: str) -> tuple[str, object]:
    """Parse a value, and return the name of the option that it sets with it.

    A strategy as ``fsdp_reshard_after_forward`` is the ``fsdp_sharding_strategy``.

    Raises:
        ValueError: As :func:`read_value`.
    """
    if option.name == "fsdp_reshard_after_forward" and text.strip().upper() in FSDP_STRATEGIES:
        option = OPTIONS["fsdp_sharding_strategy"]
    return option.name, read_value(option, text)
