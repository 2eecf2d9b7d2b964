"""Strategies: how a model is spread over ranks."""

from accelfn.parallel.exact import (
    ExactReplica,
    exact_backward,
    exact_batch,
    scale_open_sums,
    swap_parts,
)
from accelfn.parallel.replica import Replica
from accelfn.parallel.replicate import no_sync, replicate, unchecked

__all__ = (
    "ExactReplica",
    "Replica",
    "exact_backward",
    "exact_batch",
    "no_sync",
    "replicate",
    "scale_open_sums",
    "swap_parts",
    "unchecked",
)
