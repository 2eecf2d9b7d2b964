"""A tree on disk, and when it is time to write it."""

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
