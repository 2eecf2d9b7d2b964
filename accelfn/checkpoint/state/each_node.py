"""Checkpoints where every node has a disk of its own: which of them all nodes have.

Each node writes its part and commits it by itself, when all are ready. A crash in between leaves the new
checkpoint on some nodes and the old one on the others; but whoever has the new one still has the old one
beside it, which is removed only when all have committed. So the newest one that all nodes have is whole.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from accelfn.checkpoint.files.commit import find_leftovers, is_complete
from accelfn.checkpoint.files.disk import Disk
from accelfn.checkpoint.files.find import scan
from accelfn.errors import NoCheckpointError

__all__ = ("common", "parts_at", "parts_below")


def parts_at(disk: Disk, directory: str) -> list[tuple[str, str]]:
    """List the checkpoints that this node has under one name: identity and path, oldest first."""
    parent, name = os.path.split(directory)
    paths = [one.path for one in find_leftovers(disk, parent, name) if one.kind == "replaced"]
    heads = [(path, is_complete(disk, path)) for path in (*paths, directory)]
    found = [(head.generation, head.identity, path) for path, head in heads if head is not None]
    return [(identity, path) for _, identity, path in sorted(found)]


def parts_below(disk: Disk, directory: str) -> list[tuple[str, str]]:
    """List all that this node has in a directory of checkpoints, oldest first, or under the name itself."""
    own = parts_at(disk, directory)
    if own:
        return own
    try:
        found, _ = scan(disk, directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [part for one in found for part in parts_at(disk, one.path)]


def common(parts: Sequence[Sequence[Sequence[str]]], directory: str) -> str | None:
    """Return the identity of the newest checkpoint that all nodes have; None where no node has any. Pure.

    Args:
        parts: Of each node, identity and path, oldest first.
        directory: For the message.

    Raises:
        NoCheckpointError: Nodes have some, and none in common.

    >>> common([[("a", "x"), ("b", "y")], [("a", "x")]], "checkpoint")
    'a'
    """
    if not any(parts):
        return None
    others = [{identity for identity, _ in own} for own in parts[1:]]
    shared = [identity for identity, _ in parts[0] if all(identity in own for own in others)]
    if not shared:
        counts = ", ".join(f"{len(own)} on node {node}" for node, own in enumerate(parts))
        raise NoCheckpointError(
            f"{directory}: no checkpoint is on the disks of all nodes ({counts}, none in common). Bring the "
            "disk of the node that was replaced, or copy its part from where it is."
        )
    return shared[-1]
