"""Worlds of ranks in one process, faults on purpose, hypothesis strategies. For users' tests as for ours."""

from accelfn.testing.faults import Fault, InjectedFaultError
from accelfn.testing.ranks import Where, run_ranks

__all__ = ("Fault", "InjectedFaultError", "Where", "run_ranks")
