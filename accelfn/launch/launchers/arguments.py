"""Arguments of the launchers in code, refused before anything starts. Pure functions."""

from __future__ import annotations

import difflib
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

from accelfn.errors import ConfigurationError
from accelfn.launch.launchers.sending import name_of

__all__ = ("check_call", "check_environment", "check_options", "check_seconds", "check_whole")


def check_call(caller: str, fn: object, args: object) -> None:
    """Refuse a function that is none, and arguments that aren't a tuple or the like.

    Raises:
        ConfigurationError: The current folder has been removed, and no process can start in it.
        TypeError: One of the two. A text would be spread into its letters, a tensor into its rows.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise ConfigurationError(
            f"{caller}: the current folder isn't there any more, and no process can start in it. Change to "
            "one that is, with os.chdir."
        ) from error
    if not callable(fn):
        raise TypeError(f"{caller}: the first argument must be a function, got {fn!r}.")
    if isinstance(args, str | bytes) or not isinstance(args, Sequence):
        raise TypeError(
            f"{caller}: args must be a tuple or list with one item for each argument of {name_of(fn)}, got "
            f"{type(args).__name__}. For a single one write args=(x,)."
        )


def check_whole(caller: str, name: str, given: object, least: int) -> int:
    """Return ``given`` as a whole number.

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


def check_options(caller: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a keyword that a context doesn't know.

    Raises:
        TypeError: There is one.
    """
    names = tuple(known)
    for name in given:
        if name not in names:
            close = difflib.get_close_matches(name, names, 1)
            hint = (
                f"Did you mean {close[0]}?"
                if close
                else f"It takes those of init_context: {', '.join(names)}."
            )
            raise TypeError(f"{caller}: unknown argument {name!r}. {hint}")


def check_environment(caller: str, given: object) -> dict[str, str]:
    """Return the variables as a dictionary.

    Raises:
        TypeError: It isn't a mapping of texts to texts.
        ValueError: A system has no such name or value.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise TypeError(f"{caller}: environment must be a mapping of names to texts, got {given!r}.")
    checked: dict[str, str] = {}
    for name, value in cast("Mapping[object, object]", given).items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise TypeError(
                f"{caller}: environment must hold texts, got {name!r}: {value!r}. Write {str(name)!r}: "
                f"{str(value)!r}."
            )
        if not name or "=" in name or "\0" in name + value:
            raise ValueError(f"{caller}: environment can't hold {name!r}: {value!r}. Names have no =.")
        checked[name] = value
    return checked
