# torch leaves tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

"""The keys of all statistical tests are fixed, so each of them passes always or never."""

import itertools
import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accelfn.data.order import draw, make_keys, permute

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
def test_each_number_stands_at_exactly_one_position(key: tuple[int, ...], size: int) -> None:
    assert is_permutation(permute(key, size, torch.arange(size)), size)


@settings(max_examples=6)
@given(keys, st.integers(1, 10**6))
def test_so_it_does_among_a_million(key: tuple[int, ...], size: int) -> None:
    assert is_permutation(permute(key, size, torch.arange(size)), size)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9, 10, 16, 17, 25, 26, 4096, 4097, 2**20 - 1, 10**6])
def test_the_corners_of_the_network_are_bijections_too(size: int) -> None:
    assert is_permutation(permute(make_keys("corner", size), size, torch.arange(size)), size)


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


def test_positions_are_left_as_they_were() -> None:
    positions = torch.arange(10)
    permute(make_keys(1), 10, positions)
    draw(make_keys(1), 10, positions)
    assert positions.equal(torch.arange(10))


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


@pytest.mark.parametrize("position", [0, 1, 8, 9, 10, 49, 89, 98])
def test_the_distance_of_neighbours_tells_nothing(hundreds: torch.Tensor, position: int) -> None:
    distances = (hundreds[:, position + 1] - hundreds[:, position]) % 100
    counts = distances.bincount(minlength=100)
    assert int(counts[0]) == 0
    assert likelihood(counts[1:]) > MOST_UNLIKELY


@pytest.mark.parametrize("position", [0, 9, 50, 99])
def test_an_epoch_tells_nothing_of_the_next_one(hundreds: torch.Tensor, position: int) -> None:
    distances = (hundreds[1:, position] - hundreds[:-1, position]) % 100
    assert likelihood(distances.bincount(minlength=100)) > MOST_UNLIKELY


# Of 4,096 numbers or more, the network has fewer rounds.
@pytest.mark.parametrize("size", [4096, 5000, 10**6, 10**9])
def test_nor_does_it_among_many(size: int) -> None:
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
