"""The strategies, in the order in which they are planned and applied. Nothing else knows it."""

from __future__ import annotations

from typing import Any

from accelfn.parallel.engines import xla
from accelfn.parallel.facts import ModelFacts
from accelfn.parallel.strategies import (
    attention,
    compilation,
    experts,
    fp8,
    fsdp,
    fsdp_plan,
    pipeline_plan,
    recompute,
    stages,
    tensor,
)
from accelfn.parallel.strategies.strategy import Planning, Strategy


def _only(plan: Any, at: Planning) -> Any:
    return None if plan is None else plan.only(at.facts)


def _local(plan: Any, at: Planning) -> ModelFacts:
    return plan.local(at.facts)


STRATEGIES: tuple[Strategy, ...] = (
    Strategy("schedule", ("pp",), plan=pipeline_plan.plan_order),
    Strategy("pipeline", ("pp",), plan=pipeline_plan.plan, narrow=pipeline_plan.narrow, apply=stages.apply),
    Strategy("experts", ("ep",), plan=experts.plan, of_rank=_only, narrow=_local, apply=experts.apply),
    Strategy("tensor", ("tp",), plan=tensor.plan, of_rank=_only, narrow=_local, apply=tensor.apply),
    Strategy("attention", ("seq",), of_rank=attention.of_rank, apply=attention.apply, is_compute=True),
    Strategy("fp8", plan=fp8.plan, of_rank=_only, apply=fp8.apply, is_compute=True),
    Strategy("recomputed", plan=recompute.plan, of_rank=recompute.of_rank, apply=recompute.apply),
    Strategy("compiled", of_rank=compilation.of_rank, apply=compilation.apply, is_compute=True),
    Strategy("xla", of_rank=xla.of_rank, apply=xla.apply),
    Strategy("fp8", apply=fp8.apply_around, is_compute=True, is_second=True),
    Strategy("shard", of_rank=fsdp_plan.of_rank, apply=fsdp.apply),
)
