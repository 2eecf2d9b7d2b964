"""Sums over microbatches that are formed in one order, whatever the number of ranks.

Each rank forms its part of the sums: all tensors are end to end in one buffer for each dtype and device,
which is cut into one part for each rank. What a microbatch gave is sent in parts to the ranks that sum them,
and the sums come together when they are closed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, cast

import torch

from accelfn.comm import Call, catch, gather_bytes
from accelfn.context import Context
from accelfn.tree import Buffer, flatten, flatten_tensor, plan_layout

__all__ = ("OrderedSum",)

_Microbatch = Sequence[torch.Tensor | None]


class _Segment(NamedTuple):
    """The part of one tensor that lies in this rank's part of a buffer."""

    number: int  # of the tensor
    start: int  # in this rank's part
    end: int
    offset: int  # of its first element in the tensor


class OrderedSum:
    """Sums of tensors over microbatches; between two calls, this rank's part of them.

    A microbatch gives for each tensor another of its shape, or None, which is no zero: it is left out. On
    several ranks nothing but the part is held, and on one all.
    """

    def __init__(self, ctx: Context, tensors: Sequence[torch.Tensor]) -> None:
        """Begin with no sums, of tensors like ``tensors``, which are of the same kinds on all ranks."""
        self._ctx = ctx
        self._tensors = list(tensors)
        groups = plan_layout(self._tensors, flatten(self._tensors)[1]).groups
        self._parts = [_Part(group, ctx.rank, ctx.num_processes) for group in groups]
        self._touched: set[int] = set()

    @property
    def is_open(self) -> bool:
        """Whether something was added and not closed."""
        return bool(self._touched)

    def add(
        self,
        call: Call,
        microbatches: Sequence[_Microbatch],
        before: Callable[[int], torch.Tensor | None] = lambda index: None,
        error: Exception | None = None,
    ) -> frozenset[int]:
        """Add this rank's microbatches: those of rank 0 in their order, then those of rank 1, and so on.

        Ranks: every rank of the context, with equally many microbatches.

        Args:
            call: What is compared between the ranks.
            microbatches: Of this rank; left as they are.
            before: Gives what the sum of a tensor without one begins with; None for nothing. Equal on all
                ranks.
            error: Why this rank has no microbatches.

        Returns:
            Indices of the tensors that some rank's microbatch has given something for.

        Raises:
            Exception: ``error`` itself, and RemoteRankError on the other ranks; nothing has changed then.
            MismatchError: ``call`` differs between ranks.
        """
        size, count = self._ctx.num_processes, len(microbatches)
        flats: list[torch.Tensor] | None = None
        if error is None:
            flats, error = catch(lambda: [one.flatten(microbatches, self._tensors) for one in self._parts])
        width = -(-len(self._tensors) // 8)
        own = b"".join(_bits(one, width) for one in microbatches)
        if size > 1:
            blobs = gather_bytes(self._ctx, call, own, error)
        elif error is None:
            blobs = [own]
        else:
            raise error
        present = [
            _indices(blob[start:][:width]) for blob in blobs for start in range(0, width * count, width)
        ]
        for one, flat in zip(self._parts, flats or (), strict=True):
            rows = _swap_parts(self._ctx, flat.view(size, -1)).view(size * count, one.length)
            one.add(rows.unbind(), present, self._touched, before)
        found = frozenset[int]().union(*present)
        self._touched |= found
        return found

    def close(self) -> list[torch.Tensor | None]:
        """Gather the sums, and start again.

        Ranks: every rank of the context.

        Returns:
            Of each tensor its sum, laid out in memory as the tensor is; None where nothing was added.
        """
        result: list[torch.Tensor | None] = [None] * len(self._tensors)
        for one in self._parts if self._touched else ():
            joined = cast("torch.Tensor", one.part)
            if self._ctx.num_processes > 1:
                joined = self._ctx.collectives.all_gather(joined.view(torch.uint8)).view(joined.dtype)
            flats = torch.split(joined[: sum(one.group.sizes)], list(one.group.sizes))
            for index, flat in zip(one.group.leaves, flats, strict=True):
                if index in self._touched:
                    # A tensor of its own, laid out as torch would: what is computed from a gradient, such as
                    # its norm, may depend on where it is.
                    like = self._tensors[index]
                    result[index] = torch.empty_like(like, requires_grad=False).copy_(flat.view(like.shape))
        self.drop()
        return result

    def drop(self) -> None:
        """Forget what was added."""
        self._touched = set()
        for one in self._parts:
            one.part = None

    def scale(self, tensors: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
        """Multiply the sums of some of the tensors."""
        wanted = {id(tensor) for tensor in tensors}
        for one in self._parts:
            for index, start, end, _ in one.segments:
                if one.part is not None and index in self._touched and id(self._tensors[index]) in wanted:
                    one.part[start:end].mul_(factor.to(one.part.device, one.part.dtype))


class _Part:
    """This rank's part of the sums of all tensors of one dtype and device."""

    def __init__(self, group: Buffer, rank: int, size: int) -> None:
        """Pack the tensors of ``group`` end to end, in ``size`` parts of one length."""
        self.group = group
        self.size = size
        total = sum(group.sizes)
        self.length: int = -(-total // size)
        self.segments: list[_Segment] = []
        begin, end, place = rank * self.length, (rank + 1) * self.length, 0
        for index, number in zip(group.leaves, group.sizes, strict=True):
            first, last = max(place, begin), min(place + number, end)
            if first < last:
                self.segments.append(_Segment(index, first - begin, last - begin, first - place))
            place += number
        self.part: torch.Tensor | None = None  # where something was added

    def flatten(self, microbatches: Sequence[_Microbatch], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return what microbatches hold of the tensors, of shape ``(ranks, microbatches, length)``."""
        like = tensors[self.group.leaves[0]]
        flats: list[torch.Tensor] = []
        for microbatch in microbatches:
            parts: list[torch.Tensor] = []
            for index, number in zip(self.group.leaves, self.group.sizes, strict=True):
                given = microbatch[index]
                # What is missing is never looked at: the others are notified.
                parts.append(like.new_zeros(number) if given is None else flatten_tensor(given))
            parts.append(like.new_zeros(self.size * self.length - sum(self.group.sizes)))
            flats.append(torch.cat(parts).view(self.size, self.length))
        return flats[0].unsqueeze(1) if len(flats) == 1 else torch.stack(flats, 1)

    def add(
        self,
        rows: Sequence[torch.Tensor],
        present: Sequence[frozenset[int]],
        touched: set[int],
        before: Callable[[int], torch.Tensor | None],
    ) -> None:
        """Add this rank's part of each microbatch, in their order.

        Args:
            rows: Of each microbatch, this rank's part.
            present: Of each microbatch, the tensors that it has given something for.
            touched: Tensors with a sum.
            before: Gives what the sum of a tensor that isn't touched begins with.
        """
        if self.part is None:
            self.part = torch.empty_like(rows[0])
        started = {segment.number for segment in self.segments if segment.number in touched}
        for segment in self.segments:
            old = None if segment.number in touched else before(segment.number)
            if old is not None:
                flat = flatten_tensor(old)
                length = segment.end - segment.start
                self.part[segment.start : segment.end] = flat[segment.offset : segment.offset + length]
                started.add(segment.number)
        indices = {segment.number for segment in self.segments}
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


def _swap_parts(ctx: Context, parts: torch.Tensor) -> torch.Tensor:
    """Send every rank its part of the rows of all ranks.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        parts: Shape ``(ranks, n)``, contiguous: what is meant for each rank.

    Returns:
        Shape ``(ranks, n)``: what each rank meant for this one.
    """
    if ctx.num_processes == 1:
        return parts
    moved = ctx.collectives.all_to_all(parts.reshape(-1).view(torch.uint8))
    return moved.view(parts.dtype).view(ctx.num_processes, -1)


def _bits(microbatch: _Microbatch, width: int) -> bytes:
    return sum(1 << index for index, one in enumerate(microbatch) if one is not None).to_bytes(
        width, "little"
    )


def _indices(blob: bytes) -> frozenset[int]:
    return frozenset(
        8 * place + bit for place, byte in enumerate(blob) if byte for bit in range(8) if byte >> bit & 1
    )
