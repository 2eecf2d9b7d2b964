"""Read a map-style dataset by an order of its samples, or by the batches of a sampler of the user's own."""

from __future__ import annotations

import copy
import functools
import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import replace
from itertools import accumulate
from typing import Any, Generic, TypeVar, cast

import torch
from torch.utils.data import BatchSampler, DataLoader, get_worker_info

from accelfn.context import Context
from accelfn.data.order import Order, Take, check_length, draw_together, take_from
from accelfn.data.plan import EpochPlan, plan_epoch
from accelfn.data.reading import Pass, Remembering, Share, share_of, shares_of
from accelfn.errors import ConfigurationError

__all__ = (
    "BatchedReader",
    "Batches",
    "Keyed",
    "SampledReader",
    "Seeded",
    "are_even",
    "batch_sampler_of",
    "batches_of",
    "options_of",
    "rebuild",
    "remake",
    "sampler_of",
    "seed_worker",
    "share_of_batches",
    "twin_of",
)

T = TypeVar("T")
MakePlan = Callable[[int, int], EpochPlan]  # from the number of samples, and the one to start at

# Samples whose indices are computed at once: enough to make the arithmetic cheap, few enough to begin at
# once.
_BLOCK = 16_384
_FIRST_BLOCK = 256

# What a DataLoader was made with, batching apart.
_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "persistent_workers", "in_order", "pin_memory_device"),
)


class SampledReader(Remembering, Generic[T]):
    """Reads by an order of samples: any position is reached at once, and no list is held."""

    def __init__(
        self, ctx: Context, source: DataLoader[T], order: Order, rank: int, make_plan: MakePlan
    ) -> None:
        """Read for ``rank`` of those that read different data."""
        self.length: int | None = order.num_samples
        self.seed = order.seed
        self.even_batches = ctx.loading.even_batches
        self._ctx = ctx
        self._order = order
        self._rank = rank
        self._make_plan = make_plan
        self._dataset = cast("Sized", source.dataset)
        self._sampler = sampler_of(source) if order.kind == "sampler" else None
        self._batches = Batches()
        self._loader = rebuild(source, self._batches)
        self.batch_size: int | None = self.plan(0).global_batch

    def plan(self, start: int) -> EpochPlan:
        """Plan the samples from ``start`` on."""
        return _evened(self._make_plan(self._order.num_samples, start), self.even_batches)

    def choose_even(self, even: bool) -> None:
        """Fill the last step up from now on, or leave it short."""
        self.even_batches = even

    def count(self, start: int) -> int:
        """Count this rank's batches from ``start`` on."""
        return self.plan(start).num_batches(self._rank)

    def begin(self, epoch: int, start: int) -> Pass[T]:
        """Begin a pass.

        Raises:
            ValueError: The dataset has another length than it had when the loader was prepared, or a sampler
                drew another number of samples than it has promised.
        """
        check_length(self._dataset, self._order)
        plan = self.plan(start)
        key = (self.seed, epoch)
        own, _ = self._take_recalled()
        if self._sampler is None:
            take = self._order.taker(*key)
            return _planned_pass(self._loader, self._batches, plan, self._rank, take, key)

        def begin(items: list[Any]) -> Pass[T] | None:
            if len(items) != self._order.num_samples:
                return None
            return _planned_pass(self._loader, self._batches, plan, self._rank, take_from(items), key)

        drawn, begun = draw_together(self._ctx, self._sampler, epoch, begin, own.sampler)
        if begun is None:
            raise ValueError(
                f"the sampler {type(self._sampler).__name__} has a length of {self._order.num_samples}, "
                f"and drew {len(drawn.items)} samples. Its __len__ must count what its __iter__ gives."
            )
        self._sampler_after = drawn.after
        return begun._replace(sampler=drawn.before)


class BatchedReader(Remembering, Generic[T]):
    """Reads the batches of the user's own batch sampler, which rank 0 draws for all.

    Batches of the size that it names (the last may be shorter) are samples in an order, and are shared out as
    such; batches of different sizes are taken as they are, one a rank.
    """

    def __init__(
        self, ctx: Context, source: DataLoader[T], seed: int, rank: int, size: int, make_plan: MakePlan
    ) -> None:
        """Read for ``rank`` of ``size``; ``make_plan`` is for samples."""
        self.length: int | None = None
        self.seed = seed
        self.even_batches = ctx.loading.even_batches
        self._ctx = ctx
        self._sampler: Any = batch_sampler_of(source)
        self._rank, self._size = rank, size
        self._make_plan = make_plan
        self._batches = Batches()
        self._loader = rebuild(source, self._batches)
        named = getattr(self._sampler, "batch_size", None)
        self._named = named if isinstance(named, int) else None
        split = ctx.loading.split_batches
        self.batch_size: int | None = self._named if self._named is None or split else self._named * size

    def plan(self, start: int) -> None:
        """Know nothing before the batches are drawn."""
        del start

    def count(self, start: int) -> int | None:
        """Count this rank's batches, where the batch sampler has a length and nothing is read yet."""
        if start or not hasattr(self._sampler, "__len__"):
            return None
        number = len(self._sampler)
        return number if self._ctx.loading.split_batches else self._by_batch(number).num_batches(self._rank)

    def choose_even(self, even: bool) -> None:
        """Fill the last step up from now on, or leave it short."""
        self.even_batches = even

    def begin(self, epoch: int, start: int) -> Pass[T]:
        """Draw the batches and begin a pass."""
        return self.begin_after(epoch, start, 0)

    def begin_after(self, epoch: int, start: int, num_steps: int) -> Pass[T]:
        """Begin a pass that leaves out ``num_steps`` steps behind sample ``start``."""
        own, _ = self._take_recalled()
        begin = functools.partial(self._begin_with, (self.seed, epoch), start, num_steps)
        drawn, begun = draw_together(self._ctx, self._sampler, epoch, begin, own.sampler)
        if begun is None:
            raise ConfigurationError(
                "split_batches cuts each batch into equal parts, and the batch sampler "
                f"{type(self._sampler).__name__} gives batches of different sizes. Use split_batches=False."
            )
        self._sampler_after = drawn.after
        return begun._replace(sampler=drawn.before)

    def _begin_with(
        self, key: tuple[int, int], start: int, num_steps: int, items: list[Any]
    ) -> Pass[T] | None:
        """Begin a pass over batches that were drawn; None where they can't be split."""
        drawn = [list(batch) for batch in items]
        if self._named is not None and are_even(drawn, self._named):
            samples = [index for batch in drawn for index in batch]
            plan = _evened(self._make_plan(len(samples), start), self.even_batches)
            plan = plan.continued(min(len(samples), start + num_steps * plan.global_batch))
            return _planned_pass(self._loader, self._batches, plan, self._rank, take_from(samples), key)
        if self._ctx.loading.split_batches:
            return None
        ends = list(accumulate(map(len, drawn)))
        first = next((number for number, end in enumerate(ends) if end > start), len(drawn))
        plan = self._by_batch(len(drawn), min(len(drawn), first + num_steps * self._size))
        steps = plan.num_batches(self._rank)
        own = [drawn[plan.positions(step, self._rank)[0]] for step in range(steps)]
        places = (plan.start + step * self._size + self._rank for step in range(steps))
        keyed = [Keyed(batch, (*key, place)) for batch, place in zip(own, places, strict=True)]
        self._batches.begin(lambda: iter(keyed))
        counts = tuple(plan.num_batches(rank) for rank in range(plan.size))
        lengths = [len(batch) for batch in drawn]
        share_at = functools.partial(share_of_batches, plan, rank=self._rank, ends=ends, lengths=lengths)
        return Pass(counts, zip(self._loader, map(share_at, range(steps)), strict=True), share_at=share_at)

    def _by_batch(self, number: int, start: int = 0) -> EpochPlan:
        return plan_epoch(
            number,
            1,
            self._size,
            even_batches=self.even_batches,
            drop_last=bool(getattr(self._sampler, "drop_last", False)) and self._size > 1,
            start=start,
        )


def _evened(plan: EpochPlan, even: bool) -> EpochPlan:
    return replace(plan, even=even and plan.size > 1)


def are_even(batches: Sequence[Sequence[Any]], size: int) -> bool:
    """Whether batches are of ``size`` samples each, but for a shorter last one."""
    return all(len(batch) == size for batch in batches[:-1]) and (not batches or len(batches[-1]) <= size)


def share_of_batches(
    plan: EpochPlan, step: int, rank: int, ends: Sequence[int], lengths: Sequence[int]
) -> Share:
    """Describe the batch that ``rank`` reads in ``step`` of a plan that counts batches. Pure.

    Args:
        plan: Of batches, one a rank and step.
        step: From 0.
        rank: That reads it.
        ends: Samples in the batches up to each one.
        lengths: Samples in each one.
    """
    here = [plan.positions(step, one) for one in range(plan.size)]
    rows = [lengths[positions[0]] if positions else 0 for positions in here]
    new = plan.num_valid(step)  # in rank order; batches behind it are repeated
    valid = tuple(number if one < new else 0 for one, number in enumerate(rows))
    return Share(
        num_rows=rows[rank],
        max_rows=max(rows),
        num_valid=sum(valid),
        valid_by_rank=valid,
        own_valid=valid[rank],
        is_last=step == plan.num_batches(rank) - 1,
        consumed=ends[plan.consumed(step) - 1],
    )


def _planned_pass(
    loader: DataLoader[T],
    batches: Batches,
    plan: EpochPlan,
    rank: int,
    take: Take,
    key: tuple[int, int],
) -> Pass[T]:
    if isinstance(loader.dataset, Seeded):
        batches.begin(lambda: batches_of(plan, rank, take, key))
    else:
        batches.begin(lambda: _lists_of(plan, rank, take))
    counts = tuple(plan.num_batches(one) for one in range(plan.size))
    share_at = functools.partial(share_of, plan, rank=rank)
    return Pass(counts, zip(loader, shares_of(plan, rank), strict=True), share_at=share_at)


def batches_of(plan: EpochPlan, rank: int, take: Take, key: tuple[int, int]) -> Iterator[Keyed]:
    """Give the batches of ``rank``, as lists of what ``take`` gives for their positions."""
    position = plan.start + rank * plan.rank_batch
    for batch in _lists_of(plan, rank, take):
        yield Keyed(batch, (*key, position))
        position += plan.global_batch


def _lists_of(plan: EpochPlan, rank: int, take: Take) -> Iterator[list[Any]]:
    """Give the batches, and nothing with them.

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
    """Indices of one batch, with what its randomness in a worker is derived from."""

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
        """Give these from the next pass on."""
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return self._make()


class Seeded:
    """A dataset whose workers draw the same random numbers for a batch, whichever of them reads it.

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
        """Seed the worker for this batch, and ask for it where torch makes none of samples."""
        if get_worker_info() is not None:
            seed_worker(indices.key)
        return self._dataset[indices[0] if self._one else list(indices)]

    def __getitems__(self, indices: Keyed) -> Any:
        """Seed the worker for this batch, and read it as torch would."""
        if get_worker_info() is not None:
            seed_worker(indices.key)
        read = getattr(self._dataset, "__getitems__", None)
        return read(list(indices)) if read else [self._dataset[index] for index in indices]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)  # as a worker_init_fn does


def seed_worker(key: tuple[int, ...]) -> None:
    """Seed all randomness of this worker process from ``key``."""
    seed = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")
    random.seed(seed)
    # Not torch.manual_seed, which leaves a note for each device that is not initialised yet, at each call.
    torch.default_generator.manual_seed(seed >> 1)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed >> 32)


def rebuild(source: DataLoader[T], batches: Any) -> DataLoader[T]:
    """Make a loader like ``source`` that reads ``batches``.

    Args:
        source: The user's loader.
        batches: What it takes for a batch sampler.
    """
    if cast("Any", source).batch_sampler is None:
        dataset: Any = Seeded(source.dataset, one=batch_sampler_of(source) is None)
        return remake(source, dataset, sampler=batches)
    dataset = source.dataset if source.num_workers == 0 else Seeded(source.dataset)
    return remake(source, dataset, batch_sampler=batches)


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
    # How a class of the user's own is made, nobody knows: a copy keeps what it has.
    batching = {"batch_size": None, "drop_last": False, "batch_sampler": None}
    return twin_of(source, **{"dataset": dataset, **batching, **changes})


def twin_of(source: DataLoader[Any], **changes: Any) -> DataLoader[Any]:
    """Copy a loader and change attributes of the copy, which torch lets nobody change in a loader."""
    twin = copy.copy(source)
    vars(twin).update({"_iterator": None, **changes})
    return twin


def batch_sampler_of(source: DataLoader[Any]) -> Any:
    """Give what draws the batches of ``source``, None where its items are batches.

    With ``batch_size=None`` it may stand in the sampler's place: the dataset is asked for a list of indices.
    """
    loader = cast("Any", source)
    if loader.batch_sampler is None and isinstance(loader.sampler, BatchSampler):
        return loader.sampler
    return loader.batch_sampler


def sampler_of(source: DataLoader[Any]) -> Any:
    """Give what draws the samples of ``source``.

    That of its batch sampler, where it has one: a loader that was given a batch sampler has another sampler,
    which nobody asked for, beside.
    """
    return getattr(batch_sampler_of(source), "sampler", cast("Any", source).sampler)


def options_of(source: DataLoader[Any]) -> dict[str, Any]:
    """Give what ``source`` was made with, dataset and batching apart."""
    options: dict[str, Any] = {name: getattr(source, name) for name in _OPTIONS if hasattr(source, name)}
    if source.num_workers > 0:
        options["prefetch_factor"] = source.prefetch_factor
    return options
