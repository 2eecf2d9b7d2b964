"""Strategies: how a model is spread over ranks."""

from accelfn.parallel.replicate import Replica, is_replicated, no_sync, replicate, unchecked

__all__ = ("Replica", "is_replicated", "no_sync", "replicate", "unchecked")
