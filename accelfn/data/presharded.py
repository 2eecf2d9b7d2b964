"""Read data that was sharded already: every rank its own loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar, cast

from torch.utils.data import DataLoader, IterableDataset

from accelfn.comm import Call, gather_bytes
from accelfn.context import Context
from accelfn.data.order import tell
from accelfn.data.plan import BatchInfo
from accelfn.data.reader import EpochPass, Reader, ReadSettings, StreamStates, UserState, length_of, rows_of
from accelfn.data.rebuild import batch_sampler_of, remake, twin_of
from accelfn.data.states import State, StatefulIterator, begun_once, restore_sampler, sampler_state
from accelfn.data.workers import begin_reading

__all__ = ("OwnReader",)

T = TypeVar("T")


class OwnReader(Reader[T]):
    """Hands out what the user's loader gives. ``start`` and ``consumed`` count batches."""

    def __init__(self, ctx: Context, source: DataLoader[T], seed: int) -> None:
        """Read ``source``."""
        self.seed = seed
        self.even_batches: bool | None = False  # each rank has what it was given
        self._ctx = ctx = ctx.along("dp")
        self._source: Any = source
        self._sampler: Any = None
        self._states: StreamStates | None = None
        self._followed: _Followed | None = None
        self._to_end: Iterator[Any] | None = None  # of a pass that has given all its batches
        if isinstance(source.dataset, IterableDataset):
            self._states = StreamStates(ctx, source, source.dataset)
            if source.num_workers == 0:
                self._followed = _Followed(self._states.follower)
                self._source = twin_of(source, dataset=self._followed)
            elif self._states.of_workers:
                batching = {"batch_size": source.batch_size, "drop_last": source.drop_last}
                self._source = remake(source, source.dataset, stateful=True, **batching)
        else:
            self._sampler = batch_sampler_of(source) or cast("Any", source).sampler
        num_workers = None if self._states is None else source.num_workers
        self.settings: ReadSettings = ReadSettings(
            num_workers=num_workers, num_processes=ctx.num_processes, rank=ctx.rank
        )
        size = getattr(source, "batch_size", None)
        self.batch_size: int | None = None if size is None else size * ctx.num_processes

    def count(self) -> int | None:
        """Count this rank's batches, where the loader has a length."""
        return length_of(self._source)

    def can_recall(self, stream: State) -> bool:
        """Return whether the state of a stream is of this kind of loader."""
        return self._states is not None and self._states.can_recall(stream)

    def rest(self) -> UserState:
        """Return the states between passes."""
        sampler = None if self._sampler is None else sampler_state(self._sampler)
        return UserState(sampler, None if self._states is None else self._states.rest())

    def begin(self, epoch: int, start: int) -> EpochPass[T]:
        """Begin a pass; what comes before ``start`` is read and thrown away."""
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
        if self._followed is not None:
            self._followed.recalled = stream
        elif stream is not None:
            self._source.load_state_dict(stream)
        batches: Any = begin_reading(self._source, goes_on=start > 0)
        total = self.count()
        for number, batch in enumerate(batches, 1 if stream is None else at + 1):
            if number <= start:
                continue
            state: State | None = None
            self._to_end = None
            if self._followed is not None:
                state = self._followed.state()
                self._to_end = batches if state is not None and number == total else None
            elif self._states is not None and self._states.of_workers:
                state = batches.state_dict()
            yield batch, BatchInfo(num_rows=rows_of(batch), consumed=number, stream=state)


class _Followed(IterableDataset[Any]):
    """A stream that is read in this process, with its state. For everything else it is that stream.

    Attributes:
        follower: Goes through it.
        recalled: Where the next pass begins; None: at its start.
    """

    def __init__(self, follower: StatefulIterator) -> None:
        self.follower = follower
        self.recalled: State | None = None
        self._has_ended = False

    def __len__(self) -> int:
        return len(self.follower.dataset)

    def __iter__(self) -> Iterator[Any]:
        recalled, self.recalled, self._has_ended = self.recalled, None, False
        yield from begun_once(self.follower.begin(recalled))
        self._has_ended = True
        self.follower.end()

    def state(self) -> State | None:
        return self.follower.state(self._has_ended)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name in ("follower", "recalled"):
            raise AttributeError(name)
        return getattr(self.follower.dataset, name)
