"""The questionnaire of ``accelfn config`` as a pure plan: what to ask next, and what the answers make.

Kinds, choices and defaults come from the table of options; what isn't asked about stays as the file has it.
``accelfn.launch.config.ask`` puts the questions to the user.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

from accelfn.errors import ConfigurationError
from accelfn.launch.config.options import OPTIONS, Kind, choice, read_value
from accelfn.launch.config.record import LaunchConfig

#: Values by the names of questions; a question that was answered with nothing has None.
Answers = Mapping[str, object]

#: The answers to ``machine_type``, and the option that each sets.
ONE, CPUS, ACCELERATORS, TPU = "one process", "several processes on CPUs", "several accelerators", "TPU"
_TYPES: Mapping[str, tuple[str, object]] = MappingProxyType(
    {ONE: ("num_processes", 1), CPUS: ("cpu", True), ACCELERATORS: ("multi_gpu", True), TPU: ("tpu", True)}
)


@dataclass(frozen=True, slots=True)
class Question:
    """One question. Everything about it is a value or a pure function of the answers before it.

    Attributes:
        name: Name of an option, or ``machine_type``.
        text: What the user reads.
        when: Whether the answers so far make it one to ask.
        usual: The answer of who only presses Enter, where it isn't the option's default: a value, or a
            function of the answers.
        few: The only answers, where they aren't those of the option: the same, or a mapping to menu entries.
        optional: Whether nothing at all is an answer.
        example: A text that could be answered, where there is no default and an answer is needed.
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
        """How an answer is read."""
        return OPTIONS[self.name].kind if self.name in OPTIONS else choice(*_TYPES)

    def choices(self, answers: Answers) -> tuple[str, ...]:
        """Return the only answers, where they are few; empty where any text of the kind will do."""
        few = self.few(answers) if callable(self.few) else self.few
        return self.kind.choices if few is None else tuple(few)

    def title(self, one: str) -> str:
        """Return what a menu shows for a choice."""
        return one if self.few is None or callable(self.few) else self.few.get(one, one)

    def default(self, answers: Answers) -> object:
        """Return the answer of who only presses Enter; None if there is none."""
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
_is_tpu = _has("machine_type", TPU)
_is_cluster = _has("tpu_cluster", True)
_has_fsdp = _has("use_fsdp", True)
_has_mesh = _has("use_parallelism_config", True)


def _needs_rendezvous(answers: Answers) -> bool:
    """Return whether machines have to find each other; mpirun starts all of them itself."""
    several = _is_multi(answers) and _number(answers, "num_machines") > 1
    return several and answers.get("mpirun_hostfile") is None


def _asks_address(answers: Answers) -> bool:
    return _needs_rendezvous(answers) and answers.get("rdzv_endpoint") is None


def _asks_rank(answers: Answers) -> bool:
    return _needs_rendezvous(answers) and answers.get("rdzv_backend") == "static"


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
    """Return as many as fill the accelerators there are, or such that machines share the mesh evenly."""
    machines, others = _number(answers, "num_machines"), _mesh_size(answers, "dp_replicate", "tp")
    places = _number(answers, "devices", 0) * machines
    return places // others if places > others and places % others == 0 else max(2, machines)


def _usual_processes(answers: Answers) -> int:
    machines, mesh = _number(answers, "num_machines"), _mesh_size(answers, "dp_replicate", "tp", "dp_shard")
    places = _number(answers, "devices", 0) * machines if answers.get("machine_type") == ACCELERATORS else 0
    least = 2 if _is_multi(answers) and machines == 1 else machines
    return next((count for count in (mesh, places) if count > 1), least)


_RESHARDS = MappingProxyType({"FULL_SHARD": "yes (FULL_SHARD)", "SHARD_GRAD_OP": "no (SHARD_GRAD_OP)"})
_VERSIONS = MappingProxyType({"2": "2 (fully_shard)", "1": "1 (FullyShardedDataParallel)"})
_WRAPS = MappingProxyType(
    {
        "TRANSFORMER_BASED_WRAP": "the blocks of the model (TRANSFORMER_BASED_WRAP)",
        "SIZE_BASED_WRAP": "those with so many parameters (SIZE_BASED_WRAP)",
        "NO_WRAP": "none: the model is gathered at once (NO_WRAP)",
    }
)
_BACKENDS = MappingProxyType({"static": "each machine has its number (static)", "c10d": "assigned (c10d)"})


def _ranks(answers: Answers) -> tuple[str, ...]:
    return tuple(map(str, range(_number(answers, "num_machines"))))


def _precisions(answers: Answers) -> tuple[str, ...]:
    return ("no", "bf16") if _is_tpu(answers) else ("no", "fp16", "bf16")


def _usual_type(answers: Answers) -> str:
    return ACCELERATORS if _number(answers, "devices", 0) > 1 else ONE


def _asks_downcast(answers: Answers) -> bool:
    return _is_tpu(answers) and answers.get("mixed_precision") == "bf16"


def _asks_processes(answers: Answers) -> bool:
    return _is_multi(answers) or _is_tpu(answers)


#: Every question, in the order in which they are asked. A question depends on those before it only.
QUESTIONS: tuple[Question, ...] = (
    Question("machine_type", "What does it run on?", _always, _usual_type, _types_here),
    Question("num_machines", "How many machines?", _is_multi),
    Question(
        "mpirun_hostfile", "Host file of mpirun (none: torchrun)", _has("machine_type", CPUS), optional=True
    ),
    Question("rdzv_backend", "How are machines numbered?", _needs_rendezvous, "static", _BACKENDS),
    Question("machine_rank", "Number of this machine (others: --machine_rank)", _asks_rank, 0, _ranks),
    Question("main_process_ip", "Address of machine 0", _asks_address, example="10.0.0.1"),
    Question("main_process_port", "Port on machine 0 (none: 29500)", _asks_address, optional=True),
    Question("debug", "Check operations across ranks while the script runs? (slower)", _is_multi),
    Question("cpu", "Use the CPU even where there is an accelerator?", _may_use_accelerator),
    Question("dynamo_backend", "Compile models with this backend of torch.compile", _always, "no"),
    Question("use_fsdp", "Shard models over the processes, by FSDP?", _is_multi),
    Question("fsdp_version", "Which version's options?", _has_fsdp, 2, _VERSIONS),
    Question(
        *("fsdp_sharding_strategy", "Free parameters after the forward pass?", _has("fsdp_version", 1)),
        few=_RESHARDS,
    ),
    Question(
        "fsdp_reshard_after_forward", "Free parameters after the forward pass?", _has("fsdp_version", 2)
    ),
    Question("fsdp_offload_params", "Keep parameters in host memory?", _has_fsdp),
    Question(
        *("fsdp_auto_wrap_policy", "Which modules are gathered one by one?", _has_fsdp),
        *("TRANSFORMER_BASED_WRAP", _WRAPS),
    ),
    Question(
        "fsdp_transformer_layer_cls_to_wrap",
        "Classes of the blocks, separated by commas (none: those in the model's _no_split_modules)",
        _has("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
        optional=True,
    ),
    Question(
        "fsdp_min_num_params",
        "Modules of at least how many parameters?",
        _has("fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"),
    ),
    Question("use_parallelism_config", "Lay the processes out as a mesh (copies, shards, tp)?", _is_multi),
    Question("parallelism_config_dp_replicate_size", "Copies of the model (dp_replicate)", _has_mesh),
    Question("parallelism_config_tp_size", "Processes that share a layer (tp)", _has_mesh),
    Question(
        "parallelism_config_dp_shard_size", "Processes that share a copy (dp_shard)", _has_mesh, _usual_shards
    ),
    Question(
        "num_processes", "How many processes, on all machines together?", _asks_processes, _usual_processes
    ),
    Question("gpu_ids", "Which accelerators of this machine?", _has_accelerator),
    Question("enable_cpu_affinity", "Bind each process to the NUMA node of its GPU?", _has_accelerator),
    Question("main_training_function", "Function of the script that each process runs", _is_tpu),
    Question("tpu_cluster", "Start on every machine of a TPU cluster, through gcloud?", _is_tpu),
    Question("tpu_name", "Name of the TPU", _is_cluster, example="my-tpu"),
    Question("tpu_zone", "Zone of the TPU", _is_cluster, example="us-central1-a"),
    Question("mixed_precision", "Which precision?", _always, "no", _precisions),
    Question("downcast_bf16", "Should double mean fp32? (otherwise bf16 too)", _asks_downcast),
    Question(
        "gradient_accumulation_steps", "Batches in a step (none: the script's own)", _always, optional=True
    ),
)
_DECIDED = frozenset((*(question.name for question in QUESTIONS), *(name for name, _ in _TYPES.values())))


def first_answers(saved: Mapping[str, object], devices: int | None = 0, *, has_tpu: bool = False) -> Answers:
    """Return the answers before the first question: what no question is about stays as it is. Pure.

    Args:
        saved: Values of a file that is there already, by the options' names.
        devices: Accelerators of this machine; None where there are some, and it isn't known how many.
        has_tpu: Whether torch_xla is installed.

    >>> dict(first_answers({"max_restarts": 3, "num_processes": 4}))
    {'max_restarts': 3, 'devices': 0, 'has_tpu': False}
    """
    kept = {name: value for name, value in saved.items() if name not in _DECIDED and value is not None}
    # A file that is for another machine stays so.
    many = None if devices == 0 and saved.get("multi_gpu") else devices
    return {**kept, "devices": many, "has_tpu": has_tpu or saved.get("tpu") is True}


def next_question(answers: Answers) -> Question | None:
    """Return what to ask next; None at the end. Pure.

    >>> first = next_question({})
    >>> first and first.name
    'machine_type'
    """
    return next((one for one in QUESTIONS if one.name not in answers and one.when(answers)), None)


def default_of(question: Question, answers: Answers, saved: Mapping[str, object]) -> object:
    """Return what is offered as the answer: the value in the file, if it still fits; else the usual. Pure.

    Args:
        question: What is asked.
        answers: What was answered before it.
        saved: Values of a file that is there already.

    Returns:
        A value that may be answered, or None.
    """
    found = _type_in_file(saved) if question.name == "machine_type" else saved.get(question.name)
    few = question.choices(answers)
    if found is not None and (not few or str(found) in few) and not refuse(question, answers, found):
        return found
    return question.default(answers)


def read_answer(question: Question, answers: Answers, text: str) -> object:
    """Read an answer. Pure.

    Args:
        question: What was asked.
        answers: What was answered before it.
        text: The answer; ``none`` is nothing, where nothing is an answer.

    Raises:
        ValueError: It isn't valid; the message says why.
    """
    if question.optional and text.strip().lower() == "none":
        return None
    few = question.choices(answers)
    option = OPTIONS.get(question.name)
    value = question.kind.read(text) if option is None else read_value(option, text)
    if value is None or (few and str(value) not in few):
        accepted = f"one of {', '.join(few)}" if few else question.kind.accepts
        raise ValueError(f"it must be {accepted}, got {text!r}.")
    reason = refuse(question, answers, value)
    if reason:
        raise ValueError(reason)
    return value


def refuse(question: Question, answers: Answers, value: object) -> str:
    """Return the reason why an answer contradicts those before it; "" if it doesn't. Pure.

    What isn't answered yet is taken to be answered as usual, and the whole must be a configuration.
    """
    if question.name == "num_processes" and value == 1 and _is_multi(answers):
        return f"Several processes were chosen ({answers['machine_type']}): give 2 or more, got 1."
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
    """Return the values of options that the answers make, by name. Pure.

    >>> values_of({"machine_type": "several processes on CPUs", "num_processes": 2})
    {'num_processes': 2, 'cpu': True}
    """
    values = {name: value for name, value in answers.items() if name in OPTIONS and value is not None}
    kind = answers.get("machine_type")
    return values | ({} if kind is None else dict([_TYPES[str(kind)]]))
