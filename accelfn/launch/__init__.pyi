"""The names of the package: type checkers read them here, and so does ``__init__.py``."""

from accelfn.launch.command_line import parse_flags as parse_flags
from accelfn.launch.config import LaunchConfig as LaunchConfig
from accelfn.launch.functions import debug_launcher as debug_launcher
from accelfn.launch.functions import launch_processes as launch_processes
from accelfn.launch.functions import notebook_launcher as notebook_launcher
from accelfn.launch.machine import Machine as Machine
from accelfn.launch.plan import plan_launch as plan_launch
from accelfn.launch.plan_commands import LaunchPlan as LaunchPlan
from accelfn.launch.plan_commands import Script as Script
from accelfn.launch.plan_commands import format_plan as format_plan
from accelfn.launch.runs import Curve as Curve
from accelfn.launch.runs import RunRecord as RunRecord
from accelfn.launch.runs import find_runs as find_runs
from accelfn.launch.runs import read_run as read_run
from accelfn.launch.sagemaker import SagemakerPlan as SagemakerPlan
from accelfn.launch.sagemaker import plan_sagemaker as plan_sagemaker
from accelfn.launch.sources import Resolved as Resolved
from accelfn.launch.sources import resolve as resolve
