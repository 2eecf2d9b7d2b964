"""Cut a stream of samples into groups, and groups into the pieces that ranks read."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import IterableDataset, get_worker_info

from accelfn.data.draws import random_states, restore_random_states, seed_from
from accelfn.data.order import tell
from accelfn.data.plan import EpochPlan
from accelfn.data.states import State, StatefulIterator, begun_once

__all__ = ("CollatePiece", "FollowedPieces", "GroupedStream", "Piece", "StreamPlan", "cut_stream")


class StreamPlan(NamedTuple):
    """How a stream is cut.

    Attributes:
        rows: Samples in a piece.
        rank: Which piece of a group is this rank's.
        size: Pieces in a group.
        even: Complete the last group from the start of the stream.
        drop_last: Leave out the last group when it isn't full.
    """

    rows: int
    rank: int = 0
    size: int = 1
    even: bool = False
    drop_last: bool = False

    @property
    def group(self) -> int:
        """Samples in a full group."""
        return self.rows * self.size

    @property
    def num_kept(self) -> int:
        """Samples from the start of the stream that may complete this rank's last piece."""
        return (self.rank + 1) * self.rows - 1 if self.even and not self.drop_last else 0

    @property
    def in_step(self) -> bool:
        """All ranks have equally many pieces."""
        return self.even or self.drop_last or self.size == 1

    def plan(self, number: int, start: int = 0) -> EpochPlan:
        """Plan a stream of ``number`` samples from ``start`` on.

        Raises:
            ValueError: ``start`` is behind its end.
        """
        if start > number:
            raise ValueError(f"the pass is to go on at sample {start}, and the dataset has only {number}.")
        return EpochPlan(
            num_samples=number,
            rank_batch=self.rows,
            size=self.size,
            even=self.even,
            drop_last=self.drop_last,
            start=start,
        )


class Piece(NamedTuple):
    """What one rank reads of a group.

    Attributes:
        content: List of samples; once it is collated, the batch; None of a group of which this rank reads
            nothing.
        num_rows: Samples in it, padding included; 0 where it is no batch.
        num_valid: Samples of the group, over all ranks, that no earlier group has.
        at_end: The stream has ended inside of the group.
        key: What the randomness of its collation is derived from: rank, and position of the group.
        stream: State of the stream behind the group.
    """

    content: Any
    num_rows: int
    num_valid: int
    at_end: bool
    key: tuple[int, ...] = ()
    stream: Any = None


def cut_stream(
    samples: Iterator[Any],
    cut: StreamPlan,
    start: int = 0,
    begin: int = 0,
    read_first: Callable[[int], list[Any]] | None = None,
) -> Iterator[Piece]:
    """Return the pieces of one rank, each as soon as its group is complete.

    Only the samples that may complete the last group are held, apart from the current group.

    Args:
        samples: The stream, from sample ``begin`` on.
        cut: How it is cut.
        start: Samples that are read and thrown away before the first group.
        begin: Where ``samples`` begin.
        read_first: Reads the first samples of the stream again; needed where ``samples`` begin later.

    Raises:
        ValueError: The stream ends before ``start``.

    >>> [piece.content for piece in cut_stream(iter(range(9)), StreamPlan(rows=2, rank=1, size=2, even=True))]
    [[2, 3], [6, 7], [1, 2]]
    """
    samples = begun_once(samples)
    num_kept = 0 if begin else cut.num_kept
    first = [_copied(sample) for sample in islice(samples, min(start, num_kept))]
    position = begin + len(first) + sum(1 for _ in islice(samples, start - begin - len(first)))
    if position < start:
        raise ValueError(
            f"the pass is to go on at sample {start}, and the stream ended after {position}. Is it the "
            "stream that the position was taken from?"
        )
    own, end = cut.rank * cut.rows, (cut.rank + 1) * cut.rows
    while True:
        group = list(islice(samples, cut.group))
        number = len(group)
        at_end = number < cut.group
        if not number or (at_end and cut.drop_last):
            return
        first += map(_copied, group[: num_kept - len(first)])
        if at_end and cut.even and number < end:
            if begin and read_first is not None:
                first = read_first(cut.num_kept)
            group += [_copied(first[place % len(first)]) for place in range(end - number)]
        content = group[own:end]
        yield Piece(content or None, len(content), number, at_end, (cut.rank, position))
        if at_end:
            return
        position += number


def _copied(sample: Any) -> Any:
    """Copy what a collate function may take things out of: a sample that is repeated is collated twice."""
    if isinstance(sample, (MutableMapping, MutableSequence)):
        return copy.copy(cast("Any", sample))
    return sample


class GroupedStream(IterableDataset[Piece]):
    """The pieces of one rank, as a dataset of the user's loader.

    For everything else it is the user's dataset: a ``worker_init_fn`` reads and sets attributes of that.
    """

    def __init__(
        self,
        dataset: Any,
        cut: StreamPlan,
        place: torch.Tensor,
        source: int | None,
        follower: StatefulIterator | None = None,
    ) -> None:
        """Read ``dataset``.

        Args:
            dataset: The user's.
            cut: How it is cut.
            place: ``(3,)`` int64: seed, epoch and sample to start at, as of the next iteration.
            source: Number of the rank, where it alone reads this stream.
            follower: Goes through the dataset where its state is to be known.
        """
        vars(self).update(_dataset=dataset, _parts=(cut, place, source, follower), _recalled=[])

    def recall(self, state: State | None, at: int) -> None:
        """Let the next iteration in this process begin where ``state`` was taken, at sample ``at``."""
        self._recalled[:] = [] if state is None else [(state, at)]

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[Piece]:
        dataset = self._dataset
        cut, place, source, follower = self._parts
        seed, epoch, start = (int(number) for number in place)
        worker = get_worker_info()
        if place.is_shared():  # this copy has outlived the pass that it was made for, or may
            tell(dataset, epoch)
        # The same on all ranks that read the stream: it may be shuffled by what is drawn while it is read.
        key = (seed, epoch, 0 if worker is None else worker.id, *(() if source is None else (source,)))
        if worker is None:
            state, at = self._recalled.pop() if self._recalled else (None, 0)
            return FollowedPieces(cast("StatefulIterator", follower), cut, start, key, state, at)
        if worker.num_workers > 1:  # the groups of all workers take turns; whoever puts them together counts
            start = 0
        if follower is not None:
            return FollowedPieces(follower, cut, start, key)
        seed_from(key)
        pieces = cut_stream(iter(dataset), cut, start)
        return (piece._replace(key=(*key, *piece.key)) for piece in pieces)

    def __getattr__(self, name: str) -> Any:
        # States are asked of what it gives: that knows the place too.
        if name in ("_dataset", "state_dict", "load_state_dict") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)


class FollowedPieces:
    """The pieces of a pass, each with the state of the stream behind its group.

    In a worker, torchdata asks for the state and takes it up there.
    """

    def __init__(
        self,
        follower: StatefulIterator,
        cut: StreamPlan,
        start: int,
        key: tuple[int, ...],
        state: State | None = None,
        begin: int = 0,
    ) -> None:
        """Cut what ``follower`` goes through.

        Args:
            follower: Of the dataset.
            cut: How it is cut.
            start: Sample to start at.
            key: What its randomness is derived from.
            state: Where the stream begins; None at its start.
            begin: Number of the sample there.
        """
        self._follower, self._cut, self._key = follower, cut, key
        self._state, self._begin = state, begin
        self._position = start
        self._pieces: Iterator[Piece] | None = None

    def __iter__(self) -> FollowedPieces:
        return self

    def __next__(self) -> Piece:
        key = self._key
        if self._pieces is None:
            seed_from(key)
            samples = self._follower.begin(self._state)
            read_first = functools.partial(_read_first, self._follower, key)  # a method would be a cycle
            self._pieces = cut_stream(samples, self._cut, self._position, self._begin, read_first)
        if self._follower.is_stateful:
            # By the place, so that whoever goes on there draws the same. Others read from the start again.
            seed_from((*key, self._position))
        piece = next(self._pieces, None)
        if piece is None:
            self._follower.end()
            raise StopIteration
        self._position += piece.num_valid
        self._state = self._follower.state(piece.at_end)
        # In a worker, the state is asked for; what is sent along would be sent with each batch.
        stream = self._state if get_worker_info() is None else None
        return piece._replace(key=(*key, *piece.key), stream=stream)

    def state_dict(self) -> dict[str, Any]:
        """Return where the pieces of a worker are."""
        return {"position": self._position, "stream": self._state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there. Before the first piece."""
        self._position, self._state = int(state["position"]), state["stream"]
        self._begin = 0 if self._state is None else self._position


def _read_first(follower: StatefulIterator, key: tuple[int, ...], number: int) -> list[Any]:
    seed_from((*key, 0))  # as the first group was read
    return follower.first(number)


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
        # Ranks collate different samples, so they draw apart, and what they draw must not move the stream.
        before = random_states()
        seed_from(piece.key)
        batch = self._collate(samples)
        restore_random_states(before)
        return piece._replace(content=batch, key=())
