"""The command line: plan how a training script is started, then become torchrun.

Nothing here imports torch, so ``accelfn --help``, ``--dry_run`` and bad input answer at once.
"""

from accelfn.launch.command import LaunchOptions, LaunchPlan, format_plan, plan_launch, run_plan
from accelfn.launch.flags import parse_launch_options

__all__ = (
    "LaunchOptions",
    "LaunchPlan",
    "format_plan",
    "parse_launch_options",
    "plan_launch",
    "run_plan",
)
