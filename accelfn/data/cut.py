"""Cut a stream of samples into groups, and groups into the pieces that ranks read."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence
from dataclasses import dataclass
from inspect import isfunction
from itertools import islice
from typing import Any, NamedTuple, TypeVar, cast

from accelfn.data.plan import EpochPlan

__all__ = ("Piece", "StreamPlan", "begun_once", "cut_stream")

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
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
    num_passed: int = 0,
    begin: int = 0,
    read_first: Callable[[int], list[Any]] | None = None,
) -> Iterator[Piece]:
    """Return the pieces of one rank, each as soon as its group is complete.

    Only the samples that may complete the last group are held, apart from the current group.

    Args:
        samples: The stream, from sample ``begin`` on.
        cut: How it is cut.
        start: Samples that are read and thrown away before the first group.
        num_passed: Groups after that of which nothing is read.
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
        if num_passed or not content:
            num_passed = max(0, num_passed - 1)
            yield Piece(None, 0, number, at_end)
        else:
            yield Piece(content, len(content), number, at_end, (cut.rank, position))
        if at_end:
            return
        position += number


def begun_once(samples: Iterator[T]) -> Iterator[T]:
    """Return what ``samples`` gives, without asking it for an iterator again.

    One of the user's own may begin anew whenever it is asked.
    """
    return _stepped(samples) if isfunction(getattr(type(samples), "__iter__", None)) else samples


def _stepped(samples: Iterator[T]) -> Iterator[T]:
    while True:
        try:
            sample = next(samples)
        except StopIteration:
            return
        yield sample


def _copied(sample: Any) -> Any:
    """Copy what a collate function may take things out of: a sample that is repeated is collated twice."""
    if isinstance(sample, (MutableMapping, MutableSequence)):
        return copy.copy(cast("Any", sample))
    return sample
