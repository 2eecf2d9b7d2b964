"""Gradients through offloaded weights: they arrive on the weights in the host's memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.autograd.graph import saved_tensors_hooks


class _Arrive(torch.autograd.Function):
    """Stand for the copies of weights: backward hands their gradients to the weights on the host."""

    @staticmethod
    def forward(ctx: Any, copies: Sequence[torch.Tensor], *hosts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)  # a weight that wasn't used gets no gradient, as everywhere
        ctx.devices = [host.device for host in hosts]
        # Not view_as, which may give dimensions of size 1 other strides, by which convolutions go.
        return tuple(copy.detach() for copy in copies)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        moved = [
            None if gradient is None else gradient.to(device)
            for gradient, device in zip(gradients, ctx.devices, strict=True)
        ]
        return (None, *moved)


def connect(copies: Sequence[torch.Tensor], hosts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return the copies as tensors whose gradients arrive on the hosts.

    Args:
        copies: Values of the weights, on the device that computes.
        hosts: The weights on the host: leaves that require gradients or not; only the former are connected.
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


class Saved(NamedTuple):
    """Whose memory a tensor is that autograd saves.

    Attributes:
        block: Position of the block in its prefetcher.
        weight: Position of the weight among those that are packed.
        version: Of the weight on the host when it was used. None: forward has written into the copy, which
            alone has these values.
        hosts: Of the block, by ref, as they were on the host.
    """

    block: int
    weight: int
    version: int | None
    hosts: Sequence[torch.Tensor | None]


class Refetched(NamedTuple):
    """A part of a block's memory that backward needs: kept as where it lies, and not as bytes.

    Attributes:
        saved: Whose memory it is.
        dtype: Of the part.
        shape: Of the part.
        stride: In elements.
        offset: From the memory's start, in elements.
        is_conj: It is seen as its conjugate.
        is_neg: It is seen as its negative.
    """

    saved: Saved
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the part of the memory."""
        with torch.no_grad():
            part = torch.empty(0, dtype=self.dtype, device=memory.device)
            part.set_(memory.untyped_storage(), self.offset, self.shape, self.stride)
            if self.is_conj:
                part = part.conj()
            return part if not self.is_neg else cast("Any", torch)._neg_view(part)


class _Outer(NamedTuple):
    """What hooks around these have made of a tensor."""

    kept: Any


def refetching(
    find: Callable[[int, int], Saved | None], fetch: Callable[[Refetched], torch.Tensor]
) -> saved_tensors_hooks:
    """Keep weights that autograd saves as where they lie, so that the graph holds no copies of them.

    What isn't a weight goes to the hooks that are there already: those of activation checkpointing, say.
    torch itself asks the innermost ones only.

    Args:
        find: Gives the weight whose memory has this address, and this byte of it; None for other memory.
        fetch: Gives the part anew, in backward.
    """
    hooks: Any = vars(torch)["_C"]._autograd
    outer: tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None = (
        hooks._top_saved_tensors_default_hooks(False)
    )

    def keep(tensor: torch.Tensor) -> Any:
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided:
            first = int(tensor.storage_offset())
            found = find(tensor.untyped_storage().data_ptr(), first * tensor.dtype.itemsize)
            if found is not None and found.version is not None:
                form = (tensor.dtype, tensor.shape, tensor.stride(), first)
                return Refetched(found, *form, tensor.is_conj(), tensor.is_neg())
            if found is not None:
                tensor = tensor.detach().clone()
        return tensor if outer is None else _Outer(outer[0](tensor))

    def give(kept: Any) -> torch.Tensor:
        if isinstance(kept, Refetched):
            return fetch(kept)
        return outer[1](kept.kept) if outer is not None and isinstance(kept, _Outer) else kept

    return saved_tensors_hooks(keep, give)


def is_innermost(hooks: saved_tensors_hooks) -> bool:
    """Whether autograd asks these hooks now, and no others that were set since."""
    top: Any = vars(torch)["_C"]._autograd._top_saved_tensors_default_hooks(False)
    return top is not None and top[0] is hooks.pack_hook


def is_in_backward() -> bool:
    """Whether this thread runs a backward pass at this moment."""
    return vars(torch)["_C"]._current_graph_task_id() >= 0


class _AtEnd:
    """Does something once: when it is called, or else when it is forgotten."""

    _work: Callable[[], None] | None = None  # also if __init__ was interrupted

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def __call__(self) -> None:
        work, self._work = self._work, None
        if work is not None:
            work()

    def __del__(self) -> None:
        self()


def after_backward(work: Callable[[], None]) -> bool:
    """Do something at the end of the backward pass that runs, also if it fails; False if none does."""
    engine: Any = vars(torch.autograd.Variable)["_execution_engine"]  # as DDP and FSDP do
    try:
        # A pass that fails doesn't call it, but lets go of it.
        engine.queue_callback(_AtEnd(work))
    except RuntimeError:
        return False
    return True
