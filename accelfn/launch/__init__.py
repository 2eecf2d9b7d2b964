"""The command line: plan how a training script is started, and carry the plan out.

Nothing here imports torch, and a name is resolved on first use (PEP 562): a command loads its own modules.
So ``accelfn --help``, ``--dry_run`` and bad input answer at once.
"""

import typing as _typing
from importlib import import_module as _import_module
from types import MappingProxyType as _MappingProxyType

if _typing.TYPE_CHECKING:
    from accelfn.launch.command_line import parse_flags
    from accelfn.launch.config import LaunchConfig, Resolved, resolve
    from accelfn.launch.plan import (
        LaunchPlan,
        Machine,
        SagemakerPlan,
        Script,
        format_plan,
        plan_launch,
        plan_sagemaker,
    )
    from accelfn.launch.runs import Curve, RunRecord, RunTable, find_runs, read_run

__all__ = (
    "Curve",
    "LaunchConfig",
    "LaunchPlan",
    "Machine",
    "Resolved",
    "RunRecord",
    "RunTable",
    "SagemakerPlan",
    "Script",
    "find_runs",
    "format_plan",
    "parse_flags",
    "plan_launch",
    "plan_sagemaker",
    "read_run",
    "resolve",
)

_HOMES = _MappingProxyType(
    {
        name: f"accelfn.launch.{home}"
        for home, names in (
            ("command_line", "parse_flags"),
            ("config", "LaunchConfig Resolved resolve"),
            ("plan", "LaunchPlan Machine SagemakerPlan Script format_plan plan_launch plan_sagemaker"),
            ("runs", "Curve RunRecord RunTable find_runs read_run"),
        )
        for name in names.split()
    }
)


def __getattr__(name: str) -> _typing.Any:
    """Return a public name, from the module that defines it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    """List the names, public ones included."""
    return sorted({*globals(), *__all__})
