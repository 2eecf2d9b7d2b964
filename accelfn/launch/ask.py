"""Ask the questions of ``accelfn config`` on a terminal."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from accelfn.errors import ConfigurationError, MissingExtraError
from accelfn.launch.config import LaunchConfig
from accelfn.launch.config_file import read_config
from accelfn.launch.kinds import FILE
from accelfn.launch.machine import Machine
from accelfn.launch.questions import (
    PACKAGES,
    Answers,
    Question,
    default_of,
    first_answers,
    next_question,
    read_answer,
    values_of,
)

#: Asks a question, given its choices and default. Returns the text of the answer, empty for the default.
Ask = Callable[[Question, tuple[str, ...], object], str]


def ask_values(path: str, machine: Machine) -> Mapping[str, Any] | None:
    """Ask all questions on the terminal.

    Args:
        path: Config file to write; an existing one provides the defaults.
        machine: This machine; questions about missing hardware are skipped.

    Returns:
        Values by option name, or None if the user keeps an invalid file.

    Raises:
        ConfigurationError: There is no terminal, or ``path`` isn't writable.
        MissingExtraError: questionary isn't installed.
        KeyboardInterrupt: The user cancels.
        EOFError: The user cancels, or the terminal is closed.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigurationError(
            "accelfn config needs a terminal. Use accelfn config default, or pass flags to accelfn launch."
        )
    try:
        questionary: Any = importlib.import_module("questionary")
    except ImportError as error:
        raise MissingExtraError(
            "accelfn config needs questionary, which is not installed. Run: pip install 'accelfn[cli]'"
        ) from error
    _check_writable(path)
    saved: Mapping[str, Any] = MappingProxyType({})
    if os.path.exists(path):
        try:
            file = read_config(path)
            LaunchConfig(**file.values)
            saved, notes = file.values, file.notes  # notes: it is Accelerate's, which couldn't read ours
        except ConfigurationError as error:
            notes = (str(error),)
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        if notes and not questionary.confirm("Replace the file?", default=False).unsafe_ask():
            return None

    def ask(question: Question, choices: tuple[str, ...], default: object) -> str:
        return _ask(questionary, question, choices, default)

    installed = [package for package in PACKAGES if importlib.util.find_spec(package)]
    for package, what in (("torchao", "fp8"), ("deepspeed", "DeepSpeed")):
        if package not in installed:
            print(f"{what} isn't offered: it needs pip install 'accelfn[{package}]'")
    first = first_answers(saved, machine.devices, *installed)
    return values_of(ask_questions(first, saved, ask, print))


def ask_questions(
    answers: Answers, saved: Mapping[str, object], ask: Ask, report: Callable[[str], None]
) -> Answers:
    """Ask all questions, and return the answers.

    Args:
        answers: From ``first_answers``.
        saved: Values of the existing config file, used as defaults.
        ask: Asks one question.
        report: Called with the error before a question is asked again.
    """
    question = next_question(answers)
    while question is not None:
        default = default_of(question, answers, saved)
        text = ask(question, question.choices(answers), default)
        is_path = question.kind is FILE
        if is_path and text.strip() and text.strip().lower() != "none":
            text = os.path.abspath(os.path.expanduser(text.strip()))  # valid in any directory
        try:
            takes_default = not text.strip() and (default is not None or question.optional)
            value = default if takes_default else read_answer(question, answers, text)
            if is_path and isinstance(value, str) and not os.path.isfile(value):
                raise ValueError(f"no file {value!r}. Create it first, or check the path.")
        except ValueError as error:
            report(f"  Invalid answer: {error}")
            continue
        answers = {**answers, question.name: value}
        question = next_question(answers)
    return answers


def format_launch(values: Mapping[str, object], config_file: str | None) -> str:
    """Format the launch command for a configuration. Pure.

    Args:
        values: From ``ask_values``.
        config_file: Value for ``--config_file``; None for the default file.

    >>> print(format_launch({"num_machines": 2, "machine_rank": 0}, "my config.yaml"))
    launch with: accelfn launch --config_file 'my config.yaml' your_script.py
    on the other machines, use the same file and add --machine_rank (0 to 1)
    """
    flag = "" if config_file is None else f"--config_file {shlex.quote(config_file)} "
    lines = [f"launch with: accelfn launch {flag}your_script.py"]
    machines = values.get("num_machines", 1)
    if isinstance(machines, int) and values.get("machine_rank") is not None:
        lines.append(f"on the other machines, use the same file and add --machine_rank (0 to {machines - 1})")
    return "\n".join(lines)


def format_prompt(question: Question, default: object) -> str:
    """Format a question with its default. Pure.

    >>> from accelfn.launch.questions import QUESTIONS
    >>> format_prompt(next(each for each in QUESTIONS if each.name == "num_machines"), 2)
    'How many machines? [2]:'
    """
    if default is not None:
        return f"{question.text} [{question.kind.write(default)}{', or none' if question.optional else ''}]:"
    if question.optional:
        return f"{question.text} [none]:"
    return f"{question.text} (such as {question.example}):"


def _check_writable(path: str) -> None:
    """Check before the first question that the file can be written after the last."""
    folder = next(parent for parent in Path(path).absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigurationError(
            f"can't write {path}: {folder} is not a writable directory. Pass another file: accelfn config "
            "--config_file FILE"
        )


def _ask(questionary: Any, question: Question, few: tuple[str, ...], default: object) -> str:
    if question.kind.is_bool:
        answer = questionary.confirm(question.text, default=default is True).unsafe_ask()
        return "true" if answer else "false"
    if not few:
        return questionary.text(format_prompt(question, default)).unsafe_ask()
    # The shortcut of a choice is its digit if all choices are digits, else its position.
    are_digits = all(len(choice) == 1 and choice.isdecimal() for choice in few)
    choices = [questionary.Choice(choice, shortcut_key=choice if are_digits else True) for choice in few]
    given = None if default is None else str(default)
    return questionary.select(
        question.text, choices=choices, default=given, use_shortcuts=len(few) < 10
    ).unsafe_ask()
