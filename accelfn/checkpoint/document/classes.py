"""Classes by name, without importing anything for a file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, cast

import optree

from accelfn.errors import CheckpointError

__all__ = ("class_of", "find_class", "registry_entry", "spell_class", "spell_class_of")


def spell_class_of(value: object) -> str:
    """Name the class of a value, see :func:`spell_class`."""
    return spell_class(type(value))


def class_of(value: object) -> type[Any]:
    """Return the class of a value, for type checkers that would wonder of what."""
    return type(value)


def spell_class(kind: type) -> str:
    """Name a class so that :func:`find_class` finds it: its module, a colon and its qualified name.

    >>> spell_class(dict)
    'builtins:dict'
    """
    return f"{kind.__module__}:{kind.__qualname__}"


def find_class(spelled: str, like: Any, accepts: Callable[[type], bool], what: str) -> type:
    """Find a class that a file names: the one of ``like``, else one that the program has imported already.

    A module is only looked into: nothing of it runs, not even its ``__getattr__``.

    Args:
        spelled: As :func:`spell_class` gives it.
        like: A value at the same place in the tree to load into; its own class is taken if it has this name.
        accepts: Whether a class is of the kind that the file says.
        what: That kind in words, such as ``"an enum"``, for errors.

    Raises:
        ValueError: The name is none, or that of something else.
        CheckpointError: The program has no such class now.
    """
    own = class_of(like)
    if spell_class(own) == spelled and accepts(own):
        return own
    module, colon, qualname = spelled.partition(":")
    if not colon or not module or not qualname:
        raise ValueError(f"{spelled!r} is no name of a class")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        inside: dict[str, Any] = getattr(found, "__dict__", {}) if found is not None else {}
        found = inside.get(part)
    if found is None:
        raise CheckpointError(
            f"The checkpoint holds {what} {qualname} of the module {module}, which the program doesn't have: "
            "nothing is imported for a file. Import the module before loading, or load into a tree that has "
            "one (like=)."
        )
    if not isinstance(found, type) or spell_class(found) != spelled or not accepts(found):
        raise ValueError(f"{spelled} is not {what}")
    return found


def registry_entry(kind: type, namespace: str) -> Any:
    """Return how optree flattens and unflattens a class registered with it; None for another one."""
    return cast("Any", optree).register_pytree_node.get(kind, namespace=namespace)
