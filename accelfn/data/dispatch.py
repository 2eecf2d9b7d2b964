"""Let rank 0 read the data of all ranks, and send each rank its part of every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, islice
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, IterableDataset

from accelfn.comm import Call
from accelfn.comm.objects import ObjectScatter
from accelfn.context import Context
from accelfn.data.draws import read_isolated
from accelfn.data.plan import BatchInfo, EpochPlan
from accelfn.data.rebuild import Batches, ListsOf, batch_sampler_of, rebuild
from accelfn.errors import ConfigurationError
from accelfn.tree import flatten

__all__ = ("BatchSplitter", "DispatchedSteps", "SliceFunction", "check_slicing", "scatter_batches")

T = TypeVar("T")
_SLICE_FN = "slice_fn(batch, rows, *, process_index, num_processes)"


class SliceFunction(Protocol):
    """Returns one rank's rows of the batch of a whole step."""

    def __call__(self, batch: Any, part: slice, /, *, process_index: int, num_processes: int) -> Any:
        """Return rows ``part`` of ``batch``, which belong to rank ``process_index``."""
        ...


def check_slicing(source: DataLoader[Any], slice_fn: SliceFunction | None) -> None:
    """Refuse a ``slice_fn`` for a loader that makes no batches.

    Raises:
        ConfigurationError: The loader makes no batches.
    """
    if slice_fn is None:
        return
    is_stream = isinstance(source.dataset, IterableDataset)
    if (source.batch_size if is_stream else batch_sampler_of(source)) is None:
        raise ConfigurationError(
            "slice_fn slices the batch of a whole step, but a loader with batch_size=None makes no batches. "
            "Leave slice_fn out, or give the loader a batch size."
        )


class BatchSplitter:
    """Turns what rank 0's loader yields into the parts of the ranks.

    Attributes:
        splits_batch: Each step is one batch, whose rows are divided among the ranks; otherwise each rank
            gets a batch.
    """

    def __init__(self, ctx: Context, slice_fn: SliceFunction | None) -> None:
        """Split for the ranks of ``ctx``."""
        self._size = ctx.axis_size("dp")
        self._slice_fn = slice_fn
        self.splits_batch: bool = ctx.loading.split_batches or slice_fn is not None

    def parts(self, plan: EpochPlan, step: int, batches: Iterator[Any]) -> list[Any]:
        """Take the batches of a step, and return one tree for each rank that has rows."""
        rows = [plan.num_rows(step, rank) for rank in range(plan.size)]
        if not self.splits_batch:
            return list(islice(batches, sum(number > 0 for number in rows)))
        return self.split(next(batches), rows)

    def split(self, batch: Any, rows: Sequence[int]) -> list[Any]:
        """Split ``batch`` into one part for each rank that has rows; ``rows`` holds their numbers by rank."""
        rows = [number for number in rows if number]
        ends = list(accumulate(rows))
        slices = [slice(end - number, end) for number, end in zip(rows, ends, strict=True)]
        if self._slice_fn is None:
            return [batch] if self._size == 1 else _split_rows(batch, ends[-1], slices)
        parts = [
            self._slice_fn(batch, part, process_index=rank, num_processes=self._size)
            for rank, part in enumerate(slices)
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


def scatter_batches(ctx: Context, what: str) -> ObjectScatter:
    """Return what sends batches in one pass over the data; ``what`` names it, the same on every rank."""
    return ObjectScatter(ctx, Call("a dispatched batch", what, pairs=True, takes_long=True))


class DispatchedSteps(Generic[T]):
    """Carries out planned steps: rank 0 reads the batches of all ranks, and sends each rank its own.

    Attributes:
        splits_batch: Each step is read as one batch, whose rows are divided among the ranks.
    """

    def __init__(self, ctx: Context, source: DataLoader[T], slice_fn: SliceFunction | None) -> None:
        """Read with a loader like ``source``, on rank 0."""
        self._splitter = BatchSplitter(ctx, slice_fn)
        self.splits_batch: bool = self._splitter.splits_batch
        self._ctx = ctx
        self._batches = Batches()
        self._loader = rebuild(source, self._batches) if ctx.is_main_process else None

    def begin(
        self, plan: EpochPlan, lists: ListsOf, infos: Iterator[BatchInfo], epoch: int
    ) -> Iterator[tuple[T, BatchInfo]]:
        """Return this rank's batches of a plan, each with its BatchInfo."""
        steps: Iterator[tuple[list[Any], None]] | None = None
        if self._loader is not None:
            # The pieces of a step are consecutive: together they are the batch of a world of one.
            read = plan.of_one_rank() if self.splits_batch else plan
            self._batches.begin(epoch, partial(lists, read, range(read.size)))
            batches = read_isolated(self._loader, is_resumed=plan.start > 0)
            steps = ((self._splitter.parts(plan, step, batches), None) for step in range(plan.num_steps))
        scatter = scatter_batches(self._ctx, f"epoch {epoch} from sample {plan.start}")
        received = (scatter.exchange(steps) for _ in range(plan.num_steps))
        # The steps of a plan are all there.
        return ((parts[0], next(infos)) for parts, _ in cast("Iterator[Any]", received) if parts)
