"""Read on rank 0 alone, and send every rank its own part of each step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, islice
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils.data import DataLoader, IterableDataset

from accelfn.comm import failing_together
from accelfn.context import Context
from accelfn.data.draws import read_apart
from accelfn.data.order import IndexFn
from accelfn.data.plan import EpochPlan
from accelfn.data.reading import EVENED_OR_DROPPED, BatchInfo, EpochPass, share_of
from accelfn.data.rebuild import Batches, Keyed, batch_sampler_of, rebuild
from accelfn.data.sampled import batches_of, whole_batches
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


def check_slicing(ctx: Context, source: DataLoader[Any], slice_fn: SliceFunction | None) -> None:
    """Refuse a ``slice_fn`` that can't be called as it has to be, or has nothing to cut.

    Ranks: every rank of ``ctx``.

    Raises:
        ConfigurationError: The loader makes no batches.
        TypeError: ``slice_fn`` has another signature.
    """
    if slice_fn is None:
        return
    with failing_together(ctx, "prepare_data_loader"):  # that of rank 0 is called, and it may be another
        try:
            inspect.signature(slice_fn).bind(None, slice(0, 1), process_index=0, num_processes=1)
        except ValueError:  # of a function that isn't written in Python nobody may know
            pass
        except TypeError as error:
            found = getattr(slice_fn, "__qualname__", type(slice_fn).__name__)
            raise TypeError(
                f"slice_fn is called as {_SLICE_FN}, where rows is a slice, and gives these rows of the "
                f"batch. Got {found}, which can't be called so: {error}."
            ) from error
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
    """Rank 0 reads the batches of all ranks, and sends each its own.

    Attributes:
        cuts: As of :class:`accelfn.data.sampled.PlannedSteps`.
    """

    def __init__(self, ctx: Context, source: DataLoader[T], slice_fn: SliceFunction | None) -> None:
        """Read by a loader like ``source``, on rank 0."""
        self._splitter = BatchSplitter(ctx, slice_fn)
        self.cuts: bool = self._splitter.cuts
        self._ctx = ctx
        self._rank = ctx.coordinate("dp")
        self._batches = Batches()
        self._loader = rebuild(source, self._batches) if ctx.is_main_process else None

    def samples(self, plan: EpochPlan, take: IndexFn, key: tuple[int, int]) -> EpochPass[T]:
        """Begin a pass over samples in an order."""
        lists = partial(self._splitter.lists, plan, take, key)
        return self._begin(plan, lists, key, partial(share_of, plan, rank=self._rank))

    def batches(
        self,
        plan: EpochPlan,
        drawn: Sequence[Sequence[Any]],
        key: tuple[int, int],
        share_at: Callable[[int], BatchInfo],
    ) -> EpochPass[T]:
        """Begin a pass over batches as they were drawn."""
        return self._begin(plan, partial(whole_batches, plan, range(plan.size), drawn, key), key, share_at)

    def _begin(
        self,
        plan: EpochPlan,
        lists: Callable[[], Iterator[Keyed]],
        key: tuple[int, int],
        share_at: Callable[[int], BatchInfo],
    ) -> EpochPass[T]:
        steps: Iterator[tuple[list[Any], None]] | None = None
        if self._loader is not None:
            self._batches.begin(lists)
            batches = read_apart(self._loader, is_resumed=plan.start > 0)
            steps = ((self._splitter.parts(plan, step, batches), None) for step in range(plan.num_steps))
        own = plan.num_batches(self._rank)

        def read() -> Iterator[tuple[Any, BatchInfo]]:
            scatter = BatchScatter(self._ctx, f"epoch {key[1]} from sample {plan.start}")
            for step in range(plan.num_steps):
                parts, _ = cast("tuple[Sequence[Any], None]", hand_out(scatter, steps))
                if step < own:
                    yield parts[0], share_at(step)

        return EpochPass(plan.counts, read(), share_at=share_at, evened_by=EVENED_OR_DROPPED)
