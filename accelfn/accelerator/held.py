"""What an Accelerator has prepared, and somebody still holds."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

__all__ = ("Lost", "WeakRegistry")

T = TypeVar("T")


class Lost(NamedTuple):
    """What was prepared and is gone, and what of it is still there.

    Attributes:
        number: Of its kind, in the order of preparation, from 1.
        label: Its class.
        parts: What it belonged to, such as the parameters of an optimizer.
    """

    number: int
    label: str
    parts: tuple[object, ...]


class _Entry(NamedTuple):
    reference: weakref.ref[Any]
    name: str | None
    number: int
    label: str
    parts: tuple[weakref.ref[object], ...]


class WeakRegistry(Generic[T]):
    """Things in the order in which they came, and their names. None of them is kept alive by it."""

    def __init__(
        self,
        parts_of: Callable[[T], Iterable[object]] | None = None,
        label_of: Callable[[T], str] | None = None,
    ) -> None:
        """Begin with none.

        Args:
            parts_of: Gives what a thing belongs to; None where nobody misses a thing that is gone.
            label_of: Gives what a thing is called in errors; needed with ``parts_of``.
        """
        self._parts_of = parts_of
        self._label_of = label_of
        self._things: dict[int, _Entry] = {}
        self._gone: list[_Entry] = []
        self._count = 0

    def add(self, thing: T, name: str | None = None) -> None:
        """Remember a thing until nobody else holds it. With ``name``, it is called so from now on."""
        number, things, gone = id(thing), self._things, self._gone

        def forget(reference: weakref.ref[T]) -> None:
            if number in things and things[number].reference is reference:
                gone[:] = [
                    one
                    for one in (*gone, things.pop(number))
                    if any(part() is not None for part in one.parts)
                ]

        if thing in self:
            known = things[number]
            name, order, label, parts = name or known.name, *known[2:]
        else:
            self._count = order = self._count + 1
            label = "" if self._label_of is None else self._label_of(thing)
            parts = tuple(weakref.ref(one) for one in self.parts_of(thing))
        # The name goes with the thing: the next one may get the same number.
        things[number] = _Entry(weakref.ref(thing, forget), name, order, label, parts)

    def clear(self) -> None:
        """Forget all."""
        self._things.clear()
        self._gone.clear()
        self._count = 0

    def name_of(self, thing: T) -> str | None:
        """Return the name of a thing that is here; None where it has none."""
        return self._things[id(thing)].name if thing in self else None

    def parts_of(self, thing: T) -> Iterable[object]:
        """Return what a thing belongs to."""
        return () if self._parts_of is None else self._parts_of(thing)

    def lost(self) -> list[Lost]:
        """List what is gone though parts of it aren't, and nothing that is here has any of them."""
        if not self._gone:
            return []
        replaced = {id(part) for thing in self for part in self.parts_of(thing)}
        found: list[Lost] = []
        for entry in self._gone:
            parts = tuple(part for reference in entry.parts if (part := reference()) is not None)
            if parts and not any(id(part) in replaced for part in parts):
                found.append(Lost(entry.number, entry.label, parts))
        return found

    def __contains__(self, thing: object) -> bool:
        found = self._things.get(id(thing))
        return found is not None and found.reference() is thing

    def __iter__(self) -> Iterator[T]:
        found = [entry.reference() for entry in tuple(self._things.values())]
        return iter([thing for thing in found if thing is not None])

    def __reduce__(self) -> tuple[type[WeakRegistry[T]], tuple[object, ...]]:
        """Copy and pickle without the things: a copied thing adds itself."""
        return WeakRegistry, (self._parts_of, self._label_of)
