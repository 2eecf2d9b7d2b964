"""A mapping that cannot be changed, for option values inside frozen records."""

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ("FrozenOptions", "thaw")


class FrozenOptions(Mapping[str, Any]):
    """An immutable copy of a mapping with string keys; equal to any mapping with the same items.

    Inner mappings become ``FrozenOptions`` and inner lists become tuples, at any depth; other values are
    kept as they are.
    Unlike ``types.MappingProxyType`` it can be pickled and hashed (if its values can).

    >>> FrozenOptions({"wait": 1}) == {"wait": 1}
    True
    """

    __slots__ = ("_items",)

    _items: Mapping[str, Any]

    def __init__(self, items: Mapping[str, Any] | None = None) -> None:
        """Copy ``items``."""
        object.__setattr__(self, "_items", {key: _freeze(value) for key, value in (items or {}).items()})

    def __setattr__(self, name: str, value: object) -> None:
        """Refuse."""
        raise AttributeError(f"FrozenOptions cannot be changed: tried to set {name!r}. Make a new one.")

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
        """Hash without regard to order, as equality has none."""
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        """Show the items."""
        return f"FrozenOptions({self._items!r})"

    def __reduce__(self) -> tuple[type["FrozenOptions"], tuple[dict[str, Any]]]:
        """Rebuild from the items (pickle and deepcopy)."""
        return (FrozenOptions, (dict(self._items),))


def _freeze(value: Any) -> Any:
    if isinstance(value, FrozenOptions):
        return value
    if isinstance(value, Mapping):
        return FrozenOptions(value)  # pyright: ignore[reportUnknownArgumentType]
    if isinstance(value, list) or type(value) is tuple:
        return tuple(_freeze(item) for item in value)  # pyright: ignore[reportUnknownVariableType]
    return value


def thaw(value: Any) -> Any:
    """Return plain dicts for every ``FrozenOptions`` in ``value``, down to the leaves."""
    if isinstance(value, FrozenOptions):
        return {key: thaw(item) for key, item in value.items()}
    if type(value) is tuple:
        return tuple(thaw(item) for item in value)  # pyright: ignore[reportUnknownVariableType]
    return value
