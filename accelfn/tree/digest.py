"""A digest of the exact bits of each tensor, computed on the tensor's device.

The bytes of a tensor, in logical order, are read as 64-bit words ``w`` and laid out in rows of 128. All
arithmetic is on int64, which wraps, so it is modulo 2**64 and the same on every device:

1. Within a row, with odd weights ``a`` and ``b`` by position: ``s = sum(a * w)`` and
   ``t = sum(b * (a * w >> 48))``.
2. ``s`` and ``t`` are each mixed by a bijection that keeps zero, and multiplied by an odd number of the
   row's own.
3. Summed over the rows, with the mixed length added, they are the two words of the digest.

**One changed word is found with certainty**, not only probably. It changes ``w`` by some ``d`` that isn't 0
modulo 2**64, hence its row's ``s`` by ``a * d``, which isn't either, since an odd number has an inverse. The
mixing is one to one and the row's factor odd again, so the first word of the digest changes.

Several changed words could cancel in the first sum, most easily in the upper bits, which odd factors leave
where they are: two flipped signs of float64 always do. The second sum takes the upper bits of each product
down and spreads them over all 64. So differences that weren't made on purpose cancel in both with
probability about 2**-48 where only the uppermost bits of words in one row changed, and far less elsewhere.
It isn't a cryptographic digest: who knows the weights can make two tensors of one digest.

Rows of zeros add nothing, so a tensor may be padded to whole rows, and its digest doesn't depend on how many
rows are taken at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import _utils

from accelfn.tree.pack import flatten_tensor

_ROW_WORDS = 128
_ROW_BYTES = 8 * _ROW_WORDS
# Rows taken at a time, which bounds temporary memory: few enough for a cache, many enough for a large device.
_ROWS_ON_CPU = 1 << 12
_ROWS_ON_DEVICE = 1 << 16

# Of splitmix64, as signed numbers. Source: Steele, Lea and Flood 2014, "Fast splittable pseudorandom number
# generators".
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST_FACTOR = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND_FACTOR = 0x94D049BB133111EB - (1 << 64)
_UPPER = 48


def digest_tensors(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return 128 bits for each tensor that differ where any of its bits does.

    Equal for equal bytes in logical order, whatever the shape, dtype, strides and device. So ``-0.0`` and
    ``0.0`` differ, and so do NaNs of different payload.

    Nothing but the digests leaves a device, in one copy per device, and that is the only wait for it. Small
    tensors are taken together and large ones piece by piece, so temporary memory is bounded: a few times
    4 MiB on the CPU and 64 MiB on a device, ten times that where a large tensor isn't contiguous.

    Args:
        tensors: Dense, of any dtype and shape; left as they are.

    Returns:
        int64 on the CPU, of shape ``(len(tensors), 2)``.

    >>> one, other, alike = digest_tensors([torch.tensor([0.0]), torch.tensor([-0.0]), torch.tensor(0.0)])
    >>> torch.equal(one, other), torch.equal(one, alike)
    (False, True)
    """
    # By device, and there by dtype and by rows as a power of two: each of these sets fills few blocks.
    sets: dict[torch.device, dict[tuple[torch.dtype, int], list[int]]] = {}
    for index, tensor in enumerate(tensors):
        size = tensor.numel() * tensor.dtype.itemsize
        if size:
            rows = 1 << (-(-size // _ROW_BYTES) - 1).bit_length()
            sets.setdefault(tensor.device, {}).setdefault((tensor.dtype, rows), []).append(index)

    host = torch.device("cpu")  # said each time, since the default device may be another
    lengths = torch.tensor(
        [tensor.numel() * tensor.dtype.itemsize for tensor in tensors], dtype=torch.int64, device=host
    )
    result = _mix(lengths * _GOLDEN).view(-1, 1).repeat(1, 2)
    for device, by_form in sets.items():
        weights = _weights(device)
        at_once = _ROWS_ON_CPU if device.type == "cpu" else _ROWS_ON_DEVICE
        found: list[torch.Tensor] = []
        order: list[int] = []
        for (_, rows), members in by_form.items():
            alike = [_copyable(tensors[index].detach()) for index in members]
            found += (
                [_digest_small(some, rows, weights) for some in _batches(alike, at_once // rows)]
                if rows <= at_once
                else [_digest_large(one, at_once, weights) for one in alike]
            )
            order += members
        result[torch.tensor(order, device=host)] += torch.cat(found).to(host)
    return result


def split_flat(tensor: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """Return a dense tensor in flat contiguous pieces of ``size`` elements, the last one shorter.

    In logical order. No more than a piece is copied at a time; where the tensor is contiguous, nothing.

    >>> list(split_flat(torch.arange(6).view(2, 3).T, 4))
    [tensor([0, 3, 1, 4]), tensor([2, 5])]
    """
    # Only a lazy conjugate or negative is copied whole; no parameter is one.
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_contiguous():
        yield from torch.split(flatten_tensor(tensor), size)
        return
    # torch.take reads the element of a given place without copying the rest, but doesn't know all dtypes.
    parts = 2 if tensor.dtype.itemsize == 16 else 1  # complex128, as two numbers
    whole = torch.view_as_real(tensor) if parts == 2 else tensor
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    whole = whole.view(kinds[tensor.dtype.itemsize // parts])
    for start in range(0, whole.numel(), size * parts):
        places = torch.arange(start, min(whole.numel(), start + size * parts), device=tensor.device)
        yield torch.take(whole, places).view(tensor.dtype)


def _copyable(tensor: torch.Tensor) -> torch.Tensor:
    """View a dtype of one byte as bytes: torch can't copy float4, nor odd bytes of a boolean."""
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
    # In one call, as a reshape per tensor from Python takes longer than all the arithmetic.
    flat: torch.Tensor = cast("Any", _utils)._flatten_dense_tensors(pieces)
    words = _words(flatten_tensor(flat), len(tensors) * rows).view(len(tensors), rows, _ROW_WORDS)
    return _digest_rows(words, 0, weights)


def _digest_large(tensor: torch.Tensor, at_once: int, weights: torch.Tensor) -> torch.Tensor:
    """Digest one tensor ``at_once`` rows at a time: shape ``(1, 2)``."""
    total = torch.zeros(1, 2, dtype=torch.int64, device=tensor.device)
    pieces = split_flat(tensor, at_once * _ROW_BYTES // tensor.dtype.itemsize)
    for number, piece in enumerate(pieces):
        total += _digest_rows(_words(piece, at_once).unsqueeze(0), number * at_once, weights)
    return total


def _words(flat: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the bytes of a flat contiguous tensor as rows of words; copied where they don't fit."""
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
    factors = _odd(first, words.shape[1], words.device)
    return (_mix(torch.stack((sums, upper), -1)) * factors.view(-1, 1)).sum(1)


def _weights(device: torch.device) -> torch.Tensor:
    """Return the two odd weights of each position in a row."""
    return _odd(0, 2 * _ROW_WORDS, device).view(2, _ROW_WORDS)


def _odd(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return an odd number for each of ``count`` places from ``first``: what splitmix64 says of each."""
    return _mix(torch.arange(first + 1, first + count + 1, device=device) * _GOLDEN) | 1


def _mix(words: torch.Tensor) -> torch.Tensor:
    """Mix each word: one to one, and zero stays zero."""
    words = (words ^ _shifted(words, 30)) * _FIRST_FACTOR
    words = (words ^ _shifted(words, 27)) * _SECOND_FACTOR
    return words ^ _shifted(words, 31)


def _shifted(words: torch.Tensor, by: int) -> torch.Tensor:
    """Shift down and fill with zeros. torch repeats the sign, with which the mixing were not one to one."""
    return (words >> by) & ((1 << (64 - by)) - 1)
