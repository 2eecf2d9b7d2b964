"""A model of which each rank has a stage, called like the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelfn.comm import broadcast_object_list
from accelfn.context import Context
from accelfn.context.process_group import is_registered
from accelfn.errors import NotAvailableError
from accelfn.parallel import Line, Outline, PipelineEngine, PipelinePlan, SchedulePlan
from accelfn.tree import send_to_device

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ("Pipeline", "group_of")


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
            line = Line([range(ctx.num_processes)], self._ctx, group_of(ctx))
            self._engine = PipelineEngine(self._ctx, stage, plan, schedule, line)

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


def group_of(ctx: Context) -> dist.ProcessGroup:
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
