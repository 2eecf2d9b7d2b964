"""Worlds of ranks in one process, schedules and faults on purpose, hypothesis strategies.

For users' tests as for ours.
"""

from accelfn.testing.explore import Exploration, FoundOutcome, explore
from accelfn.testing.faults import Fault, InjectedFaultError
from accelfn.testing.ranks import ScheduledRun, Where, run_ranks, run_schedule, scheduling_point
from accelfn.testing.schedule import Schedule, Step, Switch, Trace

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
