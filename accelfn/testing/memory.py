"""Ranks as threads that hand each other tensors through shared memory."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from accelfn.context import CallLog, Collectives, Part, ReduceOp, World, chunk_bytes
from accelfn.testing.rendezvous import Rendezvous

__all__ = ("memory_collectives", "memory_world")


def memory_world(rank: int, size: int, num_nodes: int = 1, backend: str = "memory") -> World:
    """Describe rank ``rank`` of a world of threads, laid out as ``num_nodes`` equal nodes."""
    if size < 1 or num_nodes < 1 or size % num_nodes:
        raise ValueError(
            f"run_ranks: num_nodes must divide world_size, got world_size={size}, num_nodes={num_nodes}."
        )
    local_size = size // num_nodes
    return World(
        rank=rank,
        size=size,
        local_rank=rank % local_size,
        local_size=local_size,
        node_rank=rank // local_size,
        num_nodes=num_nodes,
        backend=backend,
    )


def memory_collectives(rendezvous: Rendezvous, rank: int, size: int, call_log: CallLog) -> Collectives:
    """Fill the seam with meetings of threads.

    A buffer that a caller goes on using is read by the others between two meetings: nobody returns before all
    have read.
    """

    def meet(call: tuple[object, ...], value: Any) -> list[Any]:
        return rendezvous.meet(rank, call, value, call_log)

    def finish(name: str) -> None:
        meet((name, "end"), None)

    def all_gather_bytes(message: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Messages are never written again, so one rendezvous is enough.
        return tuple(meet(("all_gather_bytes",), message))

    def all_gather(buffer: torch.Tensor) -> torch.Tensor:
        joined = torch.cat(meet(("all_gather", *_form(buffer)), buffer))
        finish("all_gather")
        return joined

    def all_reduce(buffer: torch.Tensor, op: ReduceOp) -> None:
        stacked = torch.stack(meet(("all_reduce", op, *_form(buffer)), buffer))
        if op == "sum":
            result = stacked.sum(0, dtype=stacked.dtype)
        else:
            result = stacked.amax(0) if op == "max" else stacked.amin(0)
        finish("all_reduce")
        buffer.copy_(result)

    def reduce_scatter(buffer: torch.Tensor) -> torch.Tensor:
        parts = meet(("reduce_scatter", *_form(buffer)), buffer)
        stacked = torch.stack([part.view(size, -1)[rank] for part in parts])
        finish("reduce_scatter")
        return stacked.sum(0, dtype=stacked.dtype)

    def broadcast(buffer: torch.Tensor, source: int) -> None:
        sent = meet(("broadcast", source, *_form(buffer)), buffer)[source]
        if rank != source:
            buffer.copy_(sent)
        finish("broadcast")

    def scatter(output: torch.Tensor, buffer: torch.Tensor | None, source: int) -> None:
        sent = meet(("scatter", source, *_form(output)), buffer)[source]
        output.copy_(sent.view(size, -1)[rank])
        finish("scatter")

    def all_to_all(buffer: torch.Tensor) -> torch.Tensor:
        parts = meet(("all_to_all", *_form(buffer)), buffer)
        received = torch.cat([part.view(size, -1)[rank] for part in parts])
        finish("all_to_all")
        return received

    def permute(outgoing: torch.Tensor, incoming: torch.Tensor, to: int, source: int) -> None:
        del to
        sent = meet(("permute",), outgoing)
        if incoming.numel():
            incoming.copy_(sent[source])
        finish("permute")

    def barrier() -> None:
        meet(("barrier",), None)

    numbers = itertools.count()

    def split(groups: Sequence[Sequence[int]], timeout: timedelta) -> tuple[Part, ...]:
        del timeout
        return tuple(_part(rendezvous.part(next(numbers), members), rank, members) for members in groups)

    return Collectives(
        all_gather_bytes=all_gather_bytes,
        all_gather=all_gather,
        all_reduce=all_reduce,
        reduce_scatter=reduce_scatter,
        broadcast=broadcast,
        scatter=scatter,
        all_to_all=all_to_all,
        permute=permute,
        barrier=barrier,
        split=split,
        chunk=chunk_bytes(size),
        while_blocked=lambda: rendezvous.aside(rank),
        board=rendezvous.board,
        call_log=call_log,
    )


def _part(place: Rendezvous, rank: int, members: Sequence[int]) -> Part:
    if len(members) == 1:
        return Part(Collectives())
    return Part(memory_collectives(place, list(members).index(rank), len(members), CallLog()))


def _form(buffer: torch.Tensor) -> tuple[object, ...]:
    return tuple(buffer.shape), buffer.dtype
