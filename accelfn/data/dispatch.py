"""Read on rank 0 alone, and send every rank its own part of each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import accumulate, islice
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, IterableDataset

from accelfn.context import Context
from accelfn.data.draws import read_apart
from accelfn.data.plan import BatchInfo, EpochPlan
from accelfn.data.rebuild import Batches, ListsOf, batch_sampler_of, rebuild
from accelfn.data.scatter import BatchScatter
from accelfn.errors import ConfigurationError
from accelfn.tree import flatten

__all__ = ("BatchSplitter", "DispatchedSteps", "SliceFunction", "check_slicing", "hand_out")

T = TypeVar("T")
_SLICE_FN = "slice_fn(batch, rows, *, process_index, num_processes)"


class SliceFunction(Protocol):
    """Cuts the part of one rank out of the batch of a whole step."""

    def __call__(self, batch: Any, part: slice, /, *, process_index: int, num_processes: int) -> Any:
        """Return rows ``part`` of ``batch``, which are those of rank ``process_index``."""
        ...


def check_slicing(source: DataLoader[Any], slice_fn: SliceFunction | None) -> None:
    """Refuse a ``slice_fn`` that has nothing to cut.

    Raises:
        ConfigurationError: The loader makes no batches.
    """
    if slice_fn is None:
        return
    is_stream = isinstance(source.dataset, IterableDataset)
    if (source.batch_size if is_stream else batch_sampler_of(source)) is None:
        raise ConfigurationError(
            "slice_fn cuts the batch of a whole step, and with batch_size=None the loader makes no batches. "
            "Leave slice_fn out, or give the loader a batch size."
        )


class BatchSplitter:
    """Makes the parts of each step of what rank 0's loader gives.

    Attributes:
        cuts: A step is one batch, of which each rank gets rows; otherwise each gets a batch of its own.
    """

    def __init__(self, ctx: Context, slice_fn: SliceFunction | None) -> None:
        """Split for the ranks of ``ctx``."""
        self._size = ctx.axis_size("dp")
        self._slice_fn = slice_fn
        self.cuts: bool = ctx.loading.split_batches or slice_fn is not None

    def parts(self, plan: EpochPlan, step: int, batches: Iterator[Any]) -> list[Any]:
        """Take a step's batches, and return one tree for each rank that has rows."""
        rows = [plan.num_rows(step, rank) for rank in range(plan.size)]
        if not self.cuts:
            return list(islice(batches, sum(number > 0 for number in rows)))
        return self.cut(next(batches), rows)

    def cut(self, batch: Any, rows: Sequence[int]) -> list[Any]:
        """Cut ``batch`` into one part for each rank that has rows; ``rows`` by rank."""
        rows = [number for number in rows if number]
        ends = list(accumulate(rows))
        slices = [slice(end - number, end) for number, end in zip(rows, ends, strict=True)]
        if self._slice_fn is None:
            return [batch] if self._size == 1 else _cut_rows(batch, ends[-1], slices)
        parts = [
            self._slice_fn(batch, part, process_index=rank, num_processes=self._size)
            for rank, part in enumerate(slices)
        ]
        if any(part is None for part in parts):
            raise TypeError(f"{_SLICE_FN} must return these rows of the batch, and it returned None.")
        return parts


def _cut_rows(batch: Any, rows: int, slices: Sequence[slice]) -> list[Any]:
    """Cut tensors, and lists with an object for each row; what has other rows would be wrong silently.

    Raises:
        TypeError: A leaf doesn't have one row for each sample.
    """

    def is_leaf(value: Any) -> bool:
        if type(value) not in (list, tuple):
            return isinstance(value, PackedSequence)
        return len(value) == rows and not any(
            isinstance(one, (torch.Tensor, list, tuple, dict, type(None))) for one in value
        )

    leaves, structure = flatten(batch, is_leaf)
    has_rows: list[bool] = []
    for index, leaf in enumerate(leaves):
        shape = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else ()
        has_rows.append(len(shape) > 0 or (type(leaf) in (list, tuple) and len(leaf) > 0))
        if isinstance(leaf, PackedSequence) or (shape and shape[0] != rows):
            what = f"of shape {shape}" if shape else "a PackedSequence"
            raise TypeError(
                f"dispatch_batches: the batch is to be cut into parts, and {structure.paths()[index]}, "
                f"{what}, doesn't have one row for each of its {rows} samples. Make tensors of it in "
                "collate_fn, cut it with slice_fn, or use dispatch_batches=False, with which each rank reads "
                "its own batches."
            )
    return [
        structure.unflatten([leaf[part] if cut else leaf for leaf, cut in zip(leaves, has_rows, strict=True)])
        for part in slices
    ]


def hand_out(
    scatter: BatchScatter, steps: Iterator[tuple[Sequence[Any], Any]] | None
) -> tuple[Sequence[Any], Any] | None:
    """Carry out one step.

    Ranks: every rank of the world.

    Args:
        scatter: Of this pass.
        steps: On rank 0: gives one part for each rank that has one, and what all ranks are sent beside.

    Returns:
        This rank's part, if it has one, and what was sent beside; None when there are no more steps.
    """
    if steps is None:
        return scatter.receive()
    step = next(steps, None)
    if step is None:
        scatter.end()
        return None
    parts, facts = step
    scatter.send(parts, facts)
    return parts[:1], facts


class DispatchedSteps(Generic[T]):
    """Carries out planned steps: rank 0 reads the batches of all ranks, and sends each its own.

    Attributes:
        cuts: Each step is read as one batch, of which every rank gets rows.
    """

    def __init__(self, ctx: Context, source: DataLoader[T], slice_fn: SliceFunction | None) -> None:
        """Read by a loader like ``source``, on rank 0."""
        self._splitter = BatchSplitter(ctx, slice_fn)
        self.cuts: bool = self._splitter.cuts
        self._ctx = ctx
        self._batches = Batches()
        self._loader = rebuild(source, self._batches) if ctx.is_main_process else None

    def begin(
        self, plan: EpochPlan, lists: ListsOf, infos: Iterator[BatchInfo], what: str
    ) -> Iterator[tuple[T, BatchInfo]]:
        """Return this rank's batches of a plan, each with what is known of it."""
        steps: Iterator[tuple[list[Any], None]] | None = None
        if self._loader is not None:
            # All ranks' pieces of a step lie one after the other: they are the batch of a world of one.
            read = plan.of_one_rank() if self.cuts else plan
            self._batches.begin(partial(lists, read, range(read.size)))
            batches = read_apart(self._loader, is_resumed=plan.start > 0)
            steps = ((self._splitter.parts(plan, step, batches), None) for step in range(plan.num_steps))
        return self._receive(plan, infos, steps, BatchScatter(self._ctx, what))

    def _receive(
        self,
        plan: EpochPlan,
        infos: Iterator[BatchInfo],
        steps: Iterator[tuple[list[Any], None]] | None,
        scatter: BatchScatter,
    ) -> Iterator[tuple[T, BatchInfo]]:
        for _ in range(plan.num_steps):
            parts, _ = cast("tuple[Sequence[Any], None]", hand_out(scatter, steps))
            if parts:
                yield parts[0], next(infos)
