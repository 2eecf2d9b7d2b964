"""Where in the user's program an operation was called."""

from __future__ import annotations

import inspect
import os
from types import FrameType

__all__ = ("call_site",)

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Frames of a progress bar, a thread pool or a test runner are not the user's: they may differ between ranks,
# as a bar does that is shown on the first rank only.
_LIBRARIES = (os.path.dirname(os.__file__) + os.sep, "<frozen ")
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def call_site() -> str:
    """Name the line outside of this package that led here, such as ``"train.py:41 in main"``.

    The nearest line of a program that isn't installed; of one that is, the nearest line at all. By the file's
    name without its folder, which need not be the same on all machines.
    """
    nearest: FrameType | None = None
    frame = inspect.currentframe()
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_PACKAGE):
            if not path.startswith(_LIBRARIES) and not any(part in path for part in _INSTALLED):
                return _name(frame)
            nearest = nearest or frame
        frame = frame.f_back
    return "" if nearest is None else _name(nearest)


def _name(frame: FrameType) -> str:
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"
