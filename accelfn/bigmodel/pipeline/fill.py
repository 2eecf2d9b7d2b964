"""Read the weights of one stage, and of no other, from a checkpoint of the whole model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from accelfn.bigmodel.load.apply import apply_plan, fetch_from_files
from accelfn.bigmodel.load.placing import read_dtype
from accelfn.bigmodel.load.plan import LoadPlan, Wishes, plan_load
from accelfn.bigmodel.load.source import Stamp, open_checkpoint
from accelfn.bigmodel.offload.blocks import slots_of
from accelfn.bigmodel.places import read_place
from accelfn.parallel import PipelinePlan
from accelfn.parallel.facts import owner_of
from accelfn.parallel.materialize import names_on_meta

__all__ = ("PlannedLoad", "check_values", "load_stage", "plan_stage_load")

_PREPARE = "prepare_pipeline"


class PlannedLoad(NamedTuple):
    """What is read from where, for the whole model.

    Attributes:
        plan: Of the tensors.
        stamps: Of the files.
    """

    plan: LoadPlan
    stamps: Mapping[Path, Stamp]


def check_values(model: nn.Module) -> None:
    """Refuse a model without values.

    Raises:
        ValueError: A tensor is on the meta device; with the names.
    """
    bare = names_on_meta(model)
    if bare:
        more = f" and {len(bare) - 5} more" if len(bare) > 5 else ""
        raise ValueError(
            f"{_PREPARE}: {', '.join(bare[:5])}{more} have no values: they are on the meta device. Pass "
            "checkpoint=, from which each rank reads its stage."
        )


def plan_stage_load(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device: torch.device,
    dtype: str | torch.dtype | None,
) -> PlannedLoad:
    """Compare a checkpoint with a whole model, whose tensors may have no values. Nothing is read.

    Effect: ties weights that the model says are tied, where the checkpoint has them once.

    Raises:
        CheckpointError: It isn't sound, or doesn't fit.
        ValueError: ``dtype`` is none.
    """
    opened = open_checkpoint(checkpoint)
    wishes = Wishes(places={"": read_place(device)}, dtype=read_dtype(dtype))
    plan = plan_load(_PREPARE, model, opened, wishes)
    if plan.needs_ties:
        # Now, and not after loading: a stage may hold one of two tied weights, and the file has the other.
        cast("Any", model).tie_weights()
        plan = plan_load(_PREPARE, model, opened, wishes)
    return PlannedLoad(plan, opened.stamps)


def load_stage(model: nn.Module, load: PlannedLoad, plan: PipelinePlan, index: int) -> None:
    """Read the weights of a stage into the whole model, straight to their device.

    Args:
        model: Changed in place.
        load: Of the whole model.
        plan: Of the stages; of a single one all is read.
        index: Of the stage.

    Raises:
        DamagedCheckpointError: A file isn't what it was.
        OSError: It can't be read.
    """
    steps = load.plan
    if len(plan.stages) > 1:
        others = plan.elsewhere([index])
        wanted = {name for name, _ in slots_of(model) if owner_of(name, others) is None}
        steps = steps._replace(
            steps=tuple(step for step in steps.steps if not wanted.isdisjoint(step.target.names)),
            values=tuple(one for one in steps.values if not wanted.isdisjoint(one[0].names)),
            extras=(),
            needs_ties=False,
        )
    apply_plan(model, steps, load.stamps, fetch_from_files(load.stamps))
