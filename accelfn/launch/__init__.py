"""The command line: plan how a training script is started, and carry the plan out.

Nothing here imports torch, and a name is resolved on first use (PEP 562): a command loads its own modules.
So ``accelfn --help``, ``--dry_run`` and bad input answer at once.
"""

# ruff: noqa: I001 -- a name that is exported is imported "as" itself, all of a module by one statement
from types import MappingProxyType as _MappingProxyType
from typing import TYPE_CHECKING as _TYPE_CHECKING

from accelfn.lazy import find_name as _find_name, list_names as _list_names

if _TYPE_CHECKING:
    from accelfn.launch.command_line import parse_flags as parse_flags
    from accelfn.launch.functions import (
        debug_launcher as debug_launcher,
        launch_processes as launch_processes,
        notebook_launcher as notebook_launcher,
    )
    from accelfn.launch.config import LaunchConfig as LaunchConfig
    from accelfn.launch.sources import Resolved as Resolved, resolve as resolve
    from accelfn.launch.machine import Machine as Machine
    from accelfn.launch.plan import plan_launch as plan_launch
    from accelfn.launch.plan_commands import (
        LaunchPlan as LaunchPlan,
        Script as Script,
        format_plan as format_plan,
    )
    from accelfn.launch.sagemaker import SagemakerPlan as SagemakerPlan, plan_sagemaker as plan_sagemaker
    from accelfn.launch.runs import (
        Curve as Curve,
        RunRecord as RunRecord,
        find_runs as find_runs,
        read_run as read_run,
    )

_LAZY = _MappingProxyType(
    {
        "accelfn.launch.command_line": ("parse_flags",),
        "accelfn.launch.config": ("LaunchConfig",),
        "accelfn.launch.functions": ("debug_launcher", "launch_processes", "notebook_launcher"),
        "accelfn.launch.machine": ("Machine",),
        "accelfn.launch.plan": ("plan_launch",),
        "accelfn.launch.plan_commands": ("LaunchPlan", "Script", "format_plan"),
        "accelfn.launch.sagemaker": ("SagemakerPlan", "plan_sagemaker"),
        "accelfn.launch.sources": ("Resolved", "resolve"),
        "accelfn.launch.runs": ("Curve", "RunRecord", "find_runs", "read_run"),
    }
)


def __getattr__(name: str) -> object:
    return _find_name(__name__, _LAZY, name)


def __dir__() -> list[str]:
    return _list_names(__name__, _LAZY)
