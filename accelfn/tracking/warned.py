"""Warnings that point at the user's line, however deep below it they are raised."""

from __future__ import annotations

import inspect
import os
import warnings

__all__ = ("warn_caller",)

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def warn_caller(message: str) -> None:
    """Warn, and name the nearest line outside of accelfn as the place."""
    depth = 1
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, stacklevel=depth)
