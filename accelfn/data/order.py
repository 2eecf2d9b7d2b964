"""In which order an epoch visits the samples: a function of seed, epoch and position, the same everywhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch.utils.data import DistributedSampler, RandomSampler, Sampler, SequentialSampler

from accelfn.comm import broadcast_object_list
from accelfn.context import Context
from accelfn.data.permutation import draw, make_keys, permute
from accelfn.data.states import State, restore_sampler, sampler_state
from accelfn.errors import ConfigurationError

__all__ = (
    "Drawn",
    "IndexFn",
    "Order",
    "check_length",
    "draw_here",
    "draw_together",
    "read_order",
    "refuse_sharded",
    "take_from",
)

P = TypeVar("P")

# Gives what stands at positions of an epoch.
IndexFn = Callable[[torch.Tensor], list[Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How the samples of an epoch are ordered. Holds no list of them.

    Attributes:
        kind: ``"sequential"``; ``"shuffled"``: each sample once before one comes twice; ``"drawn"``: each
            position for itself; ``"sampler"``: as a sampler of the user's own says.
        num_samples: Samples in an epoch.
        num_items: Samples in the dataset.
        seed: Of the order.
    """

    kind: Literal["sequential", "shuffled", "drawn", "sampler"] = "sequential"
    num_samples: int
    num_items: int
    seed: int = 0

    def at(self, epoch: int, positions: torch.Tensor) -> torch.Tensor:
        """Return which samples stand at ``positions`` of ``epoch``. Pure, and as fast for any position.

        Args:
            epoch: From 0.
            positions: ``(n,)`` int64, each in ``range(num_samples)``.

        Returns:
            ``(n,)`` int64: indices of the dataset.

        Raises:
            ValueError: The order is that of a sampler, which has to draw it.

        >>> Order(kind="shuffled", num_samples=4, num_items=4, seed=1).at(0, torch.arange(4)).sort().values
        tensor([0, 1, 2, 3])
        """
        if self.kind == "sequential":
            return positions
        if self.kind == "sampler":
            raise ValueError("Order.at: the order of a sampler of one's own is known once it has drawn it.")
        if self.kind == "drawn":
            return draw(make_keys("draw", self.seed, epoch), self.num_items, positions)
        if self.num_samples <= self.num_items:
            return permute(make_keys("shuffle", self.seed, epoch, 0), self.num_items, positions)
        # More samples than items: one shuffled order after the other.
        rounds = torch.div(positions, self.num_items, rounding_mode="floor")
        indices = torch.empty_like(positions)
        for number in sorted(set(_listed(rounds))):
            here = rounds == number
            keys = make_keys("shuffle", self.seed, epoch, number)
            indices[here] = permute(keys, self.num_items, positions[here] - number * self.num_items)
        return indices

    def taker(self, seed: int, epoch: int) -> IndexFn:
        """Return :meth:`at` of one epoch under a seed, as lists."""
        order = replace(self, seed=seed)
        return lambda positions: _listed(order.at(epoch, positions))


def read_order(sampler: Sampler[Any], dataset: Any, seed: int) -> Order:
    """Read the order that a user's sampler asks for.

    Args:
        sampler: Of the user's loader.
        dataset: Map-style.
        seed: Of a shuffled order.

    Raises:
        ConfigurationError: The sampler already deals out the samples between ranks.
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
    """Refuse a sampler that already deals out the samples between ranks."""
    if isinstance(sampler, DistributedSampler):
        raise ConfigurationError(
            "the loader has a DistributedSampler, so its data is sharded already, and sharding it again "
            'would leave out samples. Pass sharding="already_sharded", or give it a plain sampler.'
        )


def check_length(dataset: Any, order: Order) -> None:
    """Refuse a dataset that has changed its length since ``order`` was read.

    Raises:
        ValueError: It has.
    """
    if len(dataset) != order.num_items:
        raise ValueError(
            f"the dataset {type(dataset).__name__} had a length of {order.num_items} when its loader was "
            f"prepared, and now has one of {len(dataset)}. Prepare a new one."
        )


class Drawn(NamedTuple):
    """An epoch of a sampler of the user's own.

    Attributes:
        items: What it drew.
        before: Its state before.
        after: Its state when the pass had begun, None where it has none.
    """

    items: list[Any]
    before: State | None
    after: State | None


def draw_together(
    ctx: Context, sampler: Any, epoch: int, begin: Callable[[list[Any]], P], state: State | None = None
) -> tuple[Drawn, P]:
    """Let rank 0 draw an epoch from a sampler of the user's own, and every rank begin a pass with it.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        sampler: Of samples or of batches; told the epoch, if it has ``set_epoch``, and so are those in it.
        epoch: From 0.
        begin: Begins the pass over what was drawn, or refuses it, as it does on every rank then.
        state: To bring the sampler to before.

    Returns:
        What was drawn, the same on every rank, and what ``begin`` has given.
    """
    if not ctx.is_main_process:
        drawn = Drawn(*broadcast_object_list(ctx.tagged("a sampler"), []))
        return drawn, begin(drawn.items)
    items, before = draw_here(sampler, epoch, state)
    try:
        begun = begin(items)
    finally:  # all learn of items that are refused
        # As a loader begins a pass it draws from its generator, which may be the sampler's too.
        drawn = Drawn(items, before, sampler_state(sampler))
        drawn = Drawn(*broadcast_object_list(ctx.tagged("a sampler"), list[Any](drawn)))
    return drawn, begun


def draw_here(sampler: Any, epoch: int, state: State | None = None) -> tuple[list[Any], State | None]:
    """Draw an epoch from a sampler on this rank alone; arguments as :func:`draw_together`'s.

    Returns:
        What was drawn, and the sampler's state before.
    """
    for one in (sampler, getattr(sampler, "sampler", None)):
        set_epoch = getattr(one, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
    if state is not None:
        restore_sampler(sampler, state)
    before = sampler_state(sampler)
    return list(sampler), before


def take_from(drawn: Sequence[Any]) -> IndexFn:
    """Look positions up in a list."""
    return lambda positions: [drawn[position] for position in _listed(positions)]


def _listed(numbers: torch.Tensor) -> list[Any]:
    return numbers.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]


def _length(thing: Any, what: str) -> int:
    try:
        return len(cast("Sized", thing))
    except (TypeError, NotImplementedError) as error:
        raise TypeError(
            f"prepare_data_loader: the {what} {type(thing).__name__} has no length, so its samples can't be "
            f"shared out. Give it a __len__, or make the dataset an IterableDataset."
        ) from error
