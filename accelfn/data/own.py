"""Read data that was sharded already: every rank its own loader."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, TypeVar, cast

from torch.utils.data import DataLoader, IterableDataset

from accelfn.comm import Call, gather_bytes
from accelfn.context import Context
from accelfn.data.order import tell
from accelfn.data.reading import BatchInfo, EpochPass, Reader, ReadSettings, UserState, rows_of
from accelfn.data.rebuild import batch_sampler_of, is_stateful, num_workers_of, remake, twin_of
from accelfn.data.states import State, StatefulIterator, begun_once, restore_sampler, sampler_state
from accelfn.data.workers import begin_reading

__all__ = ("Followed", "OwnReader")

T = TypeVar("T")


class OwnReader(Reader[T]):
    """Hands out what the user's loader gives."""

    def __init__(self, ctx: Context, source: DataLoader[T], seed: int) -> None:
        """Read ``source``."""
        self.seed = seed
        self.even_batches: bool | None = False  # each rank has what it was given
        self._ctx = ctx = ctx.along("dp")
        self._sampler: Any = batch_sampler_of(source)
        self._source: Any = source
        self._followed: Followed | None = None
        self._is_stateful = False
        self._to_end: Iterator[Any] | None = None  # of a pass that has given all its batches
        if isinstance(source.dataset, IterableDataset):
            self._sampler = None
            self._is_stateful = source.num_workers > 0 and is_stateful(ctx, source)
            batching = {"batch_size": source.batch_size, "drop_last": source.drop_last}
            if source.num_workers == 0:
                self._followed = Followed(source.dataset)
                self._source = twin_of(source, dataset=self._followed)
            elif self._is_stateful:
                self._source = remake(source, source.dataset, stateful=True, **batching)
        elif self._sampler is None:
            self._sampler = cast("Any", source).sampler
        num_workers = source.num_workers if isinstance(source.dataset, IterableDataset) else None
        self.setting: ReadSettings = ReadSettings(
            num_workers=num_workers, num_processes=ctx.num_processes, rank=ctx.rank
        )
        size = getattr(source, "batch_size", None)
        self.batch_size: int | None = None if size is None else size * ctx.num_processes

    def count(self) -> int | None:
        """Count this rank's batches, where the loader has a length."""
        try:
            return len(cast("Sized", self._source))
        except TypeError:
            return None

    def can_recall(self, stream: State) -> bool:
        """Return whether the state of a stream is of this kind of loader."""
        if self._is_stateful:
            return num_workers_of(stream) == self._source.num_workers
        return self._followed is not None and self._followed.follower.can_take(stream)

    def rest(self) -> UserState:
        """Return the states between passes."""
        sampler = None if self._sampler is None else sampler_state(self._sampler)
        return UserState(sampler, None if self._followed is None else self._followed.follower.rest())

    def begin(self, epoch: int, start: int) -> EpochPass[T]:
        """Begin a pass; what comes before ``start``, here a number of batches, is read and thrown away."""
        if self._followed is not None:
            self._followed.follower.rewind()
            tell(self._followed, epoch)
        number = self.count()
        own = b"" if number is None else str(max(0, number - start)).encode()
        blobs = (
            [own] if self._ctx.num_processes == 1 else gather_bytes(self._ctx, Call("a pass over data"), own)
        )
        counts = tuple(int(blob) for blob in blobs) if all(blobs) else None
        recalled, at = self._take_recalled()
        if self._sampler is not None and recalled.sampler is not None:
            restore_sampler(self._sampler, recalled.sampler)
        before = None if self._sampler is None else sampler_state(self._sampler)
        stream = recalled.stream if recalled.stream is not None and self.can_recall(recalled.stream) else None
        return EpochPass(counts, self._read(start, stream, at), sampler=before, is_own=True)

    def finish(self) -> None:
        """Let the stream see its end, which a loop that knows how many batches there are doesn't ask for."""
        if self._to_end is not None:
            next(self._to_end, None)
            self._to_end = None

    def _read(self, start: int, stream: State | None, at: int) -> Iterator[tuple[T, BatchInfo]]:
        begin = 0 if stream is None else at
        if self._followed is not None:
            self._followed.recalled = stream
        elif stream is not None:
            self._source.load_state_dict(stream)
        batches: Any = begin_reading(self._source, goes_on=start > 0)
        total = self.count()
        for number, batch in enumerate(batches, begin + 1):
            if number <= start:
                continue
            state: State | None = None
            self._to_end = None
            if self._followed is not None:
                state = self._followed.state()
                self._to_end = batches if state is not None and number == total else None
            elif self._is_stateful:
                state = batches.state_dict()
            yield batch, BatchInfo(num_rows=rows_of(batch), consumed=number, stream=state)


class Followed(IterableDataset[Any]):
    """A stream that is read in this process, with its state. For everything else it is that stream.

    Attributes:
        follower: Goes through it.
        recalled: Where the next pass begins; None: at its start.
    """

    def __init__(self, dataset: Any) -> None:
        """Read ``dataset``."""
        self.follower: StatefulIterator = StatefulIterator(dataset)
        self.recalled: State | None = None
        self._inner = dataset
        self._has_ended = False

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        recalled, self.recalled, self._has_ended = self.recalled, None, False
        yield from begun_once(self.follower.begin(recalled))
        self._has_ended = True
        self.follower.end()

    def state(self) -> State | None:
        """Return where the pass is."""
        return self.follower.state(self._has_ended)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("follower", "recalled"):
            raise AttributeError(name)
        return getattr(self._inner, name)
