"""Strategies: how a model is spread over ranks."""

from accelfn.parallel.batch_norm import convert_sync_batchnorm
from accelfn.parallel.exact import (
    ExactReplica,
    exact_backward,
    exact_batch,
    scale_open_sums,
)
from accelfn.parallel.handle import check_reduced, is_kept_equal, is_replicated, local_steps, uncompiled
from accelfn.parallel.ordered_sum import OrderedSum
from accelfn.parallel.replicate import (
    check_wrapped,
    no_sync,
    replicate,
    trigger_sync_in_backward,
    unchecked,
)
from accelfn.parallel.thread_ddp import ThreadDDP

__all__ = (
    "ExactReplica",
    "OrderedSum",
    "ThreadDDP",
    "check_reduced",
    "check_wrapped",
    "convert_sync_batchnorm",
    "exact_backward",
    "exact_batch",
    "is_kept_equal",
    "is_replicated",
    "local_steps",
    "no_sync",
    "replicate",
    "scale_open_sums",
    "trigger_sync_in_backward",
    "unchecked",
    "uncompiled",
)
