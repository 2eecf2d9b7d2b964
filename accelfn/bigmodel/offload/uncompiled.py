"""Hooks that torch.compile leaves alone."""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

import torch

__all__ = ("uncompiled",)

F = TypeVar("F", bound=FunctionType)


def uncompiled(function: F) -> F:
    """Keep torch.compile out of a function and of all that it calls.

    As ``torch.compiler.disable`` does, which would import the compiler here, and that takes seconds.
    """
    frames: Any = getattr(vars(torch)["_C"]._dynamo, "eval_frame", None)
    set_strategy = getattr(frames, "set_code_exec_strategy", None)
    if set_strategy is None:  # a torch without it: hooks are traced, and only cost more compiling
        return function
    skip = frames._FrameAction.SKIP
    set_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    vars(function)["_torchdynamo_disable"] = True
    return function
