"""Cut a model into stages, one for each rank, and keep of it what a rank needs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from accelfn.bigmodel.pipeline.fill import PlannedLoad, check_values, load_stage, plan_stage_load
from accelfn.bigmodel.pipeline.run import Pipeline, group_of
from accelfn.comm import Call, agree, catch
from accelfn.context import Context, check_context
from accelfn.parallel import PipelinePlan, apply_stages, plan_stages, read_facts
from accelfn.tree import count_rows

__all__ = ("plan_pipeline", "prepare_pipeline")

_PREPARE = "prepare_pipeline"


def plan_pipeline(
    model: nn.Module,
    num_stages: int,
    *,
    split_points: str | Sequence[str] = "auto",
    no_split_module_classes: str | Sequence[str] | None = None,
    last: Sequence[str] = (),
) -> PipelinePlan:
    """Decide where a model is cut into stages. Pure: the model may lie on the meta device.

    Ranks: local.

    Args:
        model: Any whose blocks are called one after another, as :func:`accelfn.parallel.plan_stages` has it.
        num_stages: How many.
        split_points: Names of the modules that begin a stage, but for the first, in order. ``"auto"``: the
            largest stage has as few bytes of parameters as can be.
        no_split_module_classes: Names of the classes of the blocks. None: what the model says of itself
            (``_no_split_modules`` in transformers), or else the items of its lists of modules.
        last: As in :func:`accelfn.parallel.plan_stages`.

    Returns:
        The plan, which prints as a table.

    Raises:
        ConfigurationError: There are fewer blocks than stages, or a split point is none that can be.
    """
    if isinstance(split_points, str) and split_points != "auto":
        raise ValueError(
            f'{_PREPARE}: split_points must be "auto" or names of modules, got {split_points!r}.'
        )
    facts = read_facts(model)
    if no_split_module_classes is not None:
        classes = no_split_module_classes
        classes = (classes,) if isinstance(classes, str) else tuple(classes)
        facts = facts._replace(blocks=tuple(name for name, kind in facts.kinds.items() if kind in classes))
    if not isinstance(split_points, str):
        return plan_stages(facts, num_stages, split=split_points, last=last)
    costs = dict.fromkeys(facts.kinds, 0.0)
    for name in facts.shapes:
        owner = name
        while owner := owner.rpartition(".")[0]:
            if owner in costs:
                costs[owner] += facts.size_bytes(name)
    return plan_stages(facts, num_stages, costs=costs, last=last)


def prepare_pipeline(
    ctx: Context,
    model: nn.Module,
    example: Any,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    split_points: str | Sequence[str] = "auto",
    no_split_module_classes: str | Sequence[str] | None = None,
    last: Sequence[str] = (),
    num_chunks: int | None = None,
    gather_output: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
) -> Pipeline:
    """Spread a model over all ranks, stage after stage, for inference.

    Each rank keeps the tensors of its own stage, on its device, and lets go of all others. So a model that
    fits no rank is made on the meta device, and each rank reads its stage of the checkpoint. With one process
    the result runs the model itself.

    The example runs through the stages at the end: a model that can't be run in stages is refused then.

    Effect: on ``model``, which is in evaluation mode afterwards, and can't be called itself. It computes in
    the dtypes of its weights, whatever mixed precision the context has.

    Ranks: every rank of ``ctx``, with the same model.

    Args:
        ctx: The world: as many stages as processes.
        model: As in :func:`plan_pipeline`.
        example: Arguments of a call: a tuple of positional ones, a mapping of keyword ones, or the only one.
            Those of rank 0 count.
        example_kwargs: Keyword arguments of a call, beside positional ones.
        split_points: As in :func:`plan_pipeline`.
        no_split_module_classes: As in :func:`plan_pipeline`.
        last: As in :func:`plan_pipeline`.
        num_chunks: Microbatches that a batch is split into. None: one for each rank. With more of them ranks
            wait less for each other, until microbatches are too small for the device.
        gather_output: Give the result to all ranks, and not to the last one only.
        checkpoint: Of the weights, as for :func:`load_checkpoint_in_model`. Each rank reads what is in its
            stage, straight to its device. Needed where the model has tensors on the meta device.
        dtype: That floating-point weights of the checkpoint are to have. None: that of the model.

    Returns:
        What is called instead of the model, on all ranks.

    Raises:
        ValueError: The example has no batch dimension; or a tensor has no values (meta device), and no
            checkpoint is given. The model wasn't changed.
        NotAvailableError: The ranks are threads. The model wasn't changed.
        ConfigurationError: As :func:`plan_pipeline`, and the model wasn't changed; or something in the model
            depends on another stage than by the call of a block.
        CheckpointError: There is no sound checkpoint, or it doesn't fit. The model wasn't changed.
        MismatchError: The ranks' plans differ.
        RemoteRankError: Another rank has failed.
    """
    check_context(_PREPARE, ctx)
    args: tuple[Any, ...] = cast("tuple[Any, ...]", example) if isinstance(example, tuple) else (example,)
    kwargs = dict(example_kwargs or {})
    if isinstance(example, Mapping) and example_kwargs is None:
        args, kwargs = (), dict(cast("Mapping[str, Any]", example))
    chunks = ctx.num_processes if num_chunks is None else num_chunks

    def plan() -> tuple[PipelinePlan, PlannedLoad | None]:
        if type(chunks) is not int or chunks < 1:
            raise ValueError(f"{_PREPARE}: num_chunks must be a whole number of at least 1, got {chunks!r}.")
        reason = f"{_PREPARE}: a batch is cut into microbatches"
        count_rows((args, kwargs), "example", reason, with_others=True)
        if ctx.num_processes > 1:
            group_of(ctx)
        planned = plan_pipeline(
            model,
            ctx.num_processes,
            split_points=split_points,
            no_split_module_classes=no_split_module_classes,
            last=last,
        )
        load = None if checkpoint is None else plan_stage_load(model, checkpoint, ctx.device, dtype)
        if load is None:
            check_values(model)
        return planned, load

    planned, error = catch(plan)
    said = "" if planned is None else f"{planned[0]!r} {chunks} {gather_output}"
    agree(ctx, Call(_PREPARE, said, takes_long=True), error=error)
    assert planned is not None  # else all have raised
    made, error = catch(lambda: _make(ctx, model, *planned, chunks, gather_output))
    agree(ctx, Call(_PREPARE, "made", takes_long=True), error=error)
    assert made is not None
    if ctx.num_processes > 1:
        made(*args, **kwargs)
    return made


def _make(
    ctx: Context,
    model: nn.Module,
    plan: PipelinePlan,
    load: PlannedLoad | None,
    num_chunks: int,
    gather_output: bool,
) -> Pipeline:
    """Fill this rank's stage, and empty the model of all else."""
    model.eval()
    if load is not None:
        load_stage(model, load, plan, ctx.rank)
    if ctx.num_processes > 1:
        apply_stages(model, plan, [ctx.rank])
    return Pipeline(ctx, plan, model.to(ctx.device), num_chunks, gather_output)
