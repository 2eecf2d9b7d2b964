"""The table of options, of which flags, variables, keys of files, questions and the reference are made.

One row is one option: its name, the kind of its value, the default and the help. A :class:`Kind` says in
words what it accepts, so that help, errors and documentation can't drift apart.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar, cast

from accelfn.launch.config.secrets import hide_in_text

_TRUE = ("y", "yes", "t", "true", "on", "1")
_FALSE = ("n", "no", "f", "false", "off", "0")
_LATER = " (not supported yet)"
_N = TypeVar("_N", int, float)


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to write a value as text.

    Attributes:
        accepts: What is accepted, in words.
        read: Returns the value of a text; raises ``ValueError`` for one that isn't of this kind.
        metavar: Stands for the value in the help.
        choices: The only texts; empty where there are others.
        is_bool: Whether a flag of this kind can do without a value, and has a ``--no_`` form.
        separator: Of the items of a value that has several. For a line break, the flag may be repeated.
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
        """Whether the flag may be given several times, one item each."""
        return self.separator == "\n"

    def can_read(self, text: str) -> bool:
        """Return whether a text stands for a value of this kind."""
        try:
            self.read(text)
        except ValueError:
            return False
        return True

    def write(self, value: object) -> str:
        """Return a text that ``read`` turns into the value again."""
        if isinstance(value, tuple):
            return self.separator.join(map(self.write, cast("tuple[object, ...]", value)))
        return str(value).lower() if isinstance(value, bool) else str(value)

    def holds(self, value: object) -> bool:
        """Return whether a value is one that some text stands for."""
        text = self.write(value)
        if not self.can_read(text):
            return False
        read = self.read(text)
        return read == value and isinstance(read, bool) == isinstance(value, bool)


def integer(least: int, most: int | None = None) -> Kind:
    """Return the kind of whole numbers from ``least`` to ``most`` (None: no bound)."""

    def read(text: str) -> int:
        # int() alone would take "1_000" and other digits than these.
        if not re.fullmatch(r"[+-]?[0-9]+", text.strip()):
            raise ValueError(text)
        return _within(int(text), least, most)

    words = f"a whole number, {least} or more" if most is None else f"a whole number from {least} to {most}"
    return Kind(words, read, "N")


def real(least: float, most: float | None = None, *, above: bool = False) -> Kind:
    """Return the kind of finite numbers from ``least`` to ``most``; with ``above``, more than ``least``."""

    def read(text: str) -> float:
        number = _within(float(text), least, most)
        if number == float("inf") or (above and number == least):
            raise ValueError(text)
        return number

    words = f"a number more than {least:g}" if above else f"a number, {least:g} or more"
    return Kind(words if most is None else f"a number from {least:g} to {most:g}", read, "NUMBER")


def choice(*choices: str) -> Kind:
    """Return the kind of a few words, in any case.

    >>> choice("HYBRID", "E4M3").read("hybrid")
    'HYBRID'
    """
    by_lower = {one.lower(): one for one in choices}

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
    # Launchers write counts of parameters as 1e8 or 100000000.0.
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
    first, second, third = text.split(",")
    return _read_bool(first), _read_bool(second), _read_bool(third)


BOOL: Kind = Kind("true or false (yes, no, on, off, 1 and 0 do too)", _read_bool, "BOOL", is_bool=True)
TEXT: Kind = Kind("a text that is not empty", _read_text, "TEXT")
#: A file that must be there when the value is used; ``accelfn.launch.launch`` looks for it.
FILE: Kind = Kind("the name of a file", _read_text, "FILE")
HOST: Kind = Kind("the name or address of a machine", _matching(r"[\w.:%-]+|\[[\w.:%-]+\]"), "HOST")
ENDPOINT: Kind = Kind(
    "HOST:PORT, the name or address of a machine and a port",
    _matching(r"([\w.%-]+|\[[\w.:%-]+\])(:[0-9]+)?"),
    "HOST:PORT",
)
NAMES: Kind = Kind("names separated by commas", _read_names, "A,B,...")
#: Several texts of any form; in a variable one a line.
TEXTS: Kind = Kind("one or more texts", _read_texts, "TEXT", separator="\n")
SIZE: Kind = Kind("a whole number, 0 or more (1e8 is accepted)", _read_size, "N")
DEVICES: Kind = Kind("device ids separated by commas, or all", _read_devices, "A,B,...")
FLAGS_3: Kind = Kind("three of true or false, separated by commas", _read_three, "BOOL,BOOL,BOOL")
COUNT: Kind = integer(1)
PORT: Kind = integer(0, 65535)


@dataclass(frozen=True, slots=True)
class Section:
    """Options that stand together in the help, and in a config file where they have a section of their own.

    Attributes:
        title: Heading in the help.
        name: Key in a file; empty for options at its top.
        prefix: What its options' names begin with, and their keys in the file don't.
        switch: Option that makes the section active; ``"sbatch"`` for the flag of that name; empty if the
            section always is.
        on: The switch's value that does; None for any but ``no``.
        exports: Prefix of its options' names in the variables of Accelerate; empty if there are none.
    """

    title: str
    name: str = ""
    prefix: str = ""
    switch: str = ""
    on: object = True
    exports: str = ""

    @property
    def needs(self) -> str:
        """What a user types to make it active."""
        return f"--{self.switch}" if self.on is True else f"--{self.switch} {self.on or 'NAME'}"


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a launch, under all its names.

    Attributes:
        name: Its unique name: the flag's without dashes, such as ``fsdp_version``.
        kind: How its value is written.
        default: Value where no source gives one.
        about: Help in a few words.
        alias: Short spelling of the flag, such as ``-m``.
        file_key: Key in a file, where it isn't the name without the section's prefix.
        section: What it belongs to.
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
        """Its key in the section of a file, such as ``version``."""
        return self.file_key or self.name.removeprefix(self.section.prefix)

    @property
    def path(self) -> str:
        """Its keys in a file, such as ``fsdp.version``."""
        return f"{self.section.name}.{self.key}" if self.section.name else self.key

    @property
    def flags(self) -> tuple[str, ...]:
        """Spellings that set it, the long one first."""
        return (f"--{self.name}", self.alias) if self.alias else (f"--{self.name}",)

    @property
    def no_flag(self) -> str:
        """Spelling that sets it to false; empty if it isn't a yes or no."""
        return f"--no_{self.name}" if self.kind.is_bool else ""

    @property
    def exports(self) -> tuple[str, ...]:
        """Variables that the started processes read it from: accelfn's name, and Accelerate's."""
        by_rule = f"{self.section.exports}{self.key.upper()}" if self.section.exports else ""
        theirs = _EXPORTED.get(self.name, by_rule)
        if not theirs:
            return ()
        ours = "ACCELFN_DEBUG" if self.name == "debug" else f"ACCELFN_{theirs.removeprefix('ACCELERATE_')}"
        return ours, theirs

    @property
    def variables(self) -> tuple[str, ...]:
        """Variables that give it to the launcher, in the order in which they are looked for."""
        return tuple(dict.fromkeys((f"ACCELFN_{self.name.upper()}", *self.exports[:1])))

    @property
    def help(self) -> str:
        """What it is for, with a note where no launch can be given it yet."""
        choices = f": {self.kind.accepts}" if self.kind.metavar == "NAME" else ""
        waits = NOT_YET.get(self.name, (False,))[0] is True
        return f"{self.about}{choices}{_LATER if waits else ''}"

    @property
    def heading(self) -> str:
        """Heading in the help."""
        waits = (self.section.switch, self.section.on) in [(name, on) for name, (on, _) in NOT_YET.items()]
        return self.section.title + _LATER * waits


#: What the table has for engines to come: the option, the value that asks for one, and its name. A launch
#: refuses it, and the questionnaire does not ask.
NOT_YET: Mapping[str, tuple[object, str]] = MappingProxyType(
    {
        "use_deepspeed": (True, "DeepSpeed"),
        "use_megatron_lm": (True, "Megatron-LM"),
        "mixed_precision": ("fp8", "fp8"),
    }
)
#: What a launch and an import say of Amazon SageMaker.
NO_SAGEMAKER = (
    "accelfn doesn't start SageMaker's jobs. Start one with the estimator of the sagemaker package, whose "
    "entry point runs accelfn launch."
)
#: Options of which at most one may be true; one from a stronger source puts out those of weaker ones.
EXCLUSIVE: tuple[tuple[str, ...], ...] = (
    ("cpu", "multi_gpu", "tpu"),
    ("use_deepspeed", "use_fsdp", "use_megatron_lm"),
)
#: Keys of Accelerate, of any version, that are called otherwise here.
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
        "fsdp_transformer_layer_cls_to_wrap": "FSDP_TRANSFORMER_CLS_TO_WRAP",
        "gradient_clipping": "ACCELERATE_GRADIENT_CLIPPING",
        "zero3_init_flag": "ACCELERATE_DEEPSPEED_ZERO3_INIT",
        "deepspeed_hostfile": "",
        "deepspeed_exclusion_filter": "",
        "deepspeed_inclusion_filter": "",
        "deepspeed_multinode_launcher": "",
        "fp8_override_linear_precision": "",
    }
)
_DYNAMO_BACKENDS = (
    *("no", "eager", "aot_eager", "inductor", "aot_ts_nvfuser", "nvprims_nvfuser", "cudagraphs", "ofi"),
    *("fx2trt", "onnxrt", "tensorrt", "aot_torchxla_trace_once", "torchxla_trace_once", "tvm"),
)
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
_LAUNCHERS = ("pdsh", "standard", "openmpi", "mvapich", "mpich", "nossh", "slurm")
_DYNAMO_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_WRAPS = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
_PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
_STATE_DICTS = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")
_CP_STRATEGIES = choice("allgather", "alltoall")
_ATTENTION = ("auto", "flash", "fused", "unfused", "local", "true")
_PLACES = choice("LOCAL_MACHINE", "AMAZON_SAGEMAKER")
_OFFLOAD = choice("none", "cpu", "nvme")

# Each section, and the options in it.
_TABLE: tuple[Section | Option, ...] = (
    Section("General"),
    Option("module", BOOL, False, "the script is a module, as in python -m", alias="-m"),
    Option("no_python", BOOL, False, "the script is a program of its own"),
    Option("debug", BOOL, False, "compare calls in full before each operation across ranks"),
    Option("quiet", BOOL, False, "no line at the start, no report after a failure", alias="-q"),
    Option("compute_environment", _PLACES, "LOCAL_MACHINE", "where the script runs"),
    Section("Hardware"),
    Option("cpu", BOOL, False, "use the CPU even where there is an accelerator"),
    Option("multi_gpu", BOOL, False, "use several accelerators"),
    Option("tpu", BOOL, False, "use TPUs, through torch_xla"),
    Section("Resources"),
    Option(
        "mixed_precision",
        choice("no", "fp16", "bf16", "fp8"),
        None,
        "precision of contexts without their own",
    ),
    Option("gradient_accumulation_steps", COUNT, None, "accumulation of contexts without their own"),
    Option(
        "num_processes",
        COUNT,
        None,
        "processes on all machines (one per accelerator; 1 on a CPU)",
        alias="-n",
    ),
    Option("num_machines", COUNT, 1, "machines that take part"),
    Option("num_cpu_threads_per_process", COUNT, None, "OMP_NUM_THREADS (cores / processes if unset)"),
    Option("enable_cpu_affinity", BOOL, False, "bind each process to the NUMA node of its GPU"),
    Section("Paradigm", exports="ACCELERATE_"),
    Option("use_deepspeed", BOOL, False, "train with DeepSpeed"),
    Option("use_fsdp", BOOL, False, "train with FSDP"),
    Option("use_megatron_lm", BOOL, False, "train with Megatron-LM"),
    Option("use_parallelism_config", BOOL, False, "lay the processes out as a mesh"),
    Section("Machines"),
    Option("gpu_ids", DEVICES, "all", "accelerators of this machine to use"),
    Option("machine_rank", integer(0), None, "index of this machine, from 0"),
    Option("main_process_ip", HOST, None, "address of machine 0"),
    Option("main_process_port", PORT, None, "port on machine 0 (29500; on one machine any free port)"),
    Option("same_network", BOOL, True, "the machines are in one network; the plan is the same either way"),
    Option("rdzv_backend", choice("static", "c10d"), None, "ranks: by machine_rank, or assigned"),
    Option("rdzv_endpoint", ENDPOINT, None, "rendezvous, for main_process_ip and main_process_port"),
    Option("rdzv_id", TEXT, None, "rendezvous ID, the same on every machine"),
    Option("rdzv_conf", TEXT, None, "further options of the rendezvous, as key=value,..."),
    Option("preflight", BOOL, True, "compare the machines before the start, and share failures"),
    Option("preflight_timeout", real(0, above=True), 60.0, "seconds to wait for the other machines there"),
    Section("Elastic"),
    Option("max_restarts", integer(0), 0, "start all processes again so many times after one failed"),
    Option("monitor_interval", real(0, above=True), 0.1, "seconds between looks at the processes"),
    Option("shutdown_timeout", COUNT, None, "seconds from a signal until processes are killed (30)"),
    Option("role", TEXT, "default", "name of the processes in messages"),
    Option("log_dir", TEXT, None, "folder where the output of each process is kept"),
    Option("tee", TEXT, "0", "streams to show and keep: 3 is both, 0:1,1:2 differs by process", alias="-t"),
    Option("redirects", TEXT, "0", "streams to keep and not to show, as with tee", alias="-r"),
    Section("TPU", switch="tpu"),
    Option("main_training_function", TEXT, "main", "function of the script that each process of a TPU runs"),
    Option("downcast_bf16", BOOL, False, "with bf16 on a TPU, double means fp32"),
    Section("FSDP", "fsdp", "fsdp_", "use_fsdp", exports="FSDP_"),
    Option("fsdp_version", integer(1, 2), 1, "whose options are read; torch's fully_shard does both"),
    Option("fsdp_offload_params", BOOL, False, "keep parameters in host memory"),
    Option("fsdp_min_num_params", SIZE, 10**8, "size of wrapped modules, with SIZE_BASED_WRAP"),
    Option("fsdp_sharding_strategy", choice(*_STRATEGIES), "FULL_SHARD", "what version 1 shards"),
    Option("fsdp_reshard_after_forward", BOOL, True, "shard parameters again after forward, in version 2"),
    Option("fsdp_auto_wrap_policy", choice(*_WRAPS), None, "which modules are wrapped"),
    Option("fsdp_transformer_layer_cls_to_wrap", NAMES, None, "classes to wrap, with TRANSFORMER_BASED_WRAP"),
    Option("fsdp_backward_prefetch", choice(*_PREFETCHES), None, "when version 1 fetches ahead in backward"),
    Option("fsdp_state_dict_type", choice(*_STATE_DICTS), None, "form of saved weights"),
    Option("fsdp_forward_prefetch", BOOL, False, "fetch ahead in forward, in version 1"),
    Option("fsdp_use_orig_params", BOOL, True, "keep the original parameters, in version 1"),
    Option("fsdp_cpu_ram_efficient_loading", BOOL, False, "only the main process loads the weights"),
    Option("fsdp_sync_module_states", BOOL, True, "broadcast the weights of process 0, in version 1"),
    Option("fsdp_activation_checkpointing", BOOL, False, "compute activations again in backward"),
    Option("fsdp_activation_checkpointing_offload", BOOL, False, "in host memory (version 2)"),
    Option("fsdp_ignored_modules", TEXT, None, "modules that stay whole, as a pattern of names"),
    Section("DeepSpeed", "deepspeed", "deepspeed_", "use_deepspeed", exports="ACCELERATE_DEEPSPEED_"),
    Option("deepspeed_config_file", FILE, None, "DeepSpeed's own JSON file"),
    Option("zero_stage", integer(0, 3), None, "ZeRO stage (0 to 3)"),
    Option("offload_optimizer_device", _OFFLOAD, None, "where optimizer states are kept"),
    Option("offload_param_device", _OFFLOAD, None, "where parameters are kept"),
    Option("offload_optimizer_nvme_path", TEXT, None, "folder for optimizer states on nvme"),
    Option("offload_param_nvme_path", TEXT, None, "folder for parameters on nvme"),
    Option("gradient_clipping", real(0), None, "bound of the norm of gradients"),
    Option("zero3_init_flag", BOOL, None, "construct models sharded (zero.Init)"),
    Option("zero3_save_16bit_model", BOOL, None, "save whole 16-bit weights in stage 3"),
    Option("deepspeed_hostfile", FILE, None, "file that names the machines"),
    Option("deepspeed_exclusion_filter", TEXT, None, "machines and devices to leave out"),
    Option("deepspeed_inclusion_filter", TEXT, None, "machines and devices to use"),
    Option(
        "deepspeed_multinode_launcher", choice(*_LAUNCHERS), None, "how several machines are started (pdsh)"
    ),
    Option("deepspeed_moe_layer_cls_names", NAMES, None, "classes of mixture-of-experts layers"),
    Section("Megatron-LM", "megatron_lm", "megatron_lm_", "use_megatron_lm", exports="MEGATRON_LM_"),
    Option("megatron_lm_tp_degree", COUNT, 1, "processes that share a layer"),
    Option("megatron_lm_pp_degree", COUNT, 1, "stages of the pipeline"),
    Option("megatron_lm_num_micro_batches", COUNT, None, "micro-batches of the pipeline"),
    Option("megatron_lm_sequence_parallelism", BOOL, None, "shard activations along the sequence"),
    Option("megatron_lm_recompute_activations", BOOL, None, "compute activations again in backward"),
    Option("megatron_lm_use_distributed_optimizer", BOOL, None, "shard optimizer states"),
    Option("megatron_lm_gradient_clipping", real(0), 1.0, "bound of the norm of gradients"),
    Option("megatron_lm_recompute_granularity", choice("full", "selective"), None, "how much is repeated"),
    Option("megatron_lm_recompute_method", choice("uniform", "block"), None, "which layers are repeated"),
    Option("megatron_lm_recompute_num_layers", COUNT, None, "layers of a unit that is computed again"),
    Option("megatron_lm_attention_backend", choice(*_ATTENTION), None, "how attention is computed"),
    Option("megatron_lm_expert_model_parallel_size", COUNT, None, "processes that share the experts"),
    Option("megatron_lm_context_parallel_size", COUNT, None, "processes that share a sequence"),
    Option("megatron_lm_attention_dropout", real(0, 1), None, "dropout of attention"),
    Option("megatron_lm_hidden_dropout", real(0, 1), None, "dropout of hidden states"),
    Option("megatron_lm_attention_softmax_in_fp32", BOOL, None, "softmax of attention in fp32"),
    Option("megatron_lm_expert_tensor_parallel_size", COUNT, None, "processes that share an expert"),
    Option("megatron_lm_calculate_per_token_loss", BOOL, None, "scale the loss by tokens"),
    Option("megatron_lm_use_rotary_position_embeddings", BOOL, None, "rotary position embeddings"),
    Option("megatron_lm_decoder_last_pipeline_num_layers", COUNT, None, "layers of the last stage"),
    Option("megatron_lm_use_custom_fsdp", BOOL, False, "Megatron's own FSDP"),
    Option("megatron_lm_no_load_optim", BOOL, False, "leave the optimizer out when loading"),
    Option("megatron_lm_eod_mask_loss", BOOL, False, "no loss at ends of documents"),
    Option("megatron_lm_overlap_cpu_optimizer_d2h_h2d", BOOL, False, "copy beside the optimizer on the CPU"),
    Option("megatron_lm_no_save_optim", BOOL, False, "leave the optimizer out when saving"),
    Option("megatron_lm_optimizer_cpu_offload", BOOL, False, "run the optimizer on the CPU"),
    Option("megatron_lm_use_precision_aware_optimizer", BOOL, False, "optimizer states in lower precision"),
    Section(
        "Parallelism",
        "parallelism",
        "parallelism_config_",
        "use_parallelism_config",
        exports="PARALLELISM_CONFIG_",
    ),
    Option("parallelism_config_dp_replicate_size", COUNT, 1, "copies of the model"),
    Option("parallelism_config_dp_shard_size", COUNT, 1, "processes that share a copy"),
    Option("parallelism_config_tp_size", COUNT, 1, "processes that share a layer"),
    Option("parallelism_config_cp_size", COUNT, 1, "processes that share a sequence"),
    Option("parallelism_config_sp_size", COUNT, 1, "processes that share a sequence, by heads"),
    Option("parallelism_config_pp_size", COUNT, 1, "stages of the model"),
    Option("parallelism_config_ep_size", COUNT, 1, "processes that experts are spread over"),
    Option("parallelism_config_cp_backend", choice("torch"), "torch", "engine of cp"),
    Option("parallelism_config_cp_comm_strategy", _CP_STRATEGIES, "allgather", "how cp exchanges"),
    Option("parallelism_config_sp_backend", choice("torch", "deepspeed"), "torch", "engine of sp"),
    Option("parallelism_config_sp_seq_length", COUNT, None, "length of the sequences of sp"),
    Option("parallelism_config_sp_seq_length_is_variable", BOOL, True, "sequences of several lengths"),
    Option("parallelism_config_sp_attn_implementation", TEXT, "sdpa", "attention of sp"),
    Section("torch.compile", "dynamo", "dynamo_", "dynamo_backend", None, "ACCELERATE_DYNAMO_"),
    Option("dynamo_backend", choice(*_DYNAMO_BACKENDS), None, "backend of torch.compile for models"),
    Option("dynamo_mode", choice(*_DYNAMO_MODES), "default", "what to optimise for"),
    Option("dynamo_use_fullgraph", BOOL, False, "a model must be one graph"),
    Option("dynamo_use_dynamic", BOOL, None, "compile for all shapes at once"),
    Option("dynamo_use_regional_compilation", BOOL, False, "compile repeated blocks once"),
    Section("FP8", "fp8", "fp8_", "mixed_precision", "fp8", "ACCELERATE_FP8_"),
    Option("fp8_backend", choice("ao", "te", "msamp"), None, "engine: torchao, Transformer Engine, MS-AMP"),
    Option("fp8_use_autocast_during_eval", BOOL, False, "fp8 in evaluation too (te)"),
    Option("fp8_margin", integer(0), 0, "margin of the scaling factor (te)"),
    Option("fp8_interval", COUNT, 1, "steps between new scaling factors (te)"),
    Option("fp8_format", choice("HYBRID", "E4M3", "E5M2"), "HYBRID", "format of the numbers (te)"),
    Option("fp8_amax_history_len", COUNT, 1024, "steps that the scaling factor looks back (te)"),
    Option("fp8_amax_compute_algo", choice("max", "most_recent"), "most_recent", "how it uses them (te)"),
    Option("fp8_override_linear_precision", FLAGS_3, (False,) * 3, "not fp8 in fprop, dgrad, wgrad (te)"),
    Option("fp8_opt_level", choice("O1", "O2"), "O2", "what is in fp8 (msamp)"),
    Option("fp8_enable_fsdp_float8_all_gather", BOOL, True, "FSDP gathers in fp8 (ao)"),
    Option("fp8_pad_inner_dim", BOOL, True, "pad matrices to what the kernels want (ao)"),
    Section("MPI", "mpirun", "mpirun_"),
    Option("mpirun_hostfile", FILE, None, "start through mpirun, on the machines that this file names"),
    Section("TPU", "tpu_options", "tpu_", "tpu"),
    Option("tpu_cluster", BOOL, False, "start on every machine, through gcloud", file_key="use_cluster"),
    Option("tpu_use_sudo", BOOL, False, "start there with sudo"),
    Option("tpu_name", TEXT, None, "name of the TPU"),
    Option("tpu_zone", TEXT, None, "zone of the TPU"),
    Option("vm", TEXTS, None, "machine of the TPU to start on; repeatable"),
    Option("env", TEXTS, None, "NAME=VALUE to set there; repeatable"),
    Option("command_file", FILE, None, "file of shell commands that accelfn tpu-config runs there"),
    Option("commands", TEXTS, None, "shell command that accelfn tpu-config runs there; repeatable"),
    Section("SLURM", "slurm", "slurm_", "sbatch", "FILE"),
    Option("slurm_partition", TEXT, None, "partition to run in"),
    Option("slurm_account", TEXT, None, "account to charge"),
    Option("slurm_time", TEXT, None, "time limit, such as 08:00:00"),
    Option("slurm_job_name", TEXT, "accelfn", "name of the job"),
    Option("slurm_gpus_per_node", integer(0), None, "accelerators of a machine (its processes)"),
    Option("slurm_cpus_per_task", COUNT, None, "cores of each machine"),
    Option("slurm_mem", TEXT, None, "memory of each machine, such as 64G"),
    Option("slurm_output", TEXT, None, "file for the output, such as logs/%j.out"),
    Option("slurm_extra", TEXTS, None, "a further option of sbatch, such as --qos=high; repeatable"),
    Option("slurm_setup", TEXTS, None, "shell command before it, such as module load cuda; repeatable"),
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
    """Read an option's value from its text. ``none`` is no value, for an option that may have none.

    Raises:
        ValueError: The text is not of the option's kind; the message says what is.

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
        raise ValueError(f"it must be {option.kind.accepts}, got {hide_in_text(text)!r}.{hint}") from None


def suggest(word: str, words: Iterable[str]) -> str | None:
    """Return the one of ``words`` that ``word`` was probably meant to be, if there is any.

    >>> suggest("num_proceses", ["num_machines", "num_processes"])
    'num_processes'
    """
    return next(iter(difflib.get_close_matches(word, list(words), n=1, cutoff=0.7)), None)
