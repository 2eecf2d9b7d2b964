"""Split a stream of samples into groups, and each group into the pieces that ranks read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import IterableDataset, get_worker_info

from accelfn.data.draws import restore_generators, save_generators, seed_from
from accelfn.data.order import set_epoch_of
from accelfn.data.plan import EpochPlan
from accelfn.data.rebuild import Proxy
from accelfn.data.states import State, TrackedStream, iterate_once

__all__ = ("CollatePiece", "GroupedStream", "Piece", "split_stream", "stream_ended")


class Piece(NamedTuple):
    """The part of a group that one rank reads.

    Attributes:
        content: The list of samples, and after collation the batch; None if this rank has no part.
        num_rows: Samples in the piece, padding included; 0 if this rank has no part.
        num_valid: Samples of the group over all ranks, without padding.
        at_end: The stream ended within the group.
        key: Seeds the random numbers of the collation: rank, and position of the group.
        stream: State of the stream after the group.
    """

    content: Any
    num_rows: int
    num_valid: int
    at_end: bool
    key: tuple[int, ...] = ()
    stream: Any = None


def split_stream(
    samples: Iterator[Any],
    plan: EpochPlan,
    rank: int,
    start: int = 0,
    begin: int = 0,
    read_first: Callable[[int], list[Any]] | None = None,
) -> Iterator[Piece]:
    """Yield the pieces of one rank, each as soon as its group is complete.

    Apart from the current group, only the samples that may pad the last group are kept.

    Args:
        samples: The stream, from sample ``begin`` on.
        plan: Divides each group among the ranks. Its number of samples isn't used.
        rank: The rank whose pieces are yielded.
        start: The sample at which the first group begins; samples before it are read and dropped.
        begin: Position of the first of ``samples`` in the stream.
        read_first: Reads the first samples of the stream again; required if ``begin`` isn't 0.

    Raises:
        ValueError: The stream ends before ``start``.

    >>> from accelfn.data.plan import plan_epoch
    >>> plan = plan_epoch(0, batch_size=2, size=2)
    >>> [piece.content for piece in split_stream(iter(range(9)), plan, rank=1)]
    [[2, 3], [6, 7], [1, 2]]
    """
    samples = iterate_once(samples)
    piece_start, piece_end = rank * plan.rank_batch, (rank + 1) * plan.rank_batch
    pads = plan.even and not plan.drop_last
    num_kept = piece_end - 1 if pads and not begin else 0
    first = [_copied(sample) for sample in islice(samples, min(start, num_kept))]
    position = begin + len(first) + sum(1 for _ in islice(samples, start - begin - len(first)))
    if position < start:
        raise stream_ended(start, position)
    while True:
        group = list(islice(samples, plan.global_batch))
        number = len(group)
        at_end = number < plan.global_batch
        if not number or (at_end and plan.drop_last):
            return
        first += map(_copied, group[: num_kept - len(first)])
        if at_end and pads and number < piece_end:
            if begin and read_first is not None:
                first = read_first(piece_end - 1)
            group += [_copied(first[index % len(first)]) for index in range(piece_end - number)]
        content = group[piece_start:piece_end]
        yield Piece(content or None, len(content), number, at_end, (rank, position))
        if at_end:
            return
        position += number


def stream_ended(start: int, end: int) -> ValueError:
    """Return the error for a stream that ends before the sample at which a pass resumes."""
    return ValueError(
        f"can't resume at sample {start}: the stream ended after {end} samples. Restore the state with the "
        "stream that it was taken from."
    )


def _copied(sample: Any) -> Any:
    """Copy a container, which a collate function may modify: padding collates a sample a second time."""
    if isinstance(sample, (MutableMapping, MutableSequence)):
        return copy.copy(cast("Any", sample))
    return sample


class GroupedStream(Proxy, IterableDataset[Piece]):
    """Presents the pieces of one rank as a dataset to the user's loader.

    All other attributes are those of the user's dataset, such as a ``worker_init_fn`` reads and sets.
    """

    def __init__(
        self,
        tracked: TrackedStream,
        plan: EpochPlan,
        rank: int,
        position: torch.Tensor,
        source: int | None,
    ) -> None:
        """Read a dataset.

        Args:
            tracked: The user's dataset.
            plan: Divides each group among the ranks.
            rank: The rank whose pieces are read.
            position: ``(3,)`` int64: seed, epoch and first sample of the next iteration.
            source: The rank, if it alone reads this stream.
        """
        parts = (tracked, plan, rank, position, source)
        super().__init__(tracked.dataset, _parts=parts, _restored=[])

    def restore(self, state: State | None, at: int) -> None:
        """Begin the next iteration in this process at ``state``, which is that of sample ``at``."""
        self._restored[:] = [] if state is None else [(state, at)]

    def __iter__(self) -> Iterator[Piece]:
        tracked, plan, rank, position, source = self._parts
        seed, epoch, start = (int(number) for number in position)
        worker = get_worker_info()
        if (
            position.is_shared()
        ):  # a persistent worker's copy, which doesn't see the epoch set in this process
            set_epoch_of(tracked.dataset, epoch)
        # The same on all ranks that read the stream: it may shuffle with numbers drawn while it is read.
        key = (seed, epoch, 0 if worker is None else worker.id, *(() if source is None else (source,)))
        if worker is not None and worker.num_workers > 1:
            start = 0  # workers' groups alternate, so the reader that merges them counts samples
        state, at = self._restored.pop() if worker is None and self._restored else (None, 0)
        return _Pieces(tracked, partial(split_stream, plan=plan, rank=rank), key, start, state, at)

    def __getattr__(self, name: str) -> Any:
        if name in ("state_dict", "load_state_dict"):  # the iterator has them, with the position
            raise AttributeError(name)
        return super().__getattr__(name)


class _Pieces:
    """Yields the pieces of a pass, each with the state of a stateful stream after its group.

    In a worker, torchdata reads and restores the state.
    """

    def __init__(
        self,
        tracked: TrackedStream,
        split: Callable[..., Iterator[Piece]],
        key: tuple[int, ...],
        start: int,
        state: State | None,
        begin: int,
    ) -> None:
        """Split the samples of ``tracked`` from ``start`` on; ``state`` is that of sample ``begin``."""
        self._tracked, self._split, self._key = tracked, split, key
        self._position, self._state, self._begin = start, state, begin
        self._pieces: Iterator[Piece] | None = None

    def __iter__(self) -> _Pieces:
        return self

    def __next__(self) -> Piece:
        key, tracked = self._key, self._tracked
        if self._pieces is None:
            seed_from(key)
            samples = tracked.begin(self._state)
            read_first = partial(_read_first, tracked, key)  # a bound method would be a reference cycle
            self._pieces = self._split(
                samples, start=self._position, begin=self._begin, read_first=read_first
            )
        if tracked.has_state:
            # By position, so that a resumed pass draws the same. Streams without a state are read again.
            seed_from((*key, self._position))
        piece = next(self._pieces, None)
        if piece is None:
            tracked.end()
            raise StopIteration
        self._position += piece.num_valid
        self._state = tracked.state(piece.at_end)
        # In a worker torchdata calls state_dict; a state in the piece would be sent with every batch.
        stream = self._state if get_worker_info() is None else None
        return piece._replace(key=(*key, *piece.key), stream=stream)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of a worker."""
        return {"position": self._position, "stream": self._state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at ``state``; before the first piece."""
        stream = state["stream"]
        self._position = int(state["position"])
        self._state = stream if stream is not None and self._tracked.accepts(stream) else None
        self._begin = 0 if self._state is None else self._position


def _read_first(tracked: TrackedStream, key: tuple[int, ...], number: int) -> list[Any]:
    seed_from((*key, 0))  # as for the first group
    return tracked.read_first(number)


class CollatePiece:
    """Collates the samples of a piece."""

    def __init__(self, collate: Callable[[Any], Any], unbatched: bool):
        """Pass ``collate`` the list of samples, or the single sample if ``unbatched``."""
        self._collate = collate
        self._unbatched = unbatched

    def __call__(self, piece: Piece) -> Piece:
        """Collate."""
        if not piece.num_rows:
            return piece
        samples = piece.content[0] if self._unbatched else piece.content
        # Ranks collate different samples: their draws differ, and must not advance the stream's generators.
        before = save_generators()
        seed_from(piece.key)
        batch = self._collate(samples)
        restore_generators(before)
        return piece._replace(content=batch, key=())
