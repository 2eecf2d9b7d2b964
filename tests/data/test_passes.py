# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import accelfn as af
from accelfn import Context
from accelfn.data import Order
from accelfn.testing import run_ranks
from tests.data.sources import numbers

SEEDED = af.DataLoaderConfiguration(data_seed=5)


def order(num: int, epoch: int, seed: int = 5) -> list[int]:
    return (
        Order(kind="shuffled", num_samples=num, num_items=num, seed=seed)
        .at(epoch, torch.arange(num))
        .tolist()
    )


def samples(loader: Any) -> list[int]:
    return [one for batch in loader for one in batch.tolist()]


# --- the order of passes ---------------------------------------------------------------------------

actions = st.one_of(
    st.just(("pass", 0)),
    st.tuples(st.just("break"), st.integers(0, 4)),
    st.tuples(st.just("restart"), st.just(0)),
    st.tuples(st.just("load"), st.just(0)),
    st.tuples(st.just("set_epoch"), st.integers(0, 3)),
)


class Expected:
    """What a loader over shuffled data has to give, told in a few lines."""

    def __init__(self, num: int, group: int) -> None:
        self.num, self.group = num, group
        self.epoch = self.start = 0
        self.is_left = False  # by a break; a new pass is the next epoch then

    def read(self, steps: int | None) -> list[int]:
        if steps == 0:
            return []
        if self.is_left:
            self.set_epoch(self.epoch + 1)
        rest = order(self.num, self.epoch)[self.start :]
        if steps is None or steps * self.group >= len(rest) + self.group:
            self.set_epoch(self.epoch + 1)
            return rest
        self.start, self.is_left = min(self.num, self.start + steps * self.group), True
        return rest[: steps * self.group]

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.start, self.is_left = epoch, 0, False


@given(
    actions=st.lists(actions, max_size=8),
    num=st.integers(1, 9),
    world=st.integers(1, 2),
    way=st.sampled_from(["loop", "microbatches", "accelerator"]),
)
def test_passes_are_epochs(actions: list[tuple[str, int]], num: int, world: int, way: str) -> None:
    def run(ctx: Context) -> None:
        def make() -> Any:
            loader = af.prepare_data_loader(ctx, numbers(num, shuffle=True))
            return af.Accelerator(context=ctx).prepare(loader) if way == "accelerator" else loader

        def read(steps: int | None, position: int) -> list[int]:
            """Read some batches, the first at ``position``, without what is padding."""
            found: list[int] = []
            batches: Any = af.microbatches(ctx, loader) if way == "microbatches" else loader
            for item in islice(batches, steps):
                batch = item[0] if way == "microbatches" else item
                found += batch[: max(0, num - position - 2 * ctx.rank)].tolist()
                position += 2 * world
            return found

        expected = Expected(num, 2 * world)
        loader = make()
        for action, number in actions:
            if action in ("pass", "break"):
                position = 0 if expected.is_left else expected.start
                steps = None if action == "pass" else number
                whole = expected.read(steps)
                own = [sample for place, sample in enumerate(whole) if place // 2 % world == ctx.rank]
                assert read(steps, position) == own
                assert loader.epoch == expected.epoch
            elif action == "set_epoch":
                loader.set_epoch(number)
                expected.set_epoch(number)
            else:
                state = af.loader_state(loader)
                loader = make() if action == "restart" else loader
                af.restore_loader(loader, state)
                expected.is_left = False
            assert len(loader) == -(-num // (2 * world))

    run_ranks(run, world, dataloader_config=SEEDED)


def test_a_sampler_of_ones_own_draws_anew_after_a_break_and_its_place_is_kept() -> None:
    def make() -> Any:
        sampler = RandomSampler(range(12), generator=torch.Generator().manual_seed(1))
        own = type("Own", (BatchSampler,), {})(sampler, 2, False)
        return af.prepare_data_loader(Context(), DataLoader(torch.arange(12), batch_sampler=own))  # pyright: ignore[reportArgumentType]

    whole = make()
    epochs = [[batch.tolist() for batch in whole] for _ in range(3)]
    broken = make()
    found = [[batch.tolist() for batch in islice(broken, 2)] for _ in range(2)]
    assert found == [epoch[:2] for epoch in epochs[:2]]
    again = make()
    af.restore_loader(again, af.loader_state(broken))  # amid the second epoch
    assert [[batch.tolist() for batch in again] for _ in range(2)] == [epochs[1][2:], epochs[2]]


# --- skipping by hand ------------------------------------------------------------------------------


# --- the seed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["memory", "processes"])
def test_a_seed_that_is_set_after_prepare_seeds_the_order(on: Any) -> None:
    def run(ctx: Context) -> list[int]:
        torch.manual_seed(1)
        loader = af.prepare_data_loader(ctx, numbers(12, shuffle=True))
        af.set_seed(31, ctx=ctx, device_specific=True)
        return [int(one) for batch in loader for one in batch]

    for world in (1, 2):
        ranks = run_ranks(run, world, on)
        dealt = [order(12, 0, 31)[place : place + 2] for place in range(0, 12, 2)]
        for rank, found in enumerate(ranks):
            assert found == [one for batch in dealt[rank::world] for one in batch]


def test_the_order_keeps_the_seed_of_its_first_pass() -> None:
    generator = torch.Generator().manual_seed(1)
    own = af.prepare_data_loader(Context(), numbers(12, shuffle=True, generator=generator))
    generator.manual_seed(8)  # also after it was prepared
    assert samples(own) == order(12, 0, 8)
    loader, again = (af.prepare_data_loader(Context(), numbers(12, shuffle=True)) for _ in "ab")
    torch.manual_seed(3)
    assert samples(loader) == order(12, 0, 3)
    af.restore_loader(again, af.loader_state(loader))
    for same in (loader, again):  # the state's seed is the one that counts
        torch.manual_seed(4)
        assert samples(same) == order(12, 1, 3)
