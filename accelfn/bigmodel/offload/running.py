"""Which calls of modules are running: torch runs no hooks after a KeyboardInterrupt."""

from __future__ import annotations

import sys
from types import FrameType

from torch import nn

__all__ = ("is_running",)


def is_running(module: nn.Module, times: int) -> bool:
    """Whether this thread is within ``times`` calls of ``module`` at this moment, or more."""
    frame: FrameType | None = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    while frame is not None and times > 0:
        name = frame.f_code.co_name
        if name.startswith("torch_dynamo_resume"):  # what was compiled doesn't show whom it runs
            return True
        times -= name == "_call_impl" and frame.f_locals.get("self") is module
        frame = frame.f_back
    return times <= 0
