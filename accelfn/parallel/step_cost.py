"""What a step costs: saved activations, operations, and what ranks exchange. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]
"""Kinds of communication; "send" is from one rank to another."""

Overlap = Literal["forward", "backward", "none"]
"""The pass beside whose computation something is sent."""

Route = tuple[str, Collective]
"""An axis, and a kind of communication along it."""


class PassCost(NamedTuple):
    """Operations and communication of a forward or backward pass.

    Attributes:
        flops: Floating-point operations of matrix products, convolutions and attention, a multiplication and
            an addition being two. Attention counts as if it weren't causal.
        calls: Number of collectives.
        received: Bytes that they bring to a rank.
    """

    flops: int
    calls: Mapping[Route, int]
    received: Mapping[Route, int]


def add_passes(passes: Iterable[tuple[int, PassCost]]) -> PassCost:
    """Add up passes, each taken several times.

    >>> one = PassCost(5, {("tp", "all_reduce"): 1}, {("tp", "all_reduce"): 8})
    >>> add_passes([(2, one), (1, PassCost(1, {}, {}))])
    PassCost(flops=11, calls={('tp', 'all_reduce'): 2}, received={('tp', 'all_reduce'): 16})
    """
    flops, calls, received = 0, Counter[Route](), Counter[Route]()
    for times, cost in passes:
        flops += times * cost.flops
        calls.update({route: times * number for route, number in cost.calls.items()})
        received.update({route: times * size for route, size in cost.received.items()})
    return PassCost(flops, dict(calls), dict(received))


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
        forward: Cost of its forward pass.
        backward: Cost of its backward pass, with the repeated forward pass of recomputed blocks.
        largest: Bytes of the largest tensor that one of its operations computes, without gradients
            and casts of parameters.
    """

    names: tuple[str, ...]
    entering: tuple[int, int] | None
    sent: int
    saved: Mapping[int, int]
    recomputed: Mapping[str, Mapping[int, int]]
    forward: PassCost
    backward: PassCost
    largest: int


class StageCost(NamedTuple):
    """Cost of one stage in the forward and backward pass of a batch. Sizes are in bytes.

    Attributes:
        kept: Tensors that autograd saves until the backward pass, without parameters and buffers; and the
            inputs of recomputed blocks and stages.
        recomputed: Additional activations of the largest recomputed block, in its backward pass.
        received: Activations from the stage before, which get as many bytes of gradients back.
        forward: Of the forward pass.
        backward: Of the backward pass.
        largest: The largest tensor that an operation computes, without gradients and casts of parameters.
    """

    kept: int
    recomputed: int
    received: int
    forward: PassCost
    backward: PassCost
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
        counts: list[int] = []
        earlier: set[int] = set()
        for segment in self.segments:
            count = len(range(max(start, first), min(end, first + len(segment.names))))
            if count:
                if not any(counts):
                    entering, received = segment.entering if start else None, segment.sent if start else 0
                held |= segment.saved
                inner += segment.recomputed.values()
                new = sum(size for key, size in segment.saved.items() if key not in earlier)
                repeated += (count - 1) * new
            elif any(counts) and leaving is None:
                leaving = segment.entering
            counts.append(count)
            earlier |= segment.saved.keys()
            first += len(segment.names)
        held |= dict(found for found in (entering, leaving) if found is not None)
        extra = [sum(size for key, size in block.items() if key not in held) for block in inner]
        pairs = list(zip(counts, self.segments, strict=True))
        return StageCost(
            kept=sum(held.values()) + repeated,
            recomputed=max(extra, default=0),
            received=received,
            forward=add_passes((count, segment.forward) for count, segment in pairs if count),
            backward=add_passes((count, segment.backward) for count, segment in pairs if count),
            largest=max(segment.largest for count, segment in pairs if count),
        )


class Exchange(NamedTuple):
    """Collectives of one kind and purpose along one axis, in an optimizer step.

    Attributes:
        axis: The axis, or several joined by " x ".
        kind: Kind of the collectives.
        what: What they carry: "parameters", "gradients" or "activations"; in the backward pass the gradients
            of activations count as these.
        calls: How many there are.
        received: Bytes that a rank receives by them, in rings.
        overlap: The pass beside whose computation they run; "none" if ranks wait for them.
        edge: Bytes of ``received`` beside which nothing is computed, at the start or the end of the pass.
        edge_calls: Calls of ``edge``.
    """

    axis: str
    kind: Collective
    what: Literal["parameters", "gradients", "activations"]
    calls: int
    received: int
    overlap: Overlap = "none"
    edge: int = 0
    edge_calls: int = 0
