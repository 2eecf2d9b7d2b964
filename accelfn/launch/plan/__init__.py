"""From a configuration and facts about the machine to what is started: pure functions."""

from accelfn.launch.plan.choose import plan_launch
from accelfn.launch.plan.machine import Machine
from accelfn.launch.plan.record import LaunchPlan, Rendezvous, Script, format_plan

__all__ = ("LaunchPlan", "Machine", "Rendezvous", "Script", "format_plan", "plan_launch")
