"""Checks that the configuration records share.

Each one looks at fields of a record by name, and raises a ``TypeError`` for a value of the wrong type and a
``ConfigurationError`` for a value that is out of range. Those called ``settle_*`` also write the normalised
value back: they are for ``__post_init__``, before anybody else holds the record.
"""

import math
from collections.abc import Iterable, Mapping
from enum import Enum
from os import PathLike, fspath
from typing import Any, TypeVar, cast

from accelfn.context.config.enums import StringEnum
from accelfn.context.config.options import FrozenOptions
from accelfn.errors import ConfigurationError

__all__ = (
    "as_choice",
    "check_bools",
    "check_callables",
    "check_ints",
    "check_reals",
    "check_texts",
    "find_member",
    "settle",
    "settle_choice",
    "settle_classes",
    "settle_names",
    "settle_options",
    "settle_path",
    "unchecked",
    "where",
    "wrong_type",
)

E = TypeVar("E", bound=StringEnum)


def where(record: object, name: str) -> str:
    """Return ``Class.field`` for messages."""
    return f"{type(record).__name__}.{name}"


def unchecked(record: object, name: str) -> object:
    """Return a field as what it is before the checks: any object, whatever the annotation promises."""
    value: object = getattr(record, name)
    return value


def wrong_type(record: object, name: str, expected: str) -> TypeError:
    """Return the error for a field that holds a value of the wrong type."""
    value = getattr(record, name)
    return TypeError(
        f"{where(record, name)} must be {expected}, got {value!r} of type {type(value).__name__}. "
        f"Pass {expected} or leave the field out."
    )


def settle(record: object, **values: object) -> None:
    """Write normalised values into a frozen record that is still being built."""
    for name, value in values.items():
        object.__setattr__(record, name, value)


def check_bools(record: object, *names: str, optional: bool = False) -> None:
    """Require ``True`` or ``False`` (or ``None`` if ``optional``)."""
    for name in names:
        value = getattr(record, name)
        if not (isinstance(value, bool) or (optional and value is None)):
            raise wrong_type(record, name, "True, False or None" if optional else "True or False")


def check_ints(
    record: object, *names: str, minimum: int, maximum: int | None = None, optional: bool = False
) -> None:
    """Require whole numbers in ``minimum..maximum`` (or ``None`` if ``optional``)."""
    for name in names:
        value = getattr(record, name)
        if optional and value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool):
            raise wrong_type(record, name, "an int or None" if optional else "an int")
        if value < minimum or (maximum is not None and value > maximum):
            span = f"at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
            raise ConfigurationError(
                f"{where(record, name)} must be {span}, got {value}. Pass a number in that range."
            )


def check_reals(
    record: object,
    *names: str,
    minimum: float | None = None,
    above: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
    optional: bool = False,
) -> None:
    """Require finite numbers within the given bounds (or ``None`` if ``optional``)."""
    for name in names:
        value = getattr(record, name)
        if optional and value is None:
            continue
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise wrong_type(record, name, "a number or None" if optional else "a number")
        bounds = (
            ("at least", minimum, minimum is None or value >= minimum),
            ("greater than", above, above is None or value > above),
            ("at most", maximum, maximum is None or value <= maximum),
            ("less than", below, below is None or value < below),
        )
        if not (math.isfinite(value) and all(holds for _, _, holds in bounds)):
            wanted = " and ".join(f"{words} {bound}" for words, bound, _ in bounds if bound is not None)
            raise ConfigurationError(
                f"{where(record, name)} must be a finite number {wanted}".rstrip()
                + f", got {value!r}. Pass a number in that range."
            )


def check_texts(record: object, *names: str, optional: bool = False) -> None:
    """Require non-empty text (or ``None`` if ``optional``)."""
    for name in names:
        value = getattr(record, name)
        if optional and value is None:
            continue
        if not isinstance(value, str):
            raise wrong_type(record, name, "a str or None" if optional else "a str")
        if not value.strip():
            raise ConfigurationError(
                f"{where(record, name)} must not be empty, got {value!r}. Pass a text"
                + (" or None." if optional else ".")
            )


def check_callables(record: object, *names: str) -> None:
    """Require something that can be called, or ``None``."""
    for name in names:
        value = getattr(record, name)
        if value is not None and not callable(value):
            raise wrong_type(record, name, "a callable or None")


def find_member(choices: type[E], value: str, *, numbered: bool = False) -> E | None:
    """Find a member by value, whatever its case, or by position from 1 if ``numbered``."""
    text = value.strip().lower()
    for number, member in enumerate(choices, start=1):
        if text == member.value.lower() or (numbered and text == str(number)):
            return member
    return None


def as_choice(
    place: str, value: object, choices: type[E], *, numbered: bool = False, allowed: tuple[E, ...] = ()
) -> E:
    """Return the member of ``choices`` that ``value`` names.

    Args:
        place: The field, for messages.
        value: A member, its value in any case, or a member of another enum with the same name (torch's
            own enums; torch keeps some of these names private, with a leading underscore).
        choices: The enum.
        numbered: Whether the position of a member, from 1, is accepted too.
        allowed: The members that are accepted; empty for all.

    Raises:
        TypeError: ``value`` is neither text nor an enum member.
        ConfigurationError: ``value`` names none of the accepted members.
    """
    text = value.name.lstrip("_") if isinstance(value, Enum) and not isinstance(value, str) else value
    if numbered and isinstance(text, int) and not isinstance(text, bool):
        text = str(text)
    if not isinstance(text, str):
        raise TypeError(
            f"{place} must be a {choices.__name__} or a str, got {value!r} of type {type(value).__name__}. "
            f"Pass one of {', '.join(choices.values())}."
        )
    member = find_member(choices, text, numbered=numbered)
    accepted = allowed or tuple(choices)
    if member is None or member not in accepted:
        names = ", ".join(item.value for item in accepted)
        raise ConfigurationError(f"{place} does not know {value!r}. Use one of {names}.")
    return member


def settle_choice(
    record: object,
    name: str,
    choices: type[E],
    *,
    numbered: bool = False,
    optional: bool = False,
    allowed: tuple[E, ...] = (),
) -> None:
    """Turn a field into a member of ``choices``, see :func:`as_choice`."""
    value = getattr(record, name)
    if optional and value is None:
        return
    settle(
        record, **{name: as_choice(where(record, name), value, choices, numbered=numbered, allowed=allowed)}
    )


def settle_options(record: object, *names: str, optional: bool = False) -> None:
    """Replace mappings by immutable copies, so that the caller's dict is not part of the record."""
    for name in names:
        value = getattr(record, name)
        if optional and value is None:
            continue
        if not isinstance(value, Mapping):
            raise wrong_type(record, name, "a mapping or None" if optional else "a mapping")
        options = cast("Mapping[Any, Any]", value)
        if not all(isinstance(key, str) for key in options):
            raise TypeError(
                f"{where(record, name)} must have text keys, got {list(options)!r}. "
                "Name each option by a str."
            )
        settle(record, **{name: FrozenOptions(options)})


def settle_names(record: object, *names: str) -> None:
    """Turn a comma-separated text or an iterable of texts into a tuple; ``None`` stays."""
    for name in names:
        value = getattr(record, name)
        if value is None:
            continue
        if isinstance(value, str):
            value = tuple(part.strip() for part in value.split(",") if part.strip())
        if not isinstance(value, Iterable):
            raise wrong_type(record, name, "an iterable of str, a comma-separated str or None")
        items = tuple(cast("Iterable[object]", value))
        if not all(isinstance(item, str) for item in items):
            raise wrong_type(record, name, "an iterable of str, a comma-separated str or None")
        settle(record, **{name: items})


def settle_path(record: object, *names: str) -> None:
    """Turn a path into text; ``None`` stays."""
    for name in names:
        value = getattr(record, name)
        if value is None:
            continue
        if not isinstance(value, (str, PathLike)):
            raise wrong_type(record, name, "a path (str or os.PathLike) or None")
        path = fspath(cast("str | PathLike[str]", value))
        if not path:
            raise ConfigurationError(f"{where(record, name)} must not be empty. Pass a path or None.")
        settle(record, **{name: path})


def settle_classes(record: object, *names: str) -> None:
    """Turn an iterable of classes into a tuple; ``None`` is none."""
    for name in names:
        value = getattr(record, name)
        items = () if value is None else (value,)
        if isinstance(value, Iterable) and not isinstance(value, type):
            items = tuple(cast("Iterable[object]", value))
        if isinstance(value, type) or not all(isinstance(item, type) for item in items):
            raise wrong_type(record, name, "a tuple of classes, such as (MyLoader,)")
        settle(record, **{name: items})
