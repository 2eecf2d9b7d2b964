"""Options of gradient accumulation."""

from dataclasses import dataclass

from accelfn.context.config.checks import check_bools, check_ints
from accelfn.context.config.handlers import KwargsHandler

__all__ = ("GradientAccumulationPlugin",)


@dataclass(frozen=True, slots=True)
class GradientAccumulationPlugin(KwargsHandler):
    """How many micro-batches make one optimizer step.

    Attributes:
        num_steps: Micro-batches per optimizer step, at least 1. Default 1.
        adjust_scheduler: Accepted, without effect: one optimizer step is one scheduler step. Default True.
        sync_with_dataloader: Whether the last batch of a loader closes its window early. Default True.
        sync_each_batch: Whether gradients are reduced after every micro-batch, which saves memory under
            sharding and costs time; the optimizer still steps once per window. Default False.
    """

    num_steps: int = 1
    adjust_scheduler: bool = True
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False

    def __post_init__(self) -> None:
        """Check the fields."""
        check_ints(self, "num_steps", minimum=1)
        check_bools(self, "adjust_scheduler", "sync_with_dataloader", "sync_each_batch")
