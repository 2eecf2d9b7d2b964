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
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from accelfn import Context, DataLoaderConfiguration
from accelfn.data import Order, gather_for_metrics, microbatches, prepare_data_loader, read_order
from accelfn.data.order import draw, draw_together, make_keys, permute
from accelfn.errors import ConfigurationError
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
    st.integers(1, 60),
    st.integers(1, 200),
    st.integers(0, 2**63 - 1),
)


@given(orders, st.integers(0, 9), st.data())
def test_what_stands_at_a_position_depends_on_nothing_but_it(
    order: Order, epoch: int, data: st.DataObject
) -> None:
    everything = order.at(epoch, torch.arange(order.num_samples)).tolist()
    positions = data.draw(st.lists(st.integers(0, order.num_samples - 1), max_size=20))
    expected = [everything[position] for position in positions]
    assert order.at(epoch, torch.tensor(positions, dtype=torch.int64)).tolist() == expected
    assert order.index_fn(order.seed, epoch)(torch.tensor(positions, dtype=torch.int64)) == expected
    assert set(everything) <= set(range(order.num_items))


@given(st.integers(1, 40), st.integers(1, 200), st.integers(0, 2**63 - 1))
def test_no_sample_comes_twice_before_all_others_have_come(
    num_items: int, num_samples: int, seed: int
) -> None:
    order = Order(kind="shuffled", num_samples=num_samples, num_items=num_items, seed=seed)
    drawn = order.at(0, torch.arange(num_samples)).tolist()
    for start in range(0, num_samples, num_items):
        part = drawn[start : start + num_items]
        assert len(set(part)) == len(part)
    counts = Counter(drawn)
    if num_samples >= num_items:
        assert max(counts.values()) - min(counts.values()) <= 1
        assert len(counts) == num_items


def test_each_round_and_epoch_and_seed_has_an_order_of_its_own() -> None:
    order = Order(kind="shuffled", num_samples=300, num_items=100, seed=1)
    rounds = order.at(0, torch.arange(300)).reshape(3, 100).tolist()
    other = Order(kind="shuffled", num_samples=300, num_items=100, seed=2)
    for one, epoch in ((order, 1), (order, 2), (other, 0)):
        rounds += one.at(epoch, torch.arange(300)).reshape(3, 100).tolist()
    assert len({tuple(one) for one in rounds}) == 12
    drawn = [Order(kind="drawn", num_samples=50, num_items=9, seed=seed) for seed in (1, 2)]
    lists = {tuple(one.at(epoch, torch.arange(50)).tolist()) for one in drawn for epoch in (0, 1)}
    assert len(lists) == 4


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


def test_the_kind_of_a_sampler_is_read() -> None:
    items = torch.arange(3)

    def kind(sampler: Any) -> tuple[str, int, int, int]:
        order = read_order(sampler, items, 9)
        return order.kind, order.num_samples, order.num_items, order.seed

    source = cast("Any", items)
    assert kind(SequentialSampler(source)) == ("sequential", 3, 3, 9)
    assert kind(RandomSampler(source)) == ("shuffled", 3, 3, 9)
    assert kind(RandomSampler(source, num_samples=7)) == ("shuffled", 7, 3, 9)
    assert kind(RandomSampler(source, num_samples=2)) == ("shuffled", 2, 3, 9)
    assert kind(RandomSampler(source, replacement=True)) == ("drawn", 3, 3, 9)
    assert kind(RandomSampler(source, replacement=True, num_samples=50)) == ("drawn", 50, 3, 9)
    assert kind(WeightedRandomSampler([1.0, 1.0, 1.0], 5)) == ("sampler", 5, 3, 9)
    assert kind(SubsetRandomSampler([0, 2])) == ("sampler", 2, 3, 9)
    assert kind(Evens()) == ("sampler", 4, 3, 9)


@pytest.mark.parametrize("world", [1, 3])
def test_samples_may_be_drawn_with_replacement_or_more_often_than_they_are(world: int) -> None:
    items = cast("Any", torch.arange(3))
    config = DataLoaderConfiguration(data_seed=1)

    def drawn(ctx: Context) -> list[int]:
        return visited(ctx, sampling(3, RandomSampler(items, replacement=True, num_samples=50), batch_size=4))

    def longer(ctx: Context) -> list[int]:
        return visited(ctx, sampling(3, RandomSampler(items, num_samples=7)))

    def fewer(ctx: Context) -> list[int]:
        return visited(ctx, sampling(3, RandomSampler(items, num_samples=2)))

    found = run_ranks(drawn, world, dataloader_config=config)[0]
    assert len(found) == 50
    assert set(found) == {0, 1, 2}
    assert found == run_ranks(drawn, 4, dataloader_config=config)[0]
    found = run_ranks(longer, world, dataloader_config=config)[0]
    assert [sorted(found[:3]), sorted(found[3:6]), len(found)] == [[0, 1, 2], [0, 1, 2], 7]
    found = run_ranks(fewer, world, dataloader_config=config)[0]
    assert len(set(found)) == 2


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_sampler_of_ones_own_is_followed_as_rank_0_draws_it(epoch: int) -> None:
    def run(ctx: Context) -> list[int]:
        sampler = Evens() if ctx.is_main_process else SequentialSamplerOfFour()
        return visited(ctx, sampling(8, sampler), epoch)

    assert run_ranks(run, 3) == [[0, 2, 4, 6] if epoch == 0 else [6, 4, 2, 0]] * 3


class SequentialSamplerOfFour(SequentialSampler):
    """A kind of SequentialSampler with an order of its own, which must not be taken for one."""

    def __init__(self) -> None:
        super().__init__(range(4))

    def __iter__(self) -> Iterator[int]:
        return iter([3, 2, 1, 0])


def test_a_subclass_of_a_known_sampler_is_a_sampler_of_ones_own() -> None:
    assert visited(Context(), sampling(4, SequentialSamplerOfFour())) == [3, 2, 1, 0]


def test_a_sampler_inside_of_a_batch_sampler_is_told_the_epoch() -> None:
    class Outer:
        sampler = Evens()

        def __iter__(self) -> Iterator[list[int]]:
            return iter([[index] for index in self.sampler])

    assert draw_together(Context(), Outer(), 1) == ([[6], [4], [2], [0]], None, None)


def test_a_sampler_that_draws_another_number_than_it_says_is_refused_on_every_rank() -> None:
    source = sampling(8, Evens(promised=5))

    def run(ctx: Context) -> str:
        loader = prepare_data_loader(ctx, source)
        with pytest.raises(ValueError, match="Evens has length 5 but drew 4 samples"):
            next(iter(loader))
        return "refused"

    assert run_ranks(run, 2) == ["refused"] * 2


def test_a_sampler_that_deals_out_between_ranks_is_refused() -> None:
    data = torch.arange(8)
    sampler = DistributedSampler(cast("Any", data), num_replicas=2, rank=0)
    with pytest.raises(ConfigurationError, match="already_sharded"):
        read_order(sampler, data, 0)


def test_data_and_samplers_without_a_length_are_refused() -> None:
    with pytest.raises(TypeError, match="the dataset Unlisted, which has no length"):
        read_order(Evens(), Unlisted(), 0)
    with pytest.raises(TypeError, match="the sampler Endless, which has no length"):
        read_order(Endless(), torch.arange(4), 0)


def test_the_order_of_a_sampler_is_not_asked_of_the_record() -> None:
    order = Order(kind="sampler", num_samples=2, num_items=2)
    with pytest.raises(ValueError, match="custom sampler"):
        order.at(0, torch.arange(2))


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


def is_permutation(numbers: torch.Tensor, size: int) -> bool:
    return torch.equal(numbers.sort().values, torch.arange(size))


@given(keys, st.integers(1, 3000))
@example(make_keys(1), 10**6)
@example(make_keys(1), 4097)
def test_each_number_stands_at_exactly_one_position(key: tuple[int, ...], size: int) -> None:
    assert is_permutation(permute(key, size, torch.arange(size)), size)


@pytest.mark.parametrize("size", [10**12, 10**12 + 39, 2**62])
def test_in_huge_ranges_positions_keep_apart_and_nothing_is_listed(size: int) -> None:
    step = size // 10**5
    for positions in (torch.arange(10**5), torch.arange(10**5) * step, size - 1 - torch.arange(10**5)):
        images = permute(make_keys("huge", size), size, positions)
        assert images.unique().numel() == 10**5
        assert int(images.min()) >= 0
        assert int(images.max()) < size
        # Spread over the whole range, wherever the positions lie.
        assert (
            likelihood(torch.div(images, -(-size // 100), rounding_mode="floor").bincount()) > MOST_UNLIKELY
        )


@given(keys, st.integers(1, 10**12), st.data())
def test_a_position_has_the_same_number_in_any_company(
    key: tuple[int, ...], size: int, data: st.DataObject
) -> None:
    positions = torch.tensor(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=12)))
    together = permute(key, size, positions)
    assert [int(permute(key, size, one)) for one in positions] == together.tolist()
    assert permute(key, size, positions.reshape(1, -1, 1)).reshape(-1).equal(together)
    alone = [int(draw(key, size, one)) for one in positions]
    assert alone == draw(key, size, positions).tolist()


@given(keys, st.integers(1, 20_000))
def test_many_positions_are_looked_up_as_few_are_hashed(key: tuple[int, ...], size: int) -> None:
    together = permute(key, size, torch.arange(size))
    few = max(1, math.isqrt(size) - 1)  # fewer than a half has values
    for begin in (0, size // 2, size - few):
        assert permute(key, size, torch.arange(begin, begin + few)).equal(together[begin : begin + few])


@pytest.mark.parametrize(("size", "num_keys"), [(2, 2000), (3, 3000), (4, 3000), (5, 3600)])
def test_all_orders_of_a_few_numbers_are_equally_likely(size: int, num_keys: int) -> None:
    positions = torch.arange(size)
    found = Counter(
        tuple(permute(make_keys("few", key), size, positions).tolist()) for key in range(num_keys)
    )
    orders = list(itertools.permutations(range(size)))
    assert len(orders) == math.factorial(size)
    assert likelihood(torch.tensor([found[order] for order in orders])) > MOST_UNLIKELY


def is_odd(order: list[int]) -> bool:
    swaps, seen = 0, set[int]()
    for start in order:
        here, length = start, 0
        while here not in seen:
            seen.add(here)
            here = order[here]
            length += 1
        swaps += max(0, length - 1)
    return swaps % 2 == 1


@pytest.mark.parametrize("size", [6, 8, 9, 12, 24, 25, 49, 100, 121])
def test_half_of_the_orders_are_odd(size: int) -> None:
    # A network that only rotates halves of odd size would never give one of them.
    positions = torch.arange(size)
    odd = sum(is_odd(permute(make_keys("odd", key), size, positions).tolist()) for key in range(400))
    assert likelihood(torch.tensor([odd, 400 - odd])) > MOST_UNLIKELY


@pytest.fixture(scope="module")
def hundreds() -> torch.Tensor:
    """5,000 shuffled orders of 100 numbers, as those of one seed and one epoch after the other."""
    return torch.stack(
        [permute(make_keys("shuffle", 7, key, 0), 100, torch.arange(100)) for key in range(5000)]
    )


def test_each_number_stands_at_each_position_equally_often(hundreds: torch.Tensor) -> None:
    places = (torch.arange(100) * 100 + hundreds).reshape(-1).bincount(minlength=100 * 100)
    # Rows and columns add up to the number of orders, which takes 99 out of 100 of either's freedom.
    assert likelihood(places, freedom=99 * 99, scale=99 / 100) > MOST_UNLIKELY


# Of 4,096 numbers or more, the network has fewer rounds.
@pytest.mark.parametrize("size", [4096, 10**6])
def test_positions_and_epochs_are_independent_with_fewer_rounds(size: int) -> None:
    places = torch.tensor([0, 1, 63, 64, size // 2, size // 2 + 1, size - 2, size - 1])
    orders = torch.stack([permute(make_keys("shuffle", 7, key, 0), size, places) for key in range(3000)])

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
    rotated = torch.stack([torch.arange(100).roll(key) for key in range(5000)])
    distances = (rotated[:, 1] - rotated[:, 0]) % 100
    assert likelihood(distances.bincount(minlength=100)[1:]) < MOST_UNLIKELY
    fixed = torch.arange(100).expand(5000, -1)
    places = (torch.arange(100) * 100 + fixed).reshape(-1).bincount(minlength=100 * 100)
    assert likelihood(places, freedom=99 * 99, scale=99 / 100) < MOST_UNLIKELY
    # Half of the orders of three only, as those of a network of odd width would be.
    assert likelihood(torch.tensor([1000, 1000, 1000, 0, 0, 0])) < MOST_UNLIKELY


def test_keys_are_those_of_all_parts() -> None:
    parts = [(0, 0), (0, 1), (1, 0), ("0", 0), (0, 0, 0), (10,), (1, 0, 0)]
    assert len({make_keys(*one) for one in parts}) == len(parts)
    orders = {tuple(permute(make_keys(*one), 1000, torch.arange(1000)).tolist()) for one in parts}
    assert len(orders) == len(parts)


def test_numbers_are_drawn_uniformly_and_for_each_position_by_itself() -> None:
    numbers = draw(make_keys("draw", 1), 100, torch.arange(100_001))
    assert int(numbers.min()) >= 0
    assert likelihood(numbers.bincount(minlength=100)) > MOST_UNLIKELY
    pairs = numbers[:-1] * 100 + numbers[1:]
    assert likelihood(pairs.bincount(minlength=100 * 100)) > MOST_UNLIKELY
    by_key = torch.cat([draw(make_keys("draw", key), 20, torch.tensor([3])) for key in range(4000)])
    assert likelihood(by_key.bincount(minlength=20)) > MOST_UNLIKELY


@pytest.mark.parametrize("size", [0, -1, 2**62 + 1])
def test_a_size_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"got {size}"):
        permute(make_keys(1), size, torch.arange(0))


def test_an_order_is_the_same_for_ever() -> None:
    # Runs go on under a later version: an order, once given, stays.
    assert permute(make_keys("shuffle", 5, 0, 0), 8, torch.arange(8)).tolist() == [7, 5, 3, 2, 1, 0, 4, 6]
    assert draw(make_keys("draw", 5, 0), 8, torch.arange(8)).tolist() == [6, 1, 3, 3, 3, 6, 3, 4]
