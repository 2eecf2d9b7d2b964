"""A digest of the exact bits of each tensor, computed on the tensor's device.

The bytes of a tensor, in logical order, are read as 64-bit words ``w`` in rows of 128. All arithmetic is on
int64, which wraps, so it is modulo 2**64 and the same on every device:

1. Within a row, with odd weights ``a`` and ``b`` by position: ``s = sum(a * w)`` and
   ``t = sum(b * (a * w >> 48))``.
2. ``s`` and ``t`` are each mixed by a bijection that maps zero to zero, and multiplied by an odd number
   specific to the row.
3. The two words of the digest are the sums over all rows, plus the mixed length.

**A single changed word always changes the digest.** It changes ``w`` by some ``d`` that isn't 0 modulo 2**64,
hence its row's ``s`` by ``a * d``, which isn't 0 either, as odd numbers are invertible. The mixing is
bijective and the row's factor odd, so the first word of the digest changes.

Several changed words can cancel in the first sum, most easily in the upper bits, which odd factors don't
move: two flipped signs of float64 always cancel. The second sum spreads the upper bits of each product over
all 64. So accidental differences cancel in both sums with probability about 2**-48 if only the uppermost bits
of words in one row changed, and far less otherwise. The digest isn't cryptographic: collisions can be
constructed.

Rows of zeros add nothing, so a tensor can be padded to whole rows, and the digest doesn't depend on the chunk
size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import _utils

from accelfn.tree.packing import flatten_tensor

_ROW_WORDS = 128
_ROW_BYTES = 8 * _ROW_WORDS
# Rows per chunk, which bounds temporary memory: 4 MiB fit a CPU's cache, 64 MiB keep a device busy.
_CHUNK_ROWS_CPU = 1 << 12
_CHUNK_ROWS_DEVICE = 1 << 16

# Of splitmix64, as signed numbers. Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
# generators".
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST_FACTOR = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND_FACTOR = 0x94D049BB133111EB - (1 << 64)
_UPPER = 48


def digest_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a 128-bit digest of each tensor's bits.

    It depends on the bytes in logical order only, not on shape, dtype, strides and device. ``-0.0`` and
    ``0.0`` differ, as do NaNs of different payload.

    Only the digests are copied from a device, once per device, which is the only synchronisation. Small
    tensors are batched and large ones split, so temporary memory is bounded: a few times 4 MiB on the CPU and
    64 MiB on a device, ten times that for large non-contiguous tensors.

    Args:
        tensors: Dense tensors of any dtype and shape.

    Returns:
        int64 on the CPU, of shape ``(len(tensors), 2)``.

    >>> one, other, alike = digest_tensors([torch.tensor([0.0]), torch.tensor([-0.0]), torch.tensor(0.0)])
    >>> torch.equal(one, other), torch.equal(one, alike)
    (False, True)
    """
    # By device, then by dtype and number of rows rounded up to a power of two: few batches each.
    sets: dict[torch.device, dict[tuple[torch.dtype, int], list[int]]] = {}
    for index, tensor in enumerate(tensors):
        size = tensor.numel() * tensor.dtype.itemsize
        if size:
            rows = 1 << (-(-size // _ROW_BYTES) - 1).bit_length()
            sets.setdefault(tensor.device, {}).setdefault((tensor.dtype, rows), []).append(index)

    host = torch.device("cpu")  # the default device may be another
    lengths = torch.tensor(
        [tensor.numel() * tensor.dtype.itemsize for tensor in tensors], dtype=torch.int64, device=host
    )
    result = _mix(lengths * _GOLDEN).view(-1, 1).repeat(1, 2)
    for device, by_form in sets.items():
        weights = _weights(device)
        chunk_rows = _CHUNK_ROWS_CPU if device.type == "cpu" else _CHUNK_ROWS_DEVICE
        found: list[torch.Tensor] = []
        order: list[int] = []
        for (_, rows), members in by_form.items():
            alike = [_as_bytes(tensors[index].detach()) for index in members]
            found += (
                [_digest_small(some, rows, weights) for some in _batches(alike, chunk_rows // rows)]
                if rows <= chunk_rows
                else [_digest_large(one, chunk_rows, weights) for one in alike]
            )
            order += members
        result[torch.tensor(order, device=host)] += torch.cat(found).to(host)
    return result


def split_flat(tensor: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Split a dense tensor into flat contiguous pieces of ``size`` elements; the last one may be shorter.

    In logical order. One piece is copied at a time, or none if the tensor is contiguous.

    >>> list(split_flat(torch.arange(6).view(2, 3).T, 4))
    [tensor([0, 3, 1, 4]), tensor([2, 5])]
    """
    # Lazy conjugates and negatives are copied at once; parameters never are.
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        yield from torch.split(flatten_tensor(tensor), size)
        return
    # torch.take reads elements by logical index without a full copy, but doesn't support all dtypes.
    parts = 2 if tensor.dtype.itemsize == 16 else 1  # complex128, as two numbers
    whole = torch.view_as_real(tensor) if parts == 2 else tensor
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    whole = whole.view(kinds[tensor.dtype.itemsize // parts])
    for start in range(0, whole.numel(), size * parts):
        places = torch.arange(start, min(whole.numel(), start + size * parts), device=tensor.device)
        yield torch.take(whole, places).view(tensor.dtype)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View a one-byte dtype as bytes: torch can't copy float4, nor booleans other than 0 and 1."""
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def _batches(tensors: list[torch.Tensor], size: int) -> Iterator[list[torch.Tensor]]:
    for start in range(0, len(tensors), size):
        yield tensors[start : start + size]


def _digest_small(tensors: list[torch.Tensor], rows: int, weights: torch.Tensor) -> torch.Tensor:
    """Digest tensors of one dtype and device, each of at most ``rows`` rows: shape ``(len(tensors), 2)``."""
    size = rows * _ROW_BYTES // tensors[0].dtype.itemsize
    zeros = tensors[0].new_zeros(size)
    pieces: list[torch.Tensor] = []
    for tensor in tensors:
        pieces.append(tensor)
        if tensor.numel() < size:
            pieces.append(zeros[tensor.numel() :])
    # One call: a reshape per tensor from Python takes longer than all the arithmetic.
    flat: torch.Tensor = cast("Any", _utils)._flatten_dense_tensors(pieces)
    words = _words(flatten_tensor(flat), len(tensors) * rows).view(len(tensors), rows, _ROW_WORDS)
    return _digest_rows(words, 0, weights)


def _digest_large(tensor: torch.Tensor, chunk_rows: int, weights: torch.Tensor) -> torch.Tensor:
    """Digest one tensor ``chunk_rows`` rows at a time: shape ``(1, 2)``."""
    total = torch.zeros(1, 2, dtype=torch.int64, device=tensor.device)
    pieces = split_flat(tensor, chunk_rows * _ROW_BYTES // tensor.dtype.itemsize)
    for number, piece in enumerate(pieces):
        total += _digest_rows(_words(piece, chunk_rows).unsqueeze(0), number * chunk_rows, weights)
    return total


def _words(flat: torch.Tensor, rows: int) -> torch.Tensor:
    """View a flat contiguous tensor as rows of words; copied if size or alignment don't fit."""
    size = flat.dtype.itemsize
    if flat.numel() * size == rows * _ROW_BYTES and flat.storage_offset() * size % 8 == 0:
        return flat.view(torch.int64).view(rows, _ROW_WORDS)
    words = torch.zeros(rows * _ROW_WORDS, dtype=torch.int64, device=flat.device)
    words.view(flat.dtype)[: flat.numel()] = flat
    return words.view(rows, _ROW_WORDS)


def _digest_rows(words: torch.Tensor, first: int, weights: torch.Tensor) -> torch.Tensor:
    """Digest ``(n, rows, 128)`` words, whose rows are counted from ``first``: shape ``(n, 2)``."""
    products = words * weights[0]
    sums = products.sum(-1)
    upper = products.bitwise_right_shift_(_UPPER).mul_(weights[1]).sum(-1)
    factors = _odd_numbers(first, words.shape[1], words.device)
    return (_mix(torch.stack((sums, upper), -1)) * factors.view(-1, 1)).sum(1)


def _weights(device: torch.device) -> torch.Tensor:
    """Return the two odd weights of each position in a row."""
    return _odd_numbers(0, 2 * _ROW_WORDS, device).view(2, _ROW_WORDS)


def _odd_numbers(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return pseudorandom odd numbers by splitmix64 for ``count`` positions from ``first``."""
    return _mix(torch.arange(first + 1, first + count + 1, device=device) * _GOLDEN) | 1


def _mix(words: torch.Tensor) -> torch.Tensor:
    """Mix each word by a bijection that maps zero to zero."""
    words = (words ^ _shift_right(words, 30)) * _FIRST_FACTOR
    words = (words ^ _shift_right(words, 27)) * _SECOND_FACTOR
    return words ^ _shift_right(words, 31)


def _shift_right(words: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right logically; torch's shift is arithmetic, with which the mixing wouldn't be bijective."""
    return (words >> by) & ((1 << (64 - by)) - 1)
