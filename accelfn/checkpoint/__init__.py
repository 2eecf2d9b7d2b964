"""A tree on disk."""

from accelfn.checkpoint.accelerate_format import AccelerateState, read_accelerate
from accelfn.checkpoint.weights import WeightsPlan, parse_size, plan_weights, save_model

__all__ = (
    "AccelerateState",
    "WeightsPlan",
    "parse_size",
    "plan_weights",
    "read_accelerate",
    "save_model",
)
