"""A step sends what the same step in hand-written torch sends, and makes the host wait as often."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import Context
from accelfn.testing import run_ranks
from tests.bench import experts, pipeline, sequence
from tests.bench.sharding import PLAN, Step, by_functions, fsdp_by_hand, tp_by_hand
from tests.parallel.traffic import traffic_of

SIZE = (16, 2)
OPTIONS: dict[str, dict[str, Any]] = {
    "fsdp2": {"fsdp_plugin": af.FullyShardedDataParallelPlugin(fsdp_version=2)},
    "tp2": {
        "parallelism_config": af.ParallelismConfig(
            tp_size=2, tp_handler=af.config.TorchTensorParallelConfig(plan=PLAN)
        )
    },
}


class Sent(NamedTuple):
    """What torch sent in a step, and what the context sent."""

    calls: dict[str, int]
    syncs: int
    exchanges: dict[str, int]


def counted(ctx: Context, calls: Counter[str]) -> Context:
    """Return a context whose collectives are counted."""

    def count(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            calls[name] += 1
            return call(*args)

        return called

    names = [one.name for one in dataclasses.fields(ctx.collectives) if re.search("all|reduce", one.name)]
    found = {name: getattr(ctx.collectives, name) for name in names}
    wrapped = {name: count(name, call) for name, call in found.items() if callable(call)}
    return dataclasses.replace(ctx, collectives=dataclasses.replace(ctx.collectives, **wrapped))


def seen(step: Callable[[], object], exchanges: Counter[str]) -> Sent:
    step()  # the first one has things to settle
    exchanges.clear()
    traffic = traffic_of(step)
    return Sent(dict(traffic.calls), traffic.syncs, dict(exchanges))


@pytest.mark.parametrize("name", ["fsdp2", pytest.param("tp2", marks=pytest.mark.slow)])
def test_a_step_sends_what_a_hand_written_one_sends_and_one_norm(name: str) -> None:
    def on_rank(ctx: Context) -> tuple[Sent, Sent, Sent]:
        calls: Counter[str] = Counter()
        unguarded = by_functions(counted(ctx.replace(guard="off"), calls), SIZE)
        guarded = by_functions(counted(ctx, calls), SIZE)
        by_hand = fsdp_by_hand(ctx.rank, SIZE) if name == "fsdp2" else tp_by_hand(SIZE)
        return seen(unguarded, calls), seen(guarded, calls), seen(by_hand, Counter())

    for unguarded, guarded, by_hand in run_ranks(on_rank, 2, on="processes", **OPTIONS[name]):
        rest = Counter(by_hand.calls)
        rest["all_reduce"] -= 1  # of torch's own norm
        assert Counter(unguarded.calls) == Counter(guarded.calls) == rest
        assert unguarded.syncs == guarded.syncs == by_hand.syncs
        assert unguarded.exchanges == {"all_gather_bytes": 1}  # our norm
        assert guarded.exchanges == {"all_gather_bytes": 2}  # and what the forward pass will send


Way = Callable[[Context], tuple[nn.Module, Step]]


class Pair(NamedTuple):
    """A step through the functions, and the one beside it in the benchmarks.

    Attributes:
        options: Of the context.
        by_functions: Makes the model and the step of a rank.
        by_hand: Makes those in plain torch, with parameters in the same order.
        reads: How often more a rank reads a number out of a tensor that the host has: of each microbatch.
    """

    options: Any
    by_functions: Way
    by_hand: Way
    reads: int = 0


def pipelined(schedule: str) -> Pair:
    size = (16, 4)

    def functions(ctx: Context) -> tuple[nn.Module, Step]:
        return pipeline.by_functions(ctx, size)

    def by_hand(ctx: Context) -> tuple[nn.Module, Step]:
        return pipeline.by_hand(pipeline.schedule_of(ctx), ctx.rank, size)

    reads = 8 if schedule.startswith("interleaved") else 4
    return Pair(pipeline.options_of(schedule, 2, 4), functions, by_hand, reads)


def ring(rotation: str) -> Pair:
    def functions(ctx: Context) -> tuple[nn.Module, Step]:
        return sequence.by_functions(ctx, 16, SIZE)

    def by_hand(ctx: Context) -> tuple[nn.Module, Step]:
        return sequence.by_hand(rotation, 16, SIZE)

    return Pair(sequence.options("cp", 2, rotation), functions, by_hand)


def spread() -> Pair:
    def functions(ctx: Context) -> tuple[nn.Module, Step]:
        return experts.by_functions(ctx, SIZE)

    def by_hand(ctx: Context) -> tuple[nn.Module, Step]:
        return experts.by_hand(ctx.rank, ctx.num_processes, SIZE)

    return Pair(experts.options(2), functions, by_hand)


PAIRS = {
    **{f"pp2, {name}": pipelined(name) for name in pipeline.SCHEDULES},
    **{f"cp2, {name}": ring(name) for name in sequence.ROTATIONS},
    "ep2": spread(),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "ep2" else pytest.mark.slow) for name in PAIRS]
)
def test_what_is_compared_in_benchmarks_sends_and_trains_alike(name: str) -> None:
    pair = PAIRS[name]

    def on_rank(ctx: Context) -> tuple[Sent, Sent, float]:
        (ours, step), (theirs, by_hand) = pair.by_functions(ctx), pair.by_hand(ctx)
        sent = seen(step, Counter()), seen(by_hand, Counter())
        pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
        return *sent, max(float((local(one) - local(other)).detach().abs().max()) for one, other in pairs)

    def local(parameter: Any) -> torch.Tensor:
        return getattr(parameter, "_local_tensor", parameter)

    for ours, by_hand, difference in run_ranks(on_rank, 2, on="processes", **pair.options):
        assert (ours.calls, ours.syncs) == (by_hand.calls, by_hand.syncs + pair.reads)
        assert difference < 1e-6
