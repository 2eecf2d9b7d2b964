"""Validation of configuration records, and immutable mappings.

A value of the wrong type raises ``TypeError``, one out of range ``ConfigurationError``; both name the field.
``settle_*`` functions also write the normalised value back, and are for ``__post_init__`` only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from enum import Enum
from os import PathLike, fspath
from types import MappingProxyType, NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from typing_extensions import Self

from accelfn.config.enums import StringEnum
from accelfn.errors import ConfigurationError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

E = TypeVar("E", bound=StringEnum)

_NATURAL = (0, math.inf)
# By the first type of an annotation: accepted types, and their name in messages.
_ACCEPTED: Mapping[Any, tuple[tuple[type, ...], str]] = MappingProxyType(
    {
        bool: ((bool,), "True or False"),
        int: ((int,), "an int"),
        float: ((int, float), "a number"),
        str: ((str,), "a str"),
        timedelta: ((timedelta,), "a datetime.timedelta such as timedelta(seconds=600)"),
        type: ((type,), "a class"),
        **{Mapping[str, kind]: ((Mapping,), "a mapping") for kind in (Any, int, float, str)},
    }
)
_PATH = ((str, PathLike), "a path (str or os.PathLike)")
_SECONDS = ((timedelta, int, float), "seconds as a number, or a datetime.timedelta")


class FrozenOptions(Mapping[str, Any]):
    """An immutable copy of a mapping, equal to any mapping with the same items. Picklable and hashable.

    >>> FrozenOptions({"wait": 1}) == {"wait": 1}
    True
    """

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any] | None = None) -> None:
        """Copy ``items``."""
        self._items: dict[str, Any] = dict(items or {})

    def __getitem__(self, key: str) -> Any:
        """Return one value."""
        return self._items[key]

    def __iter__(self) -> Iterator[str]:
        """Walk over the keys."""
        return iter(self._items)

    def __len__(self) -> int:
        """Return the number of options."""
        return len(self._items)

    def __hash__(self) -> int:
        """Hash independently of the order."""
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        """Show the items."""
        return f"FrozenOptions({self._items!r})"


def did_you_mean(word: object, words: Iterable[str]) -> str:
    """Return `` Did you mean ...?`` with the most similar of ``words``; empty if none is similar.

    >>> did_you_mean("dp_size", ["tp_size", "dp_shard_size", "dp_replicate_size"])
    " Did you mean 'dp_shard_size' or 'dp_replicate_size'?"
    """
    # Imported for the few errors that need it.
    from difflib import get_close_matches

    known, parts = [*map(str, words)], set(str(word).split("_"))
    near = [one for one in known if len(parts) > 1 and parts <= set(one.split("_"))]
    near = near or get_close_matches(str(word), known, 1, cutoff=0.54)
    return f" Did you mean {' or '.join(map(repr, near))}?" if near else ""


def where(record: object, name: str) -> str:
    """Return ``Class.field`` for messages."""
    return f"{type(record).__name__}.{name}"


def unchecked(record: object, name: str) -> object:
    """Return a field before validation, when it can be any object."""
    value: object = getattr(record, name)
    return value


def wrong_type(record: object, name: str, expected: str) -> TypeError:
    """Return the error for a field that holds a value of the wrong type."""
    return _wrong_type(where(record, name), getattr(record, name), expected)


def _wrong_type(place: str, value: object, expected: str) -> TypeError:
    return TypeError(
        f"{place} must be {expected}, got {value!r} of type {type(value).__name__}. Correct it, or leave the "
        "field out."
    )


def settle(record: object, **values: object) -> None:
    """Write normalised values into a frozen record during its construction."""
    for name, value in values.items():
        object.__setattr__(record, name, value)


def in_range(least: float, most: float = math.inf) -> Mapping[str, Any]:
    """Return the metadata of a field whose numbers lie in a range."""
    return MappingProxyType({"range": (least, most)})


POSITIVE: Mapping[str, Any] = in_range(1)


@dataclass(frozen=True, slots=True)
class Record:
    """Base of the records: each field is validated by its annotation and metadata."""

    def __new__(cls, *args: object, **values: object) -> Self:
        """Refuse names that are no fields, with the one that was meant."""
        for name in values:
            if name not in cls.__dataclass_fields__:
                known = [one.name for one in fields(cls) if one.init]
                raise TypeError(
                    f"{cls.__name__} has no field {name!r}.{did_you_mean(name, known)} Its fields are "
                    f"{', '.join(known)}."
                )
        return super(Record, cls).__new__(cls)

    def __post_init__(self) -> None:
        """Check and normalise the fields."""
        settle_fields(self)


def settle_fields(record: DataclassInstance, /) -> None:
    """Validate and normalise every field by its annotation.

    Names of an enum become its members (``| int``: also positions from 1), paths strings, mappings immutable
    copies, and iterables of strings or comma-separated strings tuples. Strings must not be empty, numbers
    (``| str``: or "auto") must be finite, and at least 0 unless the field's metadata has another range, and
    durations must be positive. Other annotations are not checked.
    """
    kinds = kinds_of(type(record))
    for item in fields(record):
        own, value = kinds[item.name], getattr(record, item.name)
        if not (
            (value is None and NoneType in own) or (value == "auto" and own[0] in (int, float) and str in own)
        ):
            settled = _settled(where(record, item.name), value, own, item.metadata.get("range", _NATURAL))
            settle(record, **{item.name: settled})


def kinds_of(record: type) -> Mapping[str, tuple[Any, ...]]:
    """Return the types of each field of a record: those of a union, in its order."""
    found = vars(record).get("_kinds")
    if found is None:  # the class keeps them: they take longer than all checks of a record
        found = MappingProxyType(
            {
                name: get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
                for name, hint in get_type_hints(record).items()
            }
        )
        record._kinds = found
    return found


def choices_of(kinds: tuple[Any, ...]) -> type[StringEnum] | None:
    """Return the enum among the types of a field."""
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, StringEnum)), None)


def _settled(place: str, value: Any, kinds: tuple[Any, ...], bounds: tuple[float, float]) -> object:
    first, choices = kinds[0], choices_of(kinds)
    if choices is not None:
        is_flag = first is bool and isinstance(value, bool)
        is_function = callable(value) and any(get_origin(kind) is Callable for kind in kinds)
        return value if is_flag or is_function else as_choice(place, value, choices, numbered=int in kinds)
    or_none = " or None" if NoneType in kinds else ""
    if first in (Iterable[str], Sequence[str]):
        given = cast("object", value)
        if isinstance(given, str):
            return tuple(part.strip() for part in given.split(",") if part.strip())
        names = tuple(cast("Iterable[object]", given)) if isinstance(given, Iterable) else (None,)
        if not all(isinstance(name, str) for name in names):
            raise _wrong_type(place, value, f"an iterable of str, a comma-separated str{or_none}")
        return names
    if get_origin(first) is Callable:
        if not callable(value):
            raise _wrong_type(place, value, f"callable{or_none}")
        return value
    is_seconds, is_path = kinds[:2] == (timedelta, float), PathLike[str] in kinds
    accepted, expected = (
        _SECONDS if is_seconds else _PATH if is_path else _ACCEPTED.get(first, ((object,), ""))
    )
    if not isinstance(value, accepted) or (int in accepted and type(cast("object", value)) is bool):
        raise _wrong_type(place, value, expected + or_none)
    is_number = int in accepted and not isinstance(cast("object", value), timedelta)
    if is_number and not (bounds[0] <= value <= bounds[1] and math.isfinite(value)):
        most = f" and at most {bounds[1]}" if math.isfinite(bounds[1]) else ""
        raise ConfigurationError(f"{place} must be at least {bounds[0]}{most}, got {value!r}.")
    if is_seconds and is_number:
        return _settled(place, timedelta(seconds=value), (timedelta,), bounds)
    if first is str and not str(value).strip():
        raise ConfigurationError(f"{place} must not be empty, got {value!r}. Pass {expected}{or_none}.")
    if first is timedelta and value <= timedelta(0):
        raise ConfigurationError(f"{place} must be longer than zero, got {value!r}.")
    if is_path:
        return fspath(cast("str | PathLike[str]", value))
    return FrozenOptions(value) if accepted == (Mapping,) else value


def as_choice(
    place: str, value: object, choices: type[E], *, numbered: bool = False, allowed: tuple[E, ...] = ()
) -> E:
    """Convert ``value`` to a member of ``choices``.

    Args:
        place: Name of the field, for messages.
        value: A member, its value in any case, or a member of another enum with the same name (such as
            torch's enums, some of which have a leading underscore).
        choices: The enum.
        numbered: Whether to accept the position of a member, from 1.
        allowed: Accepted members; empty for all.

    Raises:
        TypeError: ``value`` is neither a string nor an enum member.
        ConfigurationError: ``value`` is none of the accepted members.
    """
    text = value.name.lstrip("_") if isinstance(value, Enum) and not isinstance(value, str) else value
    if not isinstance(text, str) and not (numbered and type(text) is int):
        raise TypeError(
            f"{place} must be a {choices.__name__} or a str, got {value!r} of type {type(value).__name__}. "
            f"Pass one of {', '.join(choices.values())}."
        )
    word, accepted = str(text).strip().lower(), allowed or tuple(choices)
    for number, member in enumerate(choices, start=1):
        if (word == member.value.lower() or (numbered and word == str(number))) and member in accepted:
            return member
    raise ConfigurationError(
        f"{place} does not know {value!r}.{did_you_mean(value, accepted)} Use one of {', '.join(accepted)}."
    )
