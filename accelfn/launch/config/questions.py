"""The questionnaire of ``accelfn config`` as a pure plan: what to ask next, and what the answers make.

Names, kinds, choices and defaults come from the table of fields, and what isn't asked about stays as the file
has it. ``accelfn.launch.config.ask`` carries the plan out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

from accelfn.errors import ConfigurationError
from accelfn.launch.config.fields import FIELD_OF, build_config, read_value
from accelfn.launch.config.kinds import Kind, choice
from accelfn.launch.config.record import LaunchConfig

#: Values by the names of questions; a question that was answered with nothing has None.
Answers = Mapping[str, object]

#: The answers to ``machine_type``, and the fields that each decides on.
ONE, CPUS, ACCELERATORS, TPU = "one process", "several processes on CPUs", "several accelerators", "TPU"
_PLACES: Mapping[str, tuple[str, object]] = MappingProxyType(
    {ONE: ("num_processes", 1), CPUS: ("cpu", True), ACCELERATORS: ("multi_gpu", True), TPU: ("tpu", True)}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question. Everything about it is a value or a pure function of the answers before it.

    Attributes:
        name: Name of a field of the table, or ``machine_type``.
        text: What the user reads.
        kind: How an answer is read.
        when: Whether the answers so far make it one to ask.
        choices: The only answers, where there are few; empty where any text of the kind will do.
        titles: What a menu shows for a choice, where that isn't the choice itself.
        default: The answer of who only presses Enter; None if there is none.
        optional: Whether nothing at all is an answer.
        example: A text that could be answered, where there is no default and an answer is needed.
        refuse: A reason against the answers up to and with this one, or "".
    """

    name: str
    text: str
    kind: Kind
    when: Callable[[Answers], bool]
    choices: Callable[[Answers], tuple[str, ...]]
    default: Callable[[Answers], object]
    titles: Mapping[str, str]
    optional: bool
    example: str
    refuse: Callable[[Answers], str]


def _ask(
    name: str,
    when: Callable[[Answers], bool],
    text: str,
    *,
    default: str | int | Callable[[Answers], object] | None = None,
    choices: tuple[str, ...] | Callable[[Answers], tuple[str, ...]] | None = None,
    titles: Mapping[str, str] | None = None,
    optional: bool = False,
    example: str = "",
    refuse: Callable[[Answers], str] = lambda _: "",
) -> Question:
    """Make a question; its kind, choices and default are the field's where they aren't passed."""
    field = FIELD_OF.get(name)
    kind = choice(*_PLACES) if field is None else field.kind
    few = kind.choices if choices is None else choices
    usual = field.default if default is None and field is not None else default
    return Question(
        name=name,
        text=text,
        kind=kind,
        when=when,
        choices=few if callable(few) else lambda _: few,
        default=usual if callable(usual) else lambda _: usual,
        titles=MappingProxyType(dict(titles or {})),
        optional=optional,
        example=example,
        refuse=refuse,
    )


def _has(name: str, *values: object) -> Callable[[Answers], bool]:
    return lambda answers: answers.get(name) in values


def _number(answers: Answers, name: str, otherwise: int) -> int:
    return cast("int", answers.get(name) or otherwise)


_is_multi = _has("machine_type", CPUS, ACCELERATORS)
_is_tpu = _has("machine_type", TPU)
_is_cluster = _has("tpu_cluster", True)
_has_fsdp = _has("use_fsdp", True)
_has_mesh = _has("use_parallelism_config", True)


def _machines_meet(answers: Answers) -> bool:
    """Whether machines have to find each other; mpirun starts all of them itself."""
    several = _is_multi(answers) and _number(answers, "num_machines", 1) > 1
    return several and answers.get("mpirun_hostfile") is None


def _asks_address(answers: Answers) -> bool:
    return _machines_meet(answers) and answers.get("rdzv_endpoint") is None


def _has_accelerator(answers: Answers) -> bool:
    kind = answers.get("machine_type")
    return kind == ACCELERATORS or (kind == ONE and answers.get("cpu") is False)


def _types(answers: Answers) -> tuple[str, ...]:
    accelerators = () if answers.get("devices") == 0 else (ACCELERATORS,)
    return (ONE, CPUS, *accelerators, *((TPU,) if answers.get("has_tpu") else ()))


def _type_in_file(values: Answers) -> str | None:
    chosen = next((kind for kind in (TPU, ACCELERATORS) if values.get(_PLACES[kind][0])), None)
    if chosen is None and not {values.get("num_processes"), values.get("num_machines")} <= {None, 1}:
        chosen = CPUS if values.get("cpu") else ACCELERATORS
    return chosen or (ONE if values.get("num_processes") == 1 or values.get("cpu") else None)


def _mesh_size(answers: Answers) -> int:
    """Count the places of the mesh; 1 where there is none."""
    if not _has_mesh(answers):
        return 1
    sizes = (f"parallelism_config_{axis}_size" for axis in ("dp_replicate", "tp", "dp_shard"))
    return math.prod(_number(answers, size, 1) for size in sizes)


def _usual_shards(answers: Answers) -> int:
    """As many as fill the accelerators there are; at least such that machines share the mesh evenly."""
    machines, others = _number(answers, "num_machines", 1), _mesh_size(answers)
    places = _number(answers, "devices", 0) * machines
    if places > others and places % others == 0:
        return places // others
    step = machines // math.gcd(machines, others)
    return step if step > 1 or (others > 1 and not _has_fsdp(answers)) else 2


def _refuse_mesh(answers: Answers) -> str:
    machines, mesh = _number(answers, "num_machines", 1), _mesh_size(answers)
    if mesh == 1:
        return "All sizes are 1, which is no mesh. Give 2 or more here."
    if _has_fsdp(answers) and answers["parallelism_config_dp_shard_size"] == 1:
        return "FSDP was chosen, and has nothing to shard over. Give 2 or more here."
    if mesh % machines == 0:
        return ""
    return f"The sizes multiply to {mesh} processes, which {machines} machines can't share evenly."


def _usual_processes(answers: Answers) -> int:
    machines, mesh = _number(answers, "num_machines", 1), _mesh_size(answers)
    places = _number(answers, "devices", 0) * machines if answers["machine_type"] == ACCELERATORS else 0
    least = 2 if _is_multi(answers) and machines == 1 else machines
    return next((count for count in (mesh, places) if count > 1), least)


def _refuse_processes(answers: Answers) -> str:
    if _is_multi(answers) and answers["num_processes"] == 1:
        return f"Several processes were chosen ({answers['machine_type']}): give 2 or more, got 1."
    mesh = _mesh_size(answers)
    if mesh not in (1, answers["num_processes"]):
        return f"The sizes of the mesh multiply to {mesh}: it needs as many processes."
    return ""


def _refuse_devices(answers: Answers) -> str:
    ids = cast("str", answers["gpu_ids"])
    here = _number(answers, "num_processes", 1) // _number(answers, "num_machines", 1)
    if ids == "all" or len(ids.split(",")) >= here:
        return ""
    return f"{here} processes on this machine need as many accelerators, and {ids} names fewer. Name more."


#: Every question, in the order in which they are asked. A question depends on those before it only.
QUESTIONS: tuple[Question, ...] = (
    _ask(
        "machine_type",
        lambda _: True,
        "What does it run on?",
        choices=_types,
        titles={ACCELERATORS: f"{ACCELERATORS} (GPU, XPU, HPU, NPU, MLU, SDAA, MUSA, Neuron)"},
        default=lambda answers: ACCELERATORS if _number(answers, "devices", 0) > 1 else ONE,
    ),
    _ask("num_machines", _is_multi, "How many machines?"),
    _ask(
        "mpirun_hostfile",
        _has("machine_type", CPUS),
        "Host file of mpirun (none: start the processes without mpirun)",
        optional=True,
    ),
    _ask(
        "rdzv_backend",
        _machines_meet,
        "How do the machines meet?",
        default="static",
        titles={"static": "each is told its number (static)", "c10d": "numbers are assigned (c10d)"},
    ),
    _ask(
        "machine_rank",
        lambda answers: _machines_meet(answers) and answers.get("rdzv_backend") == "static",
        "Number of this machine (on the others, pass theirs as --machine_rank)",
        default=0,
        choices=lambda answers: tuple(str(rank) for rank in range(_number(answers, "num_machines", 1))),
    ),
    _ask(
        "main_process_ip", _asks_address, "Address of machine 0, as the others reach it", example="10.0.0.1"
    ),
    _ask("main_process_port", _asks_address, "Port on machine 0 (none: 29500)", optional=True),
    _ask("debug", _is_multi, "Check operations across ranks while the script runs? (slower)"),
    _ask(
        "cpu",
        lambda answers: answers.get("machine_type") == ONE and answers.get("devices") != 0,
        "Use the CPU even where there is an accelerator?",
    ),
    _ask("dynamo_backend", lambda _: True, "Compile models with this backend of torch.compile", default="no"),
    _ask("use_fsdp", _is_multi, "Shard models over the processes, by FSDP?"),
    _ask(
        "fsdp_version",
        _has_fsdp,
        "Which version's options?",
        default=2,
        choices=("2", "1"),
        titles={"1": "1 (FullyShardedDataParallel)", "2": "2 (fully_shard)"},
    ),
    _ask(
        "fsdp_sharding_strategy",
        _has("fsdp_version", 1),
        "Free parameters after the forward pass?",
        choices=("FULL_SHARD", "SHARD_GRAD_OP"),
        titles={"FULL_SHARD": "yes (FULL_SHARD)", "SHARD_GRAD_OP": "no (SHARD_GRAD_OP)"},
    ),
    _ask("fsdp_reshard_after_forward", _has("fsdp_version", 2), "Free parameters after the forward pass?"),
    _ask("fsdp_offload_params", _has_fsdp, "Keep parameters in host memory?"),
    _ask(
        "fsdp_auto_wrap_policy",
        _has_fsdp,
        "Which modules are gathered one by one?",
        default="TRANSFORMER_BASED_WRAP",
        titles={
            "TRANSFORMER_BASED_WRAP": "the blocks of the model (TRANSFORMER_BASED_WRAP)",
            "SIZE_BASED_WRAP": "those with so many parameters (SIZE_BASED_WRAP)",
            "NO_WRAP": "none: the model is gathered at once (NO_WRAP)",
        },
    ),
    _ask(
        "fsdp_transformer_layer_cls_to_wrap",
        _has("fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
        "Classes of the blocks, separated by commas (none: those in the model's _no_split_modules)",
        optional=True,
    ),
    _ask(
        "fsdp_min_num_params",
        _has("fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"),
        "Modules of at least how many parameters?",
    ),
    _ask(
        "use_parallelism_config",
        _is_multi,
        "Lay the processes out as a mesh (copies, shards, layers that processes share)?",
    ),
    _ask("parallelism_config_dp_replicate_size", _has_mesh, "Copies of the model (dp_replicate)"),
    _ask("parallelism_config_tp_size", _has_mesh, "Processes that share a layer (tp)"),
    _ask(
        "parallelism_config_dp_shard_size",
        _has_mesh,
        "Processes that share a copy's parameters (dp_shard)",
        default=_usual_shards,
        refuse=_refuse_mesh,
    ),
    _ask(
        "num_processes",
        lambda answers: _is_multi(answers) or _is_tpu(answers),
        "How many processes, on all machines together?",
        default=_usual_processes,
        refuse=_refuse_processes,
    ),
    _ask("gpu_ids", _has_accelerator, "Which accelerators of this machine?", refuse=_refuse_devices),
    _ask("enable_cpu_affinity", _has_accelerator, "Bind each process to cores near its accelerator?"),
    _ask("main_training_function", _is_tpu, "Function of the script that each process runs"),
    _ask("tpu_cluster", _is_tpu, "Start on every machine of a TPU cluster, through gcloud?"),
    _ask("tpu_name", _is_cluster, "Name of the TPU", example="my-tpu"),
    _ask("tpu_zone", _is_cluster, "Zone of the TPU", example="us-central1-a"),
    _ask(
        "mixed_precision",
        lambda _: True,
        "Which precision?",
        default="no",
        choices=lambda answers: ("no", "bf16") if _is_tpu(answers) else ("no", "fp16", "bf16"),
    ),
    _ask(
        "downcast_bf16",
        lambda answers: _is_tpu(answers) and answers.get("mixed_precision") == "bf16",
        "Should double mean fp32? (otherwise bf16 too)",
    ),
    _ask(
        "gradient_accumulation_steps",
        lambda _: True,
        "Batches in one step of the optimizer (none: the script's own number)",
        optional=True,
    ),
)
_DECIDED = frozenset((*(question.name for question in QUESTIONS), *(name for name, _ in _PLACES.values())))


def first_answers(saved: Mapping[str, object], devices: int | None = 0, *, has_tpu: bool = False) -> Answers:
    """Return what stands before the first question: what no question is about stays as it is. Pure.

    Args:
        saved: Values of a file that is there already, by the fields' names.
        devices: Accelerators of this machine; None where there are some, and it isn't known how many.
        has_tpu: Whether torch_xla is installed.

    >>> dict(first_answers({"max_restarts": 3, "num_processes": 4}))
    {'max_restarts': 3, 'devices': 0, 'has_tpu': False}
    """
    kept = {
        name: value
        for name, value in saved.items()
        if name not in _DECIDED and value is not None and not FIELD_OF[name].secret
    }
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
        ValueError: It is none; the message tells why.
    """
    if question.optional and text.strip().lower() == "none":
        return None
    few = question.choices(answers)
    field = FIELD_OF.get(question.name)
    value = question.kind.read(text) if field is None else read_value(field, text)
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
    so_far: dict[str, object] = {**answers, question.name: value}
    reason = question.refuse(so_far)
    if reason:
        return reason
    for later in QUESTIONS:
        if later.name not in so_far and later.when(so_far):
            usual = later.default(so_far)
            so_far[later.name] = later.kind.read(later.example) if usual is None and later.example else usual
    try:
        config_of(so_far)
    except ConfigurationError as error:
        return str(error)
    return ""


def values_of(answers: Answers) -> dict[str, object]:
    """Return the values of fields that the answers make, by the fields' names. Pure.

    >>> values_of({"machine_type": "several processes on CPUs", "num_processes": 2})
    {'num_processes': 2, 'cpu': True}
    """
    values = {name: value for name, value in answers.items() if name in FIELD_OF and value is not None}
    place = answers.get("machine_type")
    return values | ({} if place is None else dict([_PLACES[str(place)]]))


def config_of(answers: Answers) -> LaunchConfig:
    """Build the configuration that the answers make. Pure.

    Raises:
        ConfigurationError: They contradict each other; answers that ``refuse`` lets through don't.
    """
    return build_config(values_of(answers))
