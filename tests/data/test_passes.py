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

from accelfn import Accelerator, Context, DataLoaderConfiguration, set_seed
from accelfn.data import (
    Order,
    loader_state,
    microbatches,
    prepare_data_loader,
    restore_loader,
    skip_first_batches,
)
from accelfn.data.loader import passes_of
from accelfn.testing import run_ranks
from tests.data.sources import numbers

SEEDED = DataLoaderConfiguration(data_seed=5)


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
def test_passes_are_epochs_whatever_ends_them(
    actions: list[tuple[str, int]], num: int, world: int, way: str
) -> None:
    def run(ctx: Context) -> None:
        def make() -> Any:
            loader = prepare_data_loader(ctx, numbers(num, shuffle=True))
            return Accelerator(context=ctx).prepare(loader) if way == "accelerator" else loader

        def read(steps: int | None, position: int) -> list[int]:
            """Read some batches, the first at ``position``, without what is padding."""
            found: list[int] = []
            batches: Any = microbatches(ctx, loader) if way == "microbatches" else loader
            for one in islice(batches, steps):
                batch = one[0] if way == "microbatches" else one
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
                state = loader_state(loader)
                loader = make() if action == "restart" else loader
                restore_loader(loader, state)
                expected.is_left = False
            assert len(loader) == -(-num // (2 * world))

    run_ranks(run, world, dataloader_config=SEEDED)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_breaking_off_each_epoch_reads_other_samples_each_time(num_workers: int) -> None:
    def run(ctx: Context) -> list[list[int]]:
        loader = prepare_data_loader(ctx, numbers(40, shuffle=True, num_workers=num_workers))
        found: list[list[int]] = []
        for _ in range(3):
            for batch in loader:
                found.append(batch.tolist())
                break
        return found

    (found,) = run_ranks(run, 1, dataloader_config=SEEDED)
    assert found == [order(40, epoch)[:2] for epoch in range(3)]


def test_a_sampler_of_ones_own_draws_anew_after_a_break_and_its_place_is_kept() -> None:
    def make() -> Any:
        sampler = RandomSampler(range(12), generator=torch.Generator().manual_seed(1))
        own = type("Own", (BatchSampler,), {})(sampler, 2, False)
        return prepare_data_loader(Context(), DataLoader(torch.arange(12), batch_sampler=own))  # pyright: ignore[reportArgumentType]

    whole = make()
    epochs = [[batch.tolist() for batch in whole] for _ in range(3)]
    broken = make()
    found = [[batch.tolist() for batch in islice(broken, 2)] for _ in range(2)]
    assert found == [epoch[:2] for epoch in epochs[:2]]
    again = make()
    restore_loader(again, loader_state(broken))  # amid the second epoch
    assert [[batch.tolist() for batch in again] for _ in range(2)] == [epochs[1][2:], epochs[2]]


# --- skipping by hand ------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:each of 2 ranks reads the full stream")
@pytest.mark.parametrize(("world", "read", "skipped"), [(1, 0, 2), (2, 2, 0), (2, 2, 4), (1, 5, 2)])
@pytest.mark.parametrize("kind", ["shuffled", "stream", "batches"])
def test_batches_that_are_skipped_count_from_the_start_of_the_epoch_after_a_state_was_loaded(
    kind: str, skipped: int, read: int, world: int
) -> None:
    def run(ctx: Context) -> None:
        def make() -> Any:
            num = 10 * world
            if kind == "shuffled":
                return prepare_data_loader(ctx, numbers(num, shuffle=True))
            if kind == "stream":
                return prepare_data_loader(ctx, [torch.tensor([one, one]) for one in range(5 * world)])
            own = [list(range(first, first + 2)) for first in range(0, num, 2)]
            return prepare_data_loader(ctx, DataLoader(torch.arange(num), batch_sampler=own))  # pyright: ignore[reportArgumentType]

        whole = make()
        epochs = [[batch.tolist() for batch in whole] for _ in range(3)]
        stopped = make()
        for _ in islice(stopped, read):
            pass
        again = make()
        restore_loader(again, loader_state(stopped))
        rest = skip_first_batches(again, skipped)
        assert (len(again), len(rest)) == (5, 5 - skipped)
        # A place at the end of an epoch is where the next one begins; only a pass over batches tells the end.
        epoch = 1 if read == 5 and kind != "batches" else 0
        assert [batch.tolist() for batch in rest] == epochs[epoch][skipped:]
        assert [batch.tolist() for batch in again] == epochs[epoch + 1]

    run_ranks(run, world, dataloader_config=SEEDED)


def test_a_loader_that_was_moved_into_an_epoch_goes_on_there_beside_one_that_skips() -> None:
    loader = prepare_data_loader(Context().replace(dataloader_config=SEEDED), numbers(12, shuffle=True))
    for _ in islice(loader, 2):
        pass
    state = loader_state(loader)
    restore_loader(loader, state)
    rest = skip_first_batches(loader, 4)
    assert loader_state(loader) == loader_state(rest) == state  # nothing has moved yet
    assert samples(loader) == order(12, 0)[4:]
    assert samples(rest) == order(12, 1)[8:]
    restore_loader(rest, state)  # a state that is loaded later says where to go on: nothing is skipped
    assert samples(rest) == order(12, 0)[4:]


# --- the seed --------------------------------------------------------------------------------------


@pytest.mark.parametrize("on", ["memory", "processes"])
def test_a_seed_that_is_set_after_prepare_seeds_the_order(on: Any) -> None:
    def run(ctx: Context) -> list[int]:
        torch.manual_seed(1)
        loader = prepare_data_loader(ctx, numbers(12, shuffle=True))
        set_seed(31, ctx=ctx, device_specific=True)
        return [int(one) for batch in loader for one in batch]

    for world in (1, 2):
        ranks = run_ranks(run, world, on)
        dealt = [order(12, 0, 31)[place : place + 2] for place in range(0, 12, 2)]
        for rank, found in enumerate(ranks):
            assert found == [one for batch in dealt[rank::world] for one in batch]


def test_the_order_keeps_the_seed_of_its_first_pass() -> None:
    loader = prepare_data_loader(Context(), numbers(12, shuffle=True))
    torch.manual_seed(3)
    assert samples(loader) == order(12, 0, 3)
    state = loader_state(loader)
    torch.manual_seed(4)
    assert samples(loader) == order(12, 1, 3)
    again = prepare_data_loader(Context(), numbers(12, shuffle=True))
    restore_loader(again, state)
    torch.manual_seed(4)  # the state's seed is the one that counts
    assert samples(again) == order(12, 1, 3)


def test_a_generator_that_is_seeded_after_prepare_seeds_the_order() -> None:
    generator = torch.Generator().manual_seed(1)
    loader = prepare_data_loader(Context(), numbers(12, shuffle=True, generator=generator))
    generator.manual_seed(8)
    assert samples(loader) == order(12, 0, 8)


def test_a_loop_that_reads_ahead_can_keep_the_state_of_what_it_yielded() -> None:
    loader = prepare_data_loader(Context(), numbers(6, 1))
    passes, batches = passes_of(loader), iter(loader)
    next(batches)
    passes.hold()
    next(batches)
    assert loader_state(loader).consumed == 1
    passes.release()
    assert loader_state(loader).consumed == 2
    passes.hold()
    assert len([*batches]) == 4
    held = loader_state(loader)
    assert (held.epoch, held.consumed) == (0, 2), "also after the end of the pass"
    restore_loader(loader, held)
    assert samples(loader) == [2, 3, 4, 5]
    passes.hold()
    next(iter(loader))
    state = loader_state(loader)
    assert (state.epoch, state.consumed) == (1, 1), "until the next pass"
