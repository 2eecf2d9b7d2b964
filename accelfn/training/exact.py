"""Exact mode for training: random numbers that belong to a microbatch, and means over microbatches."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from accelfn.comm import Call, agree
from accelfn.comm.agreement import layout_call
from accelfn.context import Context
from accelfn.data import MicroBatch
from accelfn.data.microbatch import Draws
from accelfn.parallel.exact import OrderedSum
from accelfn.tree import (
    find_batch_size,
    flatten,
    map_tensors,
    plan_layout,
)

# Sums of these are formed in float32 and rounded once.
_NARROW = (torch.float16, torch.bfloat16)


def num_microbatches(ctx: Context, micro: MicroBatch | None) -> int:
    """Count the parts that the loss of one batch is divided into. Pure.

    Args:
        ctx: Without exact mode gradients are averaged over the ranks, which divides them already.
        micro: Of the batch; without it the batch is a window of its own.
    """
    window = 1 if micro is None else micro.window
    return window if ctx.reduction is None else window * ctx.num_processes


@contextmanager
def draw_for(ctx: Context, micro: MicroBatch) -> Generator[None, None, None]:
    """Draw inside what belongs to the samples of a batch, whichever rank has it.

    Seeds torch's default generators (those of the CPU and of the context's device), and brings them back to
    where they were. Waits for no device.

    Ranks: every rank of ``ctx``; doesn't communicate.

    Args:
        ctx: In exact mode.
        micro: Of the batch, which knows its place in the data. One that doesn't come from
            :func:`accelfn.microbatches` is known by its index and epoch alone.
    """
    assert ctx.reduction is not None  # called in exact mode only
    number = micro.index * ctx.num_processes + ctx.rank
    draws = micro.draws or Draws(f"batch {number} of epoch {micro.epoch}")
    block, draws.blocks = draws.blocks, draws.blocks + 1
    seed = _fold(ctx.reduction.seed, draws.name, block)
    on_device: Any = None if ctx.device.type == "cpu" else torch.get_device_module(ctx.device)
    state = torch.default_generator.get_state()
    device_state = None if on_device is None else on_device.get_rng_state()
    torch.default_generator.manual_seed(seed)
    if on_device is not None:
        on_device.manual_seed(seed)
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
        if on_device is not None:
            on_device.set_rng_state(device_state)


def _fold(*parts: object) -> int:
    """Derive a seed from the text of a value. Pure."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def cut_into_microbatches(ctx: Context, arguments: Any) -> list[Any]:
    """Cut each tensor with the batch's number of rows into one part for each batch of a window. Pure.

    Args:
        ctx: Says how many.
        arguments: Of a loss function: any tree. The first tensor with a dimension tells the number of rows;
            tensors with other numbers, and what is no tensor, are in every part as they are.

    Raises:
        ValueError: There is no such tensor, or its rows can't be cut into equal parts.
    """
    number = ctx.gradient_accumulation_steps
    size = find_batch_size(arguments)
    if size % number or not size:
        raise ValueError(
            f"value_and_grad: a batch of {size} rows can't be cut into {number} equal microbatches, which "
            f"{number * ctx.num_processes} microbatches on {ctx.num_processes} ranks ask for. Pass a "
            f"multiple of {number} rows on each rank."
        )
    rows = size // number

    def cut(start: int) -> Any:
        def take(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[start : start + rows] if tensor.dim() and tensor.shape[0] == size else tensor

        return map_tensors(take, arguments)

    return [cut(start) for start in range(0, size, rows)]


def mean_of_microbatches(
    ctx: Context, microbatches: Sequence[Sequence[torch.Tensor]], error: Exception | None = None
) -> list[torch.Tensor]:
    """Average tensors over the microbatches of all ranks, added in rank order and in this rank's order.

    What float16 and bfloat16 become is formed in float32 and rounded once.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        microbatches: Of each of this rank's microbatches the same tensors; as many on every rank.
        error: Why this rank has none.

    Returns:
        The means; the same bits on every rank.

    Raises:
        Exception: ``error`` itself, and RemoteRankError on the other ranks.
        MismatchError: The tensors differ in shape or dtype between ranks.
    """
    if error is not None:
        if ctx.num_processes > 1:
            agree(ctx, Call("value_and_grad"), error=error)
        raise error
    own = microbatches[0]
    wide = [[one.float() if one.dtype in _NARROW else one for one in each] for each in microbatches]
    layout = plan_layout(wide[0], flatten(wide[0])[1])
    call = layout_call("value_and_grad", f"{len(wide)} microbatches a rank", layout)
    total = OrderedSum(ctx, wide[0])
    with torch.no_grad():
        total.add(call, wide)
        sums = cast("list[torch.Tensor]", total.close())
        number = len(wide) * ctx.num_processes
        return [one.div_(number).to(like.dtype) for one, like in zip(sums, own, strict=True)]
