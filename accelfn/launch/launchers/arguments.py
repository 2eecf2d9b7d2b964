"""Arguments of the launchers in code, refused before anything starts. Pure functions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from accelfn.launch.launchers.sending import name_of

__all__ = ("check_call", "check_environment", "check_seconds", "check_whole")


def check_call(caller: str, fn: Callable[..., Any], args: Sequence[Any]) -> None:
    """Refuse a function that is none, and arguments that aren't a tuple or the like.

    Raises:
        TypeError: One of the two. A text would be spread into its letters, a tensor into its rows.
    """
    given: object = args
    if not callable(fn):
        raise TypeError(f"{caller}: the first argument must be a function, got {fn!r}.")
    if isinstance(given, str | bytes) or not isinstance(given, Sequence):
        raise TypeError(
            f"{caller}: args must be a tuple or list with one item for each argument of {name_of(fn)}, got "
            f"{type(given).__name__}. For a single one write args=(x,)."
        )


def check_whole(caller: str, name: str, given: object, least: int) -> int:
    """Give ``given`` as a whole number.

    Raises:
        TypeError: It is of another kind.
        ValueError: It is less than ``least``.
    """
    try:
        number = None if isinstance(given, bool) else operator.index(given)  # pyright: ignore[reportArgumentType] -- asked
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"{caller}: {name} must be a whole number, {least} or more, got {given!r}.")
    if number < least:
        raise ValueError(f"{caller}: {name} must be at least {least}, got {number}.")
    return number


def check_seconds(caller: str, name: str, given: object) -> None:
    """Refuse a time that is no number above 0.

    Raises:
        TypeError: It is of another kind.
        ValueError: It is 0, negative or not a number.
    """
    if isinstance(given, bool) or not isinstance(given, int | float):
        raise TypeError(f"{caller}: {name} must be a number of seconds, got {given!r}.")
    if not given > 0:
        raise ValueError(f"{caller}: {name} must be more than 0 seconds, got {given!r}.")


def check_environment(caller: str, given: Mapping[str, str] | None) -> dict[str, str]:
    """Give the variables as a dictionary.

    Raises:
        TypeError: It isn't a mapping of texts to texts.
        ValueError: A system has no such name or value.
    """
    found: object = {} if given is None else given
    if not isinstance(found, Mapping):
        raise TypeError(f"{caller}: environment must be a mapping of names to texts, got {found!r}.")
    checked: dict[str, str] = {}
    for name, value in found.items():  # pyright: ignore[reportUnknownVariableType] -- looked at here
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(
                f"{caller}: environment must hold texts, got {name!r}: {value!r}. Write {str(name)!r}: "  # pyright: ignore[reportUnknownArgumentType]
                f"{str(value)!r}."  # pyright: ignore[reportUnknownArgumentType]
            )
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"{caller}: environment can't hold {name!r}: {value!r}. Names have no =.")
        checked[name] = value
    return checked
