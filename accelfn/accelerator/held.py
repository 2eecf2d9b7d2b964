"""What an Accelerator has prepared, and somebody still holds."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ("Held",)

T = TypeVar("T")


class Held(Generic[T]):
    """Things in the order in which they came. None of them is kept alive by it."""

    def __init__(self) -> None:
        """Begin with none."""
        self._things: dict[int, weakref.ref[T]] = {}

    def add(self, thing: T) -> None:
        """Remember a thing until nobody else holds it."""
        number, things = id(thing), self._things

        def forget(gone: weakref.ref[T]) -> None:
            if things.get(number) is gone:
                del things[number]

        things[number] = weakref.ref(thing, forget)

    def clear(self) -> None:
        """Forget all."""
        self._things.clear()

    def __iter__(self) -> Iterator[T]:
        found = [reference() for reference in tuple(self._things.values())]
        return iter([thing for thing in found if thing is not None])

    def __reduce__(self) -> tuple[type[Held[T]], tuple[()]]:
        """Leave the things out of copies and pickles: a copied thing adds itself."""
        return Held, ()
