"""A tree on disk."""

from accelfn.checkpoint.accelerate_format import AccelerateState, read_accelerate
from accelfn.checkpoint.accelerate_tree import from_accelerate, to_accelerate
from accelfn.checkpoint.accelerate_writing import write_accelerate
from accelfn.checkpoint.weights import WeightsPlan, parse_size, plan_weights, save_model

__all__ = (
    "AccelerateState",
    "WeightsPlan",
    "from_accelerate",
    "parse_size",
    "plan_weights",
    "read_accelerate",
    "save_model",
    "to_accelerate",
    "write_accelerate",
)
