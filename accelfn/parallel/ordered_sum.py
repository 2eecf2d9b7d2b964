"""One rank's part of sums that are formed in an order of their own, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from accelfn.tree import Buffer, flatten_tensor

__all__ = ("OrderedSum", "Segment")


class Segment(NamedTuple):
    """The part of one parameter that lies in this rank's part of a buffer."""

    number: int  # of the parameter
    start: int  # in this rank's part
    end: int
    offset: int  # of its first element in the parameter


class OrderedSum:
    """This rank's part of the sums of all gradients of one dtype and device."""

    def __init__(self, group: Buffer, rank: int, size: int) -> None:
        """Lay out the parameters of ``group`` end to end, in ``size`` parts of one length."""
        self.group = group
        total = sum(group.sizes)
        self.length: int = -(-total // size)  # of a part
        self.padding: int = self.length * size - total
        self.segments: list[Segment] = []
        begin, end, place = rank * self.length, (rank + 1) * self.length, 0
        for index, number in zip(group.leaves, group.sizes, strict=True):
            first, last = max(place, begin), min(place + number, end)
            if first < last:
                self.segments.append(Segment(index, first - begin, last - begin, first - place))
            place += number
        self.part: torch.Tensor | None = None  # where a window is open

    def add(
        self,
        rows: Sequence[torch.Tensor],
        present: Sequence[frozenset[int]],
        touched: set[int],
        before: Callable[[int], torch.Tensor | None],
    ) -> None:
        """Add the parts of all ranks in rank order.

        Args:
            rows: Of each rank, this rank's part of its gradients.
            present: Of each rank, the parameters that have a gradient there.
            touched: Parameters with a sum from earlier in the window.
            before: Gives what a parameter that isn't touched has in ``.grad``, where the sum goes on from.
        """
        if self.part is None:
            self.part = torch.empty_like(rows[0])
        for segment in self.segments:
            old = None if segment.number in touched else before(segment.number)
            if old is not None:
                flat = flatten_tensor(old)
                length = segment.end - segment.start
                self.part[segment.start : segment.end] = flat[segment.offset : segment.offset + length]
        indices = {segment.number for segment in self.segments}
        started = {index for index in indices if index in touched or before(index) is not None}
        if all(indices <= here for here in present) and started in (set[int](), indices):
            # Never torch.sum over the rows, whose order isn't said.
            rest = iter(rows)
            if not started:
                self.part.copy_(next(rest))
            for row in rest:
                self.part.add_(row)
            return
        for index, start, end, _ in self.segments:
            has_sum = index in started
            for row, here in zip(rows, present, strict=True):
                if index in here:
                    part = self.part[start:end]
                    # A missing gradient is no zero: adding one would turn -0.0 into 0.0.
                    part.add_(row[start:end]) if has_sum else part.copy_(row[start:end])
                    has_sum = True
