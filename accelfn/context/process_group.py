"""Fill the :class:`Collectives` seam from a torch process group.

Works for registered groups (``init_process_group``, ``new_group``) and for an unregistered one that a thread
made for itself, so nothing here asks torch's global registry: ranks are numbers inside the group.
"""

from __future__ import annotations

import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import cast

import torch
import torch.distributed as dist

from accelfn.context.collectives import Collectives, ReduceOp, chunk_bytes
from accelfn.errors import CollectiveTimeoutError, DistributedError, MissingRankError

__all__ = ("process_group_collectives",)


def process_group_collectives(
    group: dist.ProcessGroup, rank: int, size: int, *, control: dist.ProcessGroup | None = None
) -> Collectives:
    """Give collectives over ``group``.

    Args:
        group: Carries the tensors; whoever made it keeps it alive.
        rank: This rank in the group.
        size: Number of ranks in the group.
        control: Carries the CPU bytes of ``exchange``; ``group`` itself when it has a CPU backend.
    """
    # Weakly: a context that outlives its group, or hangs in a traceback, must not keep its connections.
    group = cast("dist.ProcessGroup", weakref.proxy(group))
    beside = group if control is None else cast("dist.ProcessGroup", weakref.proxy(control))
    chunk = chunk_bytes(size)

    def exchange(message: torch.Tensor) -> tuple[torch.Tensor, ...]:
        padded = torch.empty(chunk, dtype=torch.uint8)
        padded[: message.numel()] = message
        return gathered(padded, beside).view(size, chunk).unbind()

    def carrier(buffer: torch.Tensor) -> dist.ProcessGroup:
        return beside if buffer.device.type == "cpu" else group

    def gathered(buffer: torch.Tensor, through: dist.ProcessGroup) -> torch.Tensor:
        output = buffer.new_empty(size * buffer.numel())
        with _failures("all_gather", rank):
            # The method: dist.all_gather_into_tensor is deprecated in torch 2.13, its successor absent in
            # 2.11.
            through._allgather_base(output, buffer).wait()
        return output

    def all_gather(buffer: torch.Tensor) -> torch.Tensor:
        return gathered(buffer, carrier(buffer))

    def all_reduce(buffer: torch.Tensor, op: ReduceOp) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = _reduce_op(op)
        with _failures("all_reduce", rank):
            carrier(buffer).allreduce([buffer], options).wait()

    def broadcast(buffer: torch.Tensor, source: int) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = source
        with _failures("broadcast", rank):
            carrier(buffer).broadcast([buffer], options).wait()

    def scatter(output: torch.Tensor, buffer: torch.Tensor | None, source: int) -> None:
        options = dist.ScatterOptions()
        options.rootRank = source
        parts = [list(buffer.view(size, -1).unbind())] if buffer is not None and rank == source else []
        with _failures("scatter", rank):
            carrier(output).scatter([output], parts, options).wait()

    def all_to_all(buffer: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(buffer)
        with _failures("all_to_all", rank):
            carrier(buffer).alltoall_base(output, buffer, [], []).wait()
        return output

    def barrier() -> None:
        # Over the control bytes: the same on every backend, and no device has to be named.
        exchange(torch.empty(0, dtype=torch.uint8))

    return Collectives(
        exchange=exchange,
        all_gather=all_gather,
        all_reduce=all_reduce,
        broadcast=broadcast,
        scatter=scatter,
        all_to_all=all_to_all,
        barrier=barrier,
        chunk=chunk,
    )


@contextmanager
def _failures(operation: str, rank: int) -> Generator[None]:
    """Turn what a backend raises for a lost or late peer into our errors; let everything else through."""
    try:
        yield
    except ReferenceError as error:
        raise DistributedError(
            f"{operation}: the process group of this context is closed. Make a new context with init_context."
        ) from error
    except RuntimeError as error:
        text = str(error)
        if "imed out" in text or "timeout" in text.lower():
            raise CollectiveTimeoutError(
                f"rank {rank} waited in {operation} for a rank that did not come in time. Every rank must "
                f"call the same operations in the same order. The backend said: {text}"
            ) from error
        if "onnection" in text or "peer" in text:
            raise MissingRankError(
                f"rank {rank} lost its connection to another rank in {operation}: that rank has ended, or "
                f"its machine can't be reached. Look at its output first. The backend said: {text}"
            ) from error
        raise


def _reduce_op(op: ReduceOp) -> dist.ReduceOp:
    match op:
        case "sum":
            return dist.ReduceOp(dist.ReduceOp.SUM)
        case "max":
            return dist.ReduceOp(dist.ReduceOp.MAX)
        case "min":
            return dist.ReduceOp(dist.ReduceOp.MIN)
