"""In which order an epoch visits the samples: a function of (seed, epoch), the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, Sampler, SequentialSampler

from accelfn.comm import broadcast_object_list
from accelfn.context import Context
from accelfn.errors import ConfigurationError

__all__ = ("Order", "order_of")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """How the samples of an epoch are ordered.

    Attributes:
        num_samples: Samples in an epoch.
        num_items: Samples in the dataset.
        seed: Of a shuffled order; None when it isn't shuffled by us.
        replacement: Whether a sample may come twice.
        sampler: The user's own sampler, whose order of rank 0 counts; None for the orders that torch has.
    """

    num_samples: int
    num_items: int
    seed: int | None = None
    replacement: bool = False
    sampler: Sampler[Any] | None = None

    def indices(self, ctx: Context, epoch: int) -> Sequence[Any]:
        """Give the order of ``epoch``.

        Ranks: every rank of ``ctx``: a sampler of the user's own runs on rank 0, and its order is sent to the
        others.

        Raises:
            ValueError: The sampler drew another number of samples than its length says.
        """
        if self.sampler is not None:
            set_epoch = getattr(self.sampler, "set_epoch", None)
            if callable(set_epoch):
                set_epoch(epoch)
            drawn = broadcast_object_list(
                ctx.tagged("a sampler"), list(self.sampler) if ctx.is_main_process else []
            )
            if len(drawn) != self.num_samples:
                raise ValueError(
                    f"the sampler {type(self.sampler).__name__} has a length of {self.num_samples}, and drew "
                    f"{len(drawn)} samples. Its __len__ must count what its __iter__ gives."
                )
            return drawn
        if self.seed is None:
            return range(self.num_samples)
        generator = torch.Generator()
        generator.manual_seed(self.seed + epoch)
        if self.replacement:
            return _listed(torch.randint(self.num_items, (self.num_samples,), generator=generator))
        order: list[int] = []
        while len(order) < self.num_samples:  # num_samples may exceed the dataset
            order += _listed(torch.randperm(self.num_items, generator=generator))
        return order[: self.num_samples]


def order_of(ctx: Context, loader: DataLoader[Any]) -> Order:
    """Read the order that the user's loader asks for.

    Ranks: every rank of ``ctx``: a shuffling loader needs one seed, which is rank 0's.

    Raises:
        ConfigurationError: The sampler already deals out the samples between ranks.
    """
    sampler = cast("Sampler[Any]", cast("Any", loader).sampler)
    if isinstance(sampler, DistributedSampler):
        raise ConfigurationError(
            "the loader has a DistributedSampler, so its data is sharded already, and sharding it again "
            "would leave out "
            'samples. Pass sharding="already_sharded", or give it a plain sampler.'
        )
    num_items = len(cast("Sized", loader.dataset))
    if type(sampler) is SequentialSampler:
        return Order(num_samples=num_items, num_items=num_items)
    if type(sampler) is RandomSampler:
        return Order(
            num_samples=sampler.num_samples,
            num_items=num_items,
            seed=_shared_seed(ctx, sampler),
            replacement=sampler.replacement,
        )
    return Order(num_samples=len(cast("Sized", sampler)), num_items=num_items, sampler=sampler)


def _shared_seed(ctx: Context, sampler: RandomSampler) -> int:
    if ctx.loading.data_seed is not None:
        return ctx.loading.data_seed
    generator = cast("torch.Generator | None", cast("Any", sampler).generator)
    own = torch.initial_seed() if generator is None else generator.initial_seed()
    # Kept below 2**63 with room for the epoch's number.
    return broadcast_object_list(ctx.tagged("prepare_data_loader"), [own % (1 << 62)])[0]


def _listed(indices: torch.Tensor) -> list[int]:
    return indices.tolist()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType] -- torch's
