"""A tree on disk, and when it is time to write it."""

from accelfn.checkpoint.find import find_checkpoints, latest_checkpoint
from accelfn.checkpoint.keep import Keep, plan_retention, prune_checkpoints
from accelfn.checkpoint.verify import CheckpointReport, verify_checkpoint
from accelfn.checkpoint.weights import WeightsPlan, parse_size, plan_weights, save_model

__all__ = (
    "CheckpointReport",
    "Keep",
    "WeightsPlan",
    "find_checkpoints",
    "latest_checkpoint",
    "parse_size",
    "plan_retention",
    "plan_weights",
    "prune_checkpoints",
    "save_model",
    "verify_checkpoint",
from accelfn.checkpoint.preemption import EXIT_PREEMPTED, STOP_SIGNALS, PreemptionGuard, preemption
from accelfn.checkpoint.weights import WeightsPlan, parse_size, plan_weights, save_model

__all__ = (
    "EXIT_PREEMPTED",
    "STOP_SIGNALS",
    "PreemptionGuard",
    "WeightsPlan",
    "parse_size",
    "plan_weights",
    "preemption",
    "save_model",
)
