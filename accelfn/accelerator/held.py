"""What an Accelerator has prepared, and somebody still holds."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ("Held",)

T = TypeVar("T")


class Held(Generic[T]):
    """Things in the order in which they came, and their names. None of them is kept alive by it."""

    def __init__(self) -> None:
        """Begin with none."""
        self._things: dict[int, tuple[weakref.ref[T], str | None]] = {}

    def add(self, thing: T, name: str | None = None) -> None:
        """Remember a thing until nobody else holds it. With ``name``, it is called so from now on."""
        number, things = id(thing), self._things

        def forget(gone: weakref.ref[T]) -> None:
            if number in things and things[number][0] is gone:
                del things[number]

        # The name goes with the thing: the next one may get the same number.
        things[number] = weakref.ref(thing, forget), name or self.name_of(thing)

    def clear(self) -> None:
        """Forget all."""
        self._things.clear()

    def name_of(self, thing: T) -> str | None:
        """Give the name of a thing that is here; None where it has none."""
        return self._things[id(thing)][1] if thing in self else None

    def __contains__(self, thing: object) -> bool:
        found = self._things.get(id(thing))
        return found is not None and found[0]() is thing

    def __iter__(self) -> Iterator[T]:
        found = [reference() for reference, _ in tuple(self._things.values())]
        return iter([thing for thing in found if thing is not None])

    def __reduce__(self) -> tuple[type[Held[T]], tuple[()]]:
        """Leave the things out of copies and pickles: a copied thing adds itself."""
        return Held, ()
