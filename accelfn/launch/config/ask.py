"""Carries the questionnaire of ``accelfn config`` out on a terminal."""

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
from accelfn.launch.config.files import read_config
from accelfn.launch.config.options import FILE
from accelfn.launch.config.questions import (
    Answers,
    Question,
    default_of,
    first_answers,
    next_question,
    read_answer,
    values_of,
)
from accelfn.launch.config.record import LaunchConfig
from accelfn.launch.plan.machine import Machine

#: Puts a question to the user: question, choices, and the default offered. Gives the text of the answer; an
#: empty one takes the default.
Put = Callable[[Question, tuple[str, ...], object], str]


def ask_values(path: str, machine: Machine) -> Mapping[str, object] | None:
    """Ask everything on the terminal. Effect: reads the file at ``path``, and talks to the user.

    Args:
        path: Where the answers will be written; a file that is there already gives the defaults.
        machine: This machine; what it can't run is not asked about.

    Returns:
        Values by the options' names, or None if the user wants to keep a file that can't be read.

    Raises:
        ConfigurationError: There is no terminal, or nothing can be written at ``path``.
        MissingExtraError: questionary isn't installed.
        KeyboardInterrupt: The user doesn't want any more.
        EOFError: Likewise, or the terminal is gone.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigurationError(
            "questions need a terminal, and this is none. Write a plain configuration with accelfn config "
            "default, or give flags to accelfn launch."
        )
    questionary = _load_questionary()
    _check_place(path)
    saved: Mapping[str, object] = MappingProxyType({})
    if os.path.exists(path):
        try:
            saved = read_config(path).values
            LaunchConfig(**saved)
        except ConfigurationError as error:
            print(f"note: {error}", file=sys.stderr)
            if not questionary.confirm("Replace that file by your answers?", default=False).unsafe_ask():
                return None
            saved = MappingProxyType({})

    def put(question: Question, few: tuple[str, ...], default: object) -> str:
        return _put(questionary, question, few, default)

    has_tpu = importlib.util.find_spec("torch_xla") is not None
    first = first_answers(saved, machine.devices, has_tpu=has_tpu)
    return values_of(ask_questions(first, saved, put, print))


def ask_questions(
    answers: Answers, saved: Mapping[str, object], put: Put, say: Callable[[str], None]
) -> Answers:
    """Put each question of the plan until nothing is left to ask. Effect: only those of ``put`` and ``say``.

    Args:
        answers: From ``first_answers``.
        saved: Values of a file that is there already; they are the defaults.
        put: Puts one question.
        say: Called with why an answer is invalid, before the question is put again.
    """
    question = next_question(answers)
    while question is not None:
        default = default_of(question, answers, saved)
        text = put(question, question.choices(answers), default)
        is_path = question.kind is FILE
        if is_path and text.strip() and text.strip().lower() != "none":
            text = os.path.abspath(os.path.expanduser(text.strip()))  # the file is read from any folder
        try:
            takes_default = not text.strip() and (default is not None or question.optional)
            value = default if takes_default else read_answer(question, answers, text)
            if is_path and isinstance(value, str) and not os.path.isfile(value):
                raise ValueError(f"there is no file {value!r}. Make it first, or check the path.")
        except ValueError as error:
            say(f"  Invalid answer: {error}")
            continue
        answers = {**answers, question.name: value}
        question = next_question(answers)
    return answers


def format_launch(values: Mapping[str, object], config_file: str | None) -> str:
    """Write how to launch with a configuration. Pure.

    Args:
        values: From ``ask_values``.
        config_file: The value that ``--config_file`` must have; None where the file is found by itself.

    >>> print(format_launch({"num_machines": 2, "machine_rank": 0}, "my config.yaml"))
    launch with: accelfn launch --config_file 'my config.yaml' your_script.py
    on the other machines, with the same file: give --machine_rank as well, 0 to 1
    """
    flag = "" if config_file is None else f"--config_file {shlex.quote(config_file)} "
    lines = [f"launch with: accelfn launch {flag}your_script.py"]
    machines = values.get("num_machines", 1)
    if isinstance(machines, int) and values.get("machine_rank") is not None:
        lines.append(
            f"on the other machines, with the same file: give --machine_rank as well, 0 to {machines - 1}"
        )
    return "\n".join(lines)


def format_prompt(question: Question, default: object) -> str:
    """Write a question whose answer is typed, with what Enter alone would answer. Pure.

    >>> from accelfn.launch.config.questions import QUESTIONS
    >>> format_prompt(next(one for one in QUESTIONS if one.name == "num_machines"), 2)
    'How many machines? [2]:'
    """
    if default is not None:
        return f"{question.text} [{question.kind.write(default)}{', or none' if question.optional else ''}]:"
    if question.optional:
        return f"{question.text} [none]:"
    return f"{question.text} (such as {question.example}):"


def _load_questionary() -> Any:
    try:
        import questionary
    except ImportError as error:
        raise MissingExtraError(
            "the questions need questionary, which is not installed. Run: pip install 'accelfn[cli]'"
        ) from error
    return questionary


def _check_place(path: str) -> None:
    """Refuse before the first question what could not be written after the last."""
    place = Path(path).absolute()
    if place.is_dir():
        raise ConfigurationError(f"{path} is a folder. Name a file: accelfn config --config_file FILE")
    folder = next(one for one in place.parents if one.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigurationError(
            f"{path} can't be written: {folder} is not a folder that you may write to. Name another file: "
            "accelfn config --config_file FILE"
        )


def _put(questionary: Any, question: Question, few: tuple[str, ...], default: object) -> str:
    if question.kind.is_bool:
        answer = questionary.confirm(question.text, default=default is True).unsafe_ask()
        return "true" if answer else "false"
    if few:
        # Digits move to a choice; there are nine that need no other key. A choice that is itself a digit is
        # reached by that one, whatever its place.
        own = all(len(one) == 1 and one.isdecimal() for one in few)
        choices = [
            questionary.Choice(question.title(one), value=one, shortcut_key=one if own else True)
            for one in few
        ]
        return questionary.select(
            question.text,
            choices=choices,
            default=None if default is None else str(default),
            use_shortcuts=len(few) < 10,
        ).unsafe_ask()
    return questionary.text(format_prompt(question, default)).unsafe_ask()
