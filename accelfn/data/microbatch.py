"""MicroBatch: what is to be known of one batch, as a value that travels beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar, cast

import torch

from accelfn.comm import Call, check, gather, gather_bytes, gather_object
from accelfn.context import Context
from accelfn.context.config import GuardMode
from accelfn.data.loader import PreparedDataLoader
from accelfn.errors import Disagreement, NotAvailableError, UnevenDataError
from accelfn.tree import find_batch_size, flatten

__all__ = (
    "MicroBatch",
    "gather_for_metrics",
    "gather_objects_for_metrics",
    "microbatches",
    "plan_microbatch",
)

T = TypeVar("T")
Uneven = Literal["error", "stop_first", "pad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Where one batch stands in its epoch and in its accumulation window.

    Attributes:
        index: Number of the batch in the epoch, from 0.
        epoch: Number of the epoch, from 0.
        place: Place in the window, from 0.
        window: Batches that the window really holds: fewer at the end of the data.
        sync: This batch closes its window: gradients are averaged over ranks, and the optimizer steps.
        is_last: No batch follows in this epoch.
        num_rows: Samples in this rank's batch, padding included; of a loader that wasn't prepared, or was
            sharded already, the batch's first dimension; None when it has none.
        max_rows: Samples in the batch of the rank that has most; None when the loader doesn't say.
        num_valid: Rows over all ranks that are no padding; None when the loader doesn't say.
    """

    index: int
    epoch: int
    place: int
    window: int
    sync: bool
    is_last: bool
    num_rows: int | None = None
    max_rows: int | None = None
    num_valid: int | None = None


def plan_microbatch(
    index: int, epoch: int, num_batches: int, num_steps: int, sync_with_dataloader: bool = True
) -> MicroBatch:
    """Say where batch ``index`` of ``num_batches`` stands, when ``num_steps`` make a window. Pure.

    Args:
        index: Of the batch, from 0.
        epoch: Of the pass, from 0.
        num_batches: In this epoch.
        num_steps: Batches in a full window.
        sync_with_dataloader: The end of the data closes the window; otherwise windows go on into the next
            epoch.

    >>> [(m.place, m.window, m.sync) for m in (plan_microbatch(i, 0, 3, 2) for i in range(3))]
    [(0, 2, False), (1, 2, True), (0, 1, True)]
    """
    if sync_with_dataloader:
        place = index % num_steps
        window = min(num_steps, num_batches - (index - place))
    else:
        place = (epoch * num_batches + index) % num_steps
        window = num_steps
    return MicroBatch(
        index=index,
        epoch=epoch,
        place=place,
        window=window,
        sync=place == window - 1,
        is_last=index == num_batches - 1,
    )


def microbatches(
    ctx: Context, loader: Iterable[T], uneven: Uneven = "error"
) -> Iterator[tuple[T, MicroBatch]]:
    """Yield each batch of one pass over ``loader`` together with its :class:`MicroBatch`.

    Ranks: every rank of ``ctx``. A pass begins and ends with an exchange, unless the guard is off.

    Args:
        ctx: Says how many batches make a window.
        loader: From :func:`accelfn.prepare_data_loader`, or any iterable of trees with a length that is the
            same on every rank.
        uneven: What to do when ranks have different numbers of batches: ``"error"`` before the first batch,
            or ``"stop_first"`` when the rank with the fewest has no more.

    Raises:
        UnevenDataError: The ranks have different numbers of batches, and ``uneven`` is ``"error"``; the same
            error on every rank. Before the first batch, where the loaders' lengths tell.
        TypeError: The loader has no length.
        NotAvailableError: ``uneven="pad"``.

    >>> loader = [torch.zeros(2), torch.zeros(2), torch.zeros(1)]
    >>> ctx = Context().replace(gradient_accumulation_steps=2)
    >>> [(len(batch), micro.window, micro.sync) for batch, micro in microbatches(ctx, loader)]
    [(2, 2, False), (2, 2, True), (1, 1, True)]
    """
    if uneven not in ("error", "stop_first", "pad"):
        raise ValueError(f'microbatches: uneven must be "error", "stop_first" or "pad", got {uneven!r}.')
    if uneven == "pad":
        raise NotAvailableError(
            'microbatches: uneven="pad" has no machinery yet. Use even_batches=True, or "stop_first".'
        )
    if not isinstance(loader, Sized):
        raise TypeError(
            f"microbatches: the loader must have a length, got {type(loader).__name__}. The last window is "
            "averaged over "
            "what it holds, and that has to be known when it opens."
        )
    return _microbatches(ctx, loader, uneven)


def _microbatches(ctx: Context, loader: Iterable[T], uneven: Uneven) -> Iterator[tuple[T, MicroBatch]]:
    prepared = loader if isinstance(loader, PreparedDataLoader) else None
    plan = prepared.plan if prepared is not None else None
    epoch = prepared.epoch if prepared is not None else 0
    own = len(cast("Sized", loader))
    counts = _counts(ctx, own, uneven) if prepared is None else prepared.num_batches_by_rank
    if min(counts) != max(counts) and uneven == "error":
        raise _uneven(counts)
    num_batches = min(counts)
    accumulation = ctx.accumulation
    journal = ctx.collectives.journal
    journal.batches, journal.has_ended = 0, False
    for index, batch in enumerate(loader if num_batches else ()):
        journal.batches = index + 1
        micro = plan_microbatch(
            index, epoch, num_batches, accumulation.num_steps, accumulation.sync_with_dataloader
        )
        if plan is None:
            yield batch, replace(micro, num_rows=_num_rows(batch))
        else:
            # From the plan and not from the batch: its first dimension may be something else, such as time.
            rows, most = (len(plan.positions(index, rank)) for rank in (ctx.rank, 0))
            yield batch, replace(micro, num_rows=rows, max_rows=most, num_valid=plan.num_valid(index))
        if index + 1 == num_batches < own:
            break
    journal.has_ended = True
    if ctx.num_processes > 1:  # a source that gave fewer batches than its length has promised
        check(ctx, Call("microbatches", f"the end after {journal.batches} batches"))
    if prepared is not None:  # a rank that left batches over has ended its epoch like the others
        prepared.set_epoch(epoch + 1)


def _counts(ctx: Context, own: int, uneven: Uneven) -> tuple[int, ...]:
    """Ask every rank for its number of batches, where that is checked or needed."""
    if ctx.num_processes == 1 or (ctx.guard.mode == GuardMode.OFF and uneven == "error"):
        return (own,)
    return tuple(int(blob) for blob in gather_bytes(ctx, Call("microbatches"), str(own).encode()))


def _uneven(counts: Sequence[int]) -> UnevenDataError:
    expected = max(set(counts), key=counts.count)
    rows = [
        Disagreement(rank, "", f"{expected} batches", f"{count} batches")
        for rank, count in enumerate(counts)
        if count != expected
    ]
    return UnevenDataError(
        "microbatches",
        rows,
        'Use even_batches=True, drop_last=True, or uneven="stop_first".',
        counts=counts,
    )


def _num_rows(batch: Any) -> int | None:
    try:
        return find_batch_size(batch)
    except ValueError:  # no tensor in it: the batch is the user's own kind
        return None


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
        MismatchError: The trees differ between ranks.
    """
    leaves, structure = flatten(tree)
    tensors = [isinstance(leaf, torch.Tensor) for leaf in leaves]
    if not any(tensors) and isinstance(tree, list):
        return cast("T", gather_objects_for_metrics(ctx, tree, micro))
    per_row = [
        tensor and leaf.dim() > 0 and leaf.shape[0] == micro.num_rows
        for tensor, leaf in zip(tensors, leaves, strict=True)
    ]
    if micro.num_valid is None or micro.num_rows is None or micro.max_rows is None:
        return gather(ctx, tree)
    missing = micro.max_rows - micro.num_rows
    if missing:  # uneven data: the other ranks have more rows than this one
        leaves = [
            _lengthen(leaf, missing) if rows else leaf for leaf, rows in zip(leaves, per_row, strict=True)
        ]
    gathered, _ = flatten(gather(ctx, structure.unflatten(leaves)))
    cut = [leaf[: micro.num_valid] if rows else leaf for leaf, rows in zip(gathered, per_row, strict=True)]
    return cast("T", structure.unflatten(cut))


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
    objects: list[Any] = gather_object(ctx, obj)
    if micro is not None and isinstance(obj, list) and len(cast("list[Any]", obj)) == micro.num_rows:
        return objects[: micro.num_valid]
    return objects


def _lengthen(rows: torch.Tensor, missing: int) -> torch.Tensor:
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])
