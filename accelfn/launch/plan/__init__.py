"""Plan the command that starts the processes of a machine: pure functions."""

from accelfn.launch.plan.choose import plan_launch
from accelfn.launch.plan.commands import LaunchPlan, Script, format_plan
from accelfn.launch.plan.machine import Machine
from accelfn.launch.plan.sagemaker import SagemakerPlan, plan_sagemaker

__all__ = (
    "LaunchPlan",
    "Machine",
    "SagemakerPlan",
    "Script",
    "format_plan",
    "plan_launch",
    "plan_sagemaker",
)
