"""Which samples, in which order, to whom."""

from types import MappingProxyType as _MappingProxyType
from typing import TYPE_CHECKING as _TYPE_CHECKING

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
from accelfn.data.plan import DataRank, EpochPlan, data_rank, plan_epoch
from accelfn.data.resume import LoaderState
from accelfn.data.sequence import gather_sequence, shard_sequence
from accelfn.data.window import Window, num_steps, windows
from accelfn.lazy import find_name as _find_name
from accelfn.lazy import list_names as _list_names

if _TYPE_CHECKING:  # loaded when one is asked for: training draws nothing
    from accelfn.data.picture import draw_plan, draw_plan_svg

__all__ = (
    "DataRank",
    "EpochPlan",
    "LoaderState",
    "MicroBatch",
    "Order",
    "PreparedDataLoader",
    "Uneven",
    "Window",
    "data_rank",
    "draw_plan",
    "draw_plan_svg",
    "gather_for_metrics",
    "gather_objects_for_metrics",
    "gather_sequence",
    "loader_state",
    "microbatches",
    "next_plan",
    "num_steps",
    "permute",
    "plan_epoch",
    "plan_microbatch",
    "prepare_data_loader",
    "read_order",
    "restore_loader",
    "shard_sequence",
    "skip_first_batches",
    "windows",
)

_LAZY = _MappingProxyType({"accelfn.data.picture": ("draw_plan", "draw_plan_svg")})


def __getattr__(name: str) -> object:
    return _find_name(__name__, _LAZY, name)


def __dir__() -> list[str]:
    return _list_names(__name__, _LAZY)
