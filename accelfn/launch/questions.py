"""The questions of ``accelfn config``, as data and pure functions.

Kinds, choices and defaults come from the table of options. Options without a question keep their values from
the config file. ``accelfn.launch.ask`` asks the questions on a terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from sys import maxsize
from types import MappingProxyType
from typing import Any, cast

from accelfn.errors import ConfigurationError
from accelfn.launch.config import LaunchConfig
from accelfn.launch.kinds import Kind, choice
from accelfn.launch.options import OPTIONS, Option, read_value

#: Answers by question name; None for an optional question without an answer.
Answers = Mapping[str, object]

#: Values of answers by question name.
Condition = Mapping[str, object]

#: The choices of ``machine_type``, and the option that each sets.
ONE, CPUS, ACCELERATORS, TPU = "one process", "several processes on CPUs", "several accelerators", "TPU"
_TYPES: Mapping[str, tuple[str, object]] = MappingProxyType(
    {ONE: ("num_processes", 1), CPUS: ("cpu", True), ACCELERATORS: ("multi_gpu", True), TPU: ("tpu", True)}
)
_MACHINE_TYPE = Option("machine_type", choice(*_TYPES), None, "hardware")
#: Packages without which something isn't offered, and the value in a file with which it is.
PACKAGES: Mapping[str, tuple[str, object]] = MappingProxyType(
    {
        "torch_xla": ("tpu", True),
        "sagemaker": ("compute_environment", "AMAZON_SAGEMAKER"),
        "torchao": ("mixed_precision", "fp8"),
        "deepspeed": ("use_deepspeed", True),
    }
)


@dataclass(frozen=True, slots=True)
class Question:
    """A question, as values and pure functions of the previous answers.

    Attributes:
        name: Name of an option, or ``machine_type``.
        text: The text of the question.
        when: Answers that must hold for it to be asked: the value, or any of a tuple or a range. An option
            without an answer has the value None.
        unless: Answers of which none may hold.
        usual: The default answer if it isn't that of the option: a value or a function of the answers.
        few: The choices if they aren't those of the option, or a function of the answers.
        example: A valid answer, for a required question without a default.
    """

    name: str
    text: str
    when: Condition | None = None
    unless: Condition | None = None
    usual: object = None
    few: tuple[str, ...] | Callable[[Answers], tuple[str, ...]] = ()
    example: str = ""

    @property
    def optional(self) -> bool:
        """Whether ``none`` is an answer: there is no default, and none is needed."""
        return self.option.default is None and self.usual is None and not self.example

    def is_asked(self, answers: Answers) -> bool:
        """Return whether to ask it, given the previous answers."""
        return all(_hold(answers, self.when)) and not any(_hold(answers, self.unless))

    @property
    def option(self) -> Option:
        """The option that it is about."""
        return OPTIONS.get(self.name, _MACHINE_TYPE)

    @property
    def kind(self) -> Kind[Any]:
        """Kind of the answer."""
        return self.option.kind

    def choices(self, answers: Answers) -> tuple[str, ...]:
        """Return the choices; empty if any text of the kind is valid."""
        return (self.few(answers) if callable(self.few) else self.few) or self.kind.choices

    def default(self, answers: Answers) -> object:
        """Return the default answer, or None."""
        if self.usual is None:
            return self.option.default
        return self.usual(answers) if callable(self.usual) else self.usual


def _hold(answers: Answers, condition: Condition | None) -> Iterator[bool]:
    for name, wanted in (condition or {}).items():
        value = answers.get(name)
        yield value in wanted if isinstance(wanted, (tuple, range)) else value == wanted


def _number(answers: Answers, name: str, otherwise: int = 1) -> int:
    return cast("int", answers.get(name) or otherwise)


def _types_here(answers: Answers) -> tuple[str, ...]:
    accelerators = () if answers.get("devices") == 0 else (ACCELERATORS,)
    return (ONE, CPUS, *accelerators, *((TPU,) if answers.get("torch_xla") else ()))


def _usual_type(answers: Answers) -> str:
    return ACCELERATORS if _number(answers, "devices", 0) > 1 else ONE


def _type_in_file(values: Answers) -> str | None:
    chosen = next((kind for kind in (TPU, ACCELERATORS) if values.get(_TYPES[kind][0])), None)
    if chosen is None and not {values.get("num_processes"), values.get("num_machines")} <= {None, 1}:
        chosen = CPUS if values.get("cpu") else ACCELERATORS
    return chosen or (ONE if values.get("num_processes") == 1 or values.get("cpu") else None)


def _mesh_size(answers: Answers, *axes: str) -> int:
    has_mesh = answers.get("use_parallelism_config") is True
    return prod(_number(answers, f"parallelism_config_{axis}_size") for axis in axes if has_mesh)


def _usual_shards(answers: Answers) -> int:
    """Return a number of shards that uses all accelerators, or else one per machine."""
    machines, others = _number(answers, "num_machines"), _mesh_size(answers, "dp_replicate", "tp")
    devices = _number(answers, "devices", 0) * machines
    return devices // others if devices > others and devices % others == 0 else max(2, machines)


def _usual_processes(answers: Answers) -> int:
    machines, mesh = _number(answers, "num_machines"), _mesh_size(answers, "dp_replicate", "tp", "dp_shard")
    kind = answers.get("machine_type")
    devices = _number(answers, "devices", 0) * machines if kind == ACCELERATORS else 0
    least = 2 if kind in _SEVERAL and machines == 1 else machines
    return next((count for count in (mesh, devices) if count > 1), least)


def _ranks(answers: Answers) -> tuple[str, ...]:
    return tuple(map(str, range(_number(answers, "num_machines"))))


def _precisions(answers: Answers) -> tuple[str, ...]:
    if answers.get("machine_type") == TPU:
        return ("no", "bf16")
    # DeepSpeed can't be combined with fp8.
    has_fp8 = answers.get("torchao") is True and answers.get("use_deepspeed") is not True
    return ("no", "fp16", "bf16", *(("fp8",) if has_fp8 else ()))


def _given(**answers: object) -> Condition:
    return MappingProxyType(answers)


# Conditions of several questions.
_SEVERAL = (CPUS, ACCELERATORS)
_MULTI = _given(machine_type=_SEVERAL)
_MACHINES = _given(**_MULTI, num_machines=range(2, maxsize))
_ADDRESS = _given(**_MACHINES, rdzv_endpoint=None)
_ONE = _given(machine_type=ONE)
_ON_DEVICE = _given(machine_type=(ONE, ACCELERATORS))
_ON_CPU = _given(devices=0, cpu=True)
_ON_TPU = _given(machine_type=TPU)
_JOB = _given(compute_environment="AMAZON_SAGEMAKER")
_IMAGE = _given(**_JOB, image_uri=None)
_DEEPSPEED = _given(use_deepspeed=True)
_NO_FILE = _given(deepspeed_config_file=None)
_ZERO = _given(**_DEEPSPEED, **_NO_FILE)
_SHARDED = _given(zero_stage=(1, 2, 3))
_STAGE_3 = _given(zero_stage=3)
_FSDP = _given(use_fsdp=True)
_BY_CLASS = _given(fsdp_auto_wrap_policy="TRANSFORMER_BASED_WRAP")
_MESH = _given(use_parallelism_config=True)
_MANY = _given(machine_type=(*_SEVERAL, TPU))
_STATE_ON_DISK = _given(offload_optimizer_device="nvme")
_PARAMS_ON_DISK = _given(offload_param_device="nvme")
_BY_SIZE = _given(fsdp_auto_wrap_policy="SIZE_BASED_WRAP")
_FP8_FSDP = _given(**_FSDP, mixed_precision="fp8")
# Fewer choices than those of the option, or in another order.
_STAGES = ("2", "3", "1", "0")
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP")
_GIVEN = "none: set by the script"

#: All questions in order. A question depends only on previous ones.
QUESTIONS: tuple[Question, ...] = (
    Question("compute_environment", "Where does the script run?", _given(sagemaker=True)),
    Question("profile", "AWS profile (none: the credentials that boto3 finds)", _JOB),
    Question("region", "AWS region", _JOB),
    Question("iam_role_name", "Role of the job, by name or ARN", _JOB, example="my-role"),
    Question("image_uri", "Image to run in (none: by its versions)", _JOB),
    Question("transformers_version", "Version of transformers in the image", _IMAGE, example="4.56.2"),
    Question("pytorch_version", "Version of torch in the image", _IMAGE, example="2.8.0"),
    Question("py_version", "Version of Python in the image", _IMAGE, example="py312"),
    Question("sagemaker_inputs_file", "Table of inputs", _JOB),
    Question("sagemaker_metrics_file", "Table of metrics", _JOB),
    Question("sagemaker_distributed_type", "Several processes per machine?", _JOB),
    Question("ec2_instance_type", "Type of the machines", _JOB, example="ml.p4d.24xlarge"),
    Question("machine_type", "What hardware does the script run on?", None, _JOB, _usual_type, _types_here),
    Question("num_machines", "How many machines?", _MULTI),
    Question("num_machines", "How many machines?", _given(sagemaker_distributed_type="DATA_PARALLEL")),
    Question("use_deepspeed", "Train with DeepSpeed (ZeRO)?", _given(deepspeed=True), _ON_TPU),
    Question("rdzv_backend", "Are ranks of machines fixed (static) or assigned?", _MACHINES, None, "static"),
    Question("machine_rank", "Rank of this machine", _given(rdzv_backend="static"), None, 0, _ranks),
    Question("main_process_ip", "Address of machine 0", _ADDRESS, example="10.0.0.1"),
    Question("main_process_port", "Port on machine 0 (none: 29500)", _ADDRESS),
    Question("debug", "Check the arguments of collectives on all ranks? (slower)", _MULTI),
    Question("cpu", "Use the CPU even if there is an accelerator?", _ONE, _given(devices=0)),
    Question("dynamo_backend", "torch.compile backend for models", usual="no"),
    Question("deepspeed_config_file", "DeepSpeed's file (none: questions)", _DEEPSPEED),
    Question("zero_stage", "ZeRO stage (1: optimizer state, 2: gradients, 3: all)", _ZERO, None, 2, _STAGES),
    Question("offload_optimizer_device", "Place of optimizer state", _SHARDED, None, "none"),
    Question("offload_optimizer_nvme_path", "Directory for optimizer state", _STATE_ON_DISK, example="/nvme"),
    Question("offload_param_device", "Place of parameters", _STAGE_3, None, "none"),
    Question("offload_param_nvme_path", "Directory for parameters", _PARAMS_ON_DISK, example="/nvme"),
    Question("gradient_clipping", f"Maximum gradient norm ({_GIVEN})", _ZERO),
    Question("zero3_init_flag", "Create models already sharded, in zero3_init?", _STAGE_3, None, True),
    Question("deepspeed_moe_layer_cls_names", "Classes of mixture-of-experts layers", _STAGE_3),
    Question("use_fsdp", "Shard models over the processes with FSDP?", _MULTI, _DEEPSPEED),
    Question("fsdp_version", "Options of which FSDP version?", _FSDP, None, 2, ("2", "1")),
    Question("fsdp_sharding_strategy", "Sharding strategy", _given(fsdp_version=1), few=_STRATEGIES),
    Question("fsdp_reshard_after_forward", "Reshard after the forward pass?", _given(fsdp_version=2)),
    Question("fsdp_offload_params", "Offload parameters to host memory?", _FSDP),
    Question("fsdp_auto_wrap_policy", "Which modules to wrap?", _FSDP, None, "TRANSFORMER_BASED_WRAP"),
    Question("fsdp_transformer_layer_cls_to_wrap", "Layer classes (none: the model's)", _BY_CLASS),
    Question("fsdp_min_num_params", "Minimum number of parameters of a wrapped module", _BY_SIZE),
    Question(
        "use_parallelism_config", "Arrange processes in a mesh (replicas, shards, tp)?", _MULTI, _DEEPSPEED
    ),
    Question("parallelism_config_dp_replicate_size", "Data-parallel replicas (dp_replicate)", _MESH),
    Question("parallelism_config_tp_size", "Tensor-parallel size (tp)", _MESH),
    Question("parallelism_config_dp_shard_size", "Data-parallel shards", _MESH, usual=_usual_shards),
    Question("num_processes", "How many processes on all machines together?", _MANY, None, _usual_processes),
    Question("gpu_ids", "Which accelerators of this machine?", _ON_DEVICE, _ON_CPU),
    Question("enable_cpu_affinity", "Bind processes to NUMA nodes of their GPUs?", _ON_DEVICE, _ON_CPU),
    Question("main_training_function", "Function of the script that each process calls", _ON_TPU),
    Question("mixed_precision", "Which mixed precision?", _NO_FILE, None, "no", _precisions),
    Question("fp8_enable_fsdp_float8_all_gather", "Gather FSDP parameters in 8 bits?", _FP8_FSDP),
    Question("downcast_bf16", "Use fp32 for double?", _given(**_ON_TPU, mixed_precision="bf16")),
    Question("gradient_accumulation_steps", f"Accumulation steps ({_GIVEN})", _NO_FILE),
)
_DECIDED = frozenset((*(question.name for question in QUESTIONS), *(name for name, _ in _TYPES.values())))


def first_answers(saved: Mapping[str, object], devices: int | None = 0, *installed: str) -> Answers:
    """Return the initial answers: the values of options without a question. Pure.

    Args:
        saved: Values of the existing config file, by option name.
        devices: Number of accelerators of this machine; None if unknown.
        installed: Which of :data:`PACKAGES` are installed.

    >>> list(first_answers({"max_restarts": 3, "num_processes": 4}))
    ['max_restarts', 'devices', 'torch_xla', 'sagemaker', 'torchao', 'deepspeed']
    """
    kept = {name: value for name, value in saved.items() if name not in _DECIDED and value is not None}
    # The file may be for another machine.
    known = None if devices == 0 and saved.get("multi_gpu") else devices
    offered = {
        package: package in installed or saved.get(name) == value
        for package, (name, value) in PACKAGES.items()
    }
    return {**kept, "devices": known, **offered}


def next_question(answers: Answers) -> Question | None:
    """Return the next question, or None at the end. Pure.

    >>> first = next_question({})
    >>> first and first.name
    'machine_type'
    """
    return next((each for each in QUESTIONS if each.name not in answers and each.is_asked(answers)), None)


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
    value = read_value(question.option, text)
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
    if question.name == "num_processes" and value == 1 and answers.get("machine_type") in _SEVERAL:
        return f"{answers['machine_type']} need 2 or more processes, got 1."
    so_far: dict[str, object] = {**answers, question.name: value}
    for later in QUESTIONS:
        if later.name not in so_far and later.is_asked(so_far):
            usual = later.default(so_far)
            so_far[later.name] = later.kind.read(later.example) if usual is None and later.example else usual
    try:
        LaunchConfig(**values_of(so_far))
    except ConfigurationError as error:
        return str(error)
    return ""


def values_of(answers: Answers) -> dict[str, Any]:
    """Return the values of options for a config file, by option name. Pure.

    >>> values_of({"machine_type": "several processes on CPUs", "num_processes": 2})
    {'num_processes': 2, 'cpu': True}
    """
    values = {name: value for name, value in answers.items() if name in OPTIONS and value is not None}
    kind = answers.get("machine_type")
    return values if kind is None else values | dict([_TYPES[str(kind)]])
