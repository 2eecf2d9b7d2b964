"""Strategies: how a model is spread over ranks."""

from accelfn.parallel.batch_norm import convert_sync_batchnorm
from accelfn.parallel.exact import (
    ExactReplica,
    exact_backward,
    exact_batch,
    scale_open_sums,
    swap_parts,
)
from accelfn.parallel.handle import check_reduced, is_kept_equal, is_replicated, local_steps, uncompiled
from accelfn.parallel.replicate import (
    at_place,
    check_wrapped,
    no_sync,
    replicate,
    trigger_sync_in_backward,
    unchecked,
)
from accelfn.parallel.thread_ddp import ThreadDDP

__all__ = (
    "ExactReplica",
    "ThreadDDP",
    "at_place",
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
    "swap_parts",
    "trigger_sync_in_backward",
    "unchecked",
    "uncompiled",
)
