"""Pipeline-parallel inference: each rank runs one stage of a model."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import torch
from torch import nn

from accelfn.bigmodel.model_info import require_values
from accelfn.comm import Call, agree, broadcast_object_list, catch
from accelfn.context import Context, init_context, takes_context
from accelfn.context.process_group import is_registered
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.parallel import PipelinePlan, SchedulePlan, plan_stages, read_facts
from accelfn.parallel.facts import owner_of
from accelfn.parallel.forward import WrappedForward
from accelfn.parallel.strategies.pipeline import PipelineEngine
from accelfn.parallel.strategies.stages import Outline, StageRun, apply_stages, run_stage
from accelfn.parallel.values import names_on_meta
from accelfn.tree import count_rows, send_to_device
from accelfn.weights.assign import read_dtype, refs_of
from accelfn.weights.load import apply_plan
from accelfn.weights.match import LoadOptions, LoadPlan, plan_load
from accelfn.weights.open import open_weights
from accelfn.weights.places import read_place
from accelfn.weights.stored import FileId

_PREPARE = "prepare_pipeline"


PlannedLoad: TypeAlias = "tuple[LoadPlan, Mapping[Path, FileId]]"
"""The load plan of the whole model, and the identities of the files."""


def _plan_stage_load(
    model: nn.Module,
    checkpoint: str | os.PathLike[str],
    device: torch.device,
    dtype: str | torch.dtype | None,
) -> PlannedLoad:
    """Match a checkpoint with the whole model. No weight is read.

    Raises:
        CheckpointError: It is damaged, or doesn't fit.
        ValueError: There is no such ``dtype``.
    """
    opened = open_weights(checkpoint)
    options = LoadOptions(places={"": read_place(device)}, dtype=read_dtype(dtype))
    return plan_load(_PREPARE, model, opened, options), opened.file_ids


def _load_stage(model: nn.Module, load: PlannedLoad, plan: PipelinePlan, index: int) -> None:
    """Read the weights of a stage into the whole model, directly to their device.

    Args:
        model: The whole model, modified in place.
        load: The load plan of the whole model.
        plan: The stages; everything is read for a single one.
        index: The index of the stage.

    Raises:
        DamagedCheckpointError: A file was modified.
        OSError: A file can't be read.
    """
    steps, file_ids = load
    if len(plan.stages) > 1:
        other_stages = plan.elsewhere([index])
        needed = {name for name, _ in refs_of(model) if owner_of(name, other_stages) is None}
        steps = steps._replace(
            steps=tuple(step for step in steps.steps if not needed.isdisjoint(step.target.names)),
            values=tuple(value for value in steps.values if not needed.isdisjoint(value[0].names)),
            extras=(),
        )
    apply_plan(model, steps, file_ids)


if TYPE_CHECKING:
    import torch.distributed as dist


class Pipeline(nn.Module):
    """A model with one stage on each rank. All ranks call it together, like the model.

    The arguments of the first rank are used; others may pass none. The last rank gets the result, others
    None, unless ``gather_output`` is set. A batch may have any number of rows and any shape that the model
    supports. Tensors with as many rows as the first one are split into microbatches; others are passed to
    each microbatch. If sizes differ, the last row is repeated, and its results are dropped.

    For inference only: it runs in evaluation mode, without gradients.

    Ranks: every rank of the context. An exception on one rank is raised on all, and the next batch can run.

    Attributes:
        plan: The stages.
        stage: The model with this rank's tensors.
    """

    def __init__(
        self, ctx: Context, plan: PipelinePlan, stage: nn.Module, num_chunks: int, gather_output: bool
    ) -> None:
        """Initialise from the results of ``prepare_pipeline``."""
        super().__init__()
        self.plan = plan
        self.stage = stage
        self._ctx = ctx.tagged("pipeline")
        self._gather_output = gather_output
        self._engine: PipelineEngine | None = None
        if ctx.num_processes > 1:
            schedule = SchedulePlan("gpipe", ctx.num_processes, 1, num_chunks)
            self._engine = PipelineEngine(
                self._ctx, stage, plan, schedule, self._ctx, _group_of(ctx), [range(ctx.num_processes)]
            )

    def outlines_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Outline] | None:
        """Return what stages exchange for a microbatch; None if its shapes haven't been run recently."""
        return None if self._engine is None else self._engine.outlines_of(args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch.

        Raises:
            ValueError: The batch has no rows, or a result has another number of rows than its microbatch.
            ConfigurationError: The model can't run in these stages.
            Exception: From the stage of this rank.
            RemoteRankError: From the stage of another rank.
        """
        device = self._ctx.device
        if self._engine is None:
            with torch.no_grad():
                return self.stage(*send_to_device(args, device), **send_to_device(kwargs, device))
        inputs = broadcast_object_list(self._ctx, [send_to_device((args, kwargs), torch.device("cpu"))])
        args, kwargs = send_to_device(inputs[0], device)
        return self._engine.forward(args, kwargs, everywhere=self._gather_output)


def _group_of(ctx: Context) -> dist.ProcessGroup:
    """Return torch's process group of all ranks.

    Raises:
        NotAvailableError: There is none.
    """
    group = ctx.world.group
    if group is None or not is_registered(group):
        raise NotAvailableError(
            "prepare_pipeline needs ranks that are processes with an initialised torch.distributed, but "
            'these are threads. In a test, use run_ranks(..., on="processes").'
        )
    return group


def plan_pipeline(
    model: nn.Module,
    num_stages: int,
    *,
    split_points: str | Sequence[str] = "auto",
    no_split_module_classes: str | Sequence[str] | None = None,
    last: Sequence[str] = (),
) -> PipelinePlan:
    """Split a model into stages. Pure: the model may be on the meta device.

    Ranks: local.

    Args:
        model: A model whose blocks are called one after another, see :func:`accelfn.parallel.plan_stages`.
        num_stages: Number of stages.
        split_points: Names of the first modules of all stages but the first, in order. ``"auto"`` minimises
            the parameter bytes of the largest stage.
        no_split_module_classes: Names of the classes of blocks. None: those in the model's
            ``_no_split_modules``, or else the items of its module lists.
        last: As in :func:`accelfn.parallel.plan_stages`.

    Returns:
        The plan, which prints as a table.

    Raises:
        ConfigurationError: There are fewer blocks than stages, or a split point is invalid.
    """
    if isinstance(split_points, str) and split_points != "auto":
        raise ValueError(
            f'{_PREPARE}: split_points must be "auto" or a list of module names, got {split_points!r}.'
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


@takes_context
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
    """Distribute the stages of a model over all ranks, for inference.

    Each rank keeps the tensors of its own stage, on its device, and drops all others. A model that is too
    large for one rank is built on the meta device, and each rank reads its stage from the checkpoint. With
    one process the result runs the model itself.

    Finally the example runs through the stages, which fails if the model can't run in stages.

    Effect: on ``model``, which is in evaluation mode afterwards, and can't be called directly. It runs in the
    dtypes of its weights, without the context's mixed precision.

    Ranks: every rank of ``ctx``, with the same model.

    Args:
        ctx: The world, with one stage per process.
        model: As in :func:`plan_pipeline`.
        example: Arguments of a call: a tuple of positional ones, a mapping of keyword ones, or a single one.
            Those of rank 0 are used.
        example_kwargs: Keyword arguments of a call, beside positional ones.
        split_points: As in :func:`plan_pipeline`.
        no_split_module_classes: As in :func:`plan_pipeline`.
        last: As in :func:`plan_pipeline`.
        num_chunks: Number of microbatches in a batch. None: one per rank. More of them reduce idle time,
            until they are too small for the device.
        gather_output: Return the result on all ranks, instead of the last one only.
        checkpoint: A checkpoint, as in :func:`load_checkpoint_in_model`. Each rank reads its stage directly
            to its device. Required if the model has meta tensors.
        dtype: The dtype of floating weights from the checkpoint. None: the model's.

    Returns:
        The module to call instead of the model, on all ranks.

    Raises:
        ValueError: The example has no batch dimension, or the model has meta tensors and there is no
            checkpoint. The model wasn't changed.
        NotAvailableError: The ranks are threads. The model wasn't changed.
        ConfigurationError: As :func:`plan_pipeline`, and the model wasn't changed; or the model accesses
            another stage other than by calling a block.
        CheckpointError: The checkpoint is missing or damaged, or doesn't fit. The model wasn't changed.
        MismatchError: The ranks' plans differ.
        RemoteRankError: Another rank has failed.
    """
    args: tuple[Any, ...] = cast("tuple[Any, ...]", example) if isinstance(example, tuple) else (example,)
    kwargs = dict(example_kwargs or {})
    if isinstance(example, Mapping) and example_kwargs is None:
        args, kwargs = (), dict(cast("Mapping[str, Any]", example))
    chunks = ctx.num_processes if num_chunks is None else num_chunks

    def plan() -> tuple[PipelinePlan, PlannedLoad | None]:
        if type(chunks) is not int or chunks < 1:
            raise ValueError(f"{_PREPARE}: num_chunks must be an int of at least 1, got {chunks!r}.")
        reason = f"{_PREPARE}: a batch is split into microbatches"
        count_rows((args, kwargs), "example", reason, with_others=True)
        if ctx.num_processes > 1:
            _group_of(ctx)
        planned = plan_pipeline(
            model,
            ctx.num_processes,
            split_points=split_points,
            no_split_module_classes=no_split_module_classes,
            last=last,
        )
        if checkpoint is None:
            todo = "Pass checkpoint=, from which each rank reads its stage."
            require_values(_PREPARE, names_on_meta(model), todo)
            return planned, None
        return planned, _plan_stage_load(model, checkpoint, ctx.device, dtype)

    planned, error = catch(plan)
    description = "" if planned is None else f"{planned[0]!r} {chunks} {gather_output}"
    agree(ctx, Call(_PREPARE, description, takes_long=True), error=error)
    assert planned is not None  # otherwise all ranks have raised
    pipeline, error = catch(lambda: _build(ctx, model, *planned, chunks, gather_output))
    agree(ctx, Call(_PREPARE, "built", takes_long=True), error=error)
    assert pipeline is not None
    if ctx.num_processes > 1:
        pipeline(*args, **kwargs)
    return pipeline


def _build(
    ctx: Context,
    model: nn.Module,
    plan: PipelinePlan,
    load: PlannedLoad | None,
    num_chunks: int,
    gather_output: bool,
) -> Pipeline:
    """Load this rank's stage, and drop the tensors of others."""
    model.eval()
    if load is not None:
        _load_stage(model, load, plan, ctx.rank)
    if ctx.num_processes > 1:
        apply_stages(model, plan, [ctx.rank])
    return Pipeline(ctx, plan, model.to(ctx.device), num_chunks, gather_output)


ModelT = TypeVar("ModelT", bound=nn.Module)


def prepare_pippy(
    model: ModelT,
    split_points: str | Sequence[str] = "auto",
    no_split_module_classes: str | Sequence[str] | None = None,
    example_args: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool = False,
    *,
    ctx: Context | None = None,
) -> ModelT:
    """Distribute the stages of a model over all ranks, as :func:`prepare_pipeline`, but in place.

    Effect: on ``model``: its ``forward`` runs the pipeline, it keeps this rank's tensors only, and it gets
    ``hf_split_points`` (names of the first modules of all stages but the first) and ``pippy_stage``, the
    rank's ``PipelineStage`` of ``torch.distributed.pipelining``. torch's schedules run it under
    ``torch.no_grad()``, and every rank passes them the batch by keyword. It is None with one process.

    Ranks: every rank of ``ctx``.

    Args:
        model: As in :func:`prepare_pipeline`.
        split_points: As in :func:`prepare_pipeline`.
        no_split_module_classes: As in :func:`prepare_pipeline`.
        example_args: Positional arguments of a call.
        example_kwargs: Keyword arguments of a call.
        num_chunks: Number of microbatches in a batch. None: one per rank.
        gather_output: Return the result on all ranks, instead of the last one only.
        ctx: The world. None: :func:`init_context`, which uses the existing process group, or the launcher's
            environment.

    Returns:
        The same model, to be called by all ranks, with the arguments of the first one.

    Raises:
        ValueError: As :func:`prepare_pipeline`. The model wasn't changed.
        RemoteRankError: Another rank has failed.
    """
    world = init_context() if ctx is None else ctx
    pipeline = prepare_pipeline(
        world,
        model,
        tuple(example_args),
        example_kwargs=example_kwargs or {},
        split_points=split_points,
        no_split_module_classes=no_split_module_classes,
        num_chunks=num_chunks,
        gather_output=gather_output,
    )
    attributes = cast("Any", model)
    attributes.hf_split_points = list(pipeline.plan.split)
    attributes.pippy_stage = None
    if world.num_processes > 1:
        attributes.forward = _PipelineForward(model.forward, pipeline)
        attributes.pippy_stage = _torch_stage(world, pipeline)
    return model


class _PipelineForward(WrappedForward):
    """Runs the pipeline, or within it the stage of this rank."""

    def __init__(self, staged: Any, pipeline: Pipeline) -> None:
        super().__init__(staged)
        self._staged = staged
        self._pipeline = pipeline

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_outside = self._staged.run is None
        return self._pipeline(*args, **kwargs) if is_outside else self._staged(*args, **kwargs)


class _Stage(nn.Module):
    """The module of a ``PipelineStage``: called with arguments on the first stage, then with its inputs."""

    def __init__(self, pipeline: Pipeline, index: int) -> None:
        super().__init__()
        self._pipeline = pipeline
        self._index = index

    def forward(self, *values: Any, **kwargs: Any) -> Any:
        received, args = (values, ()) if self._index else ((), values)
        pipeline = self._pipeline
        outlines = pipeline.outlines_of(args, kwargs)
        if outlines is None:
            raise ConfigurationError(
                "model.pippy_stage was called with a microbatch of new shapes, for which the stages don't "
                "know what they exchange. Call the model with such a batch once, on all ranks, or pass one "
                "as the example, with the schedule's num_chunks."
            )
        device = received[0].device if received else "cpu"  # unused on the first stage
        run = StageRun(pipeline.plan, self._index, outlines, received, device)
        return run_stage(pipeline.stage, run, args, kwargs)


def _torch_stage(ctx: Context, pipeline: Pipeline) -> object:
    from torch.distributed.pipelining import PipelineStage  # takes half a second to import

    return PipelineStage(
        _Stage(pipeline, ctx.rank), ctx.rank, ctx.num_processes, ctx.device, group=_group_of(ctx)
    )
