"""The command line: plan how a training script is started, then start it.

Nothing here imports torch, so ``accelfn --help``, ``--dry_run`` and bad input answer at once.
"""

from accelfn.launch.config import LaunchConfig, Resolved, resolve
from accelfn.launch.flags import parse_flags
from accelfn.launch.plan import LaunchPlan, Machine, Script, format_plan, plan_launch

__all__ = (
    "LaunchConfig",
    "LaunchPlan",
    "Machine",
    "Resolved",
    "Script",
    "format_plan",
    "parse_flags",
    "plan_launch",
    "resolve",
)
