"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.nn.parallel import DistributedDataParallel

from accelfn.context import Context, takes_context
from accelfn.errors import ConfigurationError, NotAvailableError

M = TypeVar("M", bound=nn.Module)


@takes_context
def convert_sync_batchnorm(ctx: Context, model: M) -> M:
    """Convert batch normalisation to torch's SyncBatchNorm, with mean and variance over all ranks' batches.

    Call it before ``prepare``, and make the optimizer from the model that it returns. Names and values of the
    state dict don't change.

    Ranks: every rank of ``ctx``, in the same way; doesn't communicate.

    Args:
        ctx: The world, whose process group the layers will use.
        model: Its BatchNorm layers are replaced in place.

    Returns:
        The model; a new module if it is a BatchNorm layer itself. With one process, or without such layers,
        it is returned unchanged.

    Raises:
        NotAvailableError: Torch has no SyncBatchNorm on the CPU or for ranks that are threads.
        ConfigurationError: The model was prepared already.

    >>> model = nn.BatchNorm1d(3)
    >>> convert_sync_batchnorm(Context(), model) is model
    True
    """
    if ctx.num_processes == 1 or not any(isinstance(module, _BatchNorm) for module in model.modules()):
        return model
    if ctx.world.group is None:
        raise NotAvailableError(
            "convert_sync_batchnorm: ranks that are threads have no process group, which torch's "
            "SyncBatchNorm needs. Keep BatchNorm there, or use processes with an accelerator each."
        )
    if ctx.device.type == "cpu":
        raise NotAvailableError(
            "convert_sync_batchnorm: torch's SyncBatchNorm does not support the CPU. Keep BatchNorm there, "
            "or use a norm over single samples, such as GroupNorm."
        )
    if isinstance(model, DistributedDataParallel):
        raise ConfigurationError(
            "convert_sync_batchnorm: the model was prepared already, and DistributedDataParallel keeps its "
            "layers. Convert it first, and prepare the result."
        )
    converter = cast("Any", nn.SyncBatchNorm)
    return cast("M", converter.convert_sync_batchnorm(model, ctx.world.group))
