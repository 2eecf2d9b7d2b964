"""Which parts of the stored pieces make up what a rank wants of a tensor, in whatever cut it was saved.

The search is that of ``torch.distributed.checkpoint``, which plans every read of a tensor that is cut over
ranks so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch

from accelfn.checkpoint.header import copyable, dtype_from_name
from accelfn.checkpoint.manifest import Piece, StoredTensor
from accelfn.tree import local_of


class Overlap(NamedTuple):
    """A part of a stored piece that is wanted.

    Attributes:
        piece: What is stored.
        offset: Of the part in the piece, by dimension; None for the piece as a whole.
        shape: Of the part; None for the piece as a whole.
        target: Of the part in what is wanted.
    """

    piece: Piece
    offset: tuple[int, ...] | None
    shape: tuple[int, ...] | None
    target: tuple[int, ...]


def find_overlaps(stored: StoredTensor, target: torch.Tensor | None) -> list[Overlap]:
    """Return which parts of stored pieces make up a tensor.

    Args:
        stored: The tensor, in its pieces.
        target: A tensor that is cut over ranks, whose part on this rank is wanted; any other, or None: the
            whole.
    """
    cut = None if target is None else getattr(target, "__create_chunk_list__", None)
    if cut is None:
        return [Overlap(piece, None, None, piece.offset) for piece in stored.pieces]
    # Not at the top: this loads torch.distributed.checkpoint, which few programs need.
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        TensorProperties,
        TensorStorageMetadata,
    )
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

    known = TensorStorageMetadata(
        TensorProperties(dtype_from_name(stored.dtype)),
        torch.Size(stored.shape),
        [ChunkStorageMetadata(torch.Size(one.offset), torch.Size(one.shape)) for one in stored.pieces],
    )
    chunks = [one for one in cut() if all(one.sizes) or not stored.shape]
    found: list[Overlap] = []
    for item in create_read_items_for_chunk_list("", known, chunks):
        piece = stored.pieces[cast("int", item.storage_index.index)]
        offset, shape = tuple(item.storage_offsets), tuple(item.lengths)
        is_whole = shape == piece.shape
        found.append(
            Overlap(
                piece, None if is_whole else offset, None if is_whole else shape, tuple(item.dest_offsets)
            )
        )
    return found


def join_overlaps(
    stored: StoredTensor,
    target: torch.Tensor | None,
    overlaps: Sequence[Overlap],
    parts: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Put the parts that were read together.

    Args:
        stored: The tensor that they are of.
        target: As for :func:`find_overlaps`.
        overlaps: What it gave.
        parts: The part of each, in new memory on the CPU.

    Returns:
        The whole tensor on the CPU; of a ``target`` that is cut over ranks one cut like it, on its device.
    """
    if target is None and len(parts) == 1:
        return parts[0]
    cut: Any = target if hasattr(target, "__create_chunk_list__") else None
    shape = stored.shape if cut is None else tuple(local_of(cut).shape)
    whole = join_parts(stored.dtype, shape, overlaps, parts)
    if cut is None:
        return whole
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        whole.to(local_of(cut).device),
        cut.device_mesh,
        cut.placements,
        run_check=False,
        shape=cut.shape,
        stride=cut.stride(),
    )


def join_parts(
    dtype: str, shape: tuple[int, ...], overlaps: Sequence[Overlap], parts: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Put parts into the one tensor that they make up, on the CPU; a part that is all of it is given back."""
    if len(parts) == 1 and tuple(parts[0].shape) == shape:
        return parts[0]
    whole = torch.empty(shape, dtype=dtype_from_name(dtype), device="cpu")
    plain = copyable(whole)
    for one, part in zip(overlaps, parts, strict=True):
        place = tuple(slice(start, start + size) for start, size in zip(one.target, part.shape, strict=True))
        plain[place].copy_(copyable(part))
    return whole
