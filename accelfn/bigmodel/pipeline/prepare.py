"""Cut a model into stages, one for each rank, and keep of it what a rank needs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import fx, nn

from accelfn.bigmodel.offload.packing import plan_packing
from accelfn.bigmodel.pipeline.batch import Example, Result, read_example
from accelfn.bigmodel.pipeline.fill import PlannedLoad, check_values, load_stage, plan_stage_load
from accelfn.bigmodel.pipeline.plan import PipelinePlan, StagePlan, choose_cuts
from accelfn.bigmodel.pipeline.run import Form, Pipeline
from accelfn.bigmodel.pipeline.stage import Stage, cut_out, form_of, hold, let_go
from accelfn.bigmodel.pipeline.trace import Traced, trace_model, units_of, value_of
from accelfn.bigmodel.plan.shape import read_shape
from accelfn.comm import Call, agree, catch
from accelfn.context import Context, check_context

__all__ = ("plan_pipeline", "prepare_pipeline")

_PREPARE = "prepare_pipeline"


def plan_pipeline(
    model: nn.Module,
    example: Any,
    num_stages: int,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    split_points: str | Sequence[str] = "auto",
    no_split_module_classes: str | Sequence[str] | None = None,
    num_chunks: int | None = None,
) -> PipelinePlan:
    """Decide where a model is cut into stages. Pure: the model may lie on the meta device.

    Stages begin where modules do. Their parameters and buffers have nearly the same size, and among such cuts
    those are taken with which the least has to be passed on.

    Ranks: local.

    Args:
        model: Any whose forward can be followed by ``torch.export``.
        example: Arguments of a call: a tuple of positional ones, a mapping of keyword ones, or the only one.
        num_stages: How many.
        example_kwargs: Keyword arguments of a call, beside positional ones.
        split_points: Names of the modules that begin a stage, but for the first, in order. ``"auto"``: as
            above.
        no_split_module_classes: Names of classes of modules that aren't cut. None: what the model says of
            itself (``_no_split_modules`` in transformers), or else none.
        num_chunks: Micro-batches that a batch as large as the example is cut into. None: one for each stage.

    Returns:
        The plan, which prints as a table.

    Raises:
        ValueError: The example has no batch dimension, the model can't be followed or has too few modules, or
            a split point is no module that is called, out of order, or one of too few or too many.
    """
    asked = _read(example, example_kwargs, num_stages, num_chunks)
    if num_stages == 1:
        return _whole(model, asked)
    return _cut(model, asked, split_points, no_split_module_classes, torch.device("cpu"), {}).plan


def prepare_pipeline(
    ctx: Context,
    model: nn.Module,
    example: Any,
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    split_points: str | Sequence[str] = "auto",
    no_split_module_classes: str | Sequence[str] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
) -> Pipeline:
    """Spread a model over all ranks, stage after stage, for inference.

    Each rank keeps the tensors of its own stage, on its device, and lets go of all others: in ``model`` they
    are on the meta device afterwards. So a model that fits no rank is made on the meta device, and each rank
    reads its stage of the checkpoint. With one process the result runs the model itself.

    Effect: on ``model``, which is in evaluation mode afterwards. It computes in the dtypes of its weights,
    whatever mixed precision the context has.

    Ranks: every rank of ``ctx``, with the same model and example.

    Args:
        ctx: The world: as many stages as processes.
        model: As in :func:`plan_pipeline`.
        example: As in :func:`plan_pipeline`. Batches must be like it in all but the number of rows.
        example_kwargs: As in :func:`plan_pipeline`.
        split_points: As in :func:`plan_pipeline`.
        no_split_module_classes: As in :func:`plan_pipeline`.
        num_chunks: As in :func:`plan_pipeline`. With more of them ranks wait less for each other, until
            micro-batches are too small for the device.
        gather_output: Give the result to all ranks, and not to the last one only.
        checkpoint: Of the weights, as for :func:`load_checkpoint_in_model`. Each rank reads what is in its
            stage, straight to its device. Needed where the model has tensors on the meta device.
        dtype: That floating-point weights of the checkpoint are to have. None: that of the model.

    Returns:
        What is called instead of the model, on all ranks.

    Raises:
        ValueError: As :func:`plan_pipeline`; or a tensor has no values (meta device), and no checkpoint is
            given. The model wasn't changed.
        CheckpointError: There is no sound checkpoint, or it doesn't fit. The model wasn't changed.
        MismatchError: The ranks' plans differ.
        RemoteRankError: Another rank has failed.
    """
    check_context("prepare_pipeline", ctx)

    def plan() -> tuple[_Asked, _Cut | None, PlannedLoad | None]:
        asked = _read(example, example_kwargs, ctx.num_processes, num_chunks)
        load = None if checkpoint is None else plan_stage_load(model, checkpoint, ctx.device, dtype)
        cut = None
        if ctx.num_processes > 1:
            dtypes = {} if load is None else load.dtypes
            cut = _cut(model, asked, split_points, no_split_module_classes, ctx.device, dtypes)
        if load is None:
            check_values(model, None if cut is None else cut.traced.tensors)
        return asked, cut, load

    planned, error = catch(plan)
    said = "" if planned is None or planned[1] is None else f"{planned[1].plan!r}"
    agree(ctx, Call(_PREPARE, said, takes_long=True), error=error)
    assert planned is not None  # else all have raised
    asked, cut, load = planned
    made, error = catch(lambda: _make(ctx, model, asked, cut, load, gather_output))
    agree(ctx, Call(_PREPARE, "made", takes_long=True), error=error)
    return cast("Pipeline", made)


def _make(
    ctx: Context,
    model: nn.Module,
    asked: _Asked,
    cut: _Cut | None,
    load: PlannedLoad | None,
    gather_output: bool,
) -> Pipeline:
    """Fill this rank's stage, and empty the model of all else."""
    model.eval()
    if cut is None:
        if load is not None:
            load_stage(model, load, None)
        return Pipeline(ctx, _whole(model, asked), model.to(ctx.device), None, gather_output)
    starts = (*cut.starts, len(cut.traced.nodes))
    code = cut_out(cut.traced, starts[ctx.rank], starts[ctx.rank + 1])
    if load is not None:
        load_stage(model, load, code.tensors)
    held = hold(model, code.tensors, ctx.device)
    let_go(model, held)
    return Pipeline(ctx, cut.plan, Stage(held, code), _form(cut.traced, asked.example), gather_output)


class _Asked(NamedTuple):
    example: Example
    num_stages: int
    num_chunks: int

    @property
    def rows(self) -> int:
        return -(-self.example.num_rows // self.num_chunks)


class _Cut(NamedTuple):
    plan: PipelinePlan
    traced: Traced
    starts: tuple[int, ...]  # numbers of operations


def _read(
    example: Any, example_kwargs: Mapping[str, Any] | None, num_stages: int, num_chunks: int | None
) -> _Asked:
    for name, count in (("num_stages", num_stages), ("num_chunks", num_chunks)):
        value = cast("object", count)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ValueError(f"{_PREPARE}: {name} must be a whole number of at least 1, got {value!r}.")
    args: tuple[Any, ...] = cast("tuple[Any, ...]", example) if isinstance(example, tuple) else (example,)
    kwargs = dict(example_kwargs or {})
    if isinstance(example, Mapping) and example_kwargs is None:
        args, kwargs = (), dict(cast("Mapping[str, Any]", example))
    read = read_example(args, kwargs)
    return _Asked(read, num_stages, num_chunks or num_stages)


def _cut(
    model: nn.Module,
    asked: _Asked,
    split_points: str | Sequence[str],
    no_split_module_classes: str | Sequence[str] | None,
    device: torch.device,
    dtypes: Mapping[int, torch.dtype],
) -> _Cut:
    classes = (
        read_shape(model).no_split_classes if no_split_module_classes is None else no_split_module_classes
    )
    classes = (classes,) if isinstance(classes, str) else tuple(classes)
    traced = trace_model(model, asked.example, asked.rows, device, dtypes)
    _check_result(traced, asked.rows)
    sizes = {name: value_of(node).nbytes for name, node in traced.tensors.items()}
    if isinstance(split_points, str):
        if split_points != "auto":
            raise ValueError(
                f'{_PREPARE}: split_points must be "auto" or names of modules, got {split_points!r}.'
            )
        places, units = units_of(traced, classes)
        chosen = choose_cuts(units, sizes, asked.num_stages)
        names = [units[one].name for one in chosen[1:]]
        starts = tuple(places[one] for one in chosen)
    else:
        names = list(split_points)
        starts = (0, *_starts_of(traced, names, asked.num_stages))
    stages = tuple(
        _stage(traced, sizes, name, start, stop)
        for name, start, stop in zip(("", *names), starts, (*starts[1:], len(traced.nodes)), strict=True)
    )
    return _Cut(PipelinePlan(stages=stages, rows=asked.rows, num_chunks=asked.num_chunks), traced, starts)


def _stage(traced: Traced, sizes: Mapping[str, int], name: str, start: int, stop: int) -> StagePlan:
    code = cut_out(traced, start, stop)
    return StagePlan(
        begins_at=name,
        tensors=code.tensors,
        num_bytes=sum(sizes[one] for one in code.tensors),
        passed_on=plan_packing(code.goes_out).num_bytes if stop < len(traced.nodes) else 0,
    )


def _starts_of(traced: Traced, names: Sequence[str], num_stages: int) -> list[int]:
    """Find the first operations of the modules that the caller names."""
    if len(names) != num_stages - 1:
        raise ValueError(
            f"{_PREPARE}: {num_stages} stages need {num_stages - 1} split points, and split_points has "
            f"{len(names)}: {', '.join(names)}. Name the modules that begin all stages but the first."
        )
    first: dict[str, int] = {}
    for number, path in enumerate(traced.paths):
        for name in path:
            first.setdefault(name, number)
    unknown = [name for name in names if name not in first or not name]
    if unknown:
        raise ValueError(
            f"{_PREPARE}: split_points names {', '.join(map(repr, unknown))}, and no module of that name is "
            "called in a forward pass. Names are those of named_modules()."
        )
    starts = [first[name] for name in names]
    if any(one >= other for one, other in zip((0, *starts), starts, strict=False)):
        order = sorted(names, key=first.__getitem__)
        raise ValueError(
            f"{_PREPARE}: split_points are {', '.join(names)}, and each must begin after the one before it, "
            f"and the first after the beginning of the model. They run in the order {', '.join(order)}."
        )
    return starts


def _check_result(traced: Traced, rows: int) -> None:
    """Refuse a result that can't be put together from those of micro-batches."""
    for node in _results(traced):
        shape = tuple(value_of(node).shape)
        if not shape or shape[0] != rows:
            raise ValueError(
                f"{_PREPARE}: a result of the model has the shape {shape} for {rows} rows, so what "
                "micro-batches give can't be put together. Let the model give one row for each row of the "
                "batch: a loss without a mean, say."
            )


def _results(traced: Traced) -> tuple[fx.Node, ...]:
    return tuple(one for one in traced.outputs if isinstance(one, fx.Node))


def _form(traced: Traced, example: Example) -> Form:
    return Form(
        example=example,
        used=tuple(node is not None and bool(node.users) for node in traced.inputs),
        result=Result(
            tuple(None if isinstance(one, fx.Node) else (one,) for one in traced.outputs), traced.out_spec
        ),
        leaves=tuple(form_of(node) for node in _results(traced)),
    )


def _whole(model: nn.Module, asked: _Asked) -> PipelinePlan:
    """Give the plan of one stage, for which no model needs to be followed."""
    tensors = {name: one.nbytes for name, one in (*model.named_parameters(), *model.named_buffers())}
    stage = StagePlan(begins_at="", tensors=tuple(tensors), num_bytes=sum(tensors.values()), passed_on=0)
    return PipelinePlan(stages=(stage,), rows=asked.rows, num_chunks=asked.num_chunks)
