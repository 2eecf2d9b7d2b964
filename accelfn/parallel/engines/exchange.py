"""Move flat ranges of tensors between ranks: from the partitions of an engine to row shards, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist


class Range(NamedTuple):
    """Elements of a flattened tensor, from ``start`` on."""

    start: int
    numel: int


class Copy(NamedTuple):
    """Elements that one rank sends to another.

    Attributes:
        name: Of the tensor.
        source: Offset in the sender's part.
        target: Offset in the receiver's part.
        numel: Number of elements.
    """

    name: str
    source: int
    target: int
    numel: int


def rows_of(shape: Sequence[int], rank: int, size: int) -> Range:
    """Return the elements that a rank has of a tensor whose rows are sharded, as by ``Shard(0)``. Pure.

    A tensor without dimensions is on every rank.

    >>> [rows_of((3, 2), rank, 2) for rank in range(2)]
    [Range(start=0, numel=4), Range(start=4, numel=2)]
    """
    if not shape:
        return Range(0, 1)
    width = 1
    for length in shape[1:]:
        width *= length
    rows = -(-shape[0] // size)
    start, stop = min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0])
    return Range(start * width, (stop - start) * width)


def plan_copies(sources: Mapping[str, Range], targets: Mapping[str, Range]) -> list[Copy]:
    """Return what one rank sends to another, in the order of the names. Pure.

    Args:
        sources: The sender's parts.
        targets: The receiver's parts.

    >>> plan_copies({"w": Range(0, 4)}, {"w": Range(2, 4)})
    [Copy(name='w', source=2, target=0, numel=2)]
    """
    copies: list[Copy] = []
    for name in sorted(sources.keys() & targets.keys()):
        own, other = sources[name], targets[name]
        start, stop = max(own.start, other.start), min(own.start + own.numel, other.start + other.numel)
        if start < stop:
            copies.append(Copy(name, start - own.start, start - other.start, stop - start))
    return copies


def exchange(
    group: dist.ProcessGroup,
    parts: Mapping[str, torch.Tensor],
    sources: Sequence[Mapping[str, Range]],
    targets: Sequence[Mapping[str, Range]],
    results: Mapping[str, torch.Tensor],
) -> None:
    """Send each rank the elements of its parts. Writes into ``results``.

    Ranks: every rank of ``group``; one collective.

    Args:
        group: The ranks.
        parts: This rank's source parts, flat, by name; of one dtype and device.
        sources: The parts of each rank before.
        targets: The parts of each rank afterwards.
        results: This rank's target parts, flat, by name.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    outgoing = [plan_copies(sources[rank], targets[other]) for other in range(size)]
    incoming = [plan_copies(sources[other], targets[rank]) for other in range(size)]
    anyone = next(iter(results.values()), next(iter(parts.values()), torch.empty(0)))
    pieces = [parts[copy.name].narrow(0, copy.source, copy.numel) for copies in outgoing for copy in copies]
    sent = torch.cat(pieces) if pieces else anyone.new_empty(0)
    lengths = [sum(copy.numel for copy in copies) for copies in incoming]
    received = anyone.new_empty(sum(lengths))
    dist.all_to_all_single(  # pyright: ignore[reportUnknownMemberType]
        received, sent, lengths, [sum(copy.numel for copy in copies) for copies in outgoing], group=group
    )
    offset = 0
    for copies in incoming:
        for copy in copies:
            target = results[copy.name].narrow(0, copy.target, copy.numel)
            target.copy_(received.narrow(0, offset, copy.numel))
            offset += copy.numel
