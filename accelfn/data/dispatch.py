"""Let rank 0 read the data of all ranks, and send each rank its part of every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import Any, Protocol, cast

import torch
from torch.nn.utils.rnn import PackedSequence

from accelfn.comm import Call
from accelfn.comm.objects import ObjectScatter
from accelfn.context import Context
from accelfn.data.plan import EpochPlan
from accelfn.tree import flatten

__all__ = ("SliceFunction", "dispatch_steps", "scatter_batches", "split_step", "splits_steps")

_SLICE_FN = "slice_fn(batch, rows, *, process_index, num_processes)"


class SliceFunction(Protocol):
    """Returns one rank's rows of the batch of a whole step."""

    def __call__(self, batch: Any, part: slice, /, *, process_index: int, num_processes: int) -> Any:
        """Return rows ``part`` of ``batch``, which belong to rank ``process_index``."""
        ...


def split_step(batch: Any, num_rows: Sequence[int], slice_fn: SliceFunction | None) -> list[Any]:
    """Split the batch of a step into one part for each rank that has rows; ``num_rows`` is by rank."""
    rows = [number for number in num_rows if number]
    ends = list(accumulate(rows))
    slices = [slice(end - number, end) for number, end in zip(rows, ends, strict=True)]
    size = len(num_rows)
    if slice_fn is None:
        return [batch] if size == 1 else _split_rows(batch, ends[-1], slices)
    parts = [
        slice_fn(batch, part, process_index=rank, num_processes=size) for rank, part in enumerate(slices)
    ]
    if any(part is None for part in parts):
        raise TypeError(f"{_SLICE_FN} must return these rows of the batch, but it returned None.")
    return parts


def _split_rows(batch: Any, rows: int, slices: Sequence[slice]) -> list[Any]:
    """Split tensors, and lists that hold one object per row.

    Raises:
        TypeError: A leaf doesn't have one row per sample, so that its rows would go to the wrong ranks.
    """

    def is_leaf(value: Any) -> bool:
        if type(value) not in (list, tuple):
            return isinstance(value, PackedSequence)
        return len(value) == rows and not any(
            isinstance(item, (torch.Tensor, list, tuple, dict, type(None))) for item in value
        )

    leaves, structure = flatten(batch, is_leaf)
    has_rows: list[bool] = []
    for index, leaf in enumerate(leaves):
        shape = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else ()
        has_rows.append(len(shape) > 0 or (type(leaf) in (list, tuple) and len(leaf) > 0))
        if isinstance(leaf, PackedSequence) or (shape and shape[0] != rows):
            what = f"of shape {shape}" if shape else "a PackedSequence"
            raise TypeError(
                f"dispatch_batches can't split the batch: {structure.paths()[index]}, {what}, doesn't have "
                f"one row for each of its {rows} samples. Make it a tensor with one in collate_fn, split it "
                "with slice_fn, or use dispatch_batches=False, with which each rank reads its own batches."
            )
    return [
        structure.unflatten(
            [leaf[part] if splits else leaf for leaf, splits in zip(leaves, has_rows, strict=True)]
        )
        for part in slices
    ]


def splits_steps(ctx: Context, slice_fn: SliceFunction | None) -> bool:
    """Return whether each step is read as one batch, whose rows are divided among the ranks."""
    return ctx.loading.split_batches or slice_fn is not None


def scatter_batches(ctx: Context, what: str) -> ObjectScatter:
    """Return what sends batches in one pass over the data; ``what`` names it, the same on every rank."""
    return ObjectScatter(ctx, Call("a dispatched batch", what, pairs=True, takes_long=True))


def dispatch_steps(
    ctx: Context, plan: EpochPlan, epoch: int, batches: Iterator[Any] | None, slice_fn: SliceFunction | None
) -> Iterator[list[Any]]:
    """Carry out the steps of a plan, whose batches rank 0 reads for all ranks.

    Args:
        ctx: The world.
        plan: The same on every rank.
        epoch: The same on every rank.
        batches: On rank 0: of all ranks, or one for each step if it is to be split.
        slice_fn: As for :func:`accelfn.prepare_data_loader`.

    Returns:
        Of each step a list of this rank's batch, empty if it has none.
    """

    def parts_of(batches: Iterator[Any]) -> Iterator[tuple[list[Any], None]]:
        for step in range(plan.num_steps):
            rows = [plan.num_rows(step, rank) for rank in range(plan.size)]
            if splits_steps(ctx, slice_fn):
                yield split_step(next(batches), rows, slice_fn), None
            else:
                yield list(islice(batches, sum(number > 0 for number in rows))), None

    steps = None if batches is None else parts_of(batches)
    scatter = scatter_batches(ctx, f"epoch {epoch} from sample {plan.start}")
    # The steps of a plan are all there.
    return (cast("Any", scatter.exchange(steps))[0] for _ in range(plan.num_steps))
