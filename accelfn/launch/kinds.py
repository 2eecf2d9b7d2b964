"""Kinds of values: what an option accepts, and how it is written as text."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar, cast

T = TypeVar("T")
_N = TypeVar("_N", int, float)

_BOOLS = MappingProxyType(
    {
        **dict.fromkeys(("y", "yes", "t", "true", "on", "1"), True),
        **dict.fromkeys(("n", "no", "f", "false", "off", "0"), False),
    }
)


@dataclass(frozen=True, slots=True)
class Kind(Generic[T]):
    """How a value is written as text.

    Attributes:
        accepts: A description of the accepted values.
        read: Parses a text; raises ``ValueError`` if it is invalid.
        metavar: Placeholder for the value in the help.
        choices: The allowed texts; empty if any text that ``read`` parses is allowed.
        separator: Separator of the items of a tuple. If it is a line break, the flag may be repeated.
    """

    accepts: str
    read: Callable[[str], T]
    metavar: str
    choices: tuple[str, ...] = ()
    separator: str = ","

    @property
    def is_bool(self) -> bool:
        """Whether a flag of this kind needs no value and has a ``--no_`` form."""
        return self.metavar == "BOOL"

    @property
    def repeats(self) -> bool:
        """Whether the flag may be repeated, with one item each time."""
        return self.separator == "\n"

    def can_read(self, text: str) -> bool:
        """Return whether a text is valid for this kind."""
        try:
            self.read(text)
        except ValueError:
            return False
        return True

    def write(self, value: object) -> str:
        """Return the text of a value, the inverse of ``read``."""
        if isinstance(value, tuple):
            return self.separator.join(map(self.write, cast("tuple[object, ...]", value)))
        return str(value).lower() if isinstance(value, bool) else str(value)

    def holds(self, value: object) -> bool:
        """Return whether a value is one that ``read`` can return."""
        text = self.write(value)
        if not self.can_read(text):
            return False
        read = self.read(text)
        return read == value and isinstance(read, bool) == isinstance(value, bool)


def integer(least: int, most: int | None = None) -> Kind[int]:
    """Return the kind of integers from ``least`` to ``most`` (None: unbounded)."""

    def read(text: str) -> int:
        # int() alone accepts "1_000" and non-ASCII digits.
        if not re.fullmatch(r"[+-]?[0-9]+", text.strip()):
            raise ValueError(text)
        return _within(int(text), least, most)

    words = f"an integer, {least} or more" if most is None else f"an integer from {least} to {most}"
    return Kind(words, read, "N")


def real(least: float, most: float | None = None, *, above: bool = False) -> Kind[float]:
    """Return the kind of finite numbers from ``least`` (exclusive with ``above``) to ``most``."""

    def read(text: str) -> float:
        number = _within(float(text), least, most)
        if number == float("inf") or (above and number == least):
            raise ValueError(text)
        return number

    words = f"a number greater than {least:g}" if above else f"a number, {least:g} or more"
    return Kind(words if most is None else f"a number from {least:g} to {most:g}", read, "NUMBER")


def choice(*choices: str, numbered: bool = False) -> Kind[str]:
    """Return the kind with these choices; case is ignored. ``numbered``: also their numbers, from 1.

    >>> choice("HYBRID", "E4M3").read("hybrid")
    'HYBRID'
    """
    by_lower = {one.lower(): one for one in choices}
    if numbered:
        by_lower.update({str(number): one for number, one in enumerate(choices, 1)})

    def read(text: str) -> str:
        if text.strip().lower() not in by_lower:
            raise ValueError(text)
        return by_lower[text.strip().lower()]

    brief = "{" + ",".join(choices) + "}"
    return Kind(f"one of {', '.join(choices)}", read, brief if len(brief) < 60 else "NAME", choices)


def suggest(word: str, words: Iterable[str]) -> str | None:
    """Return the most similar of ``words``, or None if none is similar.

    >>> suggest("num_proceses", ["num_machines", "num_processes"])
    'num_processes'
    """
    return next(iter(difflib.get_close_matches(word, list(words), n=1, cutoff=0.7)), None)


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
    if word not in _BOOLS:
        raise ValueError(text)
    return _BOOLS[word]


def _read_text(text: str) -> str:
    if not text.strip():
        raise ValueError(text)
    return text


def _read_size(text: str) -> int:
    # Parameter counts may be written as 1e8 or 100000000.0.
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
    first, second, third = text.strip().strip("()[]").split(",")
    return _read_bool(first), _read_bool(second), _read_bool(third)


BOOL: Kind[bool] = Kind("true or false (or yes, no, on, off, 1, 0)", _read_bool, "BOOL")
TEXT: Kind[str] = Kind("a non-empty text", _read_text, "TEXT")
#: A file that must exist when the value is used; ``accelfn.launch.launch`` checks that.
FILE: Kind[str] = Kind("a file name", _read_text, "FILE")
HOST: Kind[str] = Kind("a host name or address", _matching(r"[\w.:%-]+|\[[\w.:%-]+\]"), "HOST")
ENDPOINT: Kind[str] = Kind("HOST:PORT", _matching(r"([\w.%-]+|\[[\w.:%-]+\])(:[0-9]{1,5})?"), "HOST:PORT")
_PAIR = r"\s*[^=\s,][^=,]*=\s*[^\s,][^,]*"
PAIRS: Kind[str] = Kind("comma-separated key=value pairs", _matching(rf"{_PAIR}(,{_PAIR})*"), "KEY=VALUE,...")
#: Output streams of processes, as torchrun has them.
STREAMS: Kind[str] = Kind(
    "0 (none), 1 (stdout), 2 (stderr) or 3 (both), or one of these per process, such as 0:3,1:2",
    _matching(r"[0-3]|[0-9]:[0-3](,[0-9]:[0-3])*"),
    "STREAMS",
)
NAMES: Kind[tuple[str, ...]] = Kind("comma-separated names", _read_names, "A,B,...")
#: Any texts; in a variable, one per line.
TEXTS: Kind[tuple[str, ...]] = Kind("one or more texts", _read_texts, "TEXT", separator="\n")
SIZE: Kind[int] = Kind("an integer, 0 or more (also as 1e8)", _read_size, "N")
DEVICES: Kind[str] = Kind("comma-separated device IDs, or all", _read_devices, "A,B,...")
FLAGS_3: Kind[tuple[bool, ...]] = Kind("three comma-separated booleans", _read_three, "BOOL,BOOL,BOOL")
COUNT: Kind[int] = integer(1)
PORT: Kind[int] = integer(0, 65535)
