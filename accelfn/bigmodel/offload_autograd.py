"""Autograd of offloaded weights: gradients arrive on the stored weights, and saved weights are refetched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.autograd.graph import saved_tensors_hooks


class _Arrive(torch.autograd.Function):
    """Identity from the copies of weights, whose backward returns gradients for the weights on the host."""

    @staticmethod
    def forward(ctx: Any, copies: Sequence[torch.Tensor], *hosts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)  # unused weights get no gradient, as usual
        ctx.devices = [host.device for host in hosts]
        # Not view_as, which may change strides of dimensions of size 1, and these affect convolutions.
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
        copies: The weights on the device that computes.
        hosts: The weights on the host. Only those that require gradients are connected.
    """
    trained = [position for position, host in enumerate(hosts) if host.requires_grad]
    if not trained:
        return tuple(copies)
    apply = cast("Callable[..., tuple[torch.Tensor, ...]]", _Arrive.apply)  # pyright: ignore[reportUnknownMemberType]
    outputs = apply([copies[position] for position in trained], *[hosts[position] for position in trained])
    connected = list(copies)
    for position, tensor in zip(trained, outputs, strict=True):
        connected[position] = tensor
    return tuple(connected)


class Saved(NamedTuple):
    """The weight to which a tensor saved by autograd belongs.

    Attributes:
        block: Position of the block in its prefetcher.
        weight: Position of the weight among the packed ones.
        version: Version of the weight on the host when it was used. None if forward has modified the copy,
            which alone has these values.
        hosts: The stored tensors of the block, by ref.
    """

    block: int
    weight: int
    version: int | None
    hosts: Sequence[torch.Tensor | None]


class Refetched(NamedTuple):
    """A view of a block's memory that backward needs, kept as its description and not as data.

    Attributes:
        saved: The weight.
        dtype: Dtype of the view.
        shape: Shape of the view.
        stride: Strides of the view, in elements.
        offset: Offset in the memory, in elements.
        is_conj: Whether it is a conjugate view.
        is_neg: Whether it is a negative view.
    """

    saved: Saved
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """Return the view of the memory."""
        with torch.no_grad():
            view = torch.empty(0, dtype=self.dtype, device=memory.device)
            view.set_(memory.untyped_storage(), self.offset, self.shape, self.stride)
            if self.is_conj:
                view = view.conj()
            return view if not self.is_neg else cast("Any", torch)._neg_view(view)


class _Outer(NamedTuple):
    """What outer hooks returned for a tensor."""

    packed: Any


def refetching(
    find: Callable[[int, int], Saved | None], fetch: Callable[[Refetched], torch.Tensor]
) -> saved_tensors_hooks:
    """Save descriptions of weights instead of their data, so that the graph holds no copies of them.

    Other tensors are passed to existing hooks, such as those of activation checkpointing, since torch only
    calls the innermost ones.

    Args:
        find: Returns the weight at an address of memory and a byte in it; None for other memory.
        fetch: Returns the view again, in backward.
    """
    hooks: Any = vars(torch)["_C"]._autograd
    outer: tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]] | None = (
        hooks._top_saved_tensors_default_hooks(False)
    )

    def pack(tensor: torch.Tensor) -> Any:
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided:
            offset = int(tensor.storage_offset())
            saved = find(tensor.untyped_storage().data_ptr(), offset * tensor.dtype.itemsize)
            if saved is not None and saved.version is not None:
                form = (tensor.dtype, tensor.shape, tensor.stride(), offset)
                return Refetched(saved, *form, tensor.is_conj(), tensor.is_neg())
            if saved is not None:
                tensor = tensor.detach().clone()
        return tensor if outer is None else _Outer(outer[0](tensor))

    def unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, Refetched):
            return fetch(packed)
        return outer[1](packed.packed) if outer is not None and isinstance(packed, _Outer) else packed

    return saved_tensors_hooks(pack, unpack)


def is_innermost(hooks: saved_tensors_hooks) -> bool:
    """Check whether autograd calls these hooks now, and not others that were set since."""
    top: Any = vars(torch)["_C"]._autograd._top_saved_tensors_default_hooks(False)
    return top is not None and top[0] is hooks.pack_hook


def is_in_backward() -> bool:
    """Check whether this thread is running a backward pass."""
    return vars(torch)["_C"]._current_graph_task_id() >= 0


class _AtEnd:
    """Calls a function once: when it is called, or else when it is deleted."""

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
    """Call a function at the end of the running backward pass, also if it fails; False if none is running."""
    engine: Any = vars(torch.autograd.Variable)["_execution_engine"]  # as DDP and FSDP do
    try:
        # A pass that fails deletes the callback without calling it.
        engine.queue_callback(_AtEnd(work))
    except RuntimeError:
        return False
    return True
