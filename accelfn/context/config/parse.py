"""From the text of an environment variable to a value.

A :class:`Form` knows what it accepts in words, so that the message of an error, the documentation and the
parser cannot drift apart.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

from accelfn.context.config.checks import find_member
from accelfn.context.config.enums import StringEnum
from accelfn.errors import ConfigurationError

__all__ = (
    "BOOL",
    "DEVICE",
    "NAMES",
    "SIZE",
    "TEXT",
    "Form",
    "choice",
    "int_at_least",
    "one_of",
    "optional",
    "or_auto",
    "real_at_least",
)

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
E = TypeVar("E", bound=StringEnum)

_TRUE = ("y", "yes", "t", "true", "on", "1")
_FALSE = ("n", "no", "f", "false", "off", "0")


@dataclass(frozen=True, slots=True)
class Form(Generic[T_co]):
    """One way to write a value as text."""

    accepts: str  # in words, for messages and documentation
    read: Callable[[str], T_co]  # raises ValueError for a text that is not of this form

    def parse(self, variable: str, text: str) -> T_co:
        """Return the value of ``text``.

        Args:
            variable: Name of the environment variable, for the message.
            text: Its content; white space around it does not count.

        Returns:
            The value.

        Raises:
            ConfigurationError: ``text`` is not of this form.
        """
        try:
            return self.read(text.strip())
        except ValueError as error:
            raise ConfigurationError(
                f"The environment variable {variable} is set to {text!r}, which is not understood. "
                f"Use {self.accepts}, or unset it."
            ) from error


def _read_bool(text: str) -> bool:
    word = text.lower()
    if word not in _TRUE + _FALSE:
        raise ValueError(text)
    return word in _TRUE


def _read_text(text: str) -> str:
    if not text:
        raise ValueError(text)
    return text


def _read_device(text: str) -> str:
    if not re.fullmatch(r"[a-z]+(:\d+)?", text):
        raise ValueError(text)
    return text


def _read_names(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(",") if part.strip())
    if not names:
        raise ValueError(text)
    return names


def _read_int(text: str) -> int:
    # int() alone would take "1_000" and other digits than these.
    if not re.fullmatch(r"[+-]?[0-9]+", text):
        raise ValueError(text)
    return int(text)


def _read_size(text: str) -> int:
    # Launchers write parameter counts as 1e8 or 100000000.0.
    number = float(text)
    if not (number.is_integer() and number >= 0):
        raise ValueError(text)
    return _read_int(text) if re.fullmatch(r"[+-]?[0-9]+", text) else int(number)


BOOL: Form[bool] = Form(f"{'/'.join(_TRUE)} or {'/'.join(_FALSE)} (any case)", _read_bool)
TEXT: Form[str] = Form("a text that is not empty", _read_text)
NAMES: Form[tuple[str, ...]] = Form("names separated by commas", _read_names)
DEVICE: Form[str] = Form("a torch device such as cpu, cuda or cuda:1", _read_device)
SIZE: Form[int] = Form("a whole number, 0 or more (1e8 is accepted)", _read_size)


def int_at_least(minimum: int, maximum: int | None = None) -> Form[int]:
    """Return the form of whole numbers from ``minimum`` to ``maximum`` (``None``: no upper bound)."""

    def read(text: str) -> int:
        number = _read_int(text)
        if number < minimum or (maximum is not None and number > maximum):
            raise ValueError(text)
        return number

    if maximum is None:
        return Form(f"a whole number, {minimum} or more", read)
    return Form(f"a whole number from {minimum} to {maximum}", read)


def real_at_least(minimum: float, maximum: float = float("inf")) -> Form[float]:
    """Return the form of finite numbers from ``minimum`` to ``maximum``."""

    def read(text: str) -> float:
        number = float(text)
        if not (minimum <= number <= maximum and number != float("inf")):
            raise ValueError(text)
        return number

    if maximum == float("inf"):
        return Form(f"a number, {minimum} or more", read)
    return Form(f"a number from {minimum} to {maximum}", read)


def choice(choices: type[E], *, numbered: bool = False) -> Form[E]:
    """Return the form that names a member of an enum, in any case, or by position from 1 if ``numbered``."""

    def read(text: str) -> E:
        member = find_member(choices, text, numbered=numbered)
        if member is None:
            raise ValueError(text)
        return member

    position = f", or its position from 1 to {len(choices)}" if numbered else ""
    return Form(f"one of {', '.join(choices.values())} (any case){position}", read)


def one_of(*words: str) -> Form[str]:
    """Return the form that is one of ``words``, in any case; the word is returned as given here."""

    def read(text: str) -> str:
        for word in words:
            if text.lower() == word.lower():
                return word
        raise ValueError(text)

    return Form(f"one of {', '.join(words)} (any case)", read)


def optional(form: Form[T]) -> Form[T | None]:
    """Return ``form`` with the word "none" added, which reads as ``None``."""

    def read(text: str) -> T | None:
        return None if text.lower() == "none" else form.read(text)

    return Form(f"{form.accepts}, or none", read)


def or_auto(form: Form[T]) -> Form[T | Literal["auto"]]:
    """Return ``form`` with the word "auto" added, which reads as itself."""

    def read(text: str) -> T | Literal["auto"]:
        return "auto" if text.lower() == "auto" else form.read(text)

    return Form(f"{form.accepts}, or auto", read)
