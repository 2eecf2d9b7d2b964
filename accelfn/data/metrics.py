"""Bring what was computed from batches together over ranks, without the rows that are padding."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, TypeVar, cast

import torch

from accelfn.comm import Call, gather, gather_bytes, gather_object
from accelfn.context import Context, check_context
from accelfn.data.microbatch import MicroBatch, check_micro
from accelfn.errors import MismatchError
from accelfn.tree import flatten

__all__ = ("gather_for_metrics", "gather_objects_for_metrics")

T = TypeVar("T")

_ROWS = struct.Struct("<QQ")


def gather_for_metrics(ctx: Context, tree: T, micro: MicroBatch) -> T:
    """Bring what was computed from one batch together over all ranks, without the rows that are padding.

    Over an epoch the results are exactly one row for each sample, in the order of the epoch.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        tree: Tensors with one row for each row of the batch; 0-d tensors and tensors with another number of
            rows are gathered and never cut. Or a list of Python objects, one for each row.
        micro: Of the batch that ``tree`` was computed from.

    Returns:
        The same tree on every rank.

    Raises:
        TypeError: Tensors and other leaves are mixed.
        MismatchError: The trees differ between ranks, as they do where a ``collate_fn`` has left out samples
            of the batch of one of them.
    """
    check_context("gather_for_metrics", ctx)
    check_micro("gather_for_metrics", micro)
    leaves, structure = flatten(tree)
    tensors = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    if not any(tensors) and isinstance(tree, list):
        return cast("T", gather_objects_for_metrics(ctx, tree, micro))
    per_row = [
        tensor and leaf.dim() > 0 and leaf.shape[0] == micro.num_rows
        for tensor, leaf in zip(tensors, leaves, strict=True)
    ]
    if micro.num_rows is None or not any(per_row):
        return _gather(ctx, tree, micro)
    valid, most = _valid_rows(ctx, micro, micro.num_rows)
    if micro.num_rows != most:  # other ranks have more rows than this one, or this one repeats a longer batch
        leaves = [_fit(leaf, most) if rows else leaf for leaf, rows in zip(leaves, per_row, strict=True)]
    gathered, _ = flatten(_gather(ctx, structure.unflatten(leaves), micro))
    cut = [_cut(leaf, valid, most) if rows else leaf for leaf, rows in zip(gathered, per_row, strict=True)]
    return cast("T", structure.unflatten(cut))


def _gather(ctx: Context, tree: T, micro: MicroBatch) -> T:
    """Gather, and where trees differ say how many rows were planned, which every rank knows."""
    try:
        return gather(ctx, tree)
    except MismatchError as error:
        if micro.max_rows is None or not all(row.path for row in error.rows):
            raise  # nobody has planned the rows, or ranks called different things
        hint = (
            f"{error.hint} By the plan of the data, the longest batch of this step has {micro.max_rows} "
            f"row{'' if micro.max_rows == 1 else 's'}. If collate_fn leaves samples out, filter the dataset "
            "instead, or keep their rows, mark them, and leave them out of what was gathered."
        )
        raise MismatchError(error.operation, error.rows, hint, error.callers) from None


def _valid_rows(ctx: Context, micro: MicroBatch, rows: int) -> tuple[int | Sequence[int], int]:
    """Say how many rows count (of all ranks together, or of each), and how many the longest batch has."""
    if micro.valid_by_rank is not None and micro.max_rows is not None:
        return micro.valid_by_rank, micro.max_rows
    if micro.num_valid is not None and micro.max_rows is not None:
        return micro.num_valid, micro.max_rows
    own = rows if micro.own_valid is None else micro.own_valid
    if ctx.num_processes == 1:
        return own, rows
    # Nobody has planned these batches, so the ranks ask each other.
    blobs = gather_bytes(ctx, Call("gather_for_metrics"), _ROWS.pack(own, rows))
    pairs = [_ROWS.unpack(blob) for blob in blobs]
    return [valid for valid, _ in pairs], max(number for _, number in pairs)


def _cut(gathered: torch.Tensor, valid: int | Sequence[int], most: int) -> torch.Tensor:
    if isinstance(valid, int):
        return gathered[:valid]
    if all(number == most for number in valid):
        return gathered
    return torch.cat([gathered[most * rank :][:number] for rank, number in enumerate(valid)])


def gather_objects_for_metrics(ctx: Context, obj: Any, micro: MicroBatch | None) -> list[Any]:
    """Bring Python objects of all ranks together; of a list with one for each row, without those of padding.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        obj: A list is joined with those of the other ranks; anything else is one item.
        micro: Of the batch that the objects were computed from; None keeps all.

    Returns:
        One list, the same on every rank.
    """
    check_context("gather_objects_for_metrics", ctx)
    check_micro("gather_objects_for_metrics", micro)
    if micro is None or not isinstance(obj, list):
        return gather_object(ctx, obj)
    own = cast("list[Any]", obj)
    # Of a batch that is padding from end to end nothing counts, even where nobody can say what its rows are.
    per_row = len(own) == micro.num_rows or (micro.num_rows is None and micro.own_valid == 0)
    return gather_object(ctx, own[: micro.own_valid] if per_row else own)


def _fit(rows: torch.Tensor, number: int) -> torch.Tensor:
    missing = number - len(rows)
    return rows[:number] if missing <= 0 else torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
