"""The questionnaire of ``accelfn config`` as a pure plan: what to ask next, and what the answers make.

The table of questions stands in ``machine_questions``, ``mesh_questions`` and ``process_questions``; names,
kinds, choices and defaults come from the table of fields. ``accelfn.launch.config.ask`` carries the plan out.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from accelfn.errors import ConfigurationError
from accelfn.launch.config.fields import FIELD_OF, build_config, read_value
from accelfn.launch.config.machine_questions import MACHINE_QUESTIONS
from accelfn.launch.config.mesh_questions import MESH_QUESTIONS
from accelfn.launch.config.process_questions import PROCESS_QUESTIONS
from accelfn.launch.config.question import ACCELERATORS, CPUS, ONE, TPU, Answers, Question
from accelfn.launch.config.record import LaunchConfig

__all__ = (
    "QUESTIONS",
    "config_of",
    "default_of",
    "first_answers",
    "next_question",
    "read_answer",
    "refuse",
    "values_of",
)

#: Every question, in the order in which they are asked. A question depends on those before it only.
QUESTIONS: tuple[Question, ...] = (*MACHINE_QUESTIONS, *MESH_QUESTIONS, *PROCESS_QUESTIONS)

# Fields that one question decides on together.
_PLACES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {
        ONE: MappingProxyType({"num_processes": 1}),
        CPUS: MappingProxyType({"cpu": True}),
        ACCELERATORS: MappingProxyType({"multi_gpu": True}),
        TPU: MappingProxyType({"tpu": True}),
    }
)
_DECIDED = frozenset(
    (
        *(question.name for question in QUESTIONS),
        *(name for values in _PLACES.values() for name in values),
    )
)


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
    """Return what to ask next; None when all is said. Pure.

    >>> first = next_question({})
    >>> first and first.name
    'compute_environment'
    """
    return next((one for one in QUESTIONS if one.name not in answers and one.when(answers)), None)


def default_of(question: Question, answers: Answers, saved: Mapping[str, object]) -> object:
    """Return what is offered as the answer: what the file says, if that still fits; else the usual. Pure.

    Args:
        question: What is asked.
        answers: What was answered before it.
        saved: Values of a file that is there already.

    Returns:
        A value that may be answered, or None.
    """
    found = question.found(saved)
    if found is not None:
        few = question.choices(answers)
        fits = not few or (isinstance(found, (str, int)) and str(found) in few)
        if fits and not refuse(question, answers, found):
            return found
    return question.default(answers)


def read_answer(question: Question, answers: Answers, text: str) -> object:
    """Read an answer. Pure.

    Args:
        question: What was asked.
        answers: What was answered before it.
        text: The answer; ``none`` is nothing, where nothing is an answer.

    Raises:
        ValueError: It is none; the message says why.
    """
    if question.optional and text.strip().lower() == "none":
        return None
    few = question.choices(answers)
    if question.name in FIELD_OF:
        value = read_value(FIELD_OF[question.name], text)
    else:
        try:
            value = question.kind.read(text)
        except ValueError:
            raise ValueError(f"it must be {question.kind.accepts}, got {text!r}.") from None
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
            if usual is None and later.example:
                usual = later.kind.read(later.example)
            so_far[later.name] = usual
    try:
        config_of(so_far)
    except ConfigurationError as error:
        return str(error)
    return ""


def values_of(answers: Answers) -> dict[str, object]:
    """Return what the answers say of fields, by the fields' names. Pure.

    >>> values_of({"machine_type": "several processes on CPUs", "num_processes": 2})
    {'num_processes': 2, 'cpu': True}
    """
    values = {name: value for name, value in answers.items() if name in FIELD_OF and value is not None}
    place = answers.get("machine_type")
    if isinstance(place, str):
        values |= _PLACES[place]
    return values


def config_of(answers: Answers) -> LaunchConfig:
    """Build the configuration that the answers make. Pure.

    Raises:
        ConfigurationError: They contradict each other; answers that ``refuse`` lets through don't.
    """
    return build_config(values_of(answers))
