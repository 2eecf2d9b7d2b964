"""Carry a plan out: meet the other machines, start, hand signals on, and say what went wrong."""

from accelfn.launch.run.carry_out import run_plan

__all__ = ("run_plan",)
