"""Cut a stream of samples into groups, and groups into the pieces that ranks read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import IterableDataset, get_worker_info

from accelfn.data.draws import Generators, seed_from
from accelfn.data.order import tell
from accelfn.data.plan import EpochPlan
from accelfn.data.states import State, StatefulIterator, begun_once

__all__ = ("CollatePiece", "GroupedStream", "Piece", "cut_stream", "stream_ended")


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
    plan: EpochPlan,
    rank: int,
    start: int = 0,
    begin: int = 0,
    read_first: Callable[[int], list[Any]] | None = None,
) -> Iterator[Piece]:
    """Return the pieces of one rank, each as soon as its group is complete.

    Only the samples that may complete the last group are held, apart from the current group.

    Args:
        samples: The stream, from sample ``begin`` on.
        plan: How it is shared out. The number of samples in it isn't looked at.
        rank: Whose pieces.
        start: Samples that are read and thrown away before the first group.
        begin: Where ``samples`` begin.
        read_first: Reads the first samples of the stream again; needed where ``samples`` begin later.

    Raises:
        ValueError: The stream ends before ``start``.

    >>> from accelfn.data.plan import plan_epoch
    >>> plan = plan_epoch(0, batch_size=2, size=2)
    >>> [piece.content for piece in cut_stream(iter(range(9)), plan, rank=1)]
    [[2, 3], [6, 7], [1, 2]]
    """
    samples = begun_once(samples)
    own, end = rank * plan.rank_batch, (rank + 1) * plan.rank_batch
    completes = plan.even and not plan.drop_last
    num_kept = end - 1 if completes and not begin else 0
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
        if at_end and completes and number < end:
            if begin and read_first is not None:
                first = read_first(end - 1)
            group += [_copied(first[place % len(first)]) for place in range(end - number)]
        content = group[own:end]
        yield Piece(content or None, len(content), number, at_end, (rank, position))
        if at_end:
            return
        position += number


def stream_ended(start: int, end: int) -> ValueError:
    """Return the error of a stream that ends before the sample at which a pass was to go on."""
    return ValueError(
        f"the pass is to go on at sample {start}, and the stream ended after {end}. Is it the stream that "
        "the position was taken from?"
    )


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
        follower: StatefulIterator,
        plan: EpochPlan,
        rank: int,
        place: torch.Tensor,
        source: int | None,
    ) -> None:
        """Read a dataset.

        Args:
            follower: Of the user's dataset.
            plan: How it is shared out.
            rank: Whose pieces.
            place: ``(3,)`` int64: seed, epoch and sample to start at, as of the next iteration.
            source: Number of the rank, where it alone reads this stream.
        """
        parts = (follower, plan, rank, place, source)
        vars(self).update(_dataset=follower.dataset, _parts=parts, _recalled=[])

    def recall(self, state: State | None, at: int) -> None:
        """Let the next iteration in this process begin where ``state`` was taken, at sample ``at``."""
        self._recalled[:] = [] if state is None else [(state, at)]

    def __len__(self) -> int:
        return len(self._dataset)

    def __iter__(self) -> Iterator[Piece]:
        follower, plan, rank, place, source = self._parts
        seed, epoch, start = (int(number) for number in place)
        worker = get_worker_info()
        if place.is_shared():  # this copy has outlived the pass that it was made for, or may
            tell(self._dataset, epoch)
        # The same on all ranks that read the stream: it may be shuffled by what is drawn while it is read.
        key = (seed, epoch, 0 if worker is None else worker.id, *(() if source is None else (source,)))
        if worker is not None and worker.num_workers > 1:
            start = 0  # the groups of all workers take turns; whoever puts them together counts
        state, at = self._recalled.pop() if worker is None and self._recalled else (None, 0)
        return _Pieces(follower, partial(cut_stream, plan=plan, rank=rank), key, start, state, at)

    def __getattr__(self, name: str) -> Any:
        # States are asked of what it gives: that knows the place too.
        if name in ("_dataset", "state_dict", "load_state_dict") or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)


class _Pieces:
    """The pieces of a pass, each with the state of the stream behind its group, where that has one.

    In a worker, torchdata asks for the state and takes it up there.
    """

    def __init__(
        self,
        follower: StatefulIterator,
        cut: Callable[..., Iterator[Piece]],
        key: tuple[int, ...],
        start: int,
        state: State | None,
        begin: int,
    ) -> None:
        """Cut what ``follower`` goes through, from sample ``start`` on; it was at ``begin`` in ``state``."""
        self._follower, self._cut, self._key = follower, cut, key
        self._position, self._state, self._begin = start, state, begin
        self._pieces: Iterator[Piece] | None = None

    def __iter__(self) -> _Pieces:
        return self

    def __next__(self) -> Piece:
        key, follower = self._key, self._follower
        if self._pieces is None:
            seed_from(key)
            samples = follower.begin(self._state)
            read_first = partial(_read_first, follower, key)  # a method would be a cycle
            self._pieces = self._cut(samples, start=self._position, begin=self._begin, read_first=read_first)
        if follower.is_stateful:
            # By the place, so that whoever goes on there draws the same. Others read from the start again.
            seed_from((*key, self._position))
        piece = next(self._pieces, None)
        if piece is None:
            follower.end()
            raise StopIteration
        self._position += piece.num_valid
        self._state = follower.state(piece.at_end)
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
        self._generators = Generators()

    def __call__(self, piece: Piece) -> Piece:
        """Collate."""
        if not piece.num_rows:
            return piece
        samples = piece.content[0] if self._is_whole else piece.content
        # Ranks collate different samples, so they draw apart, and what they draw must not move the stream.
        before = self._generators.save()
        seed_from(piece.key)
        batch = self._collate(samples)
        self._generators.restore(before)
        return piece._replace(content=batch, key=())
