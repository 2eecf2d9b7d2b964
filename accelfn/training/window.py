"""The accumulation window: in which batches ranks average gradients, and what random numbers they draw."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from accelfn.context import (
    Context,
    device_module,
    device_random_state,
    set_device_random_state,
    takes_context,
)
from accelfn.data import MicroBatch
from accelfn.data.microbatch import Draws, check_micro
from accelfn.errors import ConfigurationError
from accelfn.keys import seed_of
from accelfn.parallel.forward_agreement import at_place
from accelfn.parallel.handle import local_steps, syncing
from accelfn.parallel.strategies.exact import exact_batch
from accelfn.training.prepared import is_averaged


@takes_context
@contextmanager
def no_sync(ctx: Context, *models: nn.Module) -> Generator[None, None, None]:
    """Don't average the gradients of ``models`` in backward passes inside; they accumulate on each rank.

    A step inside uses each rank's own gradients, as in local SGD. A step outside needs a backward pass
    outside before it, which averages the accumulated gradients.

    Ranks: all of ``ctx`` in the same way; doesn't communicate.
    """
    del ctx
    with syncing(False, *models), local_steps(*models):
        yield


@takes_context
@contextmanager
def trigger_sync_in_backward(ctx: Context, model: nn.Module) -> Generator[None, None, None]:
    """Average the gradients of ``model`` in a backward pass inside, whose forward pass was under no_sync.

    Gradients accumulated by earlier backward passes are averaged with it. For windows whose length is only
    known after their forward passes.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        model: From :func:`prepare_model`; models without an engine are ignored.

    Raises:
        ConfigurationError: ``static_graph`` is on, which needs torch to know in the forward pass.
    """
    del ctx
    with syncing(True, model):
        yield


@takes_context
def accumulate(ctx: Context, micro: MicroBatch, *models: nn.Module) -> AbstractContextManager[None]:
    """Run forward and backward of one batch of a window: ranks average gradients only where it closes.

    In exact mode, torch's random numbers inside depend on the batch's samples, whichever rank has them; the
    default generators are restored afterwards.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world, and whether each batch is averaged all the same (``sync_each_batch``).
        micro: Of the batch.
        *models: Prepared models that get gradients inside.

    Raises:
        ConfigurationError: There are several ranks, and the gradients of a model aren't averaged: it was not
            prepared, or with ``evaluation_mode``; or the context is in exact mode, and the model was prepared
            without it.
    """
    check_micro("accumulate", micro, is_needed=True)
    if ctx.world.size == 1 and ctx.reduction is None:
        return nullcontext()
    return accumulate_block(ctx, micro, models)


@contextmanager
def accumulate_block(
    ctx: Context, micro: MicroBatch, models: Sequence[nn.Module], *, is_held: bool = False
) -> Generator[None, None, None]:
    """Run :func:`accumulate`; ``is_held`` as in :func:`accelfn.parallel.strategies.exact.exact_batch`."""
    for index, model in enumerate(models):
        if ctx.world.size > 1 and not is_averaged(model):
            raise ConfigurationError(
                f"accumulate: model {index}, a {type(model).__name__}, was not prepared for training, so its "
                "gradients are not averaged over the ranks. Pass the model that prepare_model(ctx, model) "
                "returns, without evaluation_mode."
            )
    # Part of the agreement on forward passes, so that ranks at different batches don't match.
    place = f"batch {micro.index} of epoch {micro.epoch} ({micro.window} a window)"
    with at_place(place, *models), ExitStack() as stack:
        if ctx.reduction is not None:
            for model in dict.fromkeys(models):
                stack.enter_context(exact_batch(model, micro, micro.place, micro.window, is_held))
            stack.enter_context(draw_for(ctx, micro))
        if not micro.sync and not ctx.accumulation.sync_each_batch:
            stack.enter_context(syncing(False, *models, is_in_window=True))
        yield


@contextmanager
def draw_for(ctx: Context, micro: MicroBatch) -> Generator[None, None, None]:
    """Make random numbers inside depend on the samples of a batch, whichever rank has it.

    Seeds torch's default generators (those of the CPU and of the context's device), and restores their states
    afterwards. Doesn't wait for the device.

    Ranks: every rank of ``ctx``; doesn't communicate.

    Args:
        ctx: In exact mode.
        micro: Of the batch, with its place in the data. One that doesn't come from
            :func:`accelfn.microbatches` is identified by its index and epoch alone.
    """
    assert ctx.reduction is not None  # called in exact mode only
    number = micro.index * ctx.num_processes + ctx.rank
    draws = micro.draws or Draws(f"batch {number} of epoch {micro.epoch}")
    block, draws.blocks = draws.blocks, draws.blocks + 1
    seed = seed_of(ctx.reduction.seed, draws.name, block) >> 1
    on_device: Any = None if ctx.device.type == "cpu" else device_module(ctx.device.type)
    state = torch.default_generator.get_state()
    device_state = None if on_device is None else device_random_state(ctx.device)
    torch.default_generator.manual_seed(seed)
    if on_device is not None:
        on_device.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
        if device_state is not None:
            set_device_random_state(ctx.device, device_state)
