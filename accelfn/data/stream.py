"""Read a stream, that is an iterable dataset: all ranks the same one, or each rank its own shards."""

from __future__ import annotations

import functools
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sized
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accelfn.context import Context
from accelfn.data.cut import Cut, Piece, cut_stream
from accelfn.data.own import rows_of
from accelfn.data.plan import EpochPlan, rows_in
from accelfn.data.reading import EVENED, EVENED_OR_DROPPED, Pass, Share, share_of
from accelfn.data.sampled import remake, seed_worker
from accelfn.data.sources import count_shards, take_shards
from accelfn.errors import ConfigurationError

__all__ = (
    "CollatePiece",
    "GroupedStream",
    "Settings",
    "StreamReader",
    "length_of",
    "pass_of",
    "read_stream",
    "tell",
)

T = TypeVar("T")


class StreamReader(Generic[T]):
    """Reads the stream in groups, a piece of each for every rank, or this rank's own stream.

    ``start`` and ``consumed`` count samples of the stream; of an own stream, those of this rank.
    """

    def __init__(
        self,
        ctx: Context,
        source: DataLoader[T],
        dataset: Any,
        cut: Cut,
        is_own: bool,
        seed: int,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> None:
        """Read ``dataset``, as it is in ``source`` or some shards of it.

        Args:
            ctx: The world.
            source: The user's loader.
            dataset: What is read.
            cut: How it is cut.
            is_own: No other rank reads the same.
            seed: Of randomness in workers.
            collate: Makes a batch of the samples of a piece; None: as ``source`` does.
        """
        self.seed = seed
        self._ctx = ctx
        self._dataset = dataset
        self._cut = cut
        self._is_own = is_own
        self._is_whole = source.batch_size is None and collate is None
        self._num_workers = source.num_workers
        self.length: int | None = self._length()
        self.batch_size: int | None = None
        if not self._is_whole:
            self.batch_size = cut.rows * (ctx.num_processes if is_own else cut.size)
        # In shared memory for workers that outlive a pass: they hear of the next one by it.
        self._place = torch.zeros(3, dtype=torch.int64)
        if source.persistent_workers:
            self._place.share_memory_()
        rank = ctx.rank if is_own else None
        self._loader: DataLoader[Piece] = remake(
            source,
            GroupedStream(dataset, cut, self._place, rank),
            collate_fn=CollatePiece(collate or cast("Any", source).collate_fn, self._is_whole),
        )

    def plan(self, start: int) -> EpochPlan | None:
        """Plan the samples from ``start`` on, where the stream has a length.

        Raises:
            ValueError: ``start`` is behind its end.
        """
        number = self._length()
        return None if number is None else self._cut.plan(number, start)

    def count(self, start: int) -> int | None:
        """Count this rank's batches from ``start`` on, where the stream has a length."""
        plan = self.plan(start)
        return None if plan is None else plan.num_batches(self._cut.rank)

    def begin(self, epoch: int, start: int) -> Pass[T]:
        """Begin a pass."""
        tell(self._dataset, epoch)  # shards are another object than the dataset that the loader tells
        self._place.copy_(torch.tensor([self.seed, epoch, start]))
        self.length = self._length()
        plan = self.plan(start)
        batches = self._read(start, plan)
        if self._is_own:
            return Pass(None, batches)
        return pass_of(batches, self._cut, plan, self._is_whole)

    def _read(self, start: int, plan: EpochPlan | None) -> Iterator[tuple[T, Share]]:
        # Several workers have read from the stream's start, and say of each group how long it was.
        consumed = 0 if self._num_workers > 1 else start
        step = 0
        for piece in self._loader:
            before, consumed = consumed, consumed + piece.num_valid
            if before < start < consumed:
                raise ConfigurationError(
                    f"the pass is to go on at sample {start}, which is inside of a group that one of "
                    f"{self._num_workers} workers reads: samples {before} to {consumed - 1}. Go on with the "
                    "same batch size and as many ranks and workers as before, or with num_workers=1."
                )
            if plan is not None and consumed > plan.num_samples:
                raise self._wrong_length(plan, "gives more")
            if plan is not None and piece.at_end and consumed < plan.num_samples:
                raise self._wrong_length(plan, f"ended after {consumed}")
            if consumed <= start or not piece.num_rows:
                continue
            yield cast("T", piece.content), self._share(piece, step, plan, consumed)
            step += 1
        if plan is not None and step < plan.num_batches(self._cut.rank):
            raise self._wrong_length(plan, f"ended after {consumed}")
        if consumed < start:
            raise ValueError(
                f"the pass is to go on at sample {start}, and the stream ended after {consumed}. Is it the "
                "stream that the position was taken from?"
            )

    def _share(self, piece: Piece, step: int, plan: EpochPlan | None, consumed: int) -> Share:
        cut = self._cut
        # Where ranks may end apart, those that have no piece of the last group don't learn of it.
        planned = plan is not None or cut.in_step
        is_last = None
        if plan is not None:
            is_last = step == plan.num_batches(cut.rank) - 1
        elif piece.at_end and self._num_workers <= 1:
            is_last = True
        own_valid = max(0, min(cut.rows, piece.num_valid - cut.rank * cut.rows))
        if self._is_whole:  # how many rows a batch of the user's own has shows in the batch only
            rows = rows_of(piece.content)
            share = Share(num_rows=rows, own_valid=None if own_valid else 0)
        elif self._is_own:
            share = Share(num_rows=piece.num_rows)
        else:
            share = Share(
                num_rows=piece.num_rows,
                max_rows=cut.rows if cut.even else min(cut.rows, piece.num_valid),
                num_valid=piece.num_valid if planned else None,
                own_valid=own_valid,
            )
        if self._is_own:  # that this rank has no more doesn't say that of the others
            is_last = None
        return share._replace(is_last=is_last, consumed=consumed)

    def _length(self) -> int | None:
        """Count the samples that all ranks read."""
        return None if self._is_own else length_of(self._dataset, self._num_workers)

    def _wrong_length(self, plan: EpochPlan, what: str) -> ValueError:
        return ValueError(
            f"the dataset {type(self._dataset).__name__} has a length of {plan.num_samples}, and {what}. Its "
            "__len__ must count what its __iter__ gives; leave it out where nobody knows."
        )


def read_stream(
    ctx: Context, source: DataLoader[T], by_source: bool, agree: Callable[[str], int]
) -> StreamReader[T]:
    """Choose how ``source``, a loader over an iterable dataset, is shared out.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        source: The user's loader.
        by_source: Each rank must get its own shards; otherwise it does where there are enough.
        agree: Compares what all ranks are about to read, and gives them one seed.

    Raises:
        ConfigurationError: Too few shards, the dataset was split already, the batch can't be split, or the
            workers don't keep to an order.
    """
    rank, size = ctx.rank, ctx.num_processes
    rows = rows_in(ctx.loading, size, source.batch_size)
    dataset: Any = source.dataset
    num_shards = count_shards(dataset)
    if by_source and (num_shards is None or num_shards < size):
        have = "offers none" if num_shards is None else f"has {num_shards}"
        raise ConfigurationError(
            f'sharding="by_source" gives each of {size} ranks its own shards of the dataset, and '
            f"{type(dataset).__name__} {have}. It needs num_shards, at least as many as ranks, and "
            'shard(num_shards, index); otherwise use sharding="global".'
        )
    is_own = size > 1 and num_shards is not None and num_shards >= size
    drop_last = source.drop_last
    if is_own:
        seed = agree(f"{num_shards} shards, {_batches_of(rows, source)}")
        cut = Cut(rows=rows, drop_last=drop_last)
        return StreamReader(ctx, source, take_shards(dataset, rank, size), cut, True, seed)
    if size > 1 and source.num_workers > 1 and not getattr(source, "in_order", True):
        raise ConfigurationError(
            "in_order=False hands out batches as workers come by them, and ranks that read one stream must "
            "hand them out in the same order. Use in_order=True, or num_workers=1."
        )
    seed = agree(f"a stream of {length_of(dataset)} samples, {_batches_of(rows, source)}")
    # A class can be counted like any object: the first such reader of this world says it.
    if size > 1 and ctx.collectives.journal.count(StreamReader) == 1 and ctx.is_main_process:
        warnings.warn(
            f"each of {size} ranks reads the whole stream and keeps its part, so the data is read {size} "
            f"times. A dataset that offers num_shards, at least {size}, and shard(num_shards, index) is read "
            'once; one that gives each rank its own part goes with sharding="already_sharded".',
            stacklevel=4,
        )
    even = ctx.loading.even_batches and size > 1  # alone, there is nobody to keep in step with
    cut = Cut(rows=rows, rank=rank, size=size, even=even, drop_last=drop_last)
    return StreamReader(ctx, source, dataset, cut, False, seed)


def _batches_of(rows: int, source: DataLoader[Any]) -> str:
    kind = "batches as they are" if source.batch_size is None else f"batches of {rows} a rank"
    last = ", the last one dropped" if source.drop_last else ""
    return f"{kind}{last}, by {source.num_workers} workers"


def pass_of(batches: Iterator[tuple[T, Share]], cut: Cut, plan: EpochPlan | None, is_whole: bool) -> Pass[T]:
    """Make a pass of the batches of a stream that all ranks read.

    Args:
        batches: Of the rank of ``cut``.
        cut: How the stream is cut.
        plan: Where the stream has a length.
        is_whole: Each sample is a batch, whose rows nobody has planned.
    """
    share_at = None if plan is None or is_whole else functools.partial(share_of, plan, rank=cut.rank)
    counts = None if plan is None else plan.counts
    evened_by = EVENED if is_whole else EVENED_OR_DROPPED
    return Pass(counts, batches, in_step=cut.in_step, share_at=share_at, evened_by=evened_by)


def length_of(dataset: Any, num_workers: int = 0) -> int | None:
    """Count the samples of a stream; None where nobody can say: several workers may each cut theirs short."""
    if num_workers > 1:
        return None
    try:
        return len(cast("Sized", dataset))
    except (TypeError, NotImplementedError):
        return None


def tell(dataset: Any, epoch: int) -> None:
    """Tell a dataset the epoch, if it asks for it."""
    set_epoch = getattr(dataset, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


class GroupedStream(IterableDataset[Piece]):
    """The pieces of one rank, as a dataset of the user's loader.

    For everything else it is the user's dataset: a ``worker_init_fn`` reads and sets attributes of that.
    """

    def __init__(self, dataset: Any, cut: Cut, place: torch.Tensor, source: int | None):
        """Read ``dataset``.

        Args:
            dataset: The user's.
            cut: How it is cut.
            place: ``(3,)`` int64: seed, epoch and sample to start at, as of the next iteration.
            source: Number of the rank, where it alone reads this stream.
        """
        vars(self)["_stream"] = Settings(dataset, cut, place, source)

    def __len__(self) -> int:
        return len(self._stream.dataset)

    def __iter__(self) -> Iterator[Piece]:
        dataset, cut, place, source = self._stream
        seed, epoch, start = (int(number) for number in place)
        worker = get_worker_info()
        if worker is None:
            return cut_stream(iter(dataset), cut, start)
        if place.is_shared():  # this copy has outlived the pass that it was made for, or may
            tell(dataset, epoch)
        # The same on all ranks that read the stream: it may be shuffled by what is drawn while it is read.
        key = (seed, epoch, worker.id, *(() if source is None else (source,)))
        seed_worker(key)
        num_passed = 0
        if worker.num_workers > 1:  # the groups of all workers take turns; whoever puts them together counts
            num_passed = max(0, -((worker.id - start // cut.group) // worker.num_workers))
            start = 0
        pieces = cut_stream(iter(dataset), cut, start, num_passed)
        return (piece._replace(key=(*key, *piece.key)) for piece in pieces)

    def __getattr__(self, name: str) -> Any:
        if name == "_stream" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._stream.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._stream.dataset, name, value)


class Settings(NamedTuple):
    """What a :class:`GroupedStream` holds."""

    dataset: Any
    cut: Cut
    place: torch.Tensor
    source: int | None


class CollatePiece:
    """Collates the samples of a piece, and leaves the rest of it as it is."""

    def __init__(self, collate: Callable[[Any], Any], is_whole: bool):
        """Collate with ``collate``: a list of samples, or each sample as it is when ``is_whole``."""
        self._collate = collate
        self._is_whole = is_whole

    def __call__(self, piece: Piece) -> Piece:
        """Collate."""
        if not piece.num_rows:
            return piece
        samples = piece.content[0] if self._is_whole else piece.content
        if get_worker_info() is None:  # the program's own randomness is its own
            return piece._replace(content=self._collate(samples))
        # Ranks collate different samples, so they draw apart, and what they draw must not move the stream.
        before = _random_state()
        seed_worker(piece.key)
        batch = self._collate(samples)
        _set_random_state(before)
        return piece._replace(content=batch, key=())


def _random_state() -> tuple[Any, torch.Tensor, Any]:
    numpy = sys.modules.get("numpy")
    state = None if numpy is None else numpy.random.get_state()
    return random.getstate(), torch.default_generator.get_state(), state


def _set_random_state(states: tuple[Any, torch.Tensor, Any]) -> None:
    random.setstate(states[0])
    torch.default_generator.set_state(states[1])
    numpy = sys.modules.get("numpy")
    if numpy is not None and states[2] is not None:
        numpy.random.set_state(states[2])
