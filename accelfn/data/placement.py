"""Bring batches to the device of a rank, while the device still computes on the ones before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from accelfn.tree import flatten, is_packed_sequence, send_to_device

__all__ = ("SideStream", "place_on_cpu", "placer")

T = TypeVar("T")


def placer(device: torch.device, non_blocking: bool) -> Callable[[Any], Any]:
    """Return what brings a tree to ``device``.

    Args:
        device: Where to. On a CUDA device copies go beside its computing, by a :class:`SideStream`.
        non_blocking: Don't wait for copies from pinned memory, which must then not be written to meanwhile.
    """
    if device.type == "cuda":
        return SideStream(device, non_blocking)

    def place(batch: Any) -> Any:
        return send_to_device(batch, device, non_blocking=non_blocking)

    return place_on_cpu if device.type == "cpu" else place


def place_on_cpu(batch: Any) -> Any:
    """Bring a tree to the CPU, where nearly all of them are already: found out at little cost."""
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
    """Copies trees to a CUDA device on a stream of its own, from pinned memory.

    The program runs ahead of the device: it asks for the next batch while the device computes on this one. A
    copy in the stream that computes would wait until that is done; here it begins at once, and what computes
    on the batch waits for it on the device. So nothing has to be read ahead for copies to cost no time.
    """

    def __init__(self, device: torch.device, non_blocking: bool) -> None:
        """Copy to ``device``; unless ``non_blocking``, wait for each copy, though not for what computes."""
        self._device = device
        self._non_blocking = non_blocking
        self._stream = torch.cuda.Stream(device)

    def __call__(self, batch: T) -> T:
        """Return ``batch`` on the device.

        Leaves that move by a ``to`` of their own do so in the stream that computes: which tensors they hold,
        and for how long, is unknown.
        """
        leaves, structure = flatten(batch, is_packed_sequence)
        mine = [index for index, leaf in enumerate(leaves) if self._is_mine(leaf)]
        if mine:
            current = torch.cuda.current_stream(self._device)
            with torch.cuda.stream(self._stream):
                for index in mine:
                    leaves[index] = _pinned(leaves[index]).to(self._device, non_blocking=True)
            current.wait_stream(self._stream)
            for index in mine:  # made for the side stream, which must not use its memory again too soon
                leaves[index].record_stream(current)
            if not self._non_blocking:
                self._stream.synchronize()
        others = set(range(len(leaves))).difference(mine)
        for index in others:
            leaves[index] = send_to_device(leaves[index], self._device, non_blocking=self._non_blocking)
        return structure.unflatten(leaves)

    def _is_mine(self, leaf: object) -> bool:
        return isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.layout == torch.strided


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_pinned() else tensor.pin_memory()
