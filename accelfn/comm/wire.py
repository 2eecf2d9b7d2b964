"""Bytes as tensors and back, and trees of tensors as bytes."""

from __future__ import annotations

import ctypes

import torch

from accelfn.tree import Buffer, flatten_group

__all__ = ("ALIGNMENT", "as_bytes", "as_tensor", "padded_size", "read_groups", "write_groups")

# Every buffer starts at a multiple of the largest element (complex128), so that a view of any dtype is
# possible.
ALIGNMENT = 16


def as_tensor(data: bytes) -> torch.Tensor:
    """Copy ``data`` into a uint8 tensor on the CPU."""
    if not data:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def as_bytes(tensor: torch.Tensor, length: int | None = None) -> bytes:
    """Copy a contiguous uint8 tensor on the CPU, or its first ``length`` elements. Needs no numpy."""
    length = tensor.numel() if length is None else length
    return ctypes.string_at(tensor.data_ptr(), length) if length else b""


def padded_size(num_bytes: int) -> int:
    """Round up to the alignment of buffers."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def write_groups(target: torch.Tensor, groups: tuple[Buffer, ...], leaves: list[torch.Tensor]) -> None:
    """Write the leaves of ``groups`` one after the other into ``target``, uint8 and large enough."""
    start = 0
    for group in groups:
        if group.num_bytes:
            target[start : start + group.num_bytes] = flatten_group(group, leaves).view(torch.uint8)
        start += padded_size(group.num_bytes)


def read_groups(source: torch.Tensor, groups: tuple[Buffer, ...]) -> list[torch.Tensor]:
    """Return one flat view of ``source`` per group, as :func:`write_groups` wrote them."""
    start = 0
    buffers: list[torch.Tensor] = []
    for group in groups:
        buffers.append(source[start : start + group.num_bytes].view(group.dtype))
        start += padded_size(group.num_bytes)
    return buffers
