"""Run a model in stages for inference, one on each rank."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

import torch
from torch import nn

from accelfn.bigmodel.assign import read_dtype, refs_of
from accelfn.bigmodel.devices import listed, read_place
from accelfn.bigmodel.load import apply_plan
from accelfn.bigmodel.load_plan import LoadOptions, LoadPlan, plan_load
from accelfn.bigmodel.weight_files import FileId, open_checkpoint
from accelfn.comm import Call, agree, broadcast_object_list, catch
from accelfn.context import Context, check_context, init_context
from accelfn.context.process_group import is_registered
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.parallel import PipelinePlan, SchedulePlan, plan_stages, read_facts
from accelfn.parallel.facts import owner_of
from accelfn.parallel.forward import WrappedForward
from accelfn.parallel.parameters import names_on_meta
from accelfn.parallel.pipeline import PipelineEngine
from accelfn.parallel.stages import Outline, StageRun, apply_stages, run_stage
from accelfn.tree import count_rows, send_to_device

_PREPARE = "prepare_pipeline"


PlannedLoad: TypeAlias = "tuple[LoadPlan, Mapping[Path, FileId]]"
"""What is read for the whole model, and the files that it is read from."""


def _plan_stage_load(
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
    options = LoadOptions(places={"": read_place(device)}, dtype=read_dtype(dtype))
    plan = plan_load(_PREPARE, model, opened, options)
    if plan.needs_ties:
        # Now, and not after loading: a stage may hold one of two tied weights, and the file has the other.
        cast("Any", model).tie_weights()
        plan = plan_load(_PREPARE, model, opened, options)
    return plan, opened.file_ids


def _load_stage(model: nn.Module, load: PlannedLoad, plan: PipelinePlan, index: int) -> None:
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
    steps, file_ids = load
    if len(plan.stages) > 1:
        others = plan.elsewhere([index])
        wanted = {name for name, _ in refs_of(model) if owner_of(name, others) is None}
        steps = steps._replace(
            steps=tuple(step for step in steps.steps if not wanted.isdisjoint(step.target.names)),
            values=tuple(one for one in steps.values if not wanted.isdisjoint(one[0].names)),
            extras=(),
            needs_ties=False,
        )
    apply_plan(model, steps, file_ids)


if TYPE_CHECKING:
    import torch.distributed as dist


class Pipeline(nn.Module):
    """A model of which each rank has a stage. Called like the model, by all ranks at a time.

    The arguments are those of the first rank; others may pass none. The last rank gets the result, and the
    others None; with ``gather_output`` all get it. A batch may have any number of rows, and any shape that
    the model takes. It is cut into microbatches: tensors with as many rows as the first one are, and all
    else comes whole to each. Where they aren't equally large, the last row is repeated, and what is computed
    of it dropped.

    For inference: it runs in evaluation mode, and no gradient is kept.

    Ranks: every rank of the context, as often as the others. What goes wrong on one is an error on all, and
    the next batch runs.

    Attributes:
        plan: Where the model is cut.
        stage: What this rank holds: the model, with the tensors of its stage; in a world of one with all.
    """

    def __init__(
        self, ctx: Context, plan: PipelinePlan, stage: nn.Module, num_chunks: int, gather_output: bool
    ) -> None:
        """Put together what ``prepare_pipeline`` has made."""
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
        """Return what stages exchange for a microbatch; None where none of its shapes has been run lately."""
        return None if self._engine is None else self._engine.outlines_of(args, kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch.

        Raises:
            ValueError: The batch has no rows, or a result hasn't as many as its microbatch.
            ConfigurationError: The model can't run in these stages.
            Exception: What the stage of this rank raised.
            RemoteRankError: What the stage of another rank raised.
        """
        device = self._ctx.device
        if self._engine is None:
            with torch.no_grad():
                return self.stage(*send_to_device(args, device), **send_to_device(kwargs, device))
        given = broadcast_object_list(self._ctx, [send_to_device((args, kwargs), torch.device("cpu"))])
        own_args, own_kwargs = send_to_device(given[0], device)
        return self._engine.forward(own_args, own_kwargs, everywhere=self._gather_output)


def _group_of(ctx: Context) -> dist.ProcessGroup:
    """Return torch's group of all ranks.

    Raises:
        NotAvailableError: Torch has none.
    """
    group = ctx.world.group
    if group is None or not is_registered(group):
        raise NotAvailableError(
            "prepare_pipeline runs torch's schedules, which need ranks that are processes with an "
            "initialised torch.distributed; these are threads. In a test, use run_ranks(..., "
            'on="processes").'
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
            _group_of(ctx)
        planned = plan_pipeline(
            model,
            ctx.num_processes,
            split_points=split_points,
            no_split_module_classes=no_split_module_classes,
            last=last,
        )
        bare = names_on_meta(model)
        if bare and checkpoint is None:
            raise ValueError(
                f"{_PREPARE}: {listed(bare)} have no values: they are on the meta device. Pass checkpoint=, "
                "from which each rank reads its stage."
            )
        load = None if checkpoint is None else _plan_stage_load(model, checkpoint, ctx.device, dtype)
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
    """Spread a model over all ranks for inference, as :func:`prepare_pipeline` does, and keep its name.

    Effect: on ``model``: its ``forward`` runs the pipeline, it holds this rank's stage only, and it has
    ``hf_split_points`` (names of the modules that begin the stages but the first) and ``pippy_stage``. This
    is the rank's ``PipelineStage`` of ``torch.distributed.pipelining``, for its schedules under
    ``torch.no_grad()``, to which every rank passes the batch, by keyword; None with one process.

    Ranks: every rank of ``ctx``.

    Args:
        model: As in :func:`prepare_pipeline`.
        split_points: As in :func:`prepare_pipeline`.
        no_split_module_classes: As in :func:`prepare_pipeline`.
        example_args: Positional arguments of a call.
        example_kwargs: Keyword arguments of a call.
        num_chunks: Microbatches that a batch is cut into. None: one for each rank.
        gather_output: Give the result to all ranks, and not to the last one only.
        ctx: The world. None: :func:`init_context`, which takes the process group that is there, or what the
            launcher has set.

    Returns:
        The same model, to be called by all ranks; the first one gives the arguments.

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
    said = cast("Any", model)
    said.hf_split_points = list(pipeline.plan.split)
    said.pippy_stage = None
    if world.num_processes > 1:
        said.forward = _PipelineForward(model.forward, pipeline)
        said.pippy_stage = _torch_stage(world, pipeline)
    return model


class _PipelineForward(WrappedForward):
    """Runs the pipeline, and inside of it the stage of this rank."""

    def __init__(self, staged: Any, pipeline: Pipeline) -> None:
        super().__init__(staged)
        self._staged = staged
        self._pipeline = pipeline

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        is_outside = self._staged.run is None
        return self._pipeline(*args, **kwargs) if is_outside else self._staged(*args, **kwargs)


class _Stage(nn.Module):
    """What torch's schedules call: the first stage with the arguments, others with what they receive."""

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
                "model.pippy_stage was called with a microbatch of other shapes than any that the model has "
                "been called with, and stages have to know what they exchange. Call the model with such a "
                "batch once, on all ranks, or pass one as the example, with num_chunks as the schedule's."
            )
        device = received[0].device if received else "cpu"  # the first stage skips no module
        run = StageRun(pipeline.plan, self._index, outlines, received, device)
        return run_stage(pipeline.stage, run, args, kwargs)


def _torch_stage(ctx: Context, pipeline: Pipeline) -> object:
    from torch.distributed.pipelining import PipelineStage  # half a second, which others shall not wait for

    return PipelineStage(
        _Stage(pipeline, ctx.rank), ctx.rank, ctx.num_processes, ctx.device, group=_group_of(ctx)
    )
