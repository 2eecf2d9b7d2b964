"""The stream of one rank as a dataset of the user's loader: pieces of groups."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import IterableDataset, get_worker_info

from accelfn.data.cut import Piece, StreamPlan, cut_stream
from accelfn.data.draws import random_states, restore_random_states, seed_from
from accelfn.data.states import State, StatefulIterator

__all__ = ("CollatePiece", "FollowedPieces", "GroupedStream", "Settings", "tell")


def tell(dataset: Any, epoch: int) -> None:
    """Set the epoch of a dataset, if it asks for it."""
    set_epoch = getattr(dataset, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


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
        vars(self)["_stream"] = Settings(dataset, cut, place, source, follower, [])

    def recall(self, state: State | None, at: int) -> None:
        """Let the next iteration begin where ``state`` was taken, at sample ``at``."""
        self._stream.recalled[:] = [] if state is None else [(state, at)]

    def __len__(self) -> int:
        return len(self._stream.dataset)

    def __iter__(self) -> Iterator[Piece]:
        dataset, cut, place, source, follower, recalled = self._stream
        seed, epoch, start = (int(number) for number in place)
        worker = get_worker_info()
        if place.is_shared():  # this copy has outlived the pass that it was made for, or may
            tell(dataset, epoch)
        # The same on all ranks that read the stream: it may be shuffled by what is drawn while it is read.
        key = (seed, epoch, 0 if worker is None else worker.id, *(() if source is None else (source,)))
        if worker is None:
            state, at = recalled.pop() if recalled else (None, 0)
            return FollowedPieces(cast("StatefulIterator", follower), cut, start, 0, key, state, at)
        num_passed = 0
        if worker.num_workers > 1:  # the groups of all workers take turns; whoever puts them together counts
            num_passed = max(0, -((worker.id - start // cut.group) // worker.num_workers))
            start = 0
        if follower is not None:
            return FollowedPieces(follower, cut, start, num_passed, key)
        seed_from(key)
        pieces = cut_stream(iter(dataset), cut, start, num_passed)
        return (piece._replace(key=(*key, *piece.key)) for piece in pieces)

    def __getattr__(self, name: str) -> Any:
        # States are asked of what it gives: that knows the place too.
        if name in ("_stream", "state_dict", "load_state_dict") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._stream.dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._stream.dataset, name, value)


class Settings(NamedTuple):
    """What a :class:`GroupedStream` holds."""

    dataset: Any
    cut: StreamPlan
    place: torch.Tensor
    source: int | None
    follower: StatefulIterator | None
    recalled: list[tuple[State, int]]  # for one iteration, in this process


class FollowedPieces:
    """The pieces of a pass, each with the state of the stream behind its group.

    In a worker, torchdata asks for the state and takes it up there.
    """

    def __init__(
        self,
        follower: StatefulIterator,
        cut: StreamPlan,
        start: int,
        num_passed: int,
        key: tuple[int, ...],
        state: State | None = None,
        begin: int = 0,
    ) -> None:
        """Cut what ``follower`` goes through.

        Args:
            follower: Of the dataset.
            cut: How it is cut.
            start: Sample to start at.
            num_passed: Groups after that of which nothing is read.
            key: What its randomness is derived from.
            state: Where the stream begins; None at its start.
            begin: Number of the sample there.
        """
        self._follower, self._cut, self._key = follower, cut, key
        self._start, self._num_passed, self._state, self._begin = start, num_passed, state, begin
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
            self._pieces = cut_stream(
                samples, self._cut, self._start, self._num_passed, self._begin, read_first
            )
        if self._follower.is_stateful:
            # By the place, so that whoever goes on there draws the same. Others read from the start again.
            seed_from((*key, self._position))
        piece = next(self._pieces, None)
        if piece is None:
            self._follower.end()
            raise StopIteration
        self._position += piece.num_valid
        self._num_passed = max(0, self._num_passed - 1)
        self._state = self._follower.state(piece.at_end)
        # In a worker, the state is asked for; what is sent along would be sent with each batch.
        stream = self._state if get_worker_info() is None else None
        return piece._replace(key=(*key, *piece.key), stream=stream)

    def state_dict(self) -> dict[str, Any]:
        """Return where the pieces of a worker are."""
        return {"position": self._position, "num_passed": self._num_passed, "stream": self._state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on there. Before the first piece."""
        self._position = self._start = int(state["position"])
        self._num_passed, self._state = int(state["num_passed"]), state["stream"]
        self._begin = 0 if self._state is None else self._start


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
