"""The command line: plan how a training script is started, and carry the plan out.

Nothing here imports torch, so ``accelfn --help``, ``--dry_run`` and bad input answer at once.
"""

from accelfn.launch.command_line import parse_flags
from accelfn.launch.config import LaunchConfig, Resolved, resolve
from accelfn.launch.migrate import Edit, Migration, Remark, plan_migration
from accelfn.launch.plan import (
    LaunchPlan,
    Machine,
    SagemakerPlan,
    Script,
    format_plan,
    plan_launch,
    plan_sagemaker,
)
from accelfn.launch.runs import Curve, RunRecord, RunTable, draw_runs_svg, find_runs, read_run

__all__ = (
    "Curve",
    "Edit",
    "LaunchConfig",
    "LaunchPlan",
    "Machine",
    "Migration",
    "Remark",
    "Resolved",
    "RunRecord",
    "RunTable",
    "SagemakerPlan",
    "Script",
    "draw_runs_svg",
    "find_runs",
    "format_plan",
    "parse_flags",
    "plan_launch",
    "plan_migration",
    "plan_sagemaker",
    "read_run",
    "resolve",
)
