"""Checks of the ranks themselves: who they are, what they send each other, random numbers."""

from __future__ import annotations

import os
import signal
import time
from typing import Any, cast

import torch

from accelfn.comm import (
    TriggerState,
    broadcast,
    broadcast_object_list,
    check_replicas,
    check_trigger,
    gather,
    gather_object,
    main_process_first,
    on_main_process,
    pad_across_processes,
    reduce,
    scatter,
    set_seed,
    set_trigger,
    split_between_processes,
    synchronize_rng_states,
)
from accelfn.context import JOINED, plan_mesh
from accelfn.launch.selftest.trial import Trial, demand

__all__ = (
    "check_collectives",
    "check_mesh",
    "check_objects",
    "check_process_control",
    "check_random",
    "check_trigger_state",
    "check_world",
)


def check_world(trial: Trial) -> str:
    """Each rank is one of the world's, and all are configured alike."""
    ctx = trial.ctx
    mine: dict[str, Any] = {
        "precision": ctx.mixed_precision,
        "gradient accumulation": ctx.gradient_accumulation_steps,
        "kind of device": ctx.device.type,
        "torch": torch.__version__,
        "guard": str(ctx.guard.mode),
    }
    if trial.spoils("settings"):
        mine["precision"] = "another one"
    told = gather_object(ctx, [(ctx.rank, ctx.world.node_rank, ctx.local_rank, mine)])
    ranks = [rank for rank, *_ in told]
    demand(ranks == list(range(ctx.num_processes)), f"the ranks are {ranks}, and not each number once")
    places = [(node, local) for _, node, local, _ in told]
    demand(len(set(places)) == len(places), f"two ranks have one place: (node, local rank) are {places}")
    for name in mine:
        found = {str(one[name]): rank for rank, *_, one in told}
        demand(len(found) == 1, f"the ranks differ in {name}: {_by_rank(found)}")
    return f"{ctx.device.type}, {ctx.mixed_precision}, {ctx.world.num_nodes} node(s)"


def _numbers(tensor: torch.Tensor) -> list[Any]:
    return cast("list[Any]", tensor.flatten().tolist())  # pyright: ignore[reportUnknownMemberType] -- torch leaves it untyped


def _by_rank(found: dict[str, int]) -> str:
    return ", ".join(f"{value!r} on rank {rank}" for value, rank in found.items())


def check_collectives(trial: Trial) -> str:
    """Tensors arrive as they were sent, of several dtypes, in one tree."""
    ctx = trial.ctx
    size, rank = ctx.num_processes, ctx.rank
    if trial.spoils("death"):
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
    if trial.spoils("hang"):
        time.sleep(3600)
    dtypes = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)
    tree = {str(dtype): torch.full((2, 3), rank + 1, dtype=dtype, device=ctx.device) for dtype in dtypes}
    tree["flag"] = torch.tensor([rank % 2 == 0], device=ctx.device)
    if trial.spoils("value"):
        tree["torch.float32"][1, 2] += 1
    everything = gather(ctx, tree)
    for dtype in dtypes:
        expected = torch.arange(1, size + 1, dtype=dtype, device=ctx.device).repeat_interleave(2)[:, None]
        found = everything[str(dtype)]
        wrong = _numbers((found != expected.expand(-1, 3)).any(1).nonzero())
        ranks = sorted({row // 2 for row in wrong})
        demand(not ranks, f"gather gave other numbers of {dtype} than rank(s) {ranks} sent")
    total = reduce(ctx, tree["torch.float32"])
    demand(bool((total == size * (size + 1) / 2).all()), f"the sum over ranks is {_numbers(total)}")
    mean = reduce(ctx, tree["torch.float32"], reduction="mean")
    demand(bool((mean == (size + 1) / 2).all()), f"the mean over ranks is {_numbers(mean)}")
    last = broadcast(ctx, tree, from_process=size - 1)["torch.int64"]
    demand(bool((last == size).all()), f"broadcast from rank {size - 1} gave {_numbers(last)}")
    parts = torch.arange(2 * size, device=ctx.device)
    part = scatter(ctx, parts)
    demand(_numbers(part) == [2 * rank, 2 * rank + 1], f"scatter gave rank {rank} {_numbers(part)}")
    padded = pad_across_processes(ctx, torch.ones(rank + 1, device=ctx.device))
    demand(padded.shape == (size,) and float(padded.sum()) == rank + 1, f"padding gave {_numbers(padded)}")
    return f"over {ctx.world.backend or 'nothing: a world of one'}"


def check_objects(trial: Trial) -> str:
    """Python objects arrive too, and inputs are shared out."""
    ctx = trial.ctx
    got = gather_object(ctx, [{"rank": ctx.rank, "text": "ä" * ctx.rank}])
    demand([one["rank"] for one in got] == list(range(ctx.num_processes)), f"gather_object gave {got}")
    sent = broadcast_object_list(ctx, [("from", ctx.rank), {ctx.rank: None}])
    demand(sent == [("from", 0), {0: None}], f"broadcast_object_list gave {sent}")
    items = list(range(3 * ctx.num_processes + 1))
    shares = gather_object(ctx, list(split_between_processes(ctx, items)))
    demand(shares == items, f"the shares of {items} are {shares}")
    return ""


def check_process_control(trial: Trial) -> str:
    """The main process goes first, and what it alone computes all can have."""
    ctx = trial.ctx
    with main_process_first(ctx):
        pass

    def number() -> int:
        return ctx.rank + 7

    shared = on_main_process(ctx, share=True)(number)()
    demand(shared == 7, f"on_main_process(share=True) gave {shared}, and the main process computed 7")
    return ""


def check_trigger_state(trial: Trial) -> str:
    """A flag that one rank sets is seen by all, once."""
    ctx = trial.ctx
    state = set_trigger(TriggerState()) if ctx.rank == ctx.num_processes - 1 else TriggerState()
    state, fired = check_trigger(ctx, state)
    demand(fired, "the last rank has set the flag, and this one does not see it")
    _, fired = check_trigger(ctx, state)
    demand(not fired, "the flag is seen a second time")
    return ""


def check_mesh(trial: Trial) -> str:
    """Along each axis of the mesh, ranks hear from those beside them and from no other."""
    ctx = trial.ctx
    plan = plan_mesh(None, ctx.num_processes) if ctx.mesh is None else ctx.mesh.plan
    mine = torch.tensor([ctx.rank + trial.spoils("value")], device=ctx.device)
    axes = plan.active()
    for axis in (*axes, *JOINED):
        beside, expected = ctx.along(axis), list(plan.group(ctx.rank, axis))
        found = _numbers(gather(beside, mine))
        demand(found == expected, f"along {axis}, rank {ctx.rank} heard from {found} and not from {expected}")
        total = _numbers(reduce(beside, mine))[0]
        demand(total == sum(expected), f"along {axis}, the ranks {expected} add up to {total}")
        place = (ctx.coordinate(axis), ctx.axis_size(axis))
        demand(place == (beside.rank, beside.num_processes), f"along {axis}, the place of a rank is {place}")
    return " x ".join(f"{axis} {plan.size(axis)}" for axis in axes)


def check_random(trial: Trial) -> str:
    """One seed gives one sequence on all ranks; states can be brought together, and held apart."""
    ctx = trial.ctx
    set_seed(11 + trial.spoils("seed"))
    check_replicas(ctx, torch.rand(4), name="numbers after set_seed(11)")
    set_seed(11, ctx=ctx, device_specific=True)
    others = ctx.along("loss")  # who shares a batch shares its seed
    drawn = _numbers(gather(others, torch.rand(1, device="cpu").to(ctx.device)))
    demand(len(set(drawn)) == len(drawn), f"ranks with seeds of their own have drawn the same: {drawn}")
    generator = torch.Generator()
    generator.manual_seed(ctx.rank)
    synchronize_rng_states(ctx, ["torch", "generator"], generator)
    numbers = (torch.rand(4), torch.rand(4, generator=generator))
    check_replicas(ctx, numbers, name="numbers after synchronize_rng_states")
    return ""
