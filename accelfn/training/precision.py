"""Compute in the precision that the context says."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from accelfn.context import Context, Precision, check_context
from accelfn.context.config import AutocastKwargs
from accelfn.parallel.forward import WrappedForward, copied_without
from accelfn.tree import convert_to_fp32

__all__ = ("MixedPrecisionForward", "autocast", "with_precision", "without_precision")

M = TypeVar("M", bound=nn.Module)


def autocast(ctx: Context, autocast_handler: AutocastKwargs | None = None) -> AbstractContextManager[Any]:
    """Compute in the context's precision inside a ``with`` block.

    Prepared models do so by themselves in ``forward``; this is for what is computed outside of them, and for
    islands of full precision.

    Ranks: local.

    Args:
        ctx: Says precision and device.
        autocast_handler: Used instead of the context's, such as ``AutocastKwargs(enabled=False)``.

    >>> with autocast(Context().replace(mixed_precision="bf16")):
    ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    torch.bfloat16
    """
    check_context("autocast", ctx)
    return _autocast(ctx.precision, ctx.device.type, autocast_handler)


def _autocast(
    precision: Precision, device_type: str, handler: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
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
    """A module's ``forward`` under autocast, with float32 results.

    It stands in for the method on the instance, so that the module keeps its class and the keys of its state
    dict.
    """

    def __init__(self, forward: Callable[..., Any], precision: Precision, device_type: str) -> None:
        """Keep what to call, and how."""
        super().__init__(forward)
        self._precision = precision
        self._device_type = device_type

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``forward`` in mixed precision."""
        with _autocast(self._precision, self._device_type):
            result = self.__wrapped__(*args, **kwargs)
        return convert_to_fp32(result)


def with_precision(ctx: Context, model: M) -> M:
    """Let ``model.forward`` compute in the context's precision from now on. Writes into the module."""
    if ctx.precision.mode != "no":
        model.forward = MixedPrecisionForward(model.forward, ctx.precision, ctx.device.type)
    return model


def without_precision(model: M) -> M:
    """Return a module that shares everything with ``model`` but computes in full precision."""
    if not isinstance(model.__dict__.get("forward"), MixedPrecisionForward):
        return model
    return copied_without(model, MixedPrecisionForward)
