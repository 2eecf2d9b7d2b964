"""Tensors laid side by side in one piece of memory, so that one transfer carries them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

__all__ = (
    "Packing",
    "Piece",
    "is_dense",
    "is_packable",
    "is_packed",
    "lasting_tensors",
    "pack",
    "plan_packing",
    "unpack",
)

# What CUDA's allocator aligns to; kernels that read vectors of 16 bytes need no more.
_ALIGNMENT = 256


class Piece(NamedTuple):
    """Where a tensor lies in the memory of a block.

    Attributes:
        start: First byte.
        dtype: Of the tensor.
        shape: Of the tensor.
        stride: Of the tensor, in elements.
    """

    start: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Packing(NamedTuple):
    """How tensors lie in one piece of memory.

    Attributes:
        num_bytes: Of the memory.
        pieces: In the order of the tensors.
    """

    num_bytes: int
    pieces: tuple[Piece, ...]


def is_packable(tensor: torch.Tensor) -> bool:
    """Whether a tensor is bytes in memory and nothing more.

    Tensors of classes of their own (quantised ones) know more than their bytes, and move by their own ``to``.
    """
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided


def plan_packing(tensors: Sequence[torch.Tensor]) -> Packing:
    """Pack tensors side by side, each aligned to 256 bytes.

    A tensor that fills its memory keeps its strides (channels last, say); another becomes contiguous.

    Args:
        tensors: Packable ones, of any device; only their shapes are read.
    """
    pieces: list[Piece] = []
    start = 0
    for tensor in tensors:
        shape = tuple(tensor.shape)
        stride = tuple(tensor.stride()) if is_dense(tensor) else _contiguous(shape)
        pieces.append(Piece(start, tensor.dtype, shape, stride))
        start += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return Packing(start, tuple(pieces))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill a piece of memory without gaps or overlaps."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def lasting_tensors() -> AbstractContextManager[Any]:
    """Let new tensors be usable in training later, also where the caller runs in inference mode.

    Elsewhere the mode isn't touched: torch's guard of it is an object, and one that a KeyboardInterrupt
    leaves behind would bring back an old state whenever it is collected, with gradients switched off.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def unpack(memory: torch.Tensor, packing: Packing) -> tuple[torch.Tensor, ...]:
    """Return the tensors that lie in the memory. Each counts its own changes (``_version``).

    Args:
        memory: uint8, shape ``(packing.num_bytes,)``, on any device, a storage of its own.
        packing: Of the tensors.
    """
    storage, device = memory.untyped_storage(), memory.device
    # Views of `memory` would share one counter of changes; so would what is made in inference mode have none.
    with lasting_tensors():
        return tuple(
            [
                torch.empty(0, dtype=dtype, device=device).set_(
                    storage, start // dtype.itemsize, shape, stride
                )
                for start, dtype, shape, stride in packing.pieces
            ]
        )


def pack(tensors: Sequence[torch.Tensor], packing: Packing, memory: torch.Tensor) -> None:
    """Write the tensors' values into memory of the packing."""
    for view, tensor in zip(unpack(memory, packing), tensors, strict=True):
        view.copy_(tensor.detach())


def is_packed(tensors: Sequence[torch.Tensor], packing: Packing) -> bool:
    """Whether the tensors lie in memory as the packing says, and need no copy of their own for a transfer."""
    if not tensors:
        return False
    storage = tensors[0].untyped_storage()
    base = storage.data_ptr()
    return storage.nbytes() >= packing.num_bytes and all(
        tensor.data_ptr() == base + piece.start and tuple(tensor.stride()) == piece.stride
        for tensor, piece in zip(tensors, packing.pieces, strict=True)
        if tensor.nbytes
    )
