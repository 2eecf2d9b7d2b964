"""A tree on disk."""

from accelfn.checkpoint.weights import save_model, save_object
from accelfn.checkpoint.weights_plan import WeightNames, WeightsPlan, parse_size, plan_weights
from accelfn.checkpoint.weights_state import get_state_dict

__all__ = (
    "WeightNames",
    "WeightsPlan",
    "get_state_dict",
    "parse_size",
    "plan_weights",
    "save_model",
    "save_object",
)
