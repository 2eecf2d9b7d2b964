"""The questions of ``accelfn config``, as data and pure functions.

Kinds, choices and defaults come from the table of options. Options without a question keep their values from
the config file. ``accelfn.launch.config.ask`` asks the questions on a terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

from accelfn.errors import ConfigurationError
from accelfn.launch.config.options import OPTIONS, Kind, choice, read_value
from accelfn.launch.config.record import LaunchConfig

#: Answers by question name; None for an optional question without an answer.
Answers = Mapping[str, object]

#: The choices of ``machine_type``, and the option that each sets.
ONE, CPUS, ACCELERATORS, TPU = "one process", "several processes on CPUs", "several accelerators", "TPU"
_TYPES: Mapping[str, tuple[str, object]] = MappingProxyType(
    {ONE: ("num_processes", 1), CPUS: ("cpu", True), ACCELERATORS: ("multi_gpu", True), TPU: ("tpu", True)}
)


@dataclass(frozen=True, slots=True)
class Question:
    """A question, as values and pure functions of the previous answers.

    Attributes:
        name: Name of an option, or ``machine_type``.
        text: The text of the question.
        when: Whether to ask it, given the previous answers.
        usual: The default answer if it isn't that of the option: a value or a function of the answers.
        few: The choices if they aren't those of the option: a function of the answers, or a mapping of
            choices to menu entries.
        optional: Whether ``none`` is an answer.
        example: A valid answer, for a required question without a default.
    """

    name: str
    text: str
    when: Callable[[Answers], bool]
    usual: object = None
    few: Callable[[Answers], tuple[str, ...]] | Mapping[str, str] | None = None
    optional: bool = False
    example: str = ""

    @property
    def kind(self) -> Kind:
        """Kind of the answer."""
        return OPTIONS[self.name].kind if self.name in OPTIONS else choice(*_TYPES)

    def choices(self, answers: Answers) -> tuple[str, ...]:
        """Return the choices; empty if any text of the kind is valid."""
        few = self.few(answers) if callable(self.few) else self.few
        return self.kind.choices if few is None else tuple(few)

    def title(self, choice: str) -> str:
        """Return the menu entry of a choice."""
        return choice if self.few is None or callable(self.few) else self.few.get(choice, choice)

    def default(self, answers: Answers) -> object:
        """Return the default answer, or None."""
        if self.usual is None:
            return OPTIONS[self.name].default
        return self.usual(answers) if callable(self.usual) else self.usual


def _has(name: str, *values: object) -> Callable[[Answers], bool]:
    return lambda answers: answers.get(name) in values


def _always(answers: Answers) -> bool:
    return True


def _number(answers: Answers, name: str, otherwise: int = 1) -> int:
    return cast("int", answers.get(name) or otherwise)


_is_multi = _has("machine_type", CPUS, ACCELERATORS)
_is_sagemaker = _has("compute_environment", "AMAZON_SAGEMAKER")
_has_sagemaker = _has("has_sagemaker", True)
_is_tpu = _has("machine_type", TPU)
_has_fsdp = _has("use_fsdp", True)
_has_deepspeed = _has("use_deepspeed", True)
_has_mesh = _has("use_parallelism_config", True)


def _is_here(answers: Answers) -> bool:
    return not _is_sagemaker(answers)


def _asks_image(answers: Answers) -> bool:
    return _is_sagemaker(answers) and answers.get("image_uri") is None


def _asks_machines(answers: Answers) -> bool:
    return _is_multi(answers) or answers.get("sagemaker_distributed_type") == "DATA_PARALLEL"


def _has_machines(answers: Answers) -> bool:
    return _is_multi(answers) and _number(answers, "num_machines") > 1


def _may_use_deepspeed(answers: Answers) -> bool:
    return answers.get("has_deepspeed") is True and not _is_tpu(answers)


def _configures_deepspeed(answers: Answers) -> bool:
    return _has_deepspeed(answers) and answers.get("deepspeed_config_file") is None


def _from_stage(stage: int) -> Callable[[Answers], bool]:
    def holds(answers: Answers) -> bool:
        return _configures_deepspeed(answers) and _number(answers, "zero_stage", 0) >= stage

    return holds


def _needs_disk(what: str) -> Callable[[Answers], bool]:
    def holds(answers: Answers) -> bool:
        return _configures_deepspeed(answers) and answers.get(f"offload_{what}_device") == "nvme"

    return holds


def _may_shard(answers: Answers) -> bool:
    return _is_multi(answers) and not _has_deepspeed(answers)


def _asks_address(answers: Answers) -> bool:
    return _has_machines(answers) and answers.get("rdzv_endpoint") is None


def _asks_rank(answers: Answers) -> bool:
    return _has_machines(answers) and answers.get("rdzv_backend") == "static"


def _has_accelerator(answers: Answers) -> bool:
    kind = answers.get("machine_type")
    return kind == ACCELERATORS or (kind == ONE and answers.get("cpu") is False)


def _may_use_accelerator(answers: Answers) -> bool:
    return answers.get("machine_type") == ONE and answers.get("devices") != 0


def _types_here(answers: Answers) -> tuple[str, ...]:
    accelerators = () if answers.get("devices") == 0 else (ACCELERATORS,)
    return (ONE, CPUS, *accelerators, *((TPU,) if answers.get("has_tpu") else ()))


def _type_in_file(values: Answers) -> str | None:
    chosen = next((kind for kind in (TPU, ACCELERATORS) if values.get(_TYPES[kind][0])), None)
    if chosen is None and not {values.get("num_processes"), values.get("num_machines")} <= {None, 1}:
        chosen = CPUS if values.get("cpu") else ACCELERATORS
    return chosen or (ONE if values.get("num_processes") == 1 or values.get("cpu") else None)


def _mesh_size(answers: Answers, *axes: str) -> int:
    size = 1
    for axis in axes if _has_mesh(answers) else ():
        size *= _number(answers, f"parallelism_config_{axis}_size")
    return size


def _usual_shards(answers: Answers) -> int:
    """Return a number of shards that uses all accelerators, or else one per machine."""
    machines, others = _number(answers, "num_machines"), _mesh_size(answers, "dp_replicate", "tp")
    devices = _number(answers, "devices", 0) * machines
    return devices // others if devices > others and devices % others == 0 else max(2, machines)


def _usual_processes(answers: Answers) -> int:
    machines, mesh = _number(answers, "num_machines"), _mesh_size(answers, "dp_replicate", "tp", "dp_shard")
    devices = _number(answers, "devices", 0) * machines if answers.get("machine_type") == ACCELERATORS else 0
    least = 2 if _is_multi(answers) and machines == 1 else machines
    return next((count for count in (mesh, devices) if count > 1), least)


_RESHARDS = MappingProxyType({"FULL_SHARD": "yes (FULL_SHARD)", "SHARD_GRAD_OP": "no (SHARD_GRAD_OP)"})
_VERSIONS = MappingProxyType({"2": "2 (fully_shard)", "1": "1 (FullyShardedDataParallel)"})
_WRAPS = MappingProxyType(
    {
        "TRANSFORMER_BASED_WRAP": "transformer layers (TRANSFORMER_BASED_WRAP)",
        "SIZE_BASED_WRAP": "large modules (SIZE_BASED_WRAP)",
        "NO_WRAP": "none: gather the whole model at once (NO_WRAP)",
    }
)
_STAGES = MappingProxyType(
    {
        "2": "2: shard optimizer state and gradients",
        "3": "3: shard parameters too",
        "1": "1: shard optimizer state",
        "0": "0: shard nothing",
    }
)
_BACKENDS = MappingProxyType(
    {"static": "each machine has a fixed rank (static)", "c10d": "ranks are assigned (c10d)"}
)
_PLACES = MappingProxyType(
    {"LOCAL_MACHINE": "this machine, or others by ssh or SLURM", "AMAZON_SAGEMAKER": "Amazon SageMaker"}
)
_SAGEMAKER_TYPES = MappingProxyType(
    {"NO": "one per machine (NO)", "DATA_PARALLEL": "one per GPU, with AWS's library (DATA_PARALLEL)"}
)


def _ranks(answers: Answers) -> tuple[str, ...]:
    return tuple(map(str, range(_number(answers, "num_machines"))))


def _precisions(answers: Answers) -> tuple[str, ...]:
    if _is_tpu(answers):
        return ("no", "bf16")
    # DeepSpeed can't be combined with it.
    has_fp8 = answers.get("has_fp8") is True and not _has_deepspeed(answers)
    return ("no", "fp16", "bf16", *(("fp8",) if has_fp8 else ()))


def _asks_all_gather(answers: Answers) -> bool:
    return answers.get("mixed_precision") == "fp8" and _has_fsdp(answers)


def _usual_type(answers: Answers) -> str:
    return ACCELERATORS if _number(answers, "devices", 0) > 1 else ONE


def _asks_downcast(answers: Answers) -> bool:
    return _is_tpu(answers) and answers.get("mixed_precision") == "bf16"


def _asks_processes(answers: Answers) -> bool:
    return _is_multi(answers) or _is_tpu(answers)


def _asks_precision(answers: Answers) -> bool:
    return not _has_deepspeed(answers) or _configures_deepspeed(answers)


#: All questions in order. A question depends only on previous ones.
QUESTIONS: tuple[Question, ...] = (
    Question("compute_environment", "Where does the script run?", _has_sagemaker, "LOCAL_MACHINE", _PLACES),
    Question("profile", "AWS profile (none: the credentials that boto3 finds)", _is_sagemaker, optional=True),
    Question("region", "AWS region", _is_sagemaker),
    Question("iam_role_name", "Role of the job, by name or ARN", _is_sagemaker, example="my-role"),
    Question("image_uri", "Image to run in (none: by its versions)", _is_sagemaker, optional=True),
    Question("transformers_version", "Version of transformers in the image", _asks_image, example="4.56.2"),
    Question("pytorch_version", "Version of torch in the image", _asks_image, example="2.8.0"),
    Question("py_version", "Version of Python in the image", _asks_image, example="py312"),
    Question("sagemaker_inputs_file", "Table of inputs", _is_sagemaker, optional=True),
    Question("sagemaker_metrics_file", "Table of metrics", _is_sagemaker, optional=True),
    Question("sagemaker_distributed_type", "Several processes?", _is_sagemaker, "NO", _SAGEMAKER_TYPES),
    Question("ec2_instance_type", "Type of the machines", _is_sagemaker, example="ml.p4d.24xlarge"),
    Question("machine_type", "What hardware does the script run on?", _is_here, _usual_type, _types_here),
    Question("num_machines", "How many machines?", _asks_machines),
    Question("use_deepspeed", "Train with DeepSpeed (ZeRO)?", _may_use_deepspeed),
    Question("rdzv_backend", "How do machines get their ranks?", _has_machines, "static", _BACKENDS),
    Question("machine_rank", "Rank of this machine (others pass --machine_rank)", _asks_rank, 0, _ranks),
    Question("main_process_ip", "Address of machine 0", _asks_address, example="10.0.0.1"),
    Question("main_process_port", "Port on machine 0 (none: 29500)", _asks_address, optional=True),
    Question("debug", "Check the arguments of collectives on all ranks? (slower)", _is_multi),
    Question("cpu", "Use the CPU even if there is an accelerator?", _may_use_accelerator),
    Question("dynamo_backend", "torch.compile backend for models", _always, "no"),
    Question(
        "deepspeed_config_file",
        "DeepSpeed's JSON config file (none: answer questions)",
        _has_deepspeed,
        optional=True,
    ),
    Question("zero_stage", "Which stage of ZeRO?", _configures_deepspeed, 2, _STAGES),
    Question("offload_optimizer_device", "Where to keep optimizer state?", _from_stage(1), "none"),
    Question(
        "offload_optimizer_nvme_path",
        "Directory on the disk for optimizer state",
        _needs_disk("optimizer"),
        example="/nvme",
    ),
    Question("offload_param_device", "Where to keep parameters?", _from_stage(3), "none"),
    Question(
        "offload_param_nvme_path",
        "Directory on the disk for parameters",
        _needs_disk("param"),
        example="/nvme",
    ),
    Question(
        "gradient_clipping",
        "Maximum gradient norm (none: set by the script)",
        _configures_deepspeed,
        optional=True,
    ),
    Question("zero3_init_flag", "Create models already sharded, in zero3_init?", _from_stage(3), True),
    Question(
        "deepspeed_moe_layer_cls_names",
        "Classes of mixture-of-experts layers, comma-separated (none: there are none)",
        _from_stage(3),
        optional=True,
    ),
    Question("use_fsdp", "Shard models over the processes with FSDP?", _may_shard),
    Question("fsdp_version", "Options of which FSDP version?", _has_fsdp, 2, _VERSIONS),
    Question(
        *("fsdp_sharding_strategy", "Reshard parameters after the forward pass?", _has("fsdp_version", 1)),
        few=_RESHARDS,
    ),
    Question(
        "fsdp_reshard_after_forward", "Reshard parameters after the forward pass?", _has("fsdp_version", 2)
    ),
    Question("fsdp_offload_params", "Offload parameters to host memory?", _has_fsdp),
    Question(
        *("fsdp_auto_wrap_policy", "Which modules to wrap separately?", _has_fsdp),
        *("TRANSFORMER_BASED_WRAP", _WRAPS),
    ),
    Question(
        "fsdp_transformer_layer_cls_to_wrap",
        "Layer classes, comma-separated (none: the model's _no_split_modules)",
        _has("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
        optional=True,
    ),
    Question(
        "fsdp_min_num_params",
        "Minimum number of parameters of a wrapped module",
        _has("fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"),
    ),
    Question("use_parallelism_config", "Arrange the processes in a mesh (replicas, shards, tp)?", _may_shard),
    Question("parallelism_config_dp_replicate_size", "Data-parallel replicas (dp_replicate)", _has_mesh),
    Question("parallelism_config_tp_size", "Tensor-parallel size (tp)", _has_mesh),
    Question("parallelism_config_dp_shard_size", "Data-parallel shards (dp_shard)", _has_mesh, _usual_shards),
    Question(
        "num_processes", "How many processes on all machines together?", _asks_processes, _usual_processes
    ),
    Question("gpu_ids", "Which accelerators of this machine?", _has_accelerator),
    Question("enable_cpu_affinity", "Bind each process to the NUMA node of its GPU?", _has_accelerator),
    Question("main_training_function", "Function of the script that each process calls", _is_tpu),
    Question("mixed_precision", "Which mixed precision?", _asks_precision, "no", _precisions),
    Question("fp8_enable_fsdp_float8_all_gather", "Gather FSDP parameters in 8 bits?", _asks_all_gather),
    Question("downcast_bf16", "Use fp32 for double? (otherwise bf16)", _asks_downcast),
    Question(
        "gradient_accumulation_steps",
        "Gradient accumulation steps (none: set by the script)",
        _asks_precision,
        optional=True,
    ),
)
_DECIDED = frozenset((*(question.name for question in QUESTIONS), *(name for name, _ in _TYPES.values())))


def first_answers(
    saved: Mapping[str, object],
    devices: int | None = 0,
    *,
    has_tpu: bool = False,
    has_sagemaker: bool = False,
    has_fp8: bool = False,
    has_deepspeed: bool = False,
) -> Answers:
    """Return the initial answers: the values of options without a question. Pure.

    Args:
        saved: Values of the existing config file, by option name.
        devices: Number of accelerators of this machine; None if unknown.
        has_tpu: Whether torch_xla is installed.
        has_sagemaker: Whether the sagemaker package is.
        has_fp8: Whether torchao is installed.
        has_deepspeed: Whether DeepSpeed is installed.

    >>> list(first_answers({"max_restarts": 3, "num_processes": 4}))
    ['max_restarts', 'devices', 'has_tpu', 'has_sagemaker', 'has_fp8', 'has_deepspeed']
    """
    kept = {name: value for name, value in saved.items() if name not in _DECIDED and value is not None}
    # The file may be for another machine.
    known = None if devices == 0 and saved.get("multi_gpu") else devices
    return {
        **kept,
        "devices": known,
        "has_tpu": has_tpu or saved.get("tpu") is True,
        "has_sagemaker": has_sagemaker or saved.get("compute_environment") == "AMAZON_SAGEMAKER",
        "has_fp8": has_fp8 or saved.get("mixed_precision") == "fp8",
        "has_deepspeed": has_deepspeed or saved.get("use_deepspeed") is True,
    }


def next_question(answers: Answers) -> Question | None:
    """Return the next question, or None at the end. Pure.

    >>> first = next_question({})
    >>> first and first.name
    'machine_type'
    """
    return next((each for each in QUESTIONS if each.name not in answers and each.when(answers)), None)


def default_of(question: Question, answers: Answers, saved: Mapping[str, object]) -> object:
    """Return the default answer: the value in the config file if it is valid, else the usual one. Pure.

    Args:
        question: The question.
        answers: Previous answers.
        saved: Values of the existing config file.
    """
    value = _type_in_file(saved) if question.name == "machine_type" else saved.get(question.name)
    choices = question.choices(answers)
    if value is not None and (not choices or str(value) in choices) and not refuse(question, answers, value):
        return value
    return question.default(answers)


def read_answer(question: Question, answers: Answers, text: str) -> object:
    """Parse an answer. Pure.

    Args:
        question: The question.
        answers: Previous answers.
        text: The answer; ``none`` is None if the question is optional.

    Raises:
        ValueError: The answer is invalid.
    """
    if question.optional and text.strip().lower() == "none":
        return None
    choices = question.choices(answers)
    option = OPTIONS.get(question.name)
    value = question.kind.read(text) if option is None else read_value(option, text)
    if value is None or (choices and str(value) not in choices):
        accepted = f"one of {', '.join(choices)}" if choices else question.kind.accepts
        raise ValueError(f"it must be {accepted}, got {text!r}.")
    reason = refuse(question, answers, value)
    if reason:
        raise ValueError(reason)
    return value


def refuse(question: Question, answers: Answers, value: object) -> str:
    """Return why an answer conflicts with previous ones, or "". Pure.

    Completes the answers with defaults, and checks that they make a valid configuration.
    """
    if question.name == "num_processes" and value == 1 and _is_multi(answers):
        return f"{answers['machine_type']} need 2 or more processes, got 1."
    so_far: dict[str, object] = {**answers, question.name: value}
    for later in QUESTIONS:
        if later.name not in so_far and later.when(so_far):
            usual = later.default(so_far)
            so_far[later.name] = later.kind.read(later.example) if usual is None and later.example else usual
    try:
        LaunchConfig(**values_of(so_far))
    except ConfigurationError as error:
        return str(error)
    return ""


def values_of(answers: Answers) -> dict[str, object]:
    """Return the values of options for a config file, by option name. Pure.

    >>> values_of({"machine_type": "several processes on CPUs", "num_processes": 2})
    {'num_processes': 2, 'cpu': True}
    """
    values = {name: value for name, value in answers.items() if name in OPTIONS and value is not None}
    kind = answers.get("machine_type")
    return values | ({} if kind is None else dict([_TYPES[str(kind)]]))
