"""Processes of a launch: the agent that runs torchrun, the worker that runs the script, and the report."""

__all__: tuple[str, ...] = ()  # modules are programs or their helpers
