"""Memory that each rank needs to train a model, and bytes that it receives: from the plan and a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from torch import nn

from accelfn.context import Context, check_context
from accelfn.errors import ConfigurationError
from accelfn.parallel.dry_run import StageCost, dry_run
from accelfn.parallel.facts import ModelFacts, owner_of, read_facts, table_text
from accelfn.parallel.pipeline_plan import SchedulePlan
from accelfn.parallel.plan import ModelPlan, plan_at
from accelfn.parallel.shard import ShardPlan
from accelfn.tree import count_rows, slice_tensors
from accelfn.tree.bars import Bar, draw_bars_svg
from accelfn.tree.structure import size_text


class _States(NamedTuple):
    """States of a torch optimizer per parameter: tensors like it, and a float32 count of its steps."""

    likes: int
    counts: bool


OPTIMIZERS: Mapping[str, _States] = MappingProxyType(
    {
        "adamw": _States(2, counts=True),
        "adam": _States(2, counts=True),
        "adagrad": _States(1, counts=True),
        "rmsprop": _States(1, counts=True),
        "momentum": _States(1, counts=False),
        "sgd": _States(0, counts=False),
    }
)
"""The supported optimizers; "momentum" is SGD with momentum."""

_COUNT_BYTES = 4

# Names and colors of the SVG.
_PARTS = (
    ("parameters", "#14407a"),
    ("gradients", "#f3c9a5"),
    ("optimizer", "#e0945a"),
    ("gathered", "#7fb0dc"),
    ("activations", "#8fbf88"),
    ("received", "#b9b9b9"),
)


class Budget(NamedTuple):
    """Memory of a rank in training, and what it receives, in bytes. Prints as a table.

    An upper bound for all ranks: where rows don't divide evenly, the first ranks have more of them; of a
    pipeline it is the rank with the largest total. Not included are the model's buffers, temporary memory of
    single operations, torch's memory for collectives in flight, and without a batch activations.

    Attributes:
        num_ranks: Ranks of the mesh.
        whole: All parameters of the model, once.
        parameters: Parameters on the rank, including ``padding``.
        padding: Padding of uneven shards to equal sizes.
        gradients: Gradients of the trained ones, as the optimizer gets them.
        optimizer: States of the optimizer.
        optimizer_name: Name of the optimizer.
        buckets: Buffers in which ``DistributedDataParallel`` averages gradients; 0 if gradients are views.
        gathered: Most bytes of gathered units at once: the rest of the model, the unit that computes, and the
            next one. All units if they aren't freed after their forward pass.
        unreduced: Unsharded gradients until the last batch of an accumulation window; 0 if each batch is
            reduced.
        activations: Tensors that autograd saves of a batch; in a pipeline those of the microbatches that the
            schedule has in flight at once. With activation checkpointing only the inputs of recomputed blocks
            count. None without a batch.
        recomputed: Activations of the largest recomputed block, additional in its backward pass.
        moved: Bytes that the rank receives in an optimizer step, by axis: parameters and gradients, and with
            a batch activations and their gradients. Rows of experts, along ``ep``, aren't counted.
        offload: Whether parameters, gradients and states are in host memory.
    """

    num_ranks: int
    whole: int
    parameters: int
    padding: int
    gradients: int
    optimizer: int
    optimizer_name: str
    buckets: int
    gathered: int
    unreduced: int
    activations: int | None
    recomputed: int
    moved: Mapping[str, int]
    offload: bool

    @property
    def held(self) -> int:
        """Memory between steps, and the gradients."""
        return self.parameters + self.gradients + self.optimizer + self.buckets

    @property
    def total(self) -> int:
        """The sum of all parts: an upper bound at any moment of a step."""
        return self.held + self.gathered + self.unreduced + (self.activations or 0) + self.recomputed

    def rows(self) -> dict[str, str]:
        """Return the lines of the table: text by title."""
        where = ", in host memory" if self.offload else ""
        parts = [f"of {size_text(self.whole)}{where}"]
        if self.padding:
            parts.append(f"{size_text(self.padding)} of it padding")
        rows = {
            "parameters": (self.parameters, ", ".join(parts)),
            "gradients": (self.gradients, where.removeprefix(", ")),
            "optimizer": (self.optimizer, f"states of {self.optimizer_name}{where}"),
            "buckets": (self.buckets, "in which gradients are averaged"),
            "held": (
                self.held,
                f"on {self._each}{'; activations not included' * (self.activations is None)}",
            ),
            "gathered": (self.gathered, "gathered units, while they compute"),
            "unreduced": (self.unreduced, "unsharded gradients, until the last batch of a window"),
        }
        if self.activations is not None:
            rows["activations"] = (self.activations, "of a batch, until its backward pass")
            rows["recomputed"] = (self.recomputed, "activations of a block, in the backward pass")
            rows["total"] = (self.total, "at most")
        table = {title: (size_text(size), text) for title, (size, text) in rows.items() if size}
        for axis, size in self.moved.items():
            table[f"along {axis}"] = (size_text(size), "received in an optimizer step")
        width = max(len(size) for size, _ in table.values())
        return {title: f"{size.rjust(width)}  {text}".rstrip() for title, (size, text) in table.items()}

    def __str__(self) -> str:
        """Return the budget as a table."""
        return table_text(self.rows())

    def svg(self) -> str:
        """Return a complete SVG document: bars of the memory and of the traffic."""
        memory = (
            self.parameters,
            self.gradients + self.buckets + self.unreduced,
            self.optimizer,
            self.gathered,
            (self.activations or 0) + self.recomputed,
        )
        bars = [Bar("memory", "", memory)]
        bars += [Bar(f"along {axis}", "", (*[0] * len(memory), size)) for axis, size in self.moved.items()]
        about = f"{self._each}: memory, and bytes received in an optimizer step"
        return draw_bars_svg([about[0].upper() + about[1:]], bars, _PARTS)

    @property
    def _each(self) -> str:
        return f"each of {self.num_ranks:,} ranks at most" if self.num_ranks > 1 else "a single rank"


def plan_memory(
    ctx: Context,
    model: nn.Module | ModelFacts,
    *,
    plan: ModelPlan | None = None,
    optimizer: str = "adamw",
    batch: Any = None,
    loss_fn: Callable[[nn.Module, Any], Any] | None = None,
) -> Budget:
    """Return the memory that each rank needs to train a model, and what it receives. Pure.

    ``ctx`` may be one of :func:`accelfn.plan_context`, for ranks that don't exist yet.

    With a batch the loss function runs once, on a copy of the model whose tensors have no memory, so it must
    not depend on values of tensors. That takes seconds for a large model, on any machine.

    Ranks: local; the same on every rank.

    Args:
        ctx: The mesh, the options, and the length of accumulation windows.
        model: Not prepared yet; its parameters may be on the meta device. Or its facts.
        plan: The model's own plan, which in a pipeline covers this rank's stages only; None for that of
            :func:`accelfn.plan_model`.
        optimizer: "adamw", "adam", "adagrad", "rmsprop", "momentum" or "sgd", as in torch; states have the
            dtypes of the parameters.
        batch: One batch of a rank, as passed to the loss function, on any device: only shapes and dtypes
            count. Where sequences are shared, this rank's shards, as of :func:`accelfn.shard_sequence`. None
            to leave activations out.
        loss_fn: As in :func:`accelfn.forward_backward`: called with the model and the batch, returns the
            loss, or the loss and its weight. None to call the model with the batch: ``model(**batch)`` if it
            is a mapping, ``model(*batch)`` if it is a list or tuple, else ``model(batch)``.

    Raises:
        ConfigurationError: The optimizer is unknown, or the options don't fit the model; or with a batch, the
            computation depends on values, or experts are spread over ranks.
        ValueError: In a pipeline, the batch can't be split along its rows.
        Exception: Raised by the model or the loss function.

    >>> print(plan_memory(Context(), nn.Linear(1000, 250)))
    parameters  1.0 MB  of 1.0 MB
    gradients   1.0 MB
    optimizer   2.0 MB  states of adamw
    held        4.0 MB  on a single rank; activations not included
    >>> import torch
    >>> batch = torch.empty(64, 1000, device="meta")
    >>> plan_memory(Context(), nn.Sequential(nn.Linear(1000, 250), nn.Sigmoid()), batch=batch).activations
    320000
    """
    check_context("plan_memory", ctx)
    if optimizer not in OPTIMIZERS:
        close = get_close_matches(optimizer, OPTIMIZERS, 1)
        raise ConfigurationError(
            f"plan_memory: unknown optimizer {optimizer!r}. "
            f"{f'Did you mean {close[0]!r}? ' if close else ''}Use one of {', '.join(OPTIMIZERS)}."
        )
    facts = model if isinstance(model, ModelFacts) else read_facts(model)
    if plan is not None:
        plans = {ctx.coordinate("pp"): plan}
    else:
        plans = {place: plan_at(ctx, model, place) for place in range(ctx.axis_size("pp"))}
    runs, schedule = None, next(iter(plans.values())).schedule
    if batch is not None:
        if isinstance(model, ModelFacts):
            raise ConfigurationError(
                "plan_memory: a batch needs a run of the model, and facts have no forward. Pass the model, "
                "whose parameters may be on the meta device."
            )
        if schedule is not None:
            rows = count_rows(batch, "batch", "plan_memory: in a pipeline a batch is split into microbatches")
            schedule = schedule.fit(rows)
            size = rows // schedule.num_microbatches
            batch = slice_tensors(batch, slice(size))
        runs = dry_run(ctx, model, [*plans.values()], batch, loss_fn)
    budgets = [
        _budget(ctx, facts, one, place, optimizer)
        if runs is None
        else _with_batch(ctx, _budget(ctx, facts, one, place, optimizer), facts, one, place, runs, schedule)
        for place, one in plans.items()
    ]
    return max(budgets, key=lambda budget: budget.total)


def _with_batch(
    ctx: Context,
    budget: Budget,
    facts: ModelFacts,
    plan: ModelPlan,
    place: int,
    runs: Sequence[StageCost],
    schedule: SchedulePlan | None,
) -> Budget:
    """Add activations and their traffic to a budget."""
    num_batches = ctx.accumulation.num_steps
    if schedule is None or plan.pipeline is None:
        (run,) = runs
        moved = {axis: num_batches * size for axis, size in run.moved.items()}
        return budget._replace(
            activations=run.kept, recomputed=run.recomputed, moved={**budget.moved, **moved}
        )
    stages = schedule.stages_of(place)
    count = num_batches * schedule.num_microbatches
    moved = Counter(budget.moved)
    for stage in stages:
        for axis, size in runs[stage].moved.items():
            moved[axis] += count * size
        # The activations of the stage before, and the gradients of the stage after.
        of_others = {
            stage - 1: runs[stage].received,
            stage + 1: runs[stage + 1].received if stage + 1 < len(runs) else 0,
        }
        moved["pp"] += count * sum(
            size for other, size in of_others.items() if size and schedule.rank_of(other) != place
        )
    return budget._replace(
        activations=schedule.most_kept(place, {stage: runs[stage].kept for stage in stages}),
        recomputed=max(runs[stage].recomputed for stage in stages),
        moved=moved,
    )


def _budget(ctx: Context, facts: ModelFacts, plan: ModelPlan, place: int, optimizer: str) -> Budget:
    """Return the budget of the ranks at a place along "pp", without a batch."""
    states = OPTIMIZERS[optimizer]
    own = facts
    if plan.pipeline is not None and plan.schedule is not None:
        own = plan.pipeline.local(facts, plan.schedule.stages_of(place))
    local = own if plan.tensor is None else plan.tensor.local(own)
    if plan.experts is not None:
        local = plan.experts.local(local)
    names = local.own_names
    shard = plan.shard
    numel = local.numel if shard is None else partial(shard.shard_numel, local)
    kept = {name: numel(name) * local.dtypes[name].itemsize for name in names}
    over = {name: 1 if shard is None else shard.shards_of(name) for name in names}
    trained = [name for name in names if name in facts.trainable]
    parameters = sum(kept.values())
    gradients = sum(kept[name] for name in trained)
    ddp = ctx.strategy.ddp
    has_buckets = plan.engine == "ddp" and ctx.reduction is None and not ddp.gradient_as_bucket_view
    holds_whole = ctx.accumulation.num_steps > 1 and not ctx.accumulation.sync_each_batch
    return Budget(
        num_ranks=plan.mesh.num_ranks,
        whole=facts.size_bytes(*facts.own_names),
        parameters=parameters,
        padding=parameters - sum(local.size_bytes(name) // over[name] for name in names),
        gradients=gradients,
        optimizer=states.likes * gradients + (_COUNT_BYTES * len(trained) if states.counts else 0),
        optimizer_name=optimizer,
        buckets=gradients if has_buckets else 0,
        gathered=0 if shard is None else _gathered(shard, local),
        unreduced=shard.unreduced_bytes if shard is not None and holds_whole else 0,
        activations=None,
        recomputed=0,
        moved=_moved(ctx, plan, local, gradients)
        | _shared(ctx, plan, {name: kept[name] for name in trained}),
        offload=shard is not None and shard.offload,
    )


def _whole_units(plan: ShardPlan, facts: ModelFacts) -> dict[str, int]:
    """Return the gathered bytes of each unit; the last is the rest of the model."""
    units = frozenset(plan.units)
    sizes = dict.fromkeys(plan.units, 0)
    for name in facts.own_names:
        if name not in plan.left_out:
            dtype = plan.param_dtype or facts.dtypes[name]
            owner = cast("str", owner_of(name, units))
            sizes[owner] += plan.shards_of(name) * plan.shard_numel(facts, name) * dtype.itemsize
    return sizes


def _gathered(plan: ShardPlan, facts: ModelFacts) -> int:
    *units, rest = _whole_units(plan, facts).values()
    return rest + sum(sorted(units)[-2:] if plan.reshard else units)


def _moved(ctx: Context, plan: ModelPlan, facts: ModelFacts, gradients: int) -> dict[str, int]:
    """Return the bytes of parameters and gradients that a rank receives in a step, by axis."""
    window = ctx.accumulation
    reductions = window.num_steps if window.sync_each_batch else 1
    if plan.shard is None:
        copies = plan.mesh.size("loss") if plan.engine == "ddp" else 1
        axes = " x ".join(plan.mesh.active("loss"))
        return {axes: reductions * _received(2 * gradients, copies)} if copies > 1 else {}
    shard = plan.shard
    units = _whole_units(shard, facts)
    dtype = shard.reduce_dtype or shard.param_dtype
    moved: dict[str, int] = {}
    for are_experts in (False, True):
        shards = shard.num_expert_shards if are_experts else shard.num_shards
        reduced = sum(
            shards * shard.shard_numel(facts, name) * (dtype or facts.dtypes[name]).itemsize
            for name in facts.own_names
            if name in facts.trainable and name not in shard.left_out
            if (name in shard.expert_dims) == are_experts
        )
        own = {name: size for name, size in units.items() if (name in shard.expert_units) == are_experts}
        # The rest of the model, "", stays gathered until its backward pass.
        gathers = sum((2 if name and shard.reshard else 1) * size for name, size in own.items())
        received = _received(window.num_steps * gathers + reductions * reduced, shards)
        axes = " x ".join(plan.mesh.parts("eshard") if are_experts else plan.mesh.active("shard"))
        if shard.num_replicas > 1 and own:
            between = _received(2 * reduced // shards, shard.num_replicas)
            moved["dp_replicate"] = moved.get("dp_replicate", 0) + reductions * between
        if shards > 1 and own:
            moved[axes] = received
    return moved


def _shared(ctx: Context, plan: ModelPlan, gradients: Mapping[str, int]) -> dict[str, int]:
    """Return the bytes received for gradients of parameters that other pipeline ranks hold too."""
    if plan.pipeline is None or plan.schedule is None:
        return {}
    reductions = ctx.accumulation.num_steps if ctx.accumulation.sync_each_batch else 1
    others = {
        name: len({plan.schedule.rank_of(stage) for stage in plan.pipeline.of(name)}) - 1
        for name in gradients
    }
    size = reductions * sum(others[name] * size for name, size in gradients.items())
    return {"pp": size} if size else {}


def _received(size: int, num_ranks: int) -> int:
    return size * (num_ranks - 1) // num_ranks
