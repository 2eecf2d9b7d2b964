"""What the passes of a batch keep and exchange: by segment, by stage and as a whole. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

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


class Segment(NamedTuple):
    """A part of the computation: a call of a block with what follows it, or what precedes the first block.

    Attributes:
        names: Names of the blocks that it stands for, equal ones after the first, in the order of their
            calls; "" for what precedes the first block.
        entering: The storage of the tensor that it gets from the segment before, and its bytes; None of the
            first.
        sent: Bytes of that tensor itself.
        saved: Bytes of the storages that autograd keeps for it, by storage; of a recomputed block its inputs.
        recomputed: The same for what its recomputed blocks save again in the backward pass, by their names.
        exchanges: Of activations in both passes, with the repeated forward pass of recomputed blocks.
        largest: Bytes of the largest tensor that one of its operations computes, without gradients
            and casts of parameters.
    """

    names: tuple[str, ...]
    entering: tuple[int, int] | None
    sent: int
    saved: Mapping[int, int]
    recomputed: Mapping[str, Mapping[int, int]]
    exchanges: tuple[Exchange, ...]
    largest: int


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


class StepCost(NamedTuple):
    """Cost of a model's passes on a rank that has all blocks, by segment.

    Attributes:
        segments: In the order of their calls.
    """

    segments: tuple[Segment, ...]

    def stages(self, starts: Sequence[str] = ()) -> tuple[StageCost, ...]:
        """Return the cost of each stage.

        Args:
            starts: The block that each stage but the first begins with. None for a single stage.
        """
        names = [name for segment in self.segments for name in segment.names]
        bounds = [0, *(names.index(name) for name in starts), len(names)]
        return tuple(self._stage(bounds[index], bounds[index + 1]) for index in range(len(bounds) - 1))

    def _stage(self, start: int, end: int) -> StageCost:
        """Return the cost of the blocks from ``start`` to ``end``, by place in the order of calls."""
        held: dict[int, int] = {}
        repeated = 0
        inner: list[Mapping[int, int]] = []
        entering: tuple[int, int] | None = None
        leaving: tuple[int, int] | None = None
        received = first = 0
        own: list[tuple[int, Segment]] = []
        earlier: set[int] = set()
        for segment in self.segments:
            count = len(range(max(start, first), min(end, first + len(segment.names))))
            if count:
                if not own:
                    entering, received = segment.entering if start else None, segment.sent if start else 0
                own.append((count, segment))
                held |= segment.saved
                inner += segment.recomputed.values()
                new = sum(size for key, size in segment.saved.items() if key not in earlier)
                repeated += (count - 1) * new
            elif own and leaving is None:
                leaving = segment.entering
            earlier |= segment.saved.keys()
            first += len(segment.names)
        held |= dict(found for found in (entering, leaving) if found is not None)
        extra = [sum(size for key, size in block.items() if key not in held) for block in inner]
        return StageCost(
            kept=sum(held.values()) + repeated,
            recomputed=max(extra, default=0),
            received=received,
            exchanges=merge(one.times(count) for count, segment in own for one in segment.exchanges),
            largest=max(segment.largest for _, segment in own),
        )
