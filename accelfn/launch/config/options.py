"""The table of launch options. Flags, variables, config keys, questions and the reference come from it.

Each row is an option: name, kind of value, default and help. A :class:`Kind` describes what it accepts, so
that help, errors and documentation agree.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar, cast

_TRUE = ("y", "yes", "t", "true", "on", "1")
_FALSE = ("n", "no", "f", "false", "off", "0")
_N = TypeVar("_N", int, float)


@dataclass(frozen=True, slots=True)
class Kind:
    """How a value is written as text.

    Attributes:
        accepts: A description of the accepted values.
        read: Parses a text; raises ``ValueError`` if it is invalid.
        metavar: Placeholder for the value in the help.
        choices: The allowed texts; empty if any text that ``read`` parses is allowed.
        is_bool: Whether a flag of this kind needs no value and has a ``--no_`` form.
        separator: Separator of items. If it is a line break, the flag may be repeated.
    """

    accepts: str
    read: Callable[[str], object]
    metavar: str
    choices: tuple[str, ...] = ()
    is_bool: bool = False
    separator: str = ","

    @property
    def has_items(self) -> bool:
        """Whether a value is a tuple."""
        return self in (NAMES, TEXTS, FLAGS_3)

    @property
    def repeats(self) -> bool:
        """Whether the flag may be repeated, with one item each time."""
        return self.separator == "\n"

    def can_read(self, text: str) -> bool:
        """Return whether a text is valid for this kind."""
        try:
            self.read(text)
        except ValueError:
            return False
        return True

    def write(self, value: object) -> str:
        """Return the text of a value, the inverse of ``read``."""
        if isinstance(value, tuple):
            return self.separator.join(map(self.write, cast("tuple[object, ...]", value)))
        return str(value).lower() if isinstance(value, bool) else str(value)

    def holds(self, value: object) -> bool:
        """Return whether a value is one that ``read`` can return."""
        text = self.write(value)
        if not self.can_read(text):
            return False
        read = self.read(text)
        return read == value and isinstance(read, bool) == isinstance(value, bool)


def integer(least: int, most: int | None = None) -> Kind:
    """Return the kind of integers from ``least`` to ``most`` (None: unbounded)."""

    def read(text: str) -> int:
        # int() alone accepts "1_000" and non-ASCII digits.
        if not re.fullmatch(r"[+-]?[0-9]+", text.strip()):
            raise ValueError(text)
        return _within(int(text), least, most)

    words = f"an integer, {least} or more" if most is None else f"an integer from {least} to {most}"
    return Kind(words, read, "N")


def real(least: float, most: float | None = None, *, above: bool = False) -> Kind:
    """Return the kind of finite numbers from ``least`` (exclusive with ``above``) to ``most``."""

    def read(text: str) -> float:
        number = _within(float(text), least, most)
        if number == float("inf") or (above and number == least):
            raise ValueError(text)
        return number

    words = f"a number greater than {least:g}" if above else f"a number, {least:g} or more"
    return Kind(words if most is None else f"a number from {least:g} to {most:g}", read, "NUMBER")


def choice(*choices: str, numbered: bool = False) -> Kind:
    """Return the kind with these choices; case is ignored. ``numbered``: also their numbers, from 1.

    >>> choice("HYBRID", "E4M3").read("hybrid")
    'HYBRID'
    """
    by_lower = {one.lower(): one for one in choices}
    if numbered:
        by_lower.update({str(number): one for number, one in enumerate(choices, 1)})

    def read(text: str) -> str:
        if text.strip().lower() not in by_lower:
            raise ValueError(text)
        return by_lower[text.strip().lower()]

    brief = "{" + ",".join(choices) + "}"
    return Kind(f"one of {', '.join(choices)}", read, brief if len(brief) < 60 else "NAME", choices)


def _within(number: _N, least: float, most: float | None) -> _N:
    if not least <= number <= (float("inf") if most is None else most):
        raise ValueError(number)
    return number


def _matching(pattern: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if not re.fullmatch(pattern, text.strip()):
            raise ValueError(text)
        return text.strip()

    return read


def _read_bool(text: str) -> bool:
    word = text.strip().lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(text)
    return word in _TRUE


def _read_text(text: str) -> str:
    if not text.strip():
        raise ValueError(text)
    return text


def _read_size(text: str) -> int:
    # Parameter counts may be written as 1e8 or 100000000.0.
    number = float(text)
    if not number.is_integer() or number < 0:
        raise ValueError(text)
    return int(text) if text.strip().isdecimal() else int(number)


def _read_names(text: str) -> tuple[str, ...]:
    return tuple(_read_text(part).strip() for part in text.strip().strip(",").split(","))


def _read_texts(text: str) -> tuple[str, ...]:
    return tuple(map(_read_text, text.split("\n")))


def _read_devices(text: str) -> str:
    return _matching(r"(?i:all)|[\w.:-]+(,[\w.:-]+)*")(re.sub(r"\s", "", text)).replace("ALL", "all")


def _read_three(text: str) -> tuple[bool, ...]:
    first, second, third = text.strip().strip("()[]").split(",")
    return _read_bool(first), _read_bool(second), _read_bool(third)


BOOL: Kind = Kind("true or false (or yes, no, on, off, 1, 0)", _read_bool, "BOOL", is_bool=True)
TEXT: Kind = Kind("a non-empty text", _read_text, "TEXT")
#: A file that must exist when the value is used; ``accelfn.launch.launch`` checks that.
FILE: Kind = Kind("a file name", _read_text, "FILE")
HOST: Kind = Kind("a host name or address", _matching(r"[\w.:%-]+|\[[\w.:%-]+\]"), "HOST")
ENDPOINT: Kind = Kind(
    "HOST:PORT",
    _matching(r"([\w.%-]+|\[[\w.:%-]+\])(:[0-9]+)?"),
    "HOST:PORT",
)
NAMES: Kind = Kind("comma-separated names", _read_names, "A,B,...")
#: Any texts; in a variable, one per line.
TEXTS: Kind = Kind("one or more texts", _read_texts, "TEXT", separator="\n")
SIZE: Kind = Kind("an integer, 0 or more (also as 1e8)", _read_size, "N")
DEVICES: Kind = Kind("comma-separated device IDs, or all", _read_devices, "A,B,...")
FLAGS_3: Kind = Kind("three comma-separated booleans", _read_three, "BOOL,BOOL,BOOL")
COUNT: Kind = integer(1)
PORT: Kind = integer(0, 65535)


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
    kind: Kind
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
)
#: Keys of any version of Accelerate that have another name here.
RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "use_cpu": "cpu",
        "tpu_use_cluster": "tpu_cluster",
        "tpu_env": "env",
        "tpu_vm": "vm",
        "fp8_amax_history_length": "fp8_amax_history_len",
        "fp8_amax_compute_algorithm": "fp8_amax_compute_algo",
        "fp8_optimization_level": "fp8_opt_level",
        "fsdp_backward_prefetch_policy": "fsdp_backward_prefetch",
        "fsdp_transformer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    }
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
_DYNAMO_BACKENDS = (
    *("no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi"),
    *("fx2trt", "onnxrt", "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "tvm"),
)
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_DYNAMO_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_WRAPS = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
_STATE_DICTS = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
_CP_STRATEGIES = choice("allgather", "alltoall")
_ATTENTION = ("auto", "flash", "fused", "unfused", "local", "true")
_PLACES = choice("LOCAL_MACHINE", "AMAZON_SAGEMAKER")
_SAGEMAKER_TYPES = choice("NO", "DATA_PARALLEL", "MODEL_PARALLEL")
_OFFLOAD = choice("none", "cpu", "nvme")


def _read_reshard(text: str) -> bool | str:
    strategy = text.strip().upper()
    return strategy if strategy in _STRATEGIES else _read_bool(text)


# Accelerate's present spelling of a strategy of version 1, too.
_RESHARD: Kind = dataclasses.replace(
    BOOL, read=_read_reshard, accepts=f"{BOOL.accepts}; for version 1 one of {', '.join(_STRATEGIES)}"
)

# Each section, and the options in it.
_TABLE: tuple[Section | Option, ...] = (
    Section("General"),
    Option("module", BOOL, False, "run the script as a module, as python -m does", alias="-m"),
    Option("no_python", BOOL, False, "run the script directly, without Python"),
    Option("compat", BOOL, False, "run a program written for Accelerate, as python -m accelfn.compat does"),
    Option("debug", BOOL, False, "check the arguments of every collective on all ranks"),
    Option("quiet", BOOL, False, "print neither the start line nor the failure report", alias="-q"),
    Option("compute_environment", _PLACES, "LOCAL_MACHINE", "where the script runs"),
    Section("Hardware"),
    Option("cpu", BOOL, False, "use the CPU even if there is an accelerator"),
    Option("multi_gpu", BOOL, False, "use several accelerators"),
    Option("tpu", BOOL, False, "use TPUs, with torch_xla"),
    Section("Resources"),
    Option(
        "mixed_precision",
        choice("no", "fp16", "bf16", "fp8"),
        None,
        "default mixed precision of contexts",
    ),
    Option("gradient_accumulation_steps", COUNT, None, "default gradient accumulation steps of contexts"),
    Option(
        "num_processes",
        COUNT,
        None,
        "number of processes on all machines (one per accelerator)",
        alias="-n",
    ),
    Option("num_machines", COUNT, 1, "number of machines"),
    Option("num_cpu_threads_per_process", COUNT, None, "OMP_NUM_THREADS of each process (cores / processes)"),
    Option("enable_cpu_affinity", BOOL, False, "bind each process to the NUMA node of its GPU"),
    Section("Paradigm", exports="ACCELERATE_"),
    Option("use_deepspeed", BOOL, False, "train with DeepSpeed"),
    Option("use_fsdp", BOOL, False, "train with FSDP"),
    Option("use_megatron_lm", BOOL, False, "train with Megatron-LM"),
    Option("use_parallelism_config", BOOL, False, "arrange the processes in a device mesh"),
    Section("Machines"),
    Option("gpu_ids", DEVICES, "all", "IDs of the accelerators to use on this machine"),
    Option("machine_rank", integer(0), None, "rank of this machine, from 0"),
    Option("main_process_ip", HOST, None, "address of machine 0"),
    Option("main_process_port", PORT, None, "port on machine 0 (29500; on one machine any free port)"),
    Option("same_network", BOOL, True, "accepted for compatibility; has no effect"),
    Option("rdzv_backend", choice("static", "c10d"), None, "static uses machine_rank, c10d assigns ranks"),
    Option("rdzv_endpoint", ENDPOINT, None, "rendezvous, instead of main_process_ip and main_process_port"),
    Option("rdzv_id", TEXT, None, "rendezvous ID, the same on every machine"),
    Option("rdzv_conf", TEXT, None, "further rendezvous options, as key=value,..."),
    Option("preflight", BOOL, True, "compare the machines before the start, and share failures between them"),
    Option("preflight_timeout", real(0, above=True), 60.0, "seconds to wait for other machines"),
    Section("Elastic"),
    Option(
        "max_restarts",
        integer(0),
        0,
        "number of times to restart all processes after a failure (with --elastic, each one)",
    ),
    Option("monitor_interval", real(0, above=True), 0.1, "seconds between checks of the processes"),
    Option("shutdown_timeout", COUNT, None, "seconds between a stop signal and SIGKILL (30)"),
    Option("role", TEXT, "default", "role of the processes in torchrun's messages"),
    Option("log_dir", TEXT, None, "directory for the logs of each process"),
    Option("tee", TEXT, "0", "streams to show and log: 3 for both, or 0:1,1:2 per process", alias="-t"),
    Option("redirects", TEXT, "0", "streams to log only; same format as tee", alias="-r"),
    Section("Elastic training", switch="elastic"),
    Option("elastic", BOOL, False, "when a process fails, restart only that one, and keep the others"),
    Option("heartbeat_timeout", real(1), 10.0, "seconds without a heartbeat before a process is killed"),
    Section("TPU", switch="tpu"),
    Option("main_training_function", TEXT, "main", "function of the script to run on each TPU core"),
    Option("downcast_bf16", BOOL, False, "with bf16 on a TPU, use fp32 for double"),
    Section("FSDP", "fsdp", "fsdp_", "use_fsdp", exports="FSDP_"),
    Option("fsdp_version", integer(1, 2), 1, "FSDP version of the options; both run on torch's fully_shard"),
    Option("fsdp_offload_params", BOOL, False, "offload parameters to host memory"),
    Option("fsdp_min_num_params", SIZE, 10**8, "minimum parameters of a module to wrap (SIZE_BASED_WRAP)"),
    Option(
        "fsdp_sharding_strategy",
        choice(*_STRATEGIES, numbered=True),
        "FULL_SHARD",
        "what to shard (version 1)",
    ),
    Option(
        "fsdp_reshard_after_forward", _RESHARD, True, "reshard parameters after the forward pass (version 2)"
    ),
    Option("fsdp_auto_wrap_policy", choice(*_WRAPS), None, "which modules to wrap"),
    Option("fsdp_transformer_layer_cls_to_wrap", NAMES, None, "classes to wrap (TRANSFORMER_BASED_WRAP)"),
    Option(
        "fsdp_backward_prefetch",
        choice(*_PREFETCHES, numbered=True),
        None,
        "backward prefetching (version 1)",
    ),
    Option("fsdp_state_dict_type", choice(*_STATE_DICTS, numbered=True), None, "format of saved weights"),
    Option("fsdp_forward_prefetch", BOOL, False, "prefetch in the forward pass (version 1)"),
    Option("fsdp_use_orig_params", BOOL, True, "keep the original parameters (version 1)"),
    Option("fsdp_cpu_ram_efficient_loading", BOOL, False, "load the weights on the main process only"),
    Option("fsdp_sync_module_states", BOOL, True, "broadcast the weights from rank 0 (version 1)"),
    Option("fsdp_activation_checkpointing", BOOL, False, "recompute activations in the backward pass"),
    Option("fsdp_activation_checkpointing_offload", BOOL, False, "offload them to host memory (version 2)"),
    Option("fsdp_ignored_modules", TEXT, None, "regular expression of module names not to shard"),
    Section("DeepSpeed", "deepspeed", "deepspeed_", "use_deepspeed", exports="ACCELERATE_DEEPSPEED_"),
    Option("deepspeed_config_file", FILE, None, "DeepSpeed's JSON config file"),
    Option("zero_stage", integer(0, 3), None, "ZeRO stage (0 to 3)"),
    Option("offload_optimizer_device", _OFFLOAD, None, "where to keep optimizer states"),
    Option("offload_param_device", _OFFLOAD, None, "where to keep parameters"),
    Option("offload_optimizer_nvme_path", TEXT, None, "NVMe directory for optimizer states"),
    Option("offload_param_nvme_path", TEXT, None, "NVMe directory for parameters"),
    Option("gradient_clipping", real(0), None, "maximum gradient norm"),
    Option("zero3_init_flag", BOOL, None, "construct models already sharded (zero.Init)"),
    Option("zero3_save_16bit_model", BOOL, None, "save unsharded 16-bit weights in stage 3"),
    Option("deepspeed_moe_layer_cls_names", NAMES, None, "classes of mixture-of-experts layers"),
    Section("Megatron-LM", "megatron_lm", "megatron_lm_", "use_megatron_lm", exports="MEGATRON_LM_"),
    Option("megatron_lm_tp_degree", COUNT, 1, "tensor-parallel size"),
    Option("megatron_lm_pp_degree", COUNT, 1, "pipeline-parallel size"),
    Option("megatron_lm_num_micro_batches", COUNT, None, "micro-batches per pipeline step"),
    Option("megatron_lm_sequence_parallelism", BOOL, None, "shard activations along the sequence"),
    Option("megatron_lm_recompute_activations", BOOL, None, "recompute activations in the backward pass"),
    Option("megatron_lm_use_distributed_optimizer", BOOL, None, "shard optimizer states"),
    Option("megatron_lm_gradient_clipping", real(0), 1.0, "maximum gradient norm"),
    Option("megatron_lm_recompute_granularity", choice("full", "selective"), None, "how much to recompute"),
    Option("megatron_lm_recompute_method", choice("uniform", "block"), None, "which layers to recompute"),
    Option("megatron_lm_recompute_num_layers", COUNT, None, "layers per recomputed unit"),
    Option("megatron_lm_attention_backend", choice(*_ATTENTION), None, "attention implementation"),
    Option("megatron_lm_expert_model_parallel_size", COUNT, None, "expert-parallel size"),
    Option("megatron_lm_context_parallel_size", COUNT, None, "context-parallel size"),
    Option("megatron_lm_attention_dropout", real(0, 1), None, "dropout rate of attention"),
    Option("megatron_lm_hidden_dropout", real(0, 1), None, "dropout rate of hidden states"),
    Option("megatron_lm_attention_softmax_in_fp32", BOOL, None, "compute the attention softmax in fp32"),
    Option("megatron_lm_expert_tensor_parallel_size", COUNT, None, "tensor-parallel size of experts"),
    Option("megatron_lm_calculate_per_token_loss", BOOL, None, "scale the loss by the number of tokens"),
    Option("megatron_lm_use_rotary_position_embeddings", BOOL, None, "use rotary position embeddings"),
    Option("megatron_lm_decoder_last_pipeline_num_layers", COUNT, None, "layers of the last pipeline stage"),
    Option("megatron_lm_use_custom_fsdp", BOOL, False, "use Megatron's own FSDP"),
    Option("megatron_lm_no_load_optim", BOOL, False, "don't load the optimizer"),
    Option("megatron_lm_eod_mask_loss", BOOL, False, "mask the loss at ends of documents"),
    Option("megatron_lm_overlap_cpu_optimizer_d2h_h2d", BOOL, False, "overlap copies with the CPU optimizer"),
    Option("megatron_lm_no_save_optim", BOOL, False, "don't save the optimizer"),
    Option("megatron_lm_optimizer_cpu_offload", BOOL, False, "run the optimizer on the CPU"),
    Option("megatron_lm_use_precision_aware_optimizer", BOOL, False, "low-precision optimizer states"),
    Section(
        "Parallelism",
        "parallelism",
        "parallelism_config_",
        "use_parallelism_config",
        exports="PARALLELISM_CONFIG_",
    ),
    Option("parallelism_config_dp_replicate_size", COUNT, 1, "data-parallel replicas"),
    Option("parallelism_config_dp_shard_size", COUNT, 1, "data-parallel shards"),
    Option("parallelism_config_tp_size", COUNT, 1, "tensor-parallel size"),
    Option("parallelism_config_cp_size", COUNT, 1, "context-parallel size"),
    Option("parallelism_config_sp_size", COUNT, 1, "sequence-parallel size (by heads)"),
    Option("parallelism_config_pp_size", COUNT, 1, "pipeline-parallel size"),
    Option("parallelism_config_ep_size", COUNT, 1, "expert-parallel size"),
    Option("parallelism_config_cp_backend", choice("torch"), "torch", "backend of cp"),
    Option("parallelism_config_cp_comm_strategy", _CP_STRATEGIES, "allgather", "communication of cp"),
    Option("parallelism_config_sp_backend", choice("torch", "deepspeed"), "torch", "backend of sp"),
    Option("parallelism_config_sp_seq_length", COUNT, None, "sequence length for sp"),
    Option("parallelism_config_sp_seq_length_is_variable", BOOL, True, "allow different sequence lengths"),
    Option(
        "parallelism_config_sp_attn_implementation", choice("sdpa"), "sdpa", "attention implementation for sp"
    ),
    Section("torch.compile", "dynamo", "dynamo_", "dynamo_backend", None, "ACCELERATE_DYNAMO_"),
    Option("dynamo_backend", choice(*_DYNAMO_BACKENDS), None, "torch.compile backend for models"),
    Option("dynamo_mode", choice(*_DYNAMO_MODES), "default", "torch.compile mode"),
    Option("dynamo_use_fullgraph", BOOL, False, "require one graph per model"),
    Option("dynamo_use_dynamic", BOOL, None, "compile with dynamic shapes"),
    Option("dynamo_use_regional_compilation", BOOL, False, "compile repeated blocks once"),
    Section("FP8", "fp8", "fp8_", "mixed_precision", "fp8", "ACCELERATE_FP8_"),
    Option("fp8_backend", choice("ao", "te", "msamp"), None, "torchao, Transformer Engine or MS-AMP"),
    Option("fp8_use_autocast_during_eval", BOOL, False, "use fp8 in evaluation too (te)"),
    Option("fp8_margin", integer(0), 0, "margin of the scaling factor (te)"),
    Option("fp8_interval", COUNT, 1, "steps between updates of the scaling factor (te)"),
    Option("fp8_format", choice("HYBRID", "E4M3", "E5M2"), "HYBRID", "fp8 format (te)"),
    Option("fp8_amax_history_len", COUNT, 1024, "length of the amax history (te)"),
    Option(
        "fp8_amax_compute_algo",
        choice("max", "most_recent"),
        "most_recent",
        "reduction of the history (te)",
    ),
    Option("fp8_override_linear_precision", FLAGS_3, (False,) * 3, "no fp8 in fprop, dgrad, wgrad (te)"),
    Option("fp8_opt_level", choice("O1", "O2"), "O2", "optimization level (msamp)"),
    Option("fp8_enable_fsdp_float8_all_gather", BOOL, True, "all-gather FSDP parameters in fp8 (ao)"),
    Option("fp8_pad_inner_dim", BOOL, True, "pad matrices to the sizes that the kernels need (ao)"),
    Section("TPU", "tpu_options", "tpu_", "tpu"),
    Option(
        "tpu_cluster",
        BOOL,
        False,
        "start on every machine of the pod with gcloud",
        file_key="use_cluster",
    ),
    Option("tpu_use_sudo", BOOL, False, "use sudo on the TPU machines"),
    Option("tpu_name", TEXT, None, "name of the TPU"),
    Option("tpu_zone", TEXT, None, "zone of the TPU"),
    Option("vm", TEXTS, None, "TPU machine to start on; repeatable"),
    Option("env", TEXTS, None, "NAME=VALUE to set on the TPU machines; repeatable"),
    Option("command_file", FILE, None, "file of shell commands for accelfn tpu-config"),
    Option("commands", TEXTS, None, "shell command for accelfn tpu-config; repeatable"),
    Section("SageMaker", "sagemaker", "sagemaker_", "compute_environment", "AMAZON_SAGEMAKER"),
    Option("ec2_instance_type", TEXT, None, "type of the machines, such as ml.p4d.24xlarge"),
    Option("iam_role_name", TEXT, None, "role of the job, by name or ARN"),
    Option("profile", TEXT, None, "AWS profile with the credentials (those that boto3 finds)"),
    Option("region", TEXT, "us-east-1", "AWS region"),
    Option("image_uri", TEXT, None, "image to run in, instead of one by its versions"),
    Option("py_version", TEXT, None, "Python of the image, such as py312"),
    Option("pytorch_version", TEXT, None, "torch of the image"),
    Option("transformers_version", TEXT, None, "transformers of the image"),
    Option("base_job_name", TEXT, "accelfn-sagemaker-1", "first part of the job's name"),
    Option("sagemaker_distributed_type", _SAGEMAKER_TYPES, "NO", "how the processes communicate"),
    Option("sagemaker_inputs_file", FILE, None, "table of inputs: name and location, separated by a tab"),
    Option("sagemaker_metrics_file", FILE, None, "table of metrics: name and regular expression"),
    Option("additional_args", TEXTS, None, "NAME=VALUE for the estimator, VALUE may be JSON; repeatable"),
)


def _all_options() -> Iterator[Option]:
    section = Section("")
    for row in _TABLE:
        if isinstance(row, Section):
            section = row
        else:
            yield dataclasses.replace(row, section=section)


#: Every option by its name, in the order of the help.
OPTIONS: Mapping[str, Option] = MappingProxyType({option.name: option for option in _all_options()})
#: Names of the sections of a config file.
SECTIONS: tuple[str, ...] = tuple(row.name for row in _TABLE if isinstance(row, Section) and row.name)


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
    value = read_value(option, text)
    is_strategy = option.kind is _RESHARD and isinstance(value, str)
    return "fsdp_sharding_strategy" if is_strategy else option.name, value


def suggest(word: str, words: Iterable[str]) -> str | None:
    """Return the most similar of ``words``, or None if none is similar.

    >>> suggest("num_proceses", ["num_machines", "num_processes"])
    'num_processes'
    """
    return next(iter(difflib.get_close_matches(word, list(words), n=1, cutoff=0.7)), None)
