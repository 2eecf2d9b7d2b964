"""Strategies: how a model is spread over ranks."""

from accelfn.parallel.batch_norm import convert_sync_batchnorm
from accelfn.parallel.replicate import (
    Replica,
    is_replicated,
    no_sync,
    replicate,
    trigger_sync_in_backward,
    unchecked,
)

__all__ = (
    "Replica",
    "convert_sync_batchnorm",
    "is_replicated",
    "no_sync",
    "replicate",
    "trigger_sync_in_backward",
    "unchecked",
)
