"""Make of what rank 0's loader gives a part for each rank, and hand them out."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, islice
from typing import Any, Protocol, cast

import torch
from torch.nn.utils.rnn import PackedSequence

from accelfn.context import Context
from accelfn.data.order import IndexFn
from accelfn.data.parts import BatchScatter, CannotSendError, Received
from accelfn.data.plan import EpochPlan
from accelfn.data.sampled import Keyed, batches_of
from accelfn.tree import flatten, slice_tensors

__all__ = ("BatchSplitter", "SliceFunction", "check_slice_function", "hand_out")

_SLICE_FN = "slice_fn(batch, rows, *, process_index, num_processes)"


class SliceFunction(Protocol):
    """Cuts the part of one rank out of the batch of a whole step."""

    def __call__(self, batch: Any, part: slice, /, *, process_index: int, num_processes: int) -> Any:
        """Return rows ``part`` of ``batch``, which are those of rank ``process_index``."""
        ...


def check_slice_function(slice_fn: object) -> None:
    """Refuse what can't be called as a slice function is, before it is: what it raises is its own affair.

    Raises:
        TypeError: It can't.
    """
    try:
        inspect.signature(cast("SliceFunction", slice_fn)).bind(
            None, slice(0, 1), process_index=0, num_processes=1
        )
    except ValueError:  # of a function that isn't written in Python nobody may know
        return
    except TypeError as error:
        found = getattr(slice_fn, "__qualname__", type(slice_fn).__name__)
        raise TypeError(
            f"slice_fn is called as {_SLICE_FN}, where rows is a slice, and gives these rows of the batch. "
            f"Got {found}, which can't be called so: {error}."
        ) from error


class BatchSplitter:
    """Makes the parts of each step of what rank 0's loader gives."""

    def __init__(self, ctx: Context, slice_fn: SliceFunction | None) -> None:
        """Deal to the ranks of ``ctx``."""
        self._size = ctx.axis_size("dp")
        self._slice_fn = slice_fn
        # A step is one batch, of which each rank gets rows; otherwise each rank gets a batch of its own.
        self.cuts: bool = ctx.loading.split_batches or slice_fn is not None

    def lists(self, plan: EpochPlan, take: IndexFn, key: tuple[int, int]) -> Iterator[Keyed]:
        """Return the lists of samples that rank 0's loader reads: a step's in one, or one for each rank."""
        rows = plan.rank_batch
        # All ranks' pieces of a step lie one after the other: they are the batch of a world of one.
        for whole in batches_of(replace(plan, rank_batch=plan.global_batch, size=1), 0, take, key):
            if self.cuts:
                yield whole
                continue
            for first in range(0, len(whole), rows):
                yield Keyed(whole[first : first + rows], (*whole.key[:-1], whole.key[-1] + first))

    def parts(self, plan: EpochPlan, step: int, batches: Iterator[Any]) -> list[Any]:
        """Take a step's batches, and give one tree for each rank that has rows."""
        rows = [plan.num_rows(step, rank) for rank in range(plan.size)]
        if not self.cuts:
            return list(islice(batches, sum(number > 0 for number in rows)))
        return self.cut(next(batches), rows)

    def cut(self, batch: Any, rows: Sequence[int]) -> list[Any]:
        """Cut ``batch`` into one part for each rank that has rows; ``rows`` by rank."""
        rows = [number for number in rows if number]
        ends = list(accumulate(rows))
        slices = [slice(end - number, end) for number, end in zip(rows, ends, strict=True)]
        if self._slice_fn is not None:
            parts = [
                self._slice_fn(batch, part, process_index=rank, num_processes=self._size)
                for rank, part in enumerate(slices)
            ]
            if any(part is None for part in parts):
                raise TypeError(f"{_SLICE_FN} must return these rows of the batch, and it returned None.")
            return parts
        if self._size == 1:
            return [batch]
        _check_rows(batch, ends[-1])
        return [slice_tensors(batch, part) for part in slices]


def _check_rows(batch: Any, rows: int) -> None:
    """Refuse what has no row for each sample: cut all the same, it would be wrong silently."""

    def is_no_tree(value: Any) -> bool:
        if isinstance(value, PackedSequence):
            return True
        # A list with one entry for each sample, such as texts.
        return (
            type(cast("object", value)) in (list, tuple)
            and len(value) == rows
            and not any(isinstance(one, (torch.Tensor, list, tuple, dict)) for one in value)
            and any(one is not None for one in value)
        )

    leaves, structure = flatten(batch, is_no_tree)
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if leaf.dim() and leaf.shape[0] != rows:
                raise CannotSendError(
                    f"the batch is to be cut into parts, and {structure.paths()[index]}, of shape "
                    f"{tuple(leaf.shape)}, doesn't have one row for each of its {rows} samples."
                )
        elif is_no_tree(leaf):
            within = "" if isinstance(leaf, PackedSequence) else "[0]"
            first: object = leaf if isinstance(leaf, PackedSequence) else leaf[0]
            raise CannotSendError(
                f"the batch is to be cut into parts, and {structure.paths()[index]}{within} is of type "
                f"{type(first).__name__}, and no tensor."
            )


def hand_out(way: BatchScatter, steps: Iterator[tuple[Sequence[Any], Any]] | None) -> Received | None:
    """Carry out one step.

    Ranks: every rank of the world.

    Args:
        way: Of this pass.
        steps: On rank 0: gives one part for each rank that has one, and what all ranks are sent beside.

    Returns:
        This rank's part, if it has one; None when there are no more steps.
    """
    if steps is None:
        return way.receive()
    try:
        parts, facts = next(steps)
    except StopIteration:
        way.end()
        return None
    except CannotSendError as error:
        way.refuse(error)
    way.send(parts, facts)
    return Received((parts[0],), facts)
