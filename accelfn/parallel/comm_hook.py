"""Gradients of DistributedDataParallel on the wire: as they are, or compressed by one of torch's hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from accelfn.context import Context
from accelfn.context.config import DDPCommunicationHookType, DistributedDataParallelKwargs, GuardMode
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.parallel.reduction import watch_reductions

__all__ = ("CommHook", "choose_comm_hook", "register_comm_hook")


class CommHook(NamedTuple):
    """What sends gradients in another form, with the state that torch passes to it."""

    state: Any
    hook: Callable[..., Any]


def choose_comm_hook(ctx: Context) -> CommHook | None:
    """Choose what ``comm_hook`` and its companions ask for; None where nothing is compressed.

    Ranks: local; the same on every rank.

    Raises:
        ConfigurationError: ``comm_state_option`` doesn't fit.
        NotAvailableError: Ranks are threads, or this torch can't run the hook.
    """
    options: DistributedDataParallelKwargs = ctx.strategy.ddp
    kinds = DDPCommunicationHookType
    if options.comm_hook == kinds.NO:
        return None
    if ctx.world.group is None:
        raise NotAvailableError(
            f"comm_hook={str(options.comm_hook)!r} compresses what DistributedDataParallel sends, and ranks "
            "that are threads send nothing. Leave it out there, or use processes."
        )
    hooks: dict[DDPCommunicationHookType, Callable[..., Any]] = {
        kinds.FP16: default_hooks.fp16_compress_hook,
        kinds.BF16: default_hooks.bf16_compress_hook,
        kinds.POWER_SGD: powerSGD_hook.powerSGD_hook,
        kinds.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
    }
    wrappers: dict[DDPCommunicationHookType, Callable[..., Any]] = {
        kinds.FP16: default_hooks.fp16_compress_wrapper,
        kinds.BF16: default_hooks.bf16_compress_wrapper,
    }
    hook = hooks[DDPCommunicationHookType(options.comm_hook)]
    state: Any = ctx.world.group
    if options.comm_hook == kinds.BATCHED_POWER_SGD and not _batched_power_sgd_works():
        raise NotAvailableError(
            f"comm_hook='batched_power_sgd': torch {torch.__version__} fails in it as soon as it begins to "
            "compress: it hands a matrix to a function that takes a stack of them. Use comm_hook='power_sgd'."
        )
    if options.comm_hook in (kinds.POWER_SGD, kinds.BATCHED_POWER_SGD):
        try:
            state = powerSGD_hook.PowerSGDState(
                process_group=ctx.world.group, **dict(options.comm_state_option)
            )
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"comm_state_option holds options of torch's PowerSGDState, got "
                f"{dict(options.comm_state_option)}: {error}"
            ) from error
    if options.comm_wrapper != kinds.NO:
        hook = wrappers[DDPCommunicationHookType(options.comm_wrapper)](hook)
    return CommHook(state, hook)


def _batched_power_sgd_works() -> bool:
    try:
        cast("Any", powerSGD_hook)._orthogonalize(torch.ones(2, 1))
    except AssertionError:
        return False
    return True


def register_comm_hook(ctx: Context, model: DistributedDataParallel, comm_hook: CommHook | None) -> None:
    """Let ``comm_hook``, or without one a reduction with an eye on other ranks, carry a model's gradients.

    Ranks: every rank of ``ctx``.

    Raises:
        ConfigurationError: Torch has no such hook for this backend.
    """
    options: DistributedDataParallelKwargs = ctx.strategy.ddp
    if comm_hook is None:
        # With a static graph torch waits for the first reductions before any callback could.
        if ctx.guard.mode != GuardMode.OFF and ctx.device.type == "cpu" and not options.static_graph:
            watch_reductions(ctx, model)
        return
    try:
        cast("Any", model).register_comm_hook(comm_hook.state, comm_hook.hook)
    except TypeError as error:
        raise ConfigurationError(
            f"comm_hook={str(options.comm_hook)!r} is not supported by torch for backend "
            f"{ctx.world.backend}: {error}"
        ) from error
