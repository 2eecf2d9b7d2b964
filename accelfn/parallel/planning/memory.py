"""Memory that each rank needs to train a model, and bytes that it receives: from the plan and a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

from torch import nn

from accelfn.context import Context, takes_context
from accelfn.parallel.facts import ModelFacts, table_text
from accelfn.parallel.plan import ModelPlan
from accelfn.parallel.planning.costs import Weights
from accelfn.parallel.planning.optimizer_states import OptimizerKind, OptimizerStates, states_of
from accelfn.parallel.planning.step import StepPlan, plan_step
from accelfn.parallel.planning.traffic import Traffic, gathered_units, sizes_of_units, traffic_at
from accelfn.parallel.planning.zero import weights_of_zero
from accelfn.tree.bars import Bar, draw_bars_svg
from accelfn.tree.structure import size_text

PARTS = (
    ("parameters", "#14407a"),
    ("gradients", "#f3c9a5"),
    ("optimizer", "#e0945a"),
    ("gathered", "#7fb0dc"),
    ("activations", "#8fbf88"),
    ("received", "#b9b9b9"),
)
"""Names and colors of the SVG: the parts of memory, and at last what is received."""


class Budget(NamedTuple):
    """Memory of a rank in training, and what it receives, in bytes. Prints as a table.

    An upper bound for all ranks: where rows don't divide evenly, the first ranks have more of them; of a
    pipeline it is the rank with the largest total. Not included are the model's buffers, memory inside of
    single operations, DeepSpeed's own buffers, and without a batch activations.

    Attributes:
        num_ranks: Ranks of the mesh.
        whole: All parameters of the model, once.
        parameters: Parameters on the rank, including ``padding``.
        padding: Padding of uneven shards to equal sizes.
        gradients: Gradients of the trained ones, as the optimizer gets them.
        optimizer: States of the optimizer.
        optimizer_name: Name of the optimizer.
        buckets: Buffers in which ``DistributedDataParallel`` averages gradients, 0 if gradients are views.
        gathered: Most bytes of gathered units at once: the rest of the model, the unit that computes, and the
            next one. All units if they aren't freed after their forward pass.
        unreduced: Unsharded gradients until the last batch of an accumulation window; 0 if each batch is
            reduced.
        reduced: Unsharded gradients of the largest unit, and their copy in the dtype in which they are
            averaged, while they are.
        accumulates: Whether gradients of one batch or microbatch are there while another one's activations
            are.
        activations: Tensors that autograd saves of a batch; in a pipeline those of the microbatches that the
            schedule has in flight at once. With activation checkpointing only the inputs of recomputed blocks
            count. None without a batch.
        recomputed: Activations of the largest recomputed block, additional in its backward pass.
        temporary: The largest tensor that an operation computes of a batch: such as gradients of logits.
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
    reduced: int
    accumulates: bool
    activations: int | None
    recomputed: int
    temporary: int
    moved: Mapping[str, int]
    offload: bool

    @property
    def held(self) -> int:
        """Memory between steps, and the gradients."""
        return self.parameters + self.gradients + self.optimizer + self.buckets

    @property
    def total(self) -> int:
        """The sum of all parts: an upper bound at any moment of a step."""
        of_weights = self.gathered + self.unreduced + self.reduced
        return self.held + of_weights + (self.activations or 0) + self.recomputed + self.temporary

    @property
    def peak(self) -> int:
        """What to expect of a step: gradients come as activations go, unless several batches accumulate."""
        gradients = self.gradients + self.unreduced + self.reduced
        activations = (self.activations or 0) + self.temporary
        most = gradients + activations if self.accumulates else max(gradients, activations)
        return self.held - self.gradients + self.gathered + self.recomputed + most

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
            "reduced": (self.reduced, "unsharded gradients, while they are averaged"),
        }
        if self.activations is not None:
            rows["activations"] = (self.activations, "of a batch, until its backward pass")
            rows["recomputed"] = (self.recomputed, "activations of a block, in the backward pass")
            rows["temporary"] = (self.temporary, "the largest tensor of an operation")
            rows["total"] = (self.total, "at most")
            if self.peak < self.total:
                rows["peak"] = (self.peak, "to expect, since gradients come as activations go")
        table = {
            title: (size_text(size), text) for title, (size, text) in rows.items() if size or title == "held"
        }
        for axis, size in self.moved.items():
            table[f"along {axis}"] = (size_text(size), "received in an optimizer step")
        width = max(len(size) for size, _ in table.values())
        return {title: f"{size.rjust(width)}  {text}".rstrip() for title, (size, text) in table.items()}

    def __str__(self) -> str:
        """Return the budget as a table."""
        return table_text(self.rows())

    def svg(self) -> str:
        """Return a complete SVG document: bars of the memory and of the traffic."""
        bars = [Bar("memory", "", self.parts)]
        bars += [
            Bar(f"along {axis}", "", (*[0] * len(self.parts), size)) for axis, size in self.moved.items()
        ]
        about = f"{self._each}: memory, and bytes received in an optimizer step"
        return draw_bars_svg([about[0].upper() + about[1:]], bars, PARTS)

    @property
    def parts(self) -> tuple[int, ...]:
        """The bytes of ``total`` by :data:`PARTS`."""
        return (
            self.parameters,
            self.gradients + self.buckets + self.unreduced + self.reduced,
            self.optimizer,
            self.gathered,
            (self.activations or 0) + self.recomputed + self.temporary,
        )

    @property
    def _each(self) -> str:
        return f"each of {self.num_ranks:,} ranks at most" if self.num_ranks > 1 else "a single rank"


@takes_context
def plan_memory(
    ctx: Context,
    model: nn.Module | ModelFacts,
    *,
    plan: ModelPlan | None = None,
    optimizer: OptimizerKind = "adamw",
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
        optimizer: "adamw", "adam", "adagrad", "rmsprop", "momentum" or "sgd", as in torch; a class or
            function that is called with parameters and returns an optimizer, which takes a step on parameters
            without memory; or a number: bytes of states per parameter.
        batch: One batch of a rank, as passed to the loss function, on any device: only shapes and dtypes
            count. Where sequences are shared, this rank's shards, as of :func:`accelfn.shard_sequence`. None
            to leave activations out.
        loss_fn: As in :func:`accelfn.forward_backward`: called with the model and the batch, returns the
            loss, or the loss and its weight. None to call the model with the batch: ``model(**batch)`` if it
            is a mapping, ``model(*batch)`` if it is a list or tuple, else ``model(batch)``.

    Raises:
        ConfigurationError: The optimizer is unknown or can't step without memory, or the options don't fit
            the model; or with a batch, the computation depends on values, or experts are spread over ranks.
        TypeError: The model isn't one.
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
    states = states_of(optimizer, "plan_memory")
    step = plan_step(ctx, model, plan=plan, batch=batch, loss_fn=loss_fn)
    return budget_of(ctx, step, states)[0]


def budget_of(ctx: Context, step: StepPlan, states: OptimizerStates) -> tuple[Budget, Traffic]:
    """Return the budget of the ranks that need most, and the traffic of those that receive most."""
    traffics = {place: traffic_at(ctx, step, place) for place in step.plans}
    budgets = (_budget_at(ctx, step, place, states, traffic.moved) for place, traffic in traffics.items())
    return (
        max(budgets, key=lambda budget: budget.total),
        max(traffics.values(), key=lambda traffic: traffic.received),
    )


def _budget_at(
    ctx: Context, step: StepPlan, place: int, states: OptimizerStates, moved: Mapping[str, int]
) -> Budget:
    """Return the budget of the ranks at a place along "pp", which receive ``moved`` along each axis."""
    if step.zero is None:
        weights = _weights(ctx, step, place, states)
    else:
        weights = weights_of_zero(step.zero, step.facts, states)
    activations, own = None, step.own_stages(place)
    if own:
        sizes = {stage: cost.kept for stage, cost in own.items()}
        activations = sizes[0] if step.schedule is None else step.schedule.most_kept(place, sizes)
    return Budget(
        num_ranks=step.plans[place].mesh.num_ranks,
        whole=step.facts.size_bytes(*step.facts.own_names),
        **weights._asdict(),
        accumulates=step.accumulates,
        activations=activations,
        recomputed=max((cost.recomputed for cost in own.values()), default=0),
        temporary=max((cost.largest for cost in own.values()), default=0),
        moved=moved,
    )


def _weights(ctx: Context, step: StepPlan, place: int, states: OptimizerStates) -> Weights:
    plan, local = step.plans[place], step.local(place)
    names, shard = local.own_names, plan.shard
    shapes = {name: local.shapes[name] if shard is None else shard.shard_shape(local, name) for name in names}
    kept = {name: prod(shape) * local.dtypes[name].itemsize for name, shape in shapes.items()}
    trained = [name for name in names if name in step.facts.trainable]
    parameters, gradients = sum(kept.values()), sum(kept[name] for name in trained)
    weights = Weights(
        parameters=parameters,
        padding=0,
        gradients=gradients,
        optimizer=sum(states.bytes_of(shapes[name], local.dtypes[name]) for name in trained),
        optimizer_name=states.name,
    )
    if shard is None:
        has_buckets = plan.engine == "ddp" and ctx.reduction is None
        has_buckets = has_buckets and not ctx.strategy.ddp.gradient_as_bucket_view
        return weights._replace(buckets=gradients if has_buckets else 0)

    def width(name: str) -> int:
        """Return the bytes of an element of an unsharded gradient, and of the copy that is reduced."""
        if name not in step.facts.trainable or shard.shards_of(name) == 1:
            return 0
        dtype = shard.param_dtype or local.dtypes[name]
        return dtype.itemsize + (shard.reduce_dtype or dtype).itemsize

    *units, rest = gathered_units(plan, shard, local).values()
    holds_whole = step.num_batches > 1 and not ctx.accumulation.sync_each_batch
    return weights._replace(
        padding=parameters - sum(local.size_bytes(name) // shard.shards_of(name) for name in names),
        gathered=rest + sum(sorted(units)[-2:] if shard.reshard else units),
        unreduced=shard.unreduced_bytes if holds_whole else 0,
        reduced=max(sizes_of_units(shard, local, width).values()),
        offload=shard.offload,
    )
