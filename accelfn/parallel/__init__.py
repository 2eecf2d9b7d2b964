"""Strategies: how a model is spread over ranks."""

from accelfn.parallel.replicate import Replica, no_sync, replicate, trigger_sync_in_backward, unchecked

__all__ = ("Replica", "no_sync", "replicate", "trigger_sync_in_backward", "unchecked")
