"""A step of a small GPT in pipeline stages, beside hand-written torch; and how long ranks wait.

Steps are compared on two processes. How long ranks wait is measured on two and four, with blocks that sleep,
and so doesn't depend on how many cores there are.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

import accelfn as af
from accelfn.config import PipelineParallelConfig
from accelfn.parallel.strategies.pipeline_plan import SchedulePlan, plan_schedule
from tests.bench.sharding import GPT, LARGE, SMALL, Step, batch_of, loss_of, trained
from tests.bench.timing import Times, compare, on_ranks, plain, rounds_of, show_beside, show_table

SCHEDULES = ("gpipe", "1f1b", "interleaved1f1b")
# Of one microbatch on one rank: long beside what a schedule itself takes.
_FORWARD_S, _BACKWARD_S = 0.02, 0.04


def options_of(schedule: str, num_ranks: int, num_microbatches: int) -> af.context.ContextOptions:
    """Return the options of a context whose ranks are one pipeline."""
    handler = PipelineParallelConfig(num_microbatches=num_microbatches, schedule=schedule)
    return {"cpu": True, "parallelism_config": af.ParallelismConfig(pp_size=num_ranks, pp_handler=handler)}


def schedule_of(ctx: af.Context) -> SchedulePlan:
    """Return the schedule of a context with a pipeline."""
    config = cast("af.ParallelismConfig", ctx.strategy.parallelism)
    return plan_schedule(cast("PipelineParallelConfig", config.pp_handler), config.pp_size)


def by_functions(ctx: af.Context, size: tuple[int, int]) -> tuple[nn.Module, Step]:
    """Return a model and its step through ``forward_backward``."""
    model = GPT(*size)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return trained(ctx, model, optimizer, batch_of(0), in_one_call=True)


def by_train_step(ctx: af.Context, size: tuple[int, int]) -> tuple[nn.Module, Step]:
    """Return a model and its step made by ``make_train_step``."""
    model: nn.Module = GPT(*size)
    model, optimizer = af.prepare(ctx, model, torch.optim.SGD(model.parameters(), 0.1))
    run = af.make_train_step(ctx, loss_of, optimizer, model=model)
    states, batch = [af.init_train_state(ctx, optimizer)], batch_of(0)

    def step() -> None:
        states[0], _ = run(states[0], batch)

    return model, step


class _Stage(nn.Module):
    """A stage of the GPT as one writes it by hand: the first one embeds, the last one has the head."""

    def __init__(self, model: GPT, index: int, num_stages: int) -> None:
        super().__init__()
        count = len(model.blocks) // num_stages
        self.embed = model.embed if index == 0 else None
        self.blocks = model.blocks[index * count : (index + 1) * count]
        is_last = index + 1 == num_stages
        self.norm, self.head = (model.norm, model.head) if is_last else (None, None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return x if self.norm is None or self.head is None else self.head(self.norm(x))


def by_hand(plan: SchedulePlan, rank: int, size: tuple[int, int]) -> tuple[nn.Module, Step]:
    """Return the stages of a rank and a step in plain torch: its stages and schedule, with shapes given."""
    model = GPT(*size)
    ids, labels = batch_of(0)
    part = ids[: len(ids) // plan.num_microbatches]
    hidden = torch.zeros(*part.shape, size[0], device="meta", requires_grad=True)
    logits = torch.zeros(*part.shape, model.head.out_features, device="meta", requires_grad=True)
    indexes = plan.stages_of(rank)
    modules = nn.ModuleList(_Stage(model, index, plan.num_stages) for index in indexes)
    run = _schedule_by_hand(plan, indexes, modules, (part.to("meta"), hidden, logits), _cross_entropy)
    optimizer: Any = torch.optim.SGD(modules.parameters(), 0.1)

    def step() -> None:
        run(ids, labels)
        optimizer.step()
        optimizer.zero_grad()

    return modules, step


def _schedule_by_hand(
    plan: SchedulePlan,
    indexes: Sequence[int],
    modules: Iterable[nn.Module],
    shapes: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    loss_fn: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return what runs a batch and its labels through stages; ``shapes``: of input, between them, output."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    first, between, last = shapes
    stages = [
        PipelineStage(
            module,
            index,
            plan.num_stages,
            torch.device("cpu"),
            input_args=between if index else first,
            output_args=last if index + 1 == plan.num_stages else between,
        )
        for module, index in zip(modules, indexes, strict=True)
    ]
    kind = cast("Any", get_schedule_class(plan.name))
    schedule = kind(stages if len(stages) > 1 else stages[0], plan.num_microbatches, loss_fn=loss_fn)

    def run(batch: torch.Tensor, labels: torch.Tensor) -> None:
        inputs = (batch,) if 0 in indexes else ()
        others = {"target": labels} if plan.num_stages - 1 in indexes else {}
        schedule.step(*inputs, **others, return_outputs=False)

    return run


def _cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def compare_steps() -> None:
    """Compare steps on this rank of two; every rank must call it."""
    rows: dict[str, Times] = {}
    for (size, shown), name in itertools.product(((SMALL, "width 128"), (LARGE, "width 384")), SCHEDULES):
        with af.init_context(**options_of(name, 2, 4)) as ctx:
            ways = {
                "`forward_backward`": by_functions(ctx, size)[1],
                "`make_train_step`": by_train_step(ctx, size)[1],
                "hand-written torch": by_hand(schedule_of(ctx), ctx.rank, size)[1],
            }
            calls = 3 if size is SMALL else 1
            times = compare(ways, rounds=40, calls=calls, before=plain.barrier)
            hand = {"hand-written torch": times.pop("hand-written torch")}
            rows |= {f"{shown}, {name}, {way}": {way: one, **hand} for way, one in times.items()}
    show_beside("pipeline", rows)


class _Pause(torch.autograd.Function):
    """Takes its time, forward and backward, and none of the processor's; counts it in ``slept``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, share: float, slept: list[float]) -> torch.Tensor:
        ctx.settings = share, slept
        _sleep(_FORWARD_S * share, slept)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        share, slept = ctx.settings
        _sleep(_BACKWARD_S * share, slept)
        return gradients[0], None, None


def _sleep(seconds: float, slept: list[float]) -> None:
    start = time.perf_counter()
    time.sleep(seconds)
    slept.append(time.perf_counter() - start)


class _Pausing(nn.Module):
    """A block that does next to nothing, in a share of the time that a rank has for a microbatch."""

    def __init__(self, share: float, slept: list[float]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.share = share
        self.slept = slept

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", cast("Any", _Pause).apply(self.layer(x), self.share, self.slept))


def _mean_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).mean()


def _mean_with(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    del labels
    return output.mean()


def idle_share(ctx: af.Context) -> Sequence[str]:
    """Return a row on how long the ranks of a pipeline wait; every rank must call it."""
    plan = schedule_of(ctx)
    slept: list[float] = []
    blocks = [_Pausing(1 / plan.stages_per_rank, slept) for _ in range(plan.num_stages)]
    x = torch.ones(plan.num_microbatches, 4)
    shape = torch.zeros(1, 4, device="meta", requires_grad=True)
    indexes = plan.stages_of(ctx.rank)
    own = copy.deepcopy([blocks[index] for index in indexes], {id(slept): slept})
    hand = _schedule_by_hand(plan, indexes, own, (shape.detach(), shape, shape), _mean_with)
    model = af.prepare_model(ctx, nn.Sequential(*blocks))
    ((_, micro),) = af.microbatches(ctx, [x])
    states = [af.init_scaler(ctx)]

    def ours() -> None:
        states[0], _ = af.forward_backward(ctx, model, _mean_of, x, states[0], micro)

    found: list[list[float]] = [[], []]
    for number in range(rounds_of(5) + 1):
        for shares, run in zip(found, (ours, lambda: hand(x, x)), strict=True):
            af.wait_for_everyone(ctx)
            slept.clear()
            start = time.perf_counter()
            run()
            taken = torch.tensor([[time.perf_counter() - start, sum(slept)]])
            seconds, busy = af.gather(ctx, taken).unbind(1)
            if number:  # the first one finds out what stages send
                shares.append(1 - float(busy.mean() / seconds.max()))
    shown = [f"{statistics.median(one):.1%} ({min(one):.1%})" for one in found]
    counts = (plan.num_ranks, plan.stages_per_rank, plan.num_microbatches)
    return plan.name, *map(str, counts), *shown, f"{plan.bubble:.1%}"


def measure_idle(num_ranks: int) -> None:
    """Measure how long ranks wait, for each schedule and several numbers of microbatches."""
    rows: list[Sequence[str]] = []
    for name, factor in itertools.product(SCHEDULES, (1, 2, 4)):
        with af.init_context(**options_of(name, num_ranks, factor * num_ranks)) as ctx:
            rows.append(idle_share(ctx))
    columns = (
        *("schedule", ">ranks", ">stages per rank", ">microbatches", ">idle, median (best)"),
        *(">hand-written torch", ">formula"),
    )
    show_table(f"pipeline-idle-{num_ranks}", columns, rows)


def measure(ctx: af.Context) -> None:
    """Measure on this rank; every rank must call it."""
    if ctx.num_processes == 2:  # with more ranks than cores they'd wait for those
        compare_steps()
    measure_idle(ctx.num_processes)


if __name__ == "__main__":
    on_ranks(measure)
