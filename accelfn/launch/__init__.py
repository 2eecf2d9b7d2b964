"""The command line: plan how a training script is started, then become torchrun.

Nothing here imports torch, so ``accelfn --help``, ``--dry_run`` and bad input answer at once.
"""

from accelfn.launch.command import LaunchOptions, LaunchPlan, format_plan, plan_launch, run_plan
from accelfn.launch.flags import parse_launch_options
from accelfn.launch.run_curves import draw_runs_html, draw_runs_svg
from accelfn.launch.run_files import Curve, RunRecord, RunTable, find_runs, read_run

__all__ = (
    "Curve",
    "LaunchOptions",
    "LaunchPlan",
    "RunRecord",
    "RunTable",
    "draw_runs_html",
    "draw_runs_svg",
    "find_runs",
    "format_plan",
    "parse_launch_options",
    "plan_launch",
    "read_run",
    "run_plan",
)
