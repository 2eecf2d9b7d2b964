"""Accelerate's hooks, as thin faces of the stream and of torch's own hooks."""

__all__: tuple[str, ...] = ()
