"""How a tree of tensors travels: whole in the opening exchange, or buffer by buffer after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch

from accelfn.comm.agreement import Call, agree, capacity, check, layout_call
from accelfn.comm.wire import padded_size, read_groups, write_groups
from accelfn.context import Context
from accelfn.tree import PackSpec, flatten, plan_layout, require_tensors

__all__ = (
    "ALONE_BYTES",
    "PackedTree",
    "all_gather_rows",
    "exchange_tree",
    "fits",
    "open_call",
    "payload_of",
    "prepare_tree",
    "unwrap",
)

# From here on a copy into a shared buffer costs more than a message of one's own.
ALONE_BYTES = 1 << 20


class PackedTree(NamedTuple):
    """A tree of tensors, ready to travel."""

    leaves: list[torch.Tensor]
    layout: PackSpec


def prepare_tree(operation: str, tree: Any, refused: Callable[[Any], bool] | None = None) -> PackedTree:
    """Flatten a tree of tensors and plan its buffers.

    Args:
        operation: For the message.
        tree: Of tensors.
        refused: Says of a container that it is no tree here. A ``PackedSequence`` is none where rows are
            joined or cut: its parts are no rows.

    Raises:
        TypeError: A leaf is no dense tensor.
    """
    leaves, structure = flatten(tree, refused)
    return PackedTree(
        require_tensors(operation, leaves, structure), plan_layout(leaves, structure, ALONE_BYTES)
    )


def unwrap(value: Any, error: Exception | None) -> Any:
    """Return what :func:`~accelfn.comm.attempt` gave, or raise what it kept."""
    if error is not None:
        raise error
    return value


def fits(ctx: Context, prepared: PackedTree) -> bool:
    """Return whether the whole tree fits into the opening exchange: the same on every rank of one layout."""
    layout = prepared.layout
    return all(group.device.type == "cpu" for group in layout.groups) and _payload_bytes(layout) <= capacity(
        ctx
    )


def payload_of(prepared: PackedTree) -> torch.Tensor:
    """Return the whole tree as bytes, buffer after buffer."""
    payload = torch.empty(_payload_bytes(prepared.layout), dtype=torch.uint8)
    write_groups(payload, prepared.layout.groups, prepared.leaves)
    return payload


def open_call(
    ctx: Context,
    operation: str,
    options: str,
    prepared: PackedTree | None,
    error: Exception | None,
    *,
    pairs: bool = True,
) -> PackedTree:
    """Open an operation whose tensors follow after the agreement."""
    call = Call(operation)
    if prepared is not None:
        call = layout_call(operation, options, prepared.layout, pairs=pairs)
    check(ctx, call, error)
    return cast("PackedTree", prepared)


def exchange_tree(ctx: Context, call: Call, prepared: PackedTree) -> list[torch.Tensor]:
    """Gather a small tree of every rank within the agreement: per group a block of shape (P, n)."""
    rows = agree(ctx, call, payload_of(prepared))
    by_rank = [read_groups(row, prepared.layout.groups) for row in rows]
    return [torch.stack(buffers) for buffers in zip(*by_rank, strict=True)]


def all_gather_rows(ctx: Context, buffer: torch.Tensor) -> torch.Tensor:
    """Gather a flat buffer of every rank: shape (P, n). As bytes, so that any dtype can travel."""
    return ctx.collectives.all_gather(buffer.view(torch.uint8)).view(buffer.dtype).view(ctx.world.size, -1)


def _payload_bytes(layout: PackSpec) -> int:
    return sum(padded_size(group.num_bytes) for group in layout.groups)
