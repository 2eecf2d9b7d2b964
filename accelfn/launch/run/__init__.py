"""What runs in the processes of a launch: torchrun's agent, the worker of each script, the report."""

__all__: tuple[str, ...] = ()  # programs, and what they need
