"""The pipeline under the name that Accelerate gives it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from torch import nn

from accelfn.bigmodel.pipeline.prepare import prepare_pipeline
from accelfn.bigmodel.pipeline.run import Pipeline, group_of
from accelfn.context import Context, init_context
from accelfn.errors import ConfigurationError
from accelfn.parallel import run_stage
from accelfn.parallel.forward import WrappedForward

__all__ = ("prepare_pippy",)

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
        return run_stage(pipeline.stage, pipeline.plan, self._index, outlines, received, args, kwargs)


def _torch_stage(ctx: Context, pipeline: Pipeline) -> object:
    from torch.distributed.pipelining import PipelineStage  # half a second, which others shall not wait for

    return PipelineStage(
        _Stage(pipeline, ctx.rank), ctx.rank, ctx.num_processes, ctx.device, group=group_of(ctx)
    )
