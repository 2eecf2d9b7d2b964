"""A tree on disk."""

from accelfn.checkpoint.weights import save_model, save_object
from accelfn.checkpoint.weights_index import WeightsFiles, find_weights
from accelfn.checkpoint.weights_load import LoadReport, load_model
from accelfn.checkpoint.weights_plan import WeightNames, WeightsPlan, parse_size, plan_weights
from accelfn.checkpoint.weights_state import get_state_dict

__all__ = (
    "LoadReport",
    "WeightNames",
    "WeightsFiles",
    "WeightsPlan",
    "find_weights",
    "get_state_dict",
    "load_model",
    "parse_size",
    "plan_weights",
    "save_model",
    "save_object",
)
