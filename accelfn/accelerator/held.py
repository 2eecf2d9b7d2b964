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
        self._things: dict[int, weakref.ref[T]] = {}
        self._names: dict[int, str] = {}

    def add(self, thing: T, name: str | None = None) -> None:
        """Remember a thing until nobody else holds it. With ``name``, it is called so from now on."""
        number, things, names = id(thing), self._things, self._names
        before = things.get(number)
        if before is None or before() is not thing:

            def forget(gone: weakref.ref[T]) -> None:
                if things.get(number) is gone:
                    del things[number]
                    names.pop(number, None)  # the next thing may get this number

            names.pop(number, None)
            things[number] = weakref.ref(thing, forget)
        if name is not None:
            names[number] = name

    def clear(self) -> None:
        """Forget all."""
        self._things.clear()
        self._names.clear()

    def name_of(self, thing: T) -> str | None:
        """Give the name of a thing that is here; None where it has none."""
        return self._names.get(id(thing)) if thing in self else None

    def __contains__(self, thing: object) -> bool:
        reference = self._things.get(id(thing))
        return reference is not None and reference() is thing

    def __iter__(self) -> Iterator[T]:
        found = [reference() for reference in tuple(self._things.values())]
        return iter([thing for thing in found if thing is not None])

    def __reduce__(self) -> tuple[type[Held[T]], tuple[()]]:
        """Leave the things out of copies and pickles: a copied thing adds itself."""
        return Held, ()
