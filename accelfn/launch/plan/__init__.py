"""From a configuration and facts about the machine to what is started: pure functions."""

from accelfn.launch.plan.choose import plan_launch
from accelfn.launch.plan.machine import Machine, NumaNode
from accelfn.launch.plan.record import LaunchPlan, Meeting, Script, format_plan

__all__ = ("LaunchPlan", "Machine", "Meeting", "NumaNode", "Script", "format_plan", "plan_launch")
