"""Plan what a rank reads of a stored tensor: the overlaps of its parts with the rank's own.

They are found by ``torch.distributed.checkpoint``'s planner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, cast

import torch

from accelfn.checkpoint.manifest import Part, StoredTensor
from accelfn.tree import from_local, local_of
from accelfn.weights.dtypes import dtype_from_name


class Overlap(NamedTuple):
    """The overlap of a stored part and a tensor to load.

    Attributes:
        part: The stored part.
        offset: Of the overlap in the part, by dimension; None for all of the part.
        shape: Of the overlap; None for all of the part.
        target: Its offset in the tensor to load.
    """

    part: Part
    offset: tuple[int, ...] | None
    shape: tuple[int, ...] | None
    target: tuple[int, ...]


Known: TypeAlias = "dict[tuple[object, ...], list[Overlap]]"
"""The overlaps that have been found, by layout and target: many tensors have the same."""


def find_overlaps(stored: StoredTensor, target: torch.Tensor | None, known: Known) -> list[Overlap]:
    """Return the stored parts that make up a tensor, or this rank's part of it.

    Args:
        stored: The tensor.
        target: A sharded tensor, to load this rank's part of it; any other, or None, to load all of it.
        known: Read and written.
    """
    cut = None if target is None else getattr(target, "__create_chunk_list__", None)
    if cut is None:
        return [Overlap(part, None, None, part.offset) for part in stored.parts]
    chunks = [one for one in cut() if all(one.sizes) or not stored.shape]
    bounds = tuple((tuple(one.offsets), tuple(one.sizes)) for one in chunks)
    key = (id(stored.parts), stored.shape, bounds)
    if key not in known:
        known[key] = _find_overlaps(stored, chunks)
    return known[key]


def _find_overlaps(stored: StoredTensor, chunks: Sequence[Any]) -> list[Overlap]:
    # Not at the top: this imports torch.distributed.checkpoint, which few programs need.
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    # It compares each chunk with each part.
    near = [part for part in stored.parts if any(_meet(part, one) for one in chunks)]
    metadata = TensorStorageMetadata(
        TensorProperties(dtype_from_name(stored.dtype)),
        torch.Size(stored.shape),
        [ChunkStorageMetadata(torch.Size(part.offset), torch.Size(part.shape)) for part in near],
    )
    found: list[Overlap] = []
    for item in create_read_items_for_chunk_list("", metadata, cast("Any", chunks)):
        part = near[cast("int", item.storage_index.index)]
        offset, shape = tuple(item.storage_offsets), tuple(item.lengths)
        is_whole = shape == part.shape
        found.append(
            Overlap(part, None if is_whole else offset, None if is_whole else shape, tuple(item.dest_offsets))
        )
    return found


def _meet(part: Part, chunk: Any) -> bool:
    return all(
        start < begin + length and begin < start + size
        for start, size, begin, length in zip(
            part.offset, part.shape, chunk.offsets, chunk.sizes, strict=True
        )
    )


def memory_for(stored: StoredTensor, target: torch.Tensor | None) -> torch.Tensor:
    """Return new memory for a tensor to load: like ``target`` on its device, and sharded like it.

    Args:
        stored: The tensor.
        target: None, or a tensor on the meta device: memory on the CPU.
    """
    dtype = dtype_from_name(stored.dtype)
    is_sharded = hasattr(target, "__create_chunk_list__")
    local = None if target is None else local_of(target)
    # XLA would compile each of the many copies into parts of a tensor.
    device = "cpu" if local is None or local.device.type in ("meta", "xla") else local.device
    shape = tuple(local.shape) if local is not None and is_sharded else stored.shape
    if dtype == torch.complex32:  # torch warns about new tensors of this dtype, and not about views
        memory = torch.empty(shape, dtype=torch.float32, device=device).view(dtype)
    else:
        memory = torch.empty(shape, dtype=dtype, device=device)
    return memory if target is None else from_local(memory, like=target)


def part_of(tensor: torch.Tensor, overlap: Overlap) -> torch.Tensor:
    """Return the view of a tensor to load, or of this rank's part of it, for one of its overlaps."""
    shape = overlap.part.shape if overlap.shape is None else overlap.shape
    local = local_of(tensor).detach()
    if tuple(local.shape) == shape:  # as usual, and slicing costs more than reading a small tensor
        return local
    bounds = zip(overlap.target, shape, strict=True)
    return local[tuple(slice(start, start + size) for start, size in bounds)]
