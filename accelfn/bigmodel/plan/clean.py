"""Device maps in fewer words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

__all__ = ("clean_device_map",)

T = TypeVar("T")


def clean_device_map(device_map: Mapping[str, T], module_name: str = "") -> dict[str, T]:
    """Name a module instead of all that is below it, where that is in one place. Pure.

    Only the map is looked at: what it leaves out goes where the rest is.

    Args:
        device_map: Places by names of modules or tensors. It is left as it is.
        module_name: Look only at what is below this module.

    Returns:
        A new map.

    >>> clean_device_map({"a.x": 0, "a.y": 0, "b.x": 0, "b.y": "cpu"})
    {'a': 0, 'b.x': 0, 'b.y': 'cpu'}
    """
    prefix = f"{module_name}." if module_name else ""
    # A trie: what is below each part of a name, and under None the place of the name itself.
    tree: dict[str | None, Any] = {}
    found: dict[str, T] = {}
    for name, place in device_map.items():
        node = tree
        if name != module_name:
            if not name.startswith(prefix):
                found[name] = place
                continue
            for part in name[len(prefix) :].split("."):
                node = node.setdefault(part, {})
        node[None] = place
    found.update(_collect(module_name, tree).entries)
    return found


class _Below(NamedTuple):
    entries: list[tuple[str, Any]]  # the highest that say the same
    num_given: int
    is_one_place: bool


def _collect(name: str, tree: Mapping[str | None, Any]) -> _Below:
    prefix = f"{name}." if name else ""
    entries: list[tuple[str, Any]] = []
    num_given, is_one_place = 0, True
    for part, inside in tree.items():
        below = _Below([(name, inside)], 1, True) if part is None else _collect(prefix + part, inside)
        num_given += below.num_given
        is_one_place = is_one_place and below.is_one_place
        entries += below.entries
    is_one_place = is_one_place and all(place == entries[0][1] for _, place in entries)
    if is_one_place and num_given > 1:
        entries = [(name, entries[0][1])]
    return _Below(entries, num_given, is_one_place)
