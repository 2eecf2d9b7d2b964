"""One question of ``accelfn config``, and the words in which the questions say when they are asked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import cast

from accelfn.launch.config.fields import FIELD_OF
from accelfn.launch.config.kinds import BOOL, Kind, choice

__all__ = (
    "ACCELERATORS",
    "CPUS",
    "ONE",
    "TPU",
    "Answers",
    "Question",
    "about",
    "is_multi",
    "is_sagemaker",
    "is_true",
    "num_machines",
    "of_table",
)

#: Values by the names of questions; a question that was answered with nothing has None.
Answers = Mapping[str, object]

#: The answers to ``machine_type``.
ONE, CPUS, ACCELERATORS, TPU = "one process", "several processes on CPUs", "several accelerators", "TPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One question. Everything about it is a value or a pure function of the answers before it.

    Attributes:
        name: Name of a field of the table; or one of its own, for a question that only decides on others.
        text: What the user reads.
        kind: How an answer is read.
        when: Whether the answers so far make it one to ask.
        choices: The only answers, where there are few; empty where any text of the kind will do.
        titles: What a menu shows for a choice, where that isn't the choice itself.
        default: The answer of who only presses Enter; None if there is none.
        optional: Whether nothing at all is an answer.
        example: A text that could be answered, where there is no default and something must be said.
        is_path: Whether the answer is a file, and so is kept as an absolute path.
        found: The answer that values of a file amount to; None if they don't say.
        refuse: A reason against the answers up to and with this one, or "".
    """

    name: str
    text: str
    kind: Kind
    when: Callable[[Answers], bool]
    choices: Callable[[Answers], tuple[str, ...]]
    default: Callable[[Answers], object]
    found: Callable[[Answers], object]
    titles: Mapping[str, str]
    optional: bool
    example: str
    is_path: bool
    refuse: Callable[[Answers], str]


def of_table(
    name: str,
    when: Callable[[Answers], bool],
    text: str = "",
    *,
    default: str | int | Callable[[Answers], object] | None = None,
    choices: tuple[str, ...] | Callable[[Answers], tuple[str, ...]] | None = None,
    titles: Mapping[str, str] | None = None,
    optional: bool = False,
    example: str = "",
    is_path: bool = False,
    refuse: Callable[[Answers], str] | None = None,
) -> Question:
    """Make the question about a field: what isn't said here, the table of fields says.

    Args:
        name: The field.
        when: Whether to ask.
        text: The field's own help if empty.
        default: A value, or a function of the answers; the field's own if None.
        choices: The kind's own if None.
        titles: This and the rest as in :class:`Question`.
        optional: Whether nothing at all is an answer.
        example: What could be answered.
        is_path: Whether it is a file.
        refuse: A reason against the answers.
    """
    field = FIELD_OF[name]
    plain = field.default if default is None else default
    few = field.kind.choices if choices is None else choices
    return Question(
        name=name,
        text=text or field.about[0].upper() + field.about[1:],
        kind=field.kind,
        when=when,
        choices=few if callable(few) else lambda _: few,
        default=default if callable(default) else lambda _: plain,
        found=lambda values: values.get(name),
        titles=MappingProxyType(dict(titles or {})),
        optional=optional,
        example=example,
        is_path=is_path,
        refuse=refuse or (lambda _: ""),
    )


def about(
    name: str,
    when: Callable[[Answers], bool],
    text: str,
    *,
    found: Callable[[Answers], object],
    default: Callable[[Answers], object] = lambda _: False,
    choices: Callable[[Answers], tuple[str, ...]] = lambda _: (),
    titles: Mapping[str, str] | None = None,
) -> Question:
    """Make a question that is no field: a menu of ``choices`` if there are ``titles``, else a yes or no."""
    return Question(
        name=name,
        text=text,
        kind=choice(*titles) if titles else BOOL,
        when=when,
        choices=choices,
        default=default,
        found=found,
        titles=MappingProxyType(dict(titles or {})),
        optional=False,
        example="",
        is_path=False,
        refuse=lambda _: "",
    )


def is_sagemaker(answers: Answers) -> bool:
    """Whether the script runs on machines that Amazon rents out."""
    return answers.get("compute_environment") == "AMAZON_SAGEMAKER"


def is_multi(answers: Answers) -> bool:
    """Whether several processes run, and not on TPUs."""
    return answers.get("machine_type") in (CPUS, ACCELERATORS)


def is_true(name: str) -> Callable[[Answers], bool]:
    """Return the condition that a yes or no was answered with yes.

    >>> is_true("use_fsdp")({"use_fsdp": True}), is_true("use_fsdp")({})
    (True, False)
    """
    return lambda answers: answers.get(name) is True


def num_machines(answers: Answers) -> int:
    """Look up how many machines there are; 1 until it was asked."""
    return cast("int", answers.get("num_machines", 1))
