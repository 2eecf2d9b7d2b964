"""Start ranks from code: a notebook, a script, a test. Each rank is a fresh process."""

from accelfn.launch.launchers.notebook import debug_launcher, notebook_launcher
from accelfn.launch.launchers.processes import launch_processes

__all__ = ("debug_launcher", "launch_processes", "notebook_launcher")
