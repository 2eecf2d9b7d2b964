"""Read data that is already sharded: every rank reads its own loader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from accelfn.comm import Call, gather_bytes
from accelfn.context import Context
from accelfn.data.order import set_epoch_of
from accelfn.data.plan import BatchInfo
from accelfn.data.reader import EpochPass, PassStart, Reader, ReadSettings, UserState, length_of, rows_of
from accelfn.data.rebuild import Proxy, batch_sampler_of, follow_epochs, keeps_states, remake, twin_of
from accelfn.data.states import State, TrackedStream, iterate_once, restore_sampler, sampler_state
from accelfn.data.workers import begin_reading

__all__ = ("PreshardedReader",)

T = TypeVar("T")


def _known_counts(loader: DataLoader[Any]) -> tuple[int, ...] | None:
    """Return each rank's number of batches, if the batch sampler has it as ``counts_by_rank``."""
    return getattr(batch_sampler_of(loader), "counts_by_rank", None)


class PreshardedReader(Reader[T]):
    """Yields the batches of the user's loader. ``start`` and ``consumed`` count batches."""

    def __init__(self, ctx: Context, source: DataLoader[T]) -> None:
        """Read ``source``."""
        known = _known_counts(source)  # never compared later
        self.what: str = "already sharded" if known is None else f"already sharded: {sum(known)} batches"
        self.even_batches: bool | None = False
        self._ctx = ctx = ctx.along("dp")
        self._epoch = torch.zeros((), dtype=torch.int64, device="cpu")
        followed = follow_epochs(source, self._epoch)
        self._source: Any = source if followed is source.dataset else twin_of(source, dataset=followed)
        self._sampler: Any = None
        self._tracked: TrackedStream | None = None
        self._tracked_dataset: _TrackedDataset | None = None
        if isinstance(source.dataset, IterableDataset):
            self._tracked = TrackedStream(source.dataset, source.num_workers, keeps_states(ctx, source))
            if source.num_workers == 0:
                self._tracked_dataset = _TrackedDataset(self._tracked)
                self._source = twin_of(source, dataset=self._tracked_dataset)
            elif self._tracked.of_workers:
                batching = {"batch_size": source.batch_size, "drop_last": source.drop_last}
                self._source = remake(source, followed, stateful=True, **batching)
        else:
            batching = batch_sampler_of(source)  # may have no length, so its truth value isn't asked for
            self._sampler = cast("Any", source).sampler if batching is None else batching
        num_workers = None if self._tracked is None else source.num_workers
        self.settings: ReadSettings = ReadSettings(
            num_workers=num_workers, num_processes=ctx.num_processes, rank=ctx.rank
        )
        size = getattr(source, "batch_size", None)
        self.batch_size: int | None = None if size is None else size * ctx.num_processes

    def count(self) -> int | None:
        """Count this rank's batches, if the loader has a length."""
        return length_of(self._source)

    def _number(self) -> int | None:
        """Return the number of batches; None if unknown: each worker of a stream may end its part early."""
        return None if self._tracked is not None and self._source.num_workers > 1 else self.count()

    def can_restore(self, stream: State) -> bool:
        """Return whether a stream's state belongs to this kind of loader."""
        return self._tracked is not None and self._tracked.can_restore(stream)

    def idle_state(self) -> UserState:
        """Return the states between passes."""
        sampler = None if self._sampler is None else sampler_state(self._sampler)
        return UserState(sampler, None if self._tracked is None else self._tracked.idle_state())

    def begin(self, at: PassStart) -> EpochPass[T]:
        """Begin a pass; batches before its start are read and dropped."""
        self._epoch.fill_(at.epoch)
        if self._tracked is not None and self._tracked_dataset is not None:
            self._tracked.rewind()
            set_epoch_of(self._tracked_dataset, at.epoch)
        counts = self._counts(at.sample)
        if self._sampler is not None and at.states.sampler is not None:
            restore_sampler(self._sampler, at.states.sampler)
        before = None if self._sampler is None else sampler_state(self._sampler)
        batches = self._read(at.sample, at.states.stream, at.states_at)
        return EpochPass(counts, batches, sampler=before, is_rank_local=True).after(at.num_skipped)

    def _counts(self, start: int) -> tuple[int, ...] | None:
        """Return each rank's number of batches from ``start`` on; exchanged, unless the sampler knows it."""
        number = self._number()
        known = _known_counts(self._source)
        if known is not None and known[self._ctx.rank] == number:
            return tuple(max(0, count - start) for count in known)
        message = b"" if number is None else str(max(0, number - start)).encode()
        messages = [message]
        if self._ctx.num_processes > 1:
            messages = gather_bytes(self._ctx, Call("a pass over data"), message)
        return tuple(int(message) for message in messages) if all(messages) else None

    def _read(self, start: int, stream: State | None, at: int) -> Iterator[tuple[T, BatchInfo]]:
        if self._tracked_dataset is not None:
            self._tracked_dataset.restored = stream
        elif stream is not None:
            self._source.load_state_dict(stream)
        batches: Any = begin_reading(self._source, is_resumed=start > 0)
        total = self._number()
        for number, batch in enumerate(batches, 1 if stream is None else at + 1):
            if number <= start:
                continue
            if total is not None and number > total:
                raise ValueError(
                    f"the loader has a length of {total} batches, but yields more. Its __len__ must return "
                    "what its __iter__ yields; omit __len__ if that is unknown."
                )
            state: State | None = None
            if self._tracked_dataset is not None:
                state = self._tracked_dataset.state()
            elif self._tracked is not None and self._tracked.of_workers:
                state = batches.state_dict()
            is_last = None if total is None else number == total
            yield batch, BatchInfo(rows_of(batch), is_last=is_last, consumed=number, stream=state)


class _TrackedDataset(Proxy, IterableDataset[Any]):
    """Stands in for a stream that this process reads, and knows its state.

    Attributes:
        tracked: The stream.
        restored: Where the next pass begins; None for its start.
    """

    tracked: TrackedStream
    restored: State | None
    _has_ended: bool

    def __init__(self, tracked: TrackedStream) -> None:
        super().__init__(tracked.dataset, tracked=tracked, restored=None, _has_ended=False)

    def __iter__(self) -> Iterator[Any]:
        restored, self.restored, self._has_ended = self.restored, None, False
        yield from iterate_once(self.tracked.begin(restored))
        self._has_ended = True
        self.tracked.end()

    def state(self) -> State | None:
        return self.tracked.state(self._has_ended)
