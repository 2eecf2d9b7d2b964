"""Objects of which only the state is known, in trees that are converted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

from accelfn.checkpoint.document.nodes import join_path


class State:
    """Stands in for an object of which only the state is known."""

    def __init__(self, state: Any) -> None:
        """Keep the state."""
        self._state = state

    def state_dict(self) -> Any:
        """Return the state."""
        return self._state

    def load_state_dict(self, state: Any) -> None:
        """Replace the state."""
        self._state = state


class Optimizer(State):
    """Stands in for an optimizer of any class."""


def states_in(tree: Any, path: str = "") -> Iterator[tuple[str, State]]:
    """List the stand-ins in a tree of dicts with their paths."""
    if isinstance(tree, State):
        yield path, tree
    elif isinstance(tree, dict):
        for key, child in cast("dict[Any, Any]", tree).items():
            yield from states_in(child, join_path(path, key))
    elif isinstance(tree, list):
        for number, child in enumerate(cast("list[Any]", tree)):
            yield from states_in(child, join_path(path, number))
