"""Which samples, in which order, to whom."""

from accelfn.data.loader import (
    PreparedDataLoader,
    loader_state,
    next_plan,
    prepare_data_loader,
    restore_loader,
    skip_first_batches,
)
from accelfn.data.metrics import gather_for_metrics, gather_objects_for_metrics
from accelfn.data.microbatch import MicroBatch, Uneven, microbatches, plan_microbatch
from accelfn.data.order import Order, permute, read_order
from accelfn.data.picture import draw_plan, draw_plan_svg
from accelfn.data.plan import DataRank, EpochPlan, data_rank, plan_epoch
from accelfn.data.resume import LoaderState
from accelfn.data.sequence import gather_sequence, shard_sequence

__all__ = (
    "DataRank",
    "EpochPlan",
    "LoaderState",
    "MicroBatch",
    "Order",
    "PreparedDataLoader",
    "Uneven",
    "data_rank",
    "draw_plan",
    "draw_plan_svg",
    "gather_for_metrics",
    "gather_objects_for_metrics",
    "gather_sequence",
    "loader_state",
    "microbatches",
    "next_plan",
    "permute",
    "plan_epoch",
    "plan_microbatch",
    "prepare_data_loader",
    "read_order",
    "restore_loader",
    "shard_sequence",
    "skip_first_batches",
)
