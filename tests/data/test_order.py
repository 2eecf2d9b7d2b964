# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import itertools
import math
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accelfn import Context, DataLoaderConfiguration
from accelfn.data import Order, gather_for_metrics, microbatches, prepare_data_loader, read_order
from accelfn.data.order import draw, make_keys, permute
from accelfn.testing import run_ranks


class Evens(Sampler[int]):
    """A sampler of one's own, with an epoch; and as such, one that draws differently on each rank."""

    def __init__(self, promised: int = 4) -> None:
        self.epoch = 0
        self.promised = promised

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter([0, 2, 4, 6] if self.epoch % 2 == 0 else [6, 4, 2, 0])

    def __len__(self) -> int:
        return self.promised


class Endless(Sampler[int]):
    """A sampler without a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


class Unlisted(torch.utils.data.Dataset[int]):
    """A dataset without a length."""

    def __getitem__(self, index: int) -> int:
        return index


def shuffling(num: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(num), shuffle=True, **options)  # pyright: ignore[reportArgumentType]


def sampling(num: int, sampler: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(num), sampler=sampler, **options)  # pyright: ignore[reportArgumentType]


def visited(ctx: Context, source: DataLoader[Any], epoch: int = 0) -> list[int]:
    """The samples of an epoch over all ranks, in order."""
    loader = prepare_data_loader(ctx, source)
    loader.set_epoch(epoch)
    return [
        index
        for batch, micro in microbatches(ctx, loader)
        for index in gather_for_metrics(ctx, batch, micro).tolist()
    ]


@pytest.mark.parametrize(("world", "epoch"), [(1, 0), (1, 7), (2, 1), (3, 0), (5, 7)])
def test_a_shuffled_order_is_a_function_of_seed_and_epoch_alone(world: int, epoch: int) -> None:
    ranks = run_ranks(
        lambda ctx: visited(ctx, shuffling(23, batch_size=1 + world % 3), epoch),
        world,
        dataloader_config=DataLoaderConfiguration(data_seed=5),
    )
    expected = (
        Order(kind="shuffled", num_samples=23, num_items=23, seed=5).at(epoch, torch.arange(23)).tolist()
    )
    assert ranks == [expected] * world
    assert sorted(expected) == list(range(23))


orders = st.builds(
    lambda kind, num_items, num_samples, seed: Order(
        kind=kind,
        num_items=num_items,
        num_samples=num_items if kind == "sequential" else num_samples,
        seed=seed,
    ),
    st.sampled_from(["sequential", "shuffled", "drawn"]),
    st.integers(1, 30),
    st.integers(1, 100),
    st.integers(0, 2**63 - 1),
)


@settings(max_examples=15)
@given(orders, st.integers(0, 9), st.data())
def test_what_stands_at_a_position_depends_on_it_alone(order: Order, epoch: int, data: st.DataObject) -> None:
    everything = order.at(epoch, torch.arange(order.num_samples)).tolist()
    positions = data.draw(st.lists(st.integers(0, order.num_samples - 1), max_size=20))
    expected = [everything[position] for position in positions]
    assert order.at(epoch, torch.tensor(positions, dtype=torch.int64)).tolist() == expected
    assert order.index_fn(order.seed, epoch)(torch.tensor(positions, dtype=torch.int64)) == expected
    assert set(everything) <= set(range(order.num_items))


@given(st.integers(1, 20), st.integers(1, 100), st.integers(0, 2**63 - 1))
def test_no_sample_comes_twice_before_all_have_come(num_items: int, num_samples: int, seed: int) -> None:
    order = Order(kind="shuffled", num_samples=num_samples, num_items=num_items, seed=seed)
    drawn = order.at(0, torch.arange(num_samples)).tolist()
    for start in range(0, num_samples, num_items):
        part = drawn[start : start + num_items]
        assert len(set(part)) == len(part)
    counts = Counter(drawn)
    if num_samples >= num_items:
        assert max(counts.values()) - min(counts.values()) <= 1
        assert len(counts) == num_items


def test_the_last_position_of_a_huge_epoch_is_reached_at_once() -> None:
    order = Order(kind="shuffled", num_samples=10**15, num_items=10**15, seed=3)
    last, first = order.at(10**6, torch.tensor([10**15 - 1, 0])).tolist()
    assert 0 <= last < 10**15
    assert last != first
    assert sys.getsizeof(order) < 200


def test_the_seed_is_that_of_the_samplers_generator_on_rank_0() -> None:
    def run(ctx: Context) -> list[int]:
        generator = torch.Generator().manual_seed(5 + 100 * ctx.rank)
        return visited(ctx, shuffling(8, generator=generator))

    expected = Order(kind="shuffled", num_samples=8, num_items=8, seed=5).at(0, torch.arange(8)).tolist()
    assert run_ranks(run, 2) == [expected] * 2


def test_without_a_generator_the_seed_is_torchs_own_on_rank_0() -> None:
    def run(ctx: Context) -> list[int]:
        torch.manual_seed(40 + ctx.rank)  # on processes, since threads share torch's generator
        return visited(ctx, shuffling(8))

    expected = Order(kind="shuffled", num_samples=8, num_items=8, seed=40).at(0, torch.arange(8)).tolist()
    assert run_ranks(run, 2, "processes") == [expected] * 2


ITEMS = cast("Any", torch.arange(3))


@pytest.mark.parametrize(
    ("sampler", "kind", "num_samples"),
    [
        (SequentialSampler(ITEMS), "sequential", 3),
        (RandomSampler(ITEMS), "shuffled", 3),
        (RandomSampler(ITEMS, num_samples=7), "shuffled", 7),
        (RandomSampler(ITEMS, replacement=True, num_samples=50), "drawn", 50),
        (WeightedRandomSampler([1.0, 1.0, 1.0], 5), "sampler", 5),
        (SubsetRandomSampler([0, 2]), "sampler", 2),
        (Evens(), "sampler", 4),
    ],
)
def test_the_kind_of_a_sampler_is_followed_in_any_world(sampler: Any, kind: Any, num_samples: int) -> None:
    assert read_order(sampler, ITEMS, 9) == Order(kind=kind, num_samples=num_samples, num_items=3, seed=9)
    if kind in ("shuffled", "drawn"):
        config = DataLoaderConfiguration(data_seed=1)
        source = sampling(3, sampler, batch_size=4)
        found = [
            run_ranks(lambda ctx: visited(ctx, source), world, dataloader_config=config)[0]
            for world in (1, 3)
        ]
        assert found[0] == found[1]
        assert (len(found[0]), set(found[0])) == (num_samples, {0, 1, 2})


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_sampler_of_ones_own_is_told_the_epoch_and_followed_as_rank_0_draws_it(epoch: int) -> None:
    def run(ctx: Context) -> list[int]:
        return visited(ctx, sampling(8, Evens() if ctx.is_main_process else Backwards()), epoch)

    assert run_ranks(run, 3) == [[0, 2, 4, 6] if epoch == 0 else [6, 4, 2, 0]] * 3
    assert visited(Context(), sampling(4, Backwards())) == [3, 2, 1, 0]


class Backwards(SequentialSampler):
    """A kind of SequentialSampler with an order of its own, which must not be taken for one."""

    def __init__(self) -> None:
        super().__init__(range(4))

    def __iter__(self) -> Iterator[int]:
        return iter([3, 2, 1, 0])


def test_a_sampler_that_draws_another_number_than_it_says_is_refused_on_every_rank() -> None:
    source = sampling(8, Evens(promised=5))

    def run(ctx: Context) -> str:
        loader = prepare_data_loader(ctx, source)
        with pytest.raises(ValueError, match="Evens has length 5 but drew 4 samples"):
            next(iter(loader))
        return "refused"

    assert run_ranks(run, 2) == ["refused"] * 2


def test_data_and_samplers_without_a_length_are_refused() -> None:
    with pytest.raises(TypeError, match="the dataset Unlisted, which has no length"):
        read_order(Evens(), Unlisted(), 0)
    with pytest.raises(TypeError, match="the sampler Endless, which has no length"):
        read_order(Endless(), torch.arange(4), 0)


# Below this a deviation is no accident.
MOST_UNLIKELY = 1e-4

keys = st.builds(make_keys, st.integers(0, 2**63 - 1), st.integers(0, 10))


def likelihood(counts: torch.Tensor, freedom: int | None = None, scale: float = 1.0) -> float:
    """How likely counts as far from equal as these are, where all are meant to be equal (chi-square)."""
    counts = counts.double().reshape(-1)
    expected = counts.mean()
    distance = float((counts - expected).square().sum() / expected) * scale
    freedom = counts.numel() - 1 if freedom is None else freedom
    return float(torch.special.gammaincc(torch.tensor(freedom / 2.0).double(), torch.tensor(distance / 2.0)))


@given(keys, st.integers(1, 3000))
@example(make_keys(1), 10**6)
@example(make_keys(1), 4097)
def test_each_number_stands_at_exactly_one_position(key: tuple[int, ...], size: int) -> None:
    together = permute(key, size, torch.arange(size))
    assert torch.equal(together.sort().values, torch.arange(size))
    few = max(1, math.isqrt(size) - 1)  # many positions are looked up, and few are hashed
    for begin in (0, size // 2, size - few):
        assert permute(key, size, torch.arange(begin, begin + few)).equal(together[begin : begin + few])


@pytest.mark.parametrize("size", [10**12 + 39, 2**62])
def test_in_huge_ranges_positions_keep_apart_and_nothing_is_listed(size: int) -> None:
    for positions in (torch.arange(10**4), torch.arange(10**4) * (size // 10**4)):
        images = permute(make_keys("huge", size), size, positions)
        assert images.unique().numel() == 10**4
        assert 0 <= int(images.min()) <= int(images.max()) < size
        # Spread over the whole range, wherever the positions lie.
        hundredths = torch.div(images, -(-size // 100), rounding_mode="floor")
        assert likelihood(hundredths.bincount()) > MOST_UNLIKELY


@pytest.mark.parametrize(
    ("size", "num_keys"), [(2, 500), (3, 1000), (4, 1200), pytest.param(5, 2400, marks=pytest.mark.slow)]
)
def test_all_orders_of_a_few_numbers_are_equally_likely(size: int, num_keys: int) -> None:
    positions = torch.arange(size)
    found = Counter(
        tuple(permute(make_keys("few", key), size, positions).tolist()) for key in range(num_keys)
    )
    orders = list(itertools.permutations(range(size)))
    assert likelihood(torch.tensor([found[order] for order in orders])) > MOST_UNLIKELY


@pytest.mark.slow
def test_positions_and_epochs_are_independent() -> None:
    size = 4096  # from here on, the network has fewer rounds
    places = torch.tensor([0, 1, 63, 64, size // 2, size // 2 + 1, size - 2, size - 1])
    orders = torch.stack([permute(make_keys("shuffle", 7, key, 0), size, places) for key in range(2000)])

    def spread(numbers: torch.Tensor) -> float:
        return likelihood(((numbers % size) * 50 // size).reshape(-1).bincount(minlength=50))

    for column in orders.unbind(1):
        assert spread(column) > MOST_UNLIKELY
        assert spread(column[1:] - column[:-1]) > MOST_UNLIKELY
    for left, right in itertools.combinations(orders.unbind(1), 2):
        assert spread(right - left) > MOST_UNLIKELY
        both = (left * 8 // size) * 8 + right * 8 // size
        assert likelihood(both.bincount(minlength=64)) > MOST_UNLIKELY


def test_the_statistics_can_fail() -> None:
    fixed = torch.arange(100).expand(5000, -1)
    places = (torch.arange(100) * 100 + fixed).reshape(-1).bincount(minlength=100 * 100)
    assert likelihood(places, freedom=99 * 99, scale=99 / 100) < MOST_UNLIKELY
    # Half of the orders of three only, as those of a network of odd width would be.
    assert likelihood(torch.tensor([1000, 1000, 1000, 0, 0, 0])) < MOST_UNLIKELY


def test_numbers_are_drawn_uniformly_and_for_each_position_by_itself() -> None:
    numbers = draw(make_keys("draw", 1), 100, torch.arange(100_001))
    assert int(numbers.min()) >= 0
    assert likelihood(numbers.bincount(minlength=100)) > MOST_UNLIKELY
    pairs = numbers[:-1] * 100 + numbers[1:]
    assert likelihood(pairs.bincount(minlength=100 * 100)) > MOST_UNLIKELY
    by_key = torch.cat([draw(make_keys("draw", key), 20, torch.tensor([3])) for key in range(2000)])
    assert likelihood(by_key.bincount(minlength=20)) > MOST_UNLIKELY


@pytest.mark.parametrize("size", [0, -1, 2**62 + 1])
def test_a_size_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"got {size}"):
        permute(make_keys(1), size, torch.arange(0))


def test_an_order_is_the_same_for_ever() -> None:
    # Runs go on under a later version: an order, once given, stays.
    assert permute(make_keys("shuffle", 5, 0, 0), 8, torch.arange(8)).tolist() == [1, 0, 4, 3, 7, 5, 2, 6]
    assert draw(make_keys("draw", 5, 0), 8, torch.arange(8)).tolist() == [1, 1, 5, 0, 3, 0, 0, 6]
