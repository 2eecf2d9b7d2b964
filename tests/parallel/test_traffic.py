"""A step sends what the same step in hand-written torch sends, and makes the host wait as often."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import accelfn as af
from accelfn import Context
from accelfn.testing import run_ranks
from tests.bench.sharding import PLAN, by_functions, fsdp_by_hand, tp_by_hand
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
    """What torch has sent in a step, and what has gone through the context."""

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


@pytest.mark.parametrize("name", OPTIONS)
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
