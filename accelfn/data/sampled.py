"""Read a map-style dataset by an order of its samples, or by the batches of a sampler of the user's own."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import Any, Generic, TypeVar, cast

from torch.utils.data import DataLoader

from accelfn.context import Context
from accelfn.data.asked import BatchSamplerSpec, SamplerSpec, batch_sampler_of, share_of_batches
from accelfn.data.draws import read_apart, seed_from
from accelfn.data.order import IndexFn, draw_together, take_from
from accelfn.data.plan import EpochPlan
from accelfn.data.reading import (
    EVENED,
    EVENED_OR_DROPPED,
    EpochPass,
    ReadSettings,
    Resumable,
    share_of,
    shares_of,
    with_rows,
)
from accelfn.errors import ConfigurationError

__all__ = (
    "BatchedReader",
    "Batches",
    "Keyed",
    "SampledReader",
    "Seeded",
    "batches_of",
    "options_of",
    "rebuild",
    "remake",
    "twin_of",
    "whole_batches",
)

T = TypeVar("T")

# Samples whose indices are computed at once: enough to make the arithmetic cheap, few enough to begin at
# once.
_BLOCK = 16_384
_FIRST_BLOCK = 256

# What a DataLoader was made with, batching apart.
_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "persistent_workers", "in_order", "pin_memory_device"),
)


class SampledReader(Resumable, Generic[T]):
    """Reads by an order of samples: any position is reached at once, and no list is held.

    Where the loader makes no batches, each rank gets one item in each step; ``start`` and ``consumed`` count
    items then.
    """

    def __init__(self, ctx: Context, source: DataLoader[T], asked: SamplerSpec, seed: int, rank: int) -> None:
        """Read what ``source`` asks for; for ``rank`` of those that read different data."""
        self.length: int | None = asked.order.num_samples
        self.batch_size: int | None = asked.batch_size
        self.seed = seed
        self.setting: ReadSettings = ReadSettings(order=asked.order.kind)
        self.even_batches: bool = ctx.loading.even_batches
        self._ctx = ctx
        self._asked = asked
        self._rank = rank
        self._batches = Batches()
        self._loader = rebuild(source, self._batches)

    def plan(self, start: int) -> EpochPlan:
        """Plan the samples from ``start`` on."""
        return self._asked.plan(start).evened(self.even_batches)

    def choose_even(self, even: bool) -> None:
        """Fill the last step up from now on, or leave it short."""
        self.even_batches = even

    def count(self, start: int) -> int:
        """Count this rank's batches from ``start`` on."""
        return self.plan(start).num_batches(self._rank)

    def begin(self, epoch: int, start: int) -> EpochPass[T]:
        """Begin a pass.

        Raises:
            ValueError: The dataset has another length than it had when the loader was prepared, or a sampler
                drew another number of samples than it has promised.
        """
        self._asked.check()
        begin = functools.partial(self._begin_with, epoch, self.plan(start))
        own, _ = self._take_recalled()
        if self._asked.sampler is None:
            return begin(None)
        drawn, begun = draw_together(self._ctx, self._asked.sampler, epoch, begin, own.sampler)
        self._sampler_after = drawn.after
        return begun._replace(sampler=drawn.before)

    def _begin_with(self, epoch: int, plan: EpochPlan, drawn: list[Any] | None) -> EpochPass[T]:
        """Begin a pass over what was drawn."""
        key = (self.seed, epoch)
        take = self._asked.take(*key, drawn)
        begun = _planned_pass(self._loader, self._batches, plan, self._rank, take, key)
        return with_rows(begun) if self._asked.are_items else begun


class BatchedReader(Resumable, Generic[T]):
    """Reads the batches of the user's own batch sampler, which rank 0 draws for all."""

    def __init__(self, ctx: Context, source: DataLoader[T], asked: BatchSamplerSpec, seed: int) -> None:
        """Read what ``source`` asks for."""
        self.length: int | None = None
        self.batch_size: int | None = asked.batch_size
        self.seed = seed
        self.even_batches: bool = ctx.loading.even_batches
        self._ctx = ctx
        self._asked = asked
        self._rank = ctx.coordinate("dp")
        self._batches = Batches()
        self._loader = rebuild(source, self._batches)

    def plan(self, start: int) -> None:
        """Return None: nothing is known before the batches are drawn."""
        del start

    def count(self, start: int) -> int | None:
        """Count this rank's batches, where the batch sampler has a length and nothing is read yet."""
        return self._asked.count(start, self._rank, self.even_batches)

    def choose_even(self, even: bool) -> None:
        """Fill the last step up from now on, or leave it short."""
        self.even_batches = even

    def begin(self, epoch: int, start: int) -> EpochPass[T]:
        """Draw the batches and begin a pass."""
        return self.begin_after(epoch, start, 0)

    def begin_after(self, epoch: int, start: int, num_steps: int) -> EpochPass[T]:
        """Begin a pass that leaves out ``num_steps`` steps behind sample ``start``."""
        own, _ = self._take_recalled()
        begin = functools.partial(self._begin_with, (self.seed, epoch), start, num_steps)
        drawn, begun = draw_together(self._ctx, self._asked.sampler, epoch, begin, own.sampler)
        self._sampler_after = drawn.after
        return begun._replace(sampler=drawn.before)

    def _begin_with(self, key: tuple[int, int], start: int, num_steps: int, items: list[Any]) -> EpochPass[T]:
        """Begin a pass over batches that were drawn."""
        asked, rank = self._asked, self._rank
        drawn = [list(batch) for batch in items]
        if asked.are_samples(drawn):
            samples = [index for batch in drawn for index in batch]
            plan = asked.plan_samples(len(samples), start).evened(self.even_batches)
            plan = plan.continued(min(len(samples), start + num_steps * plan.global_batch))
            begun = _planned_pass(self._loader, self._batches, plan, rank, take_from(samples), key)
            return begun._replace(evened_by=EVENED)
        if asked.split_batches:
            raise ConfigurationError(
                "split_batches cuts each batch into equal parts, and the batch sampler "
                f"{type(asked.sampler).__name__} gives batches of different sizes. Use split_batches=False."
            )
        lengths = [len(batch) for batch in drawn]
        plan = asked.plan_batches(lengths, start, num_steps).evened(self.even_batches)
        self._batches.begin(lambda: whole_batches(plan, (rank,), drawn, key))
        share_at = functools.partial(
            share_of_batches, plan, rank=rank, lengths=lengths, ends=list(accumulate(lengths))
        )
        shares = map(share_at, range(plan.num_batches(rank)))
        batches = zip(read_apart(self._loader, is_resumed=plan.start > 0), shares, strict=True)
        return EpochPass(plan.counts, batches, share_at=share_at, evened_by=EVENED)


def whole_batches(
    plan: EpochPlan, ranks: Sequence[int], drawn: Sequence[Sequence[Any]], key: tuple[int, int]
) -> Iterator[Keyed]:
    """Return the batches that ``ranks`` read of a plan that counts batches, step by step.

    Args:
        plan: Of batches, one a rank and step.
        ranks: Whose.
        drawn: All batches, by their position.
        key: Seed and epoch.
    """
    for step in range(plan.num_steps):
        for rank in ranks:
            for position in plan.positions(step, rank):
                yield Keyed(drawn[position], (*key, plan.start + step * plan.size + rank))


def _planned_pass(
    loader: DataLoader[T],
    batches: Batches,
    plan: EpochPlan,
    rank: int,
    take: IndexFn,
    key: tuple[int, int],
) -> EpochPass[T]:
    batches.begin(lambda: batches_of(plan, rank, take, key))
    share_at = functools.partial(share_of, plan, rank=rank)
    shares = shares_of(plan, rank)
    batched = zip(read_apart(loader, is_resumed=plan.start > 0), shares, strict=True)
    return EpochPass(plan.counts, batched, share_at=share_at, evened_by=EVENED_OR_DROPPED)


def batches_of(plan: EpochPlan, rank: int, take: IndexFn, key: tuple[int, int]) -> Iterator[Keyed]:
    """Return the batches of ``rank``, as lists of what ``take`` gives for their positions."""
    position = plan.start + rank * plan.rank_batch
    for batch in _lists_of(plan, rank, take):
        yield Keyed(batch, (*key, position))
        position += plan.global_batch


def _lists_of(plan: EpochPlan, rank: int, take: IndexFn) -> Iterator[list[Any]]:
    """Return the batches, and nothing with them.

    Computed in blocks of steps, so that neither memory nor the time to the first batch grows with the epoch.
    """
    steps, first, rows = plan.num_batches(rank), 0, plan.rank_batch
    samples = _BLOCK if steps * rows <= _BLOCK else _FIRST_BLOCK  # what is one block anyway isn't made two
    while first < steps:
        last = min(steps, first + max(1, samples // rows))
        items = take(plan.block(first, last, rank))
        for begin in range(0, len(items), rows):
            yield items[begin : begin + rows]
        first, samples = last, _BLOCK


class Keyed(list[Any]):
    """Indices of one batch, with what its randomness is derived from."""

    def __init__(self, items: Sequence[Any], key: tuple[int, ...]) -> None:
        """Hold ``items``."""
        super().__init__(items)
        self.key = key

    def __reduce__(self) -> tuple[type[Keyed], tuple[list[Any], tuple[int, ...]]]:
        """Travel to a worker."""
        return Keyed, (list(self), self.key)


class Batches:
    """What torch's DataLoader takes for a batch sampler: the batches of the pass that was begun last."""

    def __init__(self) -> None:
        """Hold no batches."""
        self._make: Callable[[], Iterator[Any]] = lambda: iter(())

    def begin(self, make: Callable[[], Iterator[Any]]) -> None:
        """Return these from the next pass on."""
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return self._make()


class Seeded:
    """A dataset that draws the same random numbers for a batch, whichever process reads it.

    So neither the number of workers nor a resumption changes an augmentation, and no two ranks share one.
    """

    _dataset: Any
    _one: bool

    def __init__(self, dataset: Any, one: bool = False) -> None:
        """Read ``dataset``; ``one``: a batch is one item of it."""
        vars(self).update(_dataset=dataset, _one=one)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, indices: Keyed) -> Any:
        """Seed the generators for this batch, and ask for it where torch makes none of samples."""
        seed_from(indices.key)
        return self._dataset[indices[0] if self._one else list(indices)]

    def __getitems__(self, indices: Keyed) -> Any:
        """Seed the generators for this batch, and read it as torch would."""
        seed_from(indices.key)
        read = getattr(self._dataset, "__getitems__", None)
        return read(list(indices)) if read else [self._dataset[index] for index in indices]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)  # as a worker_init_fn does


def rebuild(source: DataLoader[T], batches: Any) -> DataLoader[T]:
    """Make a loader like ``source`` that reads ``batches``.

    Args:
        source: The user's loader.
        batches: What it takes for a batch sampler.
    """
    if cast("Any", source).batch_sampler is None:
        dataset: Any = Seeded(source.dataset, one=batch_sampler_of(source) is None)
        return remake(source, dataset, sampler=batches)
    return remake(source, Seeded(source.dataset), batch_sampler=batches)


def remake(source: DataLoader[Any], dataset: Any, **changes: Any) -> DataLoader[Any]:
    """Make a loader of the class and with the options of ``source``, over another dataset.

    Args:
        source: The user's loader.
        dataset: What the new one reads.
        **changes: Its ``sampler``, ``batch_sampler`` or ``collate_fn``. Without a batch sampler it makes no
            batches.
    """
    if type(source) is DataLoader:
        size: dict[str, Any] = {} if "batch_sampler" in changes else {"batch_size": None}
        options: dict[str, Any] = {**options_of(source), **size, **changes}
        return DataLoader(dataset, **options)
    # It is unknown how a class of the user's own is made: a copy keeps what it has.
    batching = {"batch_size": None, "drop_last": False, "batch_sampler": None}
    return twin_of(source, **{"dataset": dataset, **batching, **changes})


def twin_of(source: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Copy a loader and change attributes of the copy, which torch lets nobody change in a loader."""
    twin = copy.copy(source)
    vars(twin).update({"_iterator": None, **changes})
    return twin


def options_of(source: DataLoader[Any]) -> dict[str, Any]:
    """Return what ``source`` was made with, dataset and batching apart."""
    options: dict[str, Any] = {name: getattr(source, name) for name in _OPTIONS if hasattr(source, name)}
    if source.num_workers > 0:
        options["prefetch_factor"] = source.prefetch_factor
    return options
