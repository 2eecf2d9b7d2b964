"""What a run leaves to look at: profiles."""

from accelfn.tracking.profiling import profile

__all__ = ("profile",)
