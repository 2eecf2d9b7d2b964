"""A tree on disk."""

from accelfn.checkpoint.weights import WeightsPlan, parse_size, plan_weights, save_model

__all__ = ("WeightsPlan", "parse_size", "plan_weights", "save_model")
