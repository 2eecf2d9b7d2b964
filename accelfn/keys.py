"""Random numbers as pure functions of a key, the same on every rank, thread and kind of device.

A key is a tensor. There is no generator whose state advances: the same key gives the same numbers, and new
keys are derived from it. The numbers are those of Philox 4x32-10 (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", SC11), computed by integer operations of torch, so that they can be mapped and compiled.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import TypeVar

import torch

__all__ = ("bernoulli", "dropout", "fold_in", "key", "normal", "permutation", "seed_of", "split", "uniform")

T = TypeVar("T", int, torch.Tensor)

_MASK = 0xFFFFFFFF
_ROUNDS = 10
# Multipliers, and what is added to the words of the key in each round.
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def key(seed: int | str | bytes, *, device: torch.device | str | None = None) -> torch.Tensor:
    """Return a key: int64, shape ``(2,)``.

    Args:
        seed: An int of 64 bits, from ``-2 ** 63``, or a text; equal ones give equal keys.
        device: Of the key, and of the numbers that are made with it; the CPU by default.

    >>> key(0)
    tensor([0, 0])
    """
    return torch.tensor(_two_words(seed), dtype=torch.int64, device=device or "cpu")


def fold_in(key: torch.Tensor, *numbers: int | torch.Tensor) -> torch.Tensor:
    """Return another key for each sequence of numbers, such as a step, a layer and the index of a sample.

    Args:
        key: A key; or several, of shape ``(..., 2)``.
        *numbers: Integers, or tensors of them, of the keys' shape without its last dimension.

    Returns:
        Keys of shape ``(..., 2)``.

    >>> bool((fold_in(key(0), 1, 2) == fold_in(fold_in(key(0), 1), 2)).all())
    True
    >>> fold_in(key(0), torch.arange(3)).shape
    torch.Size([3, 2])
    """
    for number in numbers:
        key = _folded(key, number, 1)
    return key


def seed_of(seed: int | str | bytes, *numbers: int | str) -> int:
    """Return ``fold_in(key(seed), *numbers)`` as one number of 64 bits, to seed a generator with.

    It takes microseconds, since no tensors are made. The order of samples comes from such seeds, and what a
    model draws in exact mode.

    Args:
        seed: As of :func:`key`.
        *numbers: Integers; a text counts as a number of 64 bits.

    >>> first, second = fold_in(key(7), 3).tolist()
    >>> seed_of(7, 3) == first + (second << 32)
    True
    """
    first, second = _two_words(seed)
    for number in numbers:
        low, high = _two_words(number)
        first, second, _, _ = _philox(first, second, (low, high, 1, 1))
    return first | second << 32


def split(key: torch.Tensor, number: int = 2) -> tuple[torch.Tensor, ...]:
    """Return ``number`` keys, none of which is ``key`` or one of :func:`fold_in`.

    >>> first, second = split(key(0))
    """
    return tuple(_folded(key, index, 2) for index in range(number))


def uniform(
    key: torch.Tensor, shape: Sequence[int] = (), *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return numbers that are evenly distributed in ``[0, 1)``.

    Args:
        key: A key.
        shape: Of the result.
        dtype: A floating-point dtype; the numbers are multiples of 2 ** -24, in float64 of 2 ** -53.

    >>> uniform(key(0), (2, 2))
    tensor([[0.3990, 0.8805],
            [0.7357, 0.6055]])
    """
    number = math.prod(shape)
    if dtype != torch.float64:
        return ((_bits(key, number) >> 8).to(torch.float32) * 2.0**-24).to(dtype).reshape(tuple(shape))
    bits = _bits(key, 2 * number)
    whole = ((bits[:number] >> 5) << 26) + (bits[number:] >> 6)
    return (whole.to(torch.float64) * 2.0**-53).reshape(tuple(shape))


def normal(
    key: torch.Tensor, shape: Sequence[int] = (), *, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return numbers of the standard normal distribution.

    They are computed in float64 and rounded, so that devices whose functions differ in the last bit give the
    same float32 numbers, with exceptions of one in about 10 ** 8.

    Args:
        key: A key.
        shape: Of the result.
        dtype: A floating-point dtype.

    >>> normal(key(0), (2,)).shape
    torch.Size([2])
    """
    number = math.prod(shape)
    bits = _bits(key, 2 * number).to(torch.float64)
    radius = (-2.0 * ((bits[:number] + 1.0) * 2.0**-32).log()).sqrt()
    angle = bits[number:] * (2.0**-31 * math.pi)
    return (radius * angle.cos()).to(dtype).reshape(tuple(shape))


def bernoulli(key: torch.Tensor, p: float | torch.Tensor, shape: Sequence[int] = ()) -> torch.Tensor:
    """Return booleans that are true with probability ``p``.

    Args:
        key: A key.
        p: From 0 to 1; a tensor is broadcast to ``shape``.
        shape: Of the result.

    >>> bernoulli(key(0), 0.5, (4,))
    tensor([ True, False, False, False])
    """
    if not isinstance(p, torch.Tensor) and not 0.0 <= p <= 1.0:
        raise ValueError(f"bernoulli: p must be from 0 to 1, got {p!r}.")
    return uniform(key, shape) < p


def dropout(key: torch.Tensor, x: torch.Tensor, p: float) -> torch.Tensor:
    """Set entries of ``x`` to zero with probability ``p``, and divide the others by ``1 - p``.

    Args:
        key: A key on the device of ``x``.
        x: A floating-point tensor.
        p: From 0 to 1.

    Raises:
        ValueError: ``p`` isn't from 0 to 1.

    >>> dropout(key(0), torch.ones(4), 0.5)
    tensor([0., 2., 2., 2.])
    """
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout: p must be from 0 to 1, got {p!r}.")
    kept = bernoulli(key, p, x.shape).logical_not()
    return torch.where(kept, x / (1.0 - p) if p < 1.0 else x, torch.zeros_like(x))


def permutation(key: torch.Tensor, number: int) -> torch.Tensor:
    """Return the integers below ``number`` in a random order; int64, shape ``(number,)``.

    >>> permutation(key(0), 5).sort().values
    tensor([0, 1, 2, 3, 4])
    """
    # Of two words, so that equal ones, which the sort would leave in order, are rare.
    bits = _bits(key, 2 * number)
    return ((bits[:number] << 31) ^ bits[number:]).argsort(stable=True)


def _two_words(seed: int | str | bytes) -> tuple[int, int]:
    """Return two words of 32 bits: those of a number, or of the hash of a text."""
    if not isinstance(seed, int | str | bytes):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"keys: a seed is an int or a text, got {seed!r}.")
    if not isinstance(seed, int):
        text = seed.encode() if isinstance(seed, str) else seed
        seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
    if not -(1 << 63) <= seed < 1 << 64:
        raise ValueError(f"keys: a seed has 64 bits, got {seed}. Pass another as a text, str(seed).")
    return seed & _MASK, (seed >> 32) & _MASK


def _folded(key: torch.Tensor, number: int | torch.Tensor, kind: int) -> torch.Tensor:
    """Return the key of a number; ``kind`` keeps those of :func:`fold_in` and of :func:`split` apart."""
    _check_key(key)
    counter = torch.as_tensor(number)
    if counter.is_floating_point() or counter.is_complex():
        raise TypeError(f"fold_in: numbers are integers, got {number!r}.")
    counter = counter.to(device=key.device, dtype=torch.int64)
    one = torch.ones_like(counter)
    words = _philox_of(key, (counter & _MASK, (counter >> 32) & _MASK, one, kind * one))
    return torch.stack((words[0], words[1]), dim=-1)


def _bits(key: torch.Tensor, number: int) -> torch.Tensor:
    """Return ``number`` random words of 32 bits, as int64."""
    _check_key(key)
    index = torch.arange(-(-number // 4), dtype=torch.int64, device=key.device)
    zero = torch.zeros_like(index)
    words = _philox_of(key, (index & _MASK, index >> 32, zero, zero))
    return torch.stack(words, dim=-1).flatten()[:number]


def _check_key(key: torch.Tensor) -> None:
    if not isinstance(key, torch.Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"a key is a tensor, as of accelfn.key(seed), got {key!r}.")
    if key.dtype != torch.int64 or key.dim() < 1 or key.shape[-1] != 2:
        raise TypeError(
            f"a key is an int64 tensor of shape (2,), as of accelfn.key(seed), got {key.dtype} of shape "
            f"{tuple(key.shape)}."
        )


def _philox_of(key: torch.Tensor, counter: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Return four random words of 32 bits for each counter of four words, all as int64."""
    return _philox(key[..., 0], key[..., 1], counter)


def _philox(first: T, second: T, counter: tuple[T, ...]) -> tuple[T, ...]:
    """Return the four words of a counter. The counters of keys end with ones, those of numbers with zeros.

    As int64 a product of two words overflows, whose bits are nevertheless those of the unsigned product.
    """
    one, two, three, four = counter
    for _ in range(_ROUNDS):
        left, right = one * _MULTIPLIERS[0], three * _MULTIPLIERS[1]
        one, two, three, four = (
            ((right >> 32) & _MASK) ^ two ^ first,
            right & _MASK,
            ((left >> 32) & _MASK) ^ four ^ second,
            left & _MASK,
        )
        first, second = (first + _WEYL[0]) & _MASK, (second + _WEYL[1]) & _MASK
    return one, two, three, four
