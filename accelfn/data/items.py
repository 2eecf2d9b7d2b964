"""Read a map-style dataset whose items are batches already: a loader with ``batch_size=None``."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Generic, TypeVar

from torch.utils.data import DataLoader

from accelfn.context import Context
from accelfn.data.order import Order
from accelfn.data.plan import EpochPlan, plan_epoch
from accelfn.data.reading import Own, Pass, Remembering, Share, rows_of
from accelfn.data.sampled import SampledReader

__all__ = ("ItemReader", "plan_items", "share_of_item", "with_rows")

T = TypeVar("T")


class ItemReader(Remembering, Generic[T]):
    """Reads by an order of items, of which each rank gets one in each step.

    ``start`` and ``consumed`` count items.
    """

    def __init__(self, ctx: Context, source: DataLoader[T], order: Order) -> None:
        """Read ``source`` by ``order``."""
        make_plan = functools.partial(plan_items, ctx)
        self._items: SampledReader[T] = SampledReader(ctx, source, order, ctx.rank, make_plan)
        self.length = self._items.length
        self.batch_size: int | None = None
        self.seed = order.seed

    @property
    def even_batches(self) -> bool:
        """Whether the ranks have equally many items."""
        return self._items.even_batches

    def choose_even(self, even: bool) -> None:
        """Repeat items to that end from now on, or don't."""
        self._items.choose_even(even)

    def plan(self, start: int) -> EpochPlan:
        """Plan the items from ``start`` on."""
        return self._items.plan(start)

    def count(self, start: int) -> int:
        """Count this rank's batches from ``start`` on."""
        return self._items.count(start)

    def begin(self, epoch: int, start: int) -> Pass[T]:
        """Begin a pass."""
        self._items.seed = self.seed
        begun = self._items.begin(epoch, start)
        return begun._replace(
            batches=with_rows(begun.batches), share_at=functools.partial(share_of_item, self.plan(start))
        )

    def recall(self, own: Own, start: int) -> None:
        """Let the next pass be of the epoch of ``own``."""
        self._items.recall(own, start)

    def rest(self) -> Own:
        """Say the states between passes."""
        return self._items.rest()


def plan_items(ctx: Context, number: int, start: int) -> EpochPlan:
    """Plan ``number`` items from ``start`` on, one a rank and step."""
    return plan_epoch(number, 1, ctx.num_processes, even_batches=ctx.loading.even_batches, start=start)


def share_of_item(plan: EpochPlan, step: int) -> Share:
    """Say how far ``step`` of a plan comes, and not what is in it, which only the batches tell."""
    return Share(consumed=plan.consumed(step))


def with_rows(batches: Iterator[tuple[T, Share]]) -> Iterator[tuple[T, Share]]:
    """Count the rows of batches, which only the batches themselves tell."""
    for batch, share in batches:
        own_valid = None if share.own_valid else 0
        yield (
            batch,
            Share(
                num_rows=rows_of(batch), own_valid=own_valid, is_last=share.is_last, consumed=share.consumed
            ),
        )
