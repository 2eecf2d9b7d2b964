"""Load a model on all ranks where one of them reads the files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from accelfn.bigmodel.load.apply import Fetch, apply_plan
from accelfn.bigmodel.load.plan import LoadPlan, Wishes, plan_load
from accelfn.bigmodel.load.read import PIECE_BYTES, Reading, read_tensors
from accelfn.bigmodel.load.source import Checkpoint, Stamp, open_checkpoint
from accelfn.checkpoint.weights.state import Meet, together
from accelfn.comm import broadcast_object_list
from accelfn.context import Context, init_context

__all__ = ("load_from_rank0",)


def load_from_rank0(
    operation: str,
    model: nn.Module,
    path: str | os.PathLike[str],
    wishes: Wishes,
    *,
    report: Callable[[Checkpoint, LoadPlan], None],
    show: Callable[[int], AbstractContextManager[Callable[[int], None]]],
) -> None:
    """Load a checkpoint that only rank 0 can read into the models of all ranks.

    Every rank plans for itself, on what rank 0 says of the files. Then tensors travel one after the other, in
    pieces, from and to where they belong.

    Ranks: every rank of torch's default process group.

    Args:
        operation: What errors call it.
        model: Without the wrappers around it; the same on every rank.
        path: Of the checkpoint; other ranks don't look at it.
        wishes: The same on every rank. Nothing can go to the disk.
        report: Called on rank 0 with the plan.
        show: Called on rank 0 with the bytes to come; gives what is called with those that are done.

    Raises:
        ValueError: There is no process group, or something shall go to the disk.
        RemoteRankError: Another rank has failed, such as rank 0 in reading.
        MismatchError: The ranks' models differ.
        Exception: As without other ranks.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            f"{operation}: broadcast_from_rank0 needs a process group. Call init_context or "
            "torch.distributed.init_process_group first, or leave it out: then every rank reads by itself."
        )
    if not wishes.is_whole:
        raise ValueError(
            f"{operation}: broadcast_from_rank0 gives every rank the same whole tensors, and "
            "full_state_dict=False says that each has a checkpoint with parts of its own. Choose one."
        )
    if "disk" in (wishes.places or {}).values():
        raise ValueError(
            f"{operation}: with broadcast_from_rank0 nothing can be on the disk, since only rank 0 has the "
            "files. Let every rank read, or choose other places."
        )
    with init_context() as ctx:
        together(ctx, operation, lambda meet: _load(ctx, operation, model, path, wishes, meet, report, show))


def _load(
    ctx: Context,
    operation: str,
    model: nn.Module,
    path: str | os.PathLike[str],
    wishes: Wishes,
    meet: Meet,
    report: Callable[[Checkpoint, LoadPlan], None],
    show: Callable[[int], AbstractContextManager[Callable[[int], None]]],
) -> None:
    here = open_checkpoint(path) if ctx.is_main_process else None
    meet("heads")
    told = broadcast_object_list(ctx, [_to_tell(here) if here is not None else None])[0]
    checkpoint = here if here is not None else _as_told(path, cast("Mapping[str, Any]", told))
    # What only the bytes can tell, rank 0 finds out for all.
    plan = plan_load(operation, model, checkpoint, wishes, compare=here is not None)
    meet("plan", lambda: {step.target.name: f"{step.target.kind} as {step.dtype}" for step in plan.steps})
    fetch = _fetch_from_rank0(ctx, meet, checkpoint.stamps)
    if not ctx.is_main_process:
        apply_plan(model, plan, checkpoint.stamps, fetch)
        return
    report(checkpoint, plan)
    with show(sum(step.source.num_bytes for step in plan.steps)) as advance:
        apply_plan(model, plan, checkpoint.stamps, fetch, advance=advance)


def _to_tell(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Return all that a rank without the files needs, and that can travel."""
    return {
        "tensors": {name: one._replace(elements=None) for name, one in checkpoint.tensors.items()},
        "tied": dict(checkpoint.tied),
        "others": {
            **checkpoint.others,
            # State of modules is small, and is handed over instead of being put into memory.
            **{
                name: one.map().clone()
                for name, one in checkpoint.tensors.items()
                if name.endswith("_extra_state")
            },
        },
    }


def _as_told(path: str | os.PathLike[str], told: Mapping[str, Any]) -> Checkpoint:
    return Checkpoint(place=Path(path), stamps={}, **told)


def _fetch_from_rank0(ctx: Context, meet: Meet, stamps: Mapping[Path, Stamp]) -> Fetch:
    def fetch(readings: Sequence[Reading], advance: Callable[[int], None]) -> None:
        if ctx.is_main_process:
            read_tensors(readings, stamps, advance)
        meet("tensors", lambda: {one.source.name: str(one.source.num_bytes) for one in readings})
        for one in readings:
            _broadcast(ctx, one.target)

    return Fetch(fetch, has_files=False)


def _broadcast(ctx: Context, target: torch.Tensor) -> None:
    """Fill a tensor with that of rank 0, in pieces."""
    plain = target.detach().contiguous()
    flat = plain.view(-1).view(torch.uint8)
    for start in range(0, flat.numel(), PIECE_BYTES):
        ctx.collectives.broadcast(flat[start : start + PIECE_BYTES], 0)
    if plain.data_ptr() != target.data_ptr():
        target.copy_(plain)
