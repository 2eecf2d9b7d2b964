"""Checks of what callers pass, before anything is done with it."""

from __future__ import annotations

import os

__all__ = ("require_path",)


def require_path(operation: str, argument: str, value: object, meant: str = "") -> None:
    """Check that something is a path.

    Args:
        operation: What errors call it.
        argument: Its name.
        value: Of it.
        meant: What to do instead, as a sentence.

    Raises:
        TypeError: It isn't.
    """
    if not isinstance(value, (str, os.PathLike)):
        # Its kind alone, where it may be a dict of tensors.
        given = repr(value) if isinstance(value, (int, float, bytes)) else type(value).__name__
        end = f" {meant}" if meant else ""
        raise TypeError(f"{operation}: {argument} takes a path, such as '/data/model': got {given}.{end}")
