"""Move batches to the device of a rank while it still computes on the previous ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from accelfn.context import end_step
from accelfn.context.xla import import_xla
from accelfn.devices import device_type
from accelfn.tree import flatten, is_packed_sequence, send_to_device

__all__ = ("SideStream", "place_on_cpu", "place_on_xla", "placer")

T = TypeVar("T")


def placer(device: torch.device, non_blocking: bool) -> Callable[[Any], Any]:
    """Return a function that moves a tree to ``device``.

    Args:
        device: The target. Copies to a device with CUDA's streams overlap its computation: see
            :class:`SideStream`.
        non_blocking: Don't wait for copies from pinned memory, which must not be written to meanwhile.
    """
    if device_type(device.type).has_streams:
        return SideStream(device, non_blocking)

    if device.type == "xla":
        return partial(place_on_xla, device=device)
    if device.type == "cpu":
        return place_on_cpu
    return partial(send_to_device, device=device, non_blocking=non_blocking)


def place_on_xla(batch: Any, device: torch.device) -> Any:
    """Start what was recorded so far, and move a tree to XLA's device; in SPMD mode rows are sharded.

    As torch_xla's ``MpDeviceLoader``, without its thread that reads ahead: the position of a loader counts
    the batches that were handed out.
    """
    end_step()
    placed = send_to_device(batch, device)
    if import_xla("torch_xla.runtime").is_spmd():
        spmd = import_xla("torch_xla.distributed.spmd")
        mesh = spmd.get_global_mesh()
        for leaf in flatten(placed)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.dim():
                spmd.mark_sharding(leaf, mesh, ("fsdp", *[None] * (leaf.dim() - 1)))
    return placed


def place_on_cpu(batch: Any) -> Any:
    """Move a tree to the CPU, with a fast path for tensors that are already there."""
    kind = type(batch)  # pyright: ignore[reportUnknownVariableType]
    if kind is torch.Tensor:
        if batch.is_cpu:
            return batch
    elif kind is list or kind is tuple or kind is dict:
        for leaf in batch.values() if kind is dict else batch:
            if type(leaf) is not torch.Tensor or not leaf.is_cpu:
                break
        else:
            return batch
    return send_to_device(batch, "cpu")


class SideStream:
    """Copies trees from pinned memory to an accelerator on a stream of its own.

    The program runs ahead of the device: it requests the next batch while the device computes on this one. A
    copy on the computing stream would wait for that computation; on a side stream it begins immediately, and
    only the computation on the batch waits for it. So copies cost no time, without prefetching batches.
    """

    def __init__(self, device: torch.device, non_blocking: bool) -> None:
        """Copy to ``device``; unless ``non_blocking``, wait for each copy, but not for the computation."""
        self._device = device
        self._non_blocking = non_blocking
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def __call__(self, batch: T) -> T:
        """Return ``batch`` on the device.

        Leaves with their own ``to`` method move on the computing stream, since the lifetime of their tensors
        is unknown.
        """
        leaves, structure = flatten(batch, is_packed_sequence)
        dense = {
            index: leaf
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.layout == torch.strided
        }
        if dense:
            current = self._module.current_stream(self._device)
            with self._module.stream(self._stream):
                for index, leaf in dense.items():
                    pinned = leaf if leaf.is_pinned() else leaf.pin_memory()
                    leaves[index] = pinned.to(self._device, non_blocking=True)
            current.wait_stream(self._stream)
            for index in dense:  # allocated on the side stream, which must not reuse the memory too early
                leaves[index].record_stream(current)
            if not self._non_blocking:
                self._stream.synchronize()
        for index in set(range(len(leaves))).difference(dense):
            leaves[index] = send_to_device(leaves[index], self._device, non_blocking=self._non_blocking)
        return structure.unflatten(leaves)
