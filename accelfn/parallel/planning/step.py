"""One optimizer step of a model on a mesh: the facts from which memory and traffic are planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from accelfn.context import Context
from accelfn.errors import ConfigurationError
from accelfn.parallel.facts import ModelFacts, read_facts
from accelfn.parallel.plan import ModelPlan, plan_rank, plan_whole
from accelfn.parallel.planning.costs import StageCost, stages_of
from accelfn.parallel.planning.dry_run import dry_run
from accelfn.parallel.planning.zero import ZeroPlan, plan_zero
from accelfn.parallel.strategies.pipeline_plan import SchedulePlan
from accelfn.tree import count_rows, slice_tensors


class StepPlan(NamedTuple):
    """A step of a model on a mesh.

    Attributes:
        facts: Of the complete model.
        plans: By place along "pp"; places with equal plans and costs may be left out.
        schedule: Of the batch; None without a pipeline.
        stages: Costs of the passes of a batch, or in a pipeline of a microbatch, by stage; None without one.
        num_batches: Batches in an accumulation window.
        zero: How DeepSpeed shards the model; None if it doesn't train.
    """

    facts: ModelFacts
    plans: Mapping[int, ModelPlan]
    schedule: SchedulePlan | None
    stages: tuple[StageCost, ...] | None
    num_batches: int
    zero: ZeroPlan | None = None

    @property
    def accumulates(self) -> bool:
        """Whether gradients of one batch or microbatch are there while another one's activations are."""
        return self.num_batches > 1 or self.schedule is not None

    def own_stages(self, place: int) -> dict[int, StageCost]:
        """Return the costs of the stages of the ranks at a place, by stage; none without a batch."""
        if self.stages is None:
            return {}
        own = range(1) if self.schedule is None else self.schedule.stages_of(place)
        return {stage: self.stages[stage] for stage in own}

    def local(self, place: int) -> ModelFacts:
        """Return the facts of the model of the ranks at a place, before it is sharded."""
        plan, facts = self.plans[place], self.facts
        if plan.pipeline is not None and plan.schedule is not None:
            facts = plan.pipeline.local(facts, plan.schedule.stages_of(place))
        if plan.tensor is not None:
            facts = plan.tensor.local(facts)
        return facts if plan.experts is None else plan.experts.local(facts)


def plan_step(
    ctx: Context,
    model: nn.Module | ModelFacts,
    *,
    plan: ModelPlan | None = None,
    batch: Any = None,
    loss_fn: Callable[[nn.Module, Any], Any] | None = None,
) -> StepPlan:
    """Plan a model on a mesh, and simulate the passes of a batch if there is one. Pure.

    Arguments and errors are those of :func:`accelfn.plan_memory`.
    """
    facts = model if isinstance(model, ModelFacts) else read_facts(model)
    config: Any = getattr(model, "config", None)
    hidden_size = getattr(config, "hidden_size", None)
    zero = plan_zero(ctx, facts, hidden_size if isinstance(hidden_size, int) else None)
    if plan is None:
        whole = plan_whole(ctx, model, facts=facts)
        plans = {place: plan_rank(whole, place) for place in range(ctx.axis_size("pp"))}
        some = plans[0]
    else:
        whole, plans, some = None, {ctx.coordinate("pp"): plan}, plan
    schedule, stages = some.schedule, None
    if batch is not None:
        if isinstance(model, ModelFacts):
            raise ConfigurationError(
                "a plan with a batch needs a run of the model, and facts have no forward. Pass the model, "
                "whose parameters may be on the meta device."
            )
        if schedule is not None:
            rows = count_rows(batch, "batch", "a plan: in a pipeline a batch is split into microbatches")
            schedule = schedule.fit(rows)
            batch = slice_tensors(batch, slice(rows // schedule.num_microbatches))
        split = () if some.pipeline is None else some.pipeline.split
        if whole is not None and split:
            some = plan_rank(whole.but(pipeline=None, schedule=None), 0)
        dtype = None if zero is None else zero.dtype
        stages = stages_of(dry_run(ctx, model, facts, some, batch, loss_fn, split=split, dtype=dtype), split)
    return StepPlan(facts, plans, schedule, stages, ctx.accumulation.num_steps, zero)
