"""What the passes of a batch keep and exchange: by segment and by stage. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]
"""Kinds of communication; "send" is from one rank to another."""


class Exchange(NamedTuple):
    """Collectives of one kind and purpose along one axis in one pass, in an optimizer step.

    Attributes:
        axis: The axis, or several joined by " x ".
        kind: Kind of the collectives.
        what: What they carry: "parameters", "gradients" or "activations"; in the backward pass the gradients
            of activations count as these.
        calls: How many there are.
        received: Bytes that a rank receives by them, in rings.
        during: The pass, "forward" or "backward"; or "step", with the optimizer's.
    """

    axis: str
    kind: Collective
    what: Literal["parameters", "gradients", "activations"]
    calls: int
    received: int
    during: Literal["forward", "backward", "step"]

    @property
    def key(self) -> tuple[str, ...]:
        """All but the sizes."""
        return self.axis, self.kind, self.what, self.during

    def times(self, count: int) -> Exchange:
        """Return what takes place several times."""
        return self._replace(calls=count * self.calls, received=count * self.received)


def merge(exchanges: Iterable[Exchange]) -> tuple[Exchange, ...]:
    """Join exchanges that differ in their sizes only, and leave empty ones out.

    >>> one = Exchange("tp", "all_reduce", "activations", 1, 8, "forward")
    >>> merge([one, one.times(2), one._replace(axis="cp", received=0)]) == (one.times(3),)
    True
    """
    merged: dict[tuple[str, ...], Exchange] = {}
    for one in exchanges:
        if (before := merged.get(one.key)) is not None:
            one = one._replace(calls=before.calls + one.calls, received=before.received + one.received)
        merged[one.key] = one
    return tuple(one for one in merged.values() if one.received)


def received_in_ring(size: int, num_ranks: int) -> int:
    """Return the bytes that each of some ranks receives of a tensor that they gather, or reduce to shards."""
    return size * (num_ranks - 1) // num_ranks


Storages = dict[int, Any]
"""Storages without memory by their addresses, which are unique while they are in here."""


@dataclass(slots=True)
class Segment:
    """A part of the computation: a call of a block with what follows it, or what precedes the first block.

    Attributes:
        name: Name of the block; "" for what precedes the first one.
        entering: The storage of the tensor that it gets from the segment before; None of the first.
        sent: Bytes of that tensor itself.
        saved: The storages that autograd keeps for it; of a recomputed block its inputs.
        new: Bytes of those that no segment before has.
        recomputed: What its recomputed blocks save again in the backward pass, by their names.
        exchanges: Of activations in both passes, with the repeated forward pass of recomputed blocks.
        largest: Bytes of the largest tensor that one of its operations computes, without gradients
            and casts of parameters.
    """

    name: str
    entering: Any = None
    sent: int = 0
    saved: Storages = field(default_factory=Storages)
    new: int = 0
    recomputed: dict[str, Storages] = field(default_factory=dict[str, Storages])
    exchanges: list[Exchange] = field(default_factory=list[Exchange])
    largest: int = 0


class Weights(NamedTuple):
    """What a rank holds of parameters, in bytes; the names are those of :class:`accelfn.parallel.Budget`."""

    parameters: int
    padding: int
    gradients: int
    optimizer: int
    optimizer_name: str
    buckets: int = 0
    gathered: int = 0
    unreduced: int = 0
    reduced: int = 0
    offload: bool = False


class StageCost(NamedTuple):
    """Cost of one stage in the forward and backward pass of a batch. Sizes are in bytes.

    Attributes:
        kept: Tensors that autograd saves until the backward pass, without parameters and buffers; and the
            inputs of recomputed blocks and stages.
        recomputed: Additional activations of the largest recomputed block, in its backward pass.
        received: Activations from the stage before, which get as many bytes of gradients back.
        exchanges: Of activations within the stage.
        largest: The largest tensor that an operation computes, without gradients and casts of parameters.
    """

    kept: int
    recomputed: int
    received: int
    exchanges: tuple[Exchange, ...]
    largest: int


def stages_of(segments: Sequence[Segment], starts: Sequence[str] = ()) -> tuple[StageCost, ...]:
    """Return the cost of each stage.

    Args:
        segments: In the order of their calls; one that is like the one before it has the same ``saved``.
        starts: The block that each stage but the first begins with. None for a single stage.
    """
    names = [segment.name for segment in segments]
    bounds = [0, *(names.index(name) for name in starts), len(names)]
    return tuple(_stage(segments, start, end) for start, end in pairwise(bounds))


def _stage(segments: Sequence[Segment], start: int, end: int) -> StageCost:
    own = segments[start:end]
    held = Storages()
    for segment in own:
        held |= segment.saved
    leaving = next((one.entering for one in segments[end:] if one.saved is not own[-1].saved), None)
    held |= {one._cdata: one for one in (own[0].entering, leaving) if one is not None}
    inner = [block for segment in own for block in segment.recomputed.values()]
    return StageCost(
        kept=sum(storage.nbytes() for storage in held.values())
        + sum(one.new for before, one in pairwise(own) if one.saved is before.saved),
        recomputed=max(
            (sum(one.nbytes() for key, one in block.items() if key not in held) for block in inner), default=0
        ),
        received=own[0].sent,
        exchanges=merge(
            one
            for segment in own
            for one in sorted(segment.exchanges, key=lambda one: one.during, reverse=True)  # forward first
        ),
        largest=max(segment.largest for segment in own),
    )
