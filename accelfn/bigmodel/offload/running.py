"""Which calls are running: torch runs no hooks after a KeyboardInterrupt."""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn

__all__ = ("caller_of_hook", "is_running", "is_within")


def caller_of_hook() -> FrameType:
    """Return the frame that called the function that calls this: it exists as long as its module runs."""
    return sys._getframe(2)  # pyright: ignore[reportPrivateUsage]


def is_within(frame: FrameType) -> bool:
    """Whether this thread is within the frame at this moment."""
    now: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while now is not None and now is not frame:
        now = now.f_back
    return now is not None


def is_running(module: nn.Module, times: int) -> bool:
    """Whether this thread is within ``times`` calls of ``module`` at this moment, or more."""
    frame: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and times > 0:
        name = frame.f_code.co_name
        if name.startswith("torch_dynamo_resume"):  # what was compiled doesn't show whom it runs
            return True
        times -= name == "_call_impl" and frame.f_locals.get("self") is module
        frame = frame.f_back
    return times <= 0
