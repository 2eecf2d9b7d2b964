"""Gradients through weights that travel: they arrive on the weights at rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.autograd.graph import saved_tensors_hooks

__all__ = ("Refetched", "connect", "refetching")


class _Arrive(torch.autograd.Function):
    """Stand for the copies of weights: backward hands their gradients to the weights at rest."""

    @staticmethod
    def forward(ctx: Any, copies: Sequence[torch.Tensor], *hosts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)  # a weight that wasn't used gets no gradient, as everywhere
        ctx.devices = [host.device for host in hosts]
        return tuple(copy.view_as(copy) for copy in copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        moved = [
            None if gradient is None else gradient.to(device)
            for gradient, device in zip(gradients, ctx.devices, strict=True)
        ]
        return (None, *moved)


def connect(copies: Sequence[torch.Tensor], hosts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Give the copies as tensors whose gradients arrive on the hosts.

    Args:
        copies: Values of the weights, on the device that computes.
        hosts: The weights at rest: leaves that require gradients or not; only the former are connected.
    """
    trained = [place for place, host in enumerate(hosts) if host.requires_grad]
    if not trained:
        return tuple(copies)
    apply = cast("Callable[..., tuple[torch.Tensor, ...]]", _Arrive.apply)  # pyright: ignore[reportUnknownMemberType]
    joined = apply([copies[place] for place in trained], *[hosts[place] for place in trained])
    connected = list(copies)
    for place, tensor in zip(trained, joined, strict=True):
        connected[place] = tensor
    return tuple(connected)


class Refetched(NamedTuple):
    """A part of a block's memory that backward needs: kept as where it lies, and not as bytes.

    Attributes:
        block: Position of the block in its stream.
        versions: Of the weights at rest when they were used.
        dtype: Of the part.
        shape: Of the part.
        stride: In elements.
        offset: From the memory's start, in elements.
    """

    block: int
    versions: tuple[int, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """Give the part of the memory."""
        part = torch.empty(0, dtype=self.dtype, device=memory.device)
        return part.set_(memory.untyped_storage(), self.offset, self.shape, self.stride)


def refetching(
    find: Callable[[int], tuple[int, tuple[int, ...]] | None], fetch: Callable[[Refetched], torch.Tensor]
) -> saved_tensors_hooks:
    """Keep weights that autograd saves as where they lie, so that the graph holds no copies of them.

    Args:
        find: Gives the block, and the versions of its weights, whose memory has this address; None for
            other memory.
        fetch: Gives the part anew, in backward.
    """

    def keep(tensor: torch.Tensor) -> torch.Tensor | Refetched:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided:
            return tensor
        found = find(tensor.untyped_storage().data_ptr())
        if found is None:
            return tensor
        return Refetched(
            *found, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
        )

    def give(kept: torch.Tensor | Refetched) -> torch.Tensor:
        return fetch(kept) if isinstance(kept, Refetched) else kept

    return saved_tensors_hooks(keep, give)
