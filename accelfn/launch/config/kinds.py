"""How values are written in flags, variables and files: from text to value, and back.

A :class:`Kind` says in words what it accepts, so that help, errors and documentation cannot drift apart.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_TRUE = ("y", "yes", "t", "true", "on", "1")
_FALSE = ("n", "no", "f", "false", "off", "0")
_WHOLE = re.compile(r"[+-]?[0-9]+")
_HOST = re.compile(r"[\w.:%-]+|\[[\w.:%-]+\]")
_ENDPOINT = re.compile(r"([\w.%-]+|\[[\w.:%-]+\])(:[0-9]+)?")


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to write a value as text.

    Attributes:
        accepts: What is accepted, in words.
        read: Gives the value of a text; raises ``ValueError`` for one that isn't of this kind.
        write: Gives a text that ``read`` turns into the value again.
        metavar: Stands for the value in the help; empty for a switch, which takes none.
        choices: The only texts, as they are best written; empty where there are others.
        is_bool: Whether a flag of this kind has a ``--no_`` form.
        repeats: Whether the flag may be given several times, one item each.
    """

    accepts: str
    read: Callable[[str], object]
    write: Callable[[object], str]
    metavar: str
    choices: tuple[str, ...] = ()
    is_bool: bool = False
    repeats: bool = False


def _read_bool(text: str) -> bool:
    word = text.strip().lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(text)
    return word in _TRUE


def _write_bool(value: object) -> str:
    if not isinstance(value, bool):
        raise ValueError(value)
    return "true" if value else "false"


def _read_text(text: str) -> str:
    if not text.strip():
        raise ValueError(text)
    return text


def _read_whole(text: str) -> int:
    # int() alone would take "1_000" and other digits than these.
    if not _WHOLE.fullmatch(text.strip()):
        raise ValueError(text)
    return int(text)


def _read_size(text: str) -> int:
    # Launchers write counts of parameters as 1e8 or 100000000.0.
    if _WHOLE.fullmatch(text.strip()):
        number = int(text)
    else:
        real_number = float(text)
        if not real_number.is_integer():
            raise ValueError(text)
        number = int(real_number)
    if number < 0:
        raise ValueError(text)
    return number


def _read_names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise ValueError(text)
    return names


def _write_names(value: object) -> str:
    if not isinstance(value, tuple):
        raise ValueError(value)
    return ",".join(str(one) for one in value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def _read_devices(text: str) -> str:
    word = re.sub(r"\s", "", text)
    if word.lower() == "all":
        return "all"
    if not re.fullmatch(r"[\w.:-]+(,[\w.:-]+)*", word):
        raise ValueError(text)
    return word


def _matching(pattern: re.Pattern[str]) -> Callable[[str], object]:
    def read(text: str) -> str:
        if not pattern.fullmatch(text.strip()):
            raise ValueError(text)
        return text.strip()

    return read


def _read_three(text: str) -> tuple[bool, ...]:
    values = tuple(_read_bool(part) for part in text.split(","))
    if len(values) != 3:
        raise ValueError(text)
    return values


def _write_three(value: object) -> str:
    if not isinstance(value, tuple):
        raise ValueError(value)
    return ",".join(_write_bool(one) for one in value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


def _read_texts(text: str) -> tuple[str, ...]:
    return tuple(_read_text(line) for line in text.split("\n"))


def _write_texts(value: object) -> str:
    if not isinstance(value, tuple):
        raise ValueError(value)
    return "\n".join(str(one) for one in value)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]


_BOOL_WORDS = "true or false (yes, no, on, off, 1 and 0 do too)"

#: A yes or no whose flag takes a value, or none for yes: ``--flag``, ``--flag true``, ``--no_flag``.
BOOL: Kind = Kind(_BOOL_WORDS, _read_bool, _write_bool, "BOOL", is_bool=True)
#: A yes or no whose flag takes no value: ``--flag``, ``--flag=true``, ``--no_flag``.
SWITCH: Kind = Kind(_BOOL_WORDS, _read_bool, _write_bool, "", is_bool=True)
TEXT: Kind = Kind("a text that is not empty", _read_text, str, "TEXT")
#: A file that must be there when the value is used; ``accelfn.launch.inputs`` looks for it.
FILE: Kind = Kind("the name of a file", _read_text, str, "FILE")
HOST: Kind = Kind("the name or address of a machine", _matching(_HOST), str, "HOST")
ENDPOINT: Kind = Kind(
    "HOST:PORT, the name or address of a machine and a port", _matching(_ENDPOINT), str, "HOST:PORT"
)
NAMES: Kind = Kind("names separated by commas", _read_names, _write_names, "A,B,...")
#: Several texts of any form; in a variable one a line.
TEXTS: Kind = Kind("one or more texts", _read_texts, _write_texts, "TEXT", repeats=True)
SIZE: Kind = Kind("a whole number, 0 or more (1e8 is accepted)", _read_size, str, "N")
DEVICES: Kind = Kind("device ids separated by commas, or all", _read_devices, str, "A,B,...")
FLAGS_3: Kind = Kind(
    "three of true or false, separated by commas", _read_three, _write_three, "BOOL,BOOL,BOOL"
)


def integer(least: int, most: int | None = None) -> Kind:
    """Return the kind of whole numbers from ``least`` to ``most`` (None: no bound)."""

    def read(text: str) -> int:
        number = _read_whole(text)
        if number < least or (most is not None and number > most):
            raise ValueError(text)
        return number

    words = f"a whole number, {least} or more" if most is None else f"a whole number from {least} to {most}"
    return Kind(words, read, str, "N")


def real(least: float, most: float | None = None, *, above: bool = False) -> Kind:
    """Return the kind of finite numbers from ``least`` to ``most``; with ``above``, more than ``least``."""

    def read(text: str) -> float:
        number = float(text)
        fits = least <= number < float("inf") and (most is None or number <= most)
        if not fits or (above and number == least):
            raise ValueError(text)
        return number

    words = f"a number more than {least:g}" if above else f"a number, {least:g} or more"
    return Kind(words if most is None else f"a number from {least:g} to {most:g}", read, str, "NUMBER")


def choice(*choices: str) -> Kind:
    """Return the kind of a few words, in any case.

    >>> choice("HYBRID", "E4M3").read("hybrid")
    'HYBRID'
    """
    by_lower = tuple((one.lower(), one) for one in choices)

    def read(text: str) -> str:
        found = next((one for lower, one in by_lower if lower == text.strip().lower()), None)
        if found is None:
            raise ValueError(text)
        return found

    brief = "{" + ",".join(choices) + "}"
    return Kind(f"one of {', '.join(choices)}", read, str, brief if len(brief) < 60 else "NAME", choices)


COUNT: Kind = integer(1)
PORT: Kind = integer(0, 65535)


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """The part of an option that its name, type and default do not declare.

    Attributes:
        kind: How the value is written.
        about: Help in a few words; the default is added where it is shown.
        flag: Name of the flag without dashes, where it isn't the section's prefix and the field's name.
        aliases: Further spellings of the flag, such as ``-m``.
        exports: Variable that scripts of Accelerate read the value from; None for what the section's rule
            makes of the name, "" for none.
        secret: Never printed.
        group: Heading in the help of this option and those after it, for options that aren't in a section.
    """

    kind: Kind
    about: str
    flag: str = ""
    aliases: tuple[str, ...] = ()
    exports: str | None = None
    secret: bool = False
    group: str = ""


def row(kind: Kind, default: object, about: str, **options: Any) -> Any:
    """Declare a field of a record; ``options`` are the further ones of :class:`Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(kind=kind, about=about, **options)})
