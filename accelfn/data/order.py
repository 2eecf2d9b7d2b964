"""The order of samples in an epoch: a function of seed, epoch and position, the same on every rank.

Shuffling needs no shuffled list: a keyed permutation computes the sample at any position independently.
A permutation of ``n`` numbers is a generalised Feistel network over at least ``n`` pairs ``(left, right)``,
whose rounds add a keyed hash of one half to the other; results of at least ``n`` are permuted again until
they are smaller, which is cycle walking (J. Black, P. Rogaway: Ciphers with Arbitrary Finite Domains, CT-RSA
2002). The hash is the finaliser of SplitMix64. It is meant for shuffling, not for cryptography.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

import torch
from torch.utils.data import DistributedSampler, RandomSampler, Sampler, SequentialSampler

from accelfn.comm import broadcast_object_list
from accelfn.context import Context
from accelfn.data.draws import seeded
from accelfn.data.states import State, restore_sampler, sampler_state
from accelfn.errors import ConfigurationError
from accelfn.keys import seed_of

__all__ = (
    "IndexFn",
    "Order",
    "draw",
    "draw_together",
    "index_list",
    "make_keys",
    "permute",
    "read_order",
    "refuse_sharded",
    "set_epoch_of",
)

# With ideal hashes, the orders of 8 numbers are then 0.03 from uniform in total variation (0.28 with 8
# rounds), and those of fewer numbers closer; of more numbers, no statistic of one or two positions differs.
ROUNDS = 16
# For this many numbers half of the rounds suffice for that, and an epoch begins in half the time.
_MANY, _ROUNDS_OF_MANY = 4096, 8
_POSITIVE = (1 << 63) - 1
# The largest domain whose pairs fit into int64.
_MAX_SIZE = 1 << 62
# The largest width whose double fits into int32, where arithmetic costs half.
_MAX_TABLE = 1 << 30

# Returns the indices of the samples at positions of an epoch.
IndexFn = Callable[[torch.Tensor], list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """The order of the samples of an epoch, computed without a list.

    Attributes:
        kind: ``"sequential"``; ``"shuffled"``: without replacement; ``"drawn"``: with replacement;
            ``"sampler"``: by a custom sampler.
        num_samples: Samples in an epoch.
        num_items: Samples in the dataset.
        seed: Of the order.
    """

    kind: Literal["sequential", "shuffled", "drawn", "sampler"] = "sequential"
    num_samples: int
    num_items: int
    seed: int = 0

    def at(self, epoch: int, positions: torch.Tensor) -> torch.Tensor:
        """Return the samples at ``positions`` of ``epoch``. Pure, in constant time per position.

        Args:
            epoch: From 0.
            positions: ``(n,)`` int64, each in ``range(num_samples)``.

        Returns:
            ``(n,)`` int64: indices of the dataset.

        Raises:
            ValueError: The order is that of a custom sampler.

        >>> Order(kind="shuffled", num_samples=4, num_items=4, seed=1).at(0, torch.arange(4)).sort().values
        tensor([0, 1, 2, 3])
        """
        if self.kind == "sequential":
            return positions
        if self.kind == "sampler":
            raise ValueError("Order.at can't compute the order of a custom sampler: use what it has drawn.")
        if self.kind == "drawn":
            return draw(make_keys("draw", self.seed, epoch), self.num_items, positions)
        if self.num_samples <= self.num_items:
            return permute(make_keys("shuffle", self.seed, epoch, 0), self.num_items, positions)
        # More samples than items: consecutive shuffled orders.
        rounds = torch.div(positions, self.num_items, rounding_mode="floor")
        indices = torch.empty_like(positions)
        for number in sorted(set(_listed(rounds))):
            here = rounds == number
            keys = make_keys("shuffle", self.seed, epoch, number)
            indices[here] = permute(keys, self.num_items, positions[here] - number * self.num_items)
        return indices

    def index_fn(self, seed: int, epoch: int) -> IndexFn:
        """Return a function that returns :meth:`at` of one epoch and seed as a list."""
        order = replace(self, seed=seed)
        return lambda positions: _listed(order.at(epoch, positions))


def read_order(sampler: Sampler[Any], dataset: Any, seed: int) -> Order:
    """Return the order that a user's sampler describes.

    Args:
        sampler: Of the user's loader.
        dataset: A map-style dataset.
        seed: Of the order.

    Raises:
        ConfigurationError: The sampler already shards the samples.
        TypeError: The dataset or the sampler has no length.
    """
    refuse_sharded(sampler)
    num_items = _length(dataset, "dataset")
    if type(sampler) is SequentialSampler:
        return Order(num_samples=num_items, num_items=num_items, seed=seed)
    if type(sampler) is RandomSampler:
        kind = "drawn" if sampler.replacement else "shuffled"
        return Order(kind=kind, num_samples=sampler.num_samples, num_items=num_items, seed=seed)
    return Order(kind="sampler", num_samples=_length(sampler, "sampler"), num_items=num_items, seed=seed)


def refuse_sharded(sampler: object) -> None:
    """Raise if a sampler already shards the samples."""
    if isinstance(sampler, DistributedSampler):
        raise ConfigurationError(
            "the loader has a DistributedSampler, so its data is already sharded, and sharding it again "
            'would lose samples. Pass sharding="already_sharded", or use a plain sampler.'
        )


def draw_together(
    ctx: Context, sampler: Any, seed: int, epoch: int, state: State | None = None
) -> tuple[list[Any], State | None, State | None]:
    """Draw an epoch from a custom sampler on rank 0, for all ranks.

    What it draws from the program's generators is a function of seed and epoch, and doesn't advance them.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        sampler: A sampler or batch sampler. Its ``set_epoch`` is called if it has one, and that of its inner
            sampler.
        seed: Of the order.
        epoch: From 0.
        state: The state to restore before.

    Returns:
        What was drawn, and the sampler's states before and after; None for a sampler without a state.
    """
    drawn: list[Any] = []
    if ctx.is_main_process:
        set_epoch_of(sampler, epoch)
        set_epoch_of(getattr(sampler, "sampler", None), epoch)
        if state is not None:
            restore_sampler(sampler, state)
        before = sampler_state(sampler)
        with seeded((seed, epoch)):
            items = list(sampler)
        drawn = [items, before, sampler_state(sampler)]
    all_items, before, after = broadcast_object_list(ctx.tagged("a sampler"), drawn)
    return all_items, before, after


def set_epoch_of(thing: Any, epoch: int) -> None:
    """Call ``set_epoch`` of a dataset or sampler, if it has one."""
    set_epoch = getattr(thing, "set_epoch", None)
    if callable(set_epoch):
        set_epoch(epoch)


def index_list(drawn: Sequence[Any]) -> IndexFn:
    """Return a function that looks positions up in a list."""
    return lambda positions: [drawn[position] for position in _listed(positions)]


def _listed(numbers: torch.Tensor) -> list[Any]:
    return numbers.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _length(thing: Any, what: str) -> int:
    try:
        return len(cast("Sized", thing))
    except (TypeError, NotImplementedError) as error:
        raise TypeError(
            f"prepare_data_loader can't shard the {what} {type(thing).__name__}, which has no length. Add a "
            "__len__, or make the dataset an IterableDataset."
        ) from error


def make_keys(*parts: int | str) -> tuple[int, ...]:
    """Derive the keys of all rounds from the numbers and words that identify an order. Pure.

    >>> make_keys(7, 0)[:2] == make_keys(7, 0)[:2], make_keys(7, 0) == make_keys(7, 1)
    (True, False)
    """
    seed = seed_of(*parts)
    return tuple(seed_of(seed, number) - (1 << 63) for number in range(ROUNDS))


def permute(keys: tuple[int, ...], size: int, positions: torch.Tensor) -> torch.Tensor:
    """Return the number at each of ``positions`` in a shuffled order of ``range(size)``. Pure.

    Args:
        keys: From :func:`make_keys`.
        size: Number of numbers, at most ``2**62``.
        positions: int64 of any shape, each in ``range(size)``.

    Returns:
        int64, of the same shape; a bijection of ``range(size)``.

    >>> sorted(permute(make_keys(1), 5, torch.arange(5)).tolist())
    [0, 1, 2, 3, 4]
    """
    if not 0 < size <= _MAX_SIZE:
        raise ValueError(f"permute: size must be in 1..2**62, got {size}.")
    if size >= _MANY:
        keys = keys[:_ROUNDS_OF_MANY]
    width = _width(size)
    height = -(-size // width)
    numbers = positions.reshape(-1)
    # If there are more pairs than halves, hash each half once and look the result up.
    shifts = _shifts(keys, width, height) if width <= min(numbers.numel(), _MAX_TABLE) else None

    if shifts is None:
        pass_rounds = partial(_hash_rounds, keys, width, height)
    else:
        pass_rounds = partial(_look_up_rounds, shifts, width, height)
    numbers = pass_rounds(numbers)
    outside = torch.nonzero(numbers >= size).reshape(-1)
    while outside.numel():
        walked = pass_rounds(numbers[outside])
        numbers[outside] = walked
        outside = outside[walked >= size]
    return numbers.reshape(positions.shape)


def draw(keys: tuple[int, ...], size: int, positions: torch.Tensor) -> torch.Tensor:
    """Draw a number of ``range(size)`` for each of ``positions`` independently. Pure.

    Args:
        keys: From :func:`make_keys`.
        size: At most ``2**32`` for a bias below ``2**-31``.
        positions: int64 of any shape.

    Returns:
        int64, of the same shape.
    """
    first, second = keys[:2]
    return _hashed(_hashed(positions, first), second) % size


def _width(size: int) -> int:
    """Choose the number of left halves: about the number of right halves, with few surplus pairs.

    The number is even: shifts of an odd number are even permutations, which reach only half of the orders.
    """
    least = math.isqrt(size - 1) + 1
    least += least % 2
    return min(range(least, least + min(least // 4, 64) + 1, 2), key=lambda width: -size % width)


def _hash_rounds(keys: tuple[int, ...], width: int, height: int, numbers: torch.Tensor) -> torch.Tensor:
    left = numbers % width
    right = torch.div(numbers, width, rounding_mode="floor")
    for index, key in enumerate(keys):
        if index % 2:
            right.add_(_hashed(left, key).remainder_(height)).remainder_(height)
        else:
            left.add_(_hashed(right, key).remainder_(width)).remainder_(width)
    return right.mul_(width).add_(left)


def _shifts(keys: tuple[int, ...], width: int, height: int) -> torch.Tensor:
    """Return by how much each round shifts one half, for every value of the other half.

    Returns:
        ``(rounds, width)`` int32; in even rows, only the first ``height`` values are used.
    """
    bounds = torch.tensor([height if index % 2 else width for index in range(len(keys))], device="cpu")
    return (
        _hashed(torch.arange(width, device="cpu"), torch.tensor(keys, device="cpu")[:, None])
        .remainder_(bounds[:, None])
        .int()
    )


def _look_up_rounds(shifts: torch.Tensor, width: int, height: int, numbers: torch.Tensor) -> torch.Tensor:
    """Compute the result of :func:`_hash_rounds` from the tables of :func:`_shifts`."""
    rows = torch.div(numbers, width, rounding_mode="floor")
    left, right = (numbers - rows * width).int(), rows.int()
    # The sum of two numbers below a bound: looking up its remainder is much cheaper than a division.
    sums = torch.arange(2 * width, dtype=torch.int32, device="cpu")
    wrap_left, wrap_right = sums % width, sums % height
    moved = torch.empty_like(left)
    for index, shift in enumerate(shifts.unbind()):
        if index % 2:
            torch.index_select(shift, 0, left, out=moved)
            torch.index_select(wrap_right, 0, moved.add_(right), out=right)
        else:
            torch.index_select(shift, 0, right, out=moved)
            torch.index_select(wrap_left, 0, moved.add_(left), out=left)
    return right.long().mul_(width).add_(left)


def _hashed(numbers: torch.Tensor, key: int | torch.Tensor) -> torch.Tensor:
    """Hash to 63 bits. Products wrap; the masks clear the sign bits that shifts of int64 replicate."""
    mixed = (numbers * -7046029254386353131) ^ key  # 0x9E3779B97F4A7C15, which spreads neighbours
    mixed.bitwise_xor_((mixed >> 30).bitwise_and_((1 << 34) - 1)).mul_(-4658895280553007687)
    mixed.bitwise_xor_((mixed >> 27).bitwise_and_((1 << 37) - 1)).mul_(-7723592293110705685)
    mixed.bitwise_xor_((mixed >> 31).bitwise_and_((1 << 33) - 1))
    return mixed.bitwise_and_(_POSITIVE)
