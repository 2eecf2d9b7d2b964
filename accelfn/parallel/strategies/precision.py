"""Mixed precision: a module's ``forward`` under autocast."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from accelfn.config import AutocastKwargs
from accelfn.context import Context, Precision, takes_context
from accelfn.parallel.forward import WrappedForward
from accelfn.tree import convert_to_fp32

M = TypeVar("M", bound=nn.Module)


@takes_context
def autocast(ctx: Context, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
    """Compute in the context's precision inside a ``with`` block.

    Prepared models do so in their ``forward``; use this for computations outside of them, and to compute
    parts in full precision.

    Ranks: local.

    Args:
        ctx: Has precision and device.
        autocast_handler: Used instead of the context's, such as ``AutocastKwargs(enabled=False)``.

    >>> with autocast(Context().replace(mixed_precision="bf16")):
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.bfloat16
    """
    return autocast_in(ctx.precision, ctx.device.type, autocast_handler)


def autocast_in(
    precision: Precision, device_type: str, handler: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """Return a context manager that computes in a precision, with the handler's options if there is one."""
    if precision.mode == "no":
        return nullcontext()
    options = precision.autocast if handler is None else handler
    return torch.autocast(
        device_type,
        dtype=torch.float16 if precision.mode == "fp16" else torch.bfloat16,
        enabled=options.enabled,
        cache_enabled=options.cache_enabled,
    )


class MixedPrecisionForward(WrappedForward):
    """A module's ``forward`` under autocast, with float32 results."""

    def __init__(self, forward: Callable[..., Any], precision: Precision, device_type: str) -> None:
        """Wrap ``forward``."""
        super().__init__(forward)
        self._precision = precision
        self._device_type = device_type

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``forward`` in mixed precision."""
        if torch.is_autocast_enabled(self._device_type):
            # Around several steps it would keep its copies of the weights, from before the first of them.
            torch.clear_autocast_cache()
        with autocast_in(self._precision, self._device_type):
            result = self.__wrapped__(*args, **kwargs)
        return convert_to_fp32(result)


def with_precision(ctx: Context, model: M) -> M:
    """Make ``model.forward`` compute in the context's precision. Writes into the module."""
    if ctx.precision.mode != "no":
        model.forward = MixedPrecisionForward(model.forward, ctx.precision, ctx.device.type)
    return model
