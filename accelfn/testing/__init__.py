"""Worlds of ranks in one process, schedules and faults on purpose, hypothesis strategies.

For users' tests as for ours.
"""

import importlib
import typing

from accelfn.testing.exploration import Exploration, FoundOutcome, explore
from accelfn.testing.faults import Fault, InjectedFaultError
from accelfn.testing.ranks import ScheduledRun, Where, run_ranks, run_schedule, scheduling_point
from accelfn.testing.schedule import Schedule, Step, Switch, Trace

if typing.TYPE_CHECKING:  # loaded when one is asked for, since hypothesis is optional
    from accelfn.testing.strategies import Mismatched as Mismatched
    from accelfn.testing.strategies import gradients as gradients
    from accelfn.testing.strategies import masks as masks
    from accelfn.testing.strategies import mismatched_trees as mismatched_trees
    from accelfn.testing.strategies import parameters as parameters
    from accelfn.testing.strategies import random_keys as random_keys
    from accelfn.testing.strategies import rank_trees as rank_trees
    from accelfn.testing.strategies import schedules as schedules
    from accelfn.testing.strategies import tensors as tensors
    from accelfn.testing.strategies import trees as trees
    from accelfn.testing.strategies import worlds as worlds

__all__ = (
    "Exploration",
    "Fault",
    "FoundOutcome",
    "InjectedFaultError",
    "Schedule",
    "ScheduledRun",
    "Step",
    "Switch",
    "Trace",
    "Where",
    "explore",
    "run_ranks",
    "run_schedule",
    "scheduling_point",
)
_STRATEGIES = (
    *("Mismatched", "gradients", "masks", "mismatched_trees", "parameters", "random_keys", "rank_trees"),
    *("schedules", "tensors", "trees", "worlds"),
)


def __getattr__(name: str) -> object:
    if name in _STRATEGIES:
        return getattr(importlib.import_module("accelfn.testing.strategies"), name)
    raise AttributeError(f"module 'accelfn.testing' has no attribute {name!r}")
