"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.parallel import DistributedDataParallel

from accelfn.context import Context, check_context
from accelfn.errors import ConfigurationError, NotAvailableError

__all__ = ("convert_sync_batchnorm",)

M = TypeVar("M", bound=nn.Module)


def convert_sync_batchnorm(ctx: Context, model: M) -> M:
    """Let batch normalisation take mean and variance over the batches of all ranks: torch's SyncBatchNorm.

    Call it before ``prepare``, and make the optimizer from what it returns. Names and values of the state
    dict stay as they are.

    Ranks: every rank of ``ctx``, in the same way; doesn't communicate.

    Args:
        ctx: The world, whose process group the layers will use.
        model: Its BatchNorm layers are replaced in place.

    Returns:
        The model; another module where it is a BatchNorm layer itself. With one process, and without such
        layers, it comes back as it is.

    Raises:
        NotAvailableError: Torch has no SyncBatchNorm on the CPU, nor for ranks that are threads.
        ConfigurationError: The model was prepared already.

    >>> model = nn.BatchNorm1d(3)
    >>> convert_sync_batchnorm(Context(), model) is model
    True
    """
    check_context("convert_sync_batchnorm", ctx)
    if ctx.num_processes == 1 or not any(isinstance(one, _BatchNorm) for one in model.modules()):
        return model
    if ctx.world.group is None:
        raise NotAvailableError(
            "convert_sync_batchnorm: ranks that are threads have no process group, which torch's "
            "SyncBatchNorm needs. Leave BatchNorm as it is there, or use processes with an accelerator each."
        )
    if ctx.device.type == "cpu":
        raise NotAvailableError(
            "convert_sync_batchnorm: torch's SyncBatchNorm does not compute on the CPU. Leave BatchNorm as "
            "it is there, or take a norm that looks at one sample, such as GroupNorm."
        )
    if isinstance(model, DistributedDataParallel):
        raise ConfigurationError(
            "convert_sync_batchnorm: the model was prepared already, and DistributedDataParallel holds on to "
            "its layers. Convert it first, and prepare what comes back."
        )
    converter = cast("Any", nn.SyncBatchNorm)
    return cast("M", converter.convert_sync_batchnorm(model, ctx.world.group))
