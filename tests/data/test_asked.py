# torch leaves DataLoader and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler

from accelfn import DataLoaderConfiguration
from accelfn.data import plan_epoch
from accelfn.data.asked import BatchSamplerSpec, SamplerSpec, batch_sampler_of, read_asked, sampler_of
from accelfn.errors import ConfigurationError

PLAIN = DataLoaderConfiguration()


class Listed(Sampler[Any]):
    """Gives what it was made with; knows a batch size where it was told one."""

    def __init__(self, given: list[Any], batch_size: Any = None, says: int | None = None) -> None:
        self.given = given
        self.batch_size = batch_size
        self.says = len(given) if says is None else says

    def __iter__(self) -> Iterator[Any]:
        return iter(self.given)

    def __len__(self) -> int:
        return self.says


def data(num: int) -> Any:
    return torch.arange(num)


def batches(sampler: Listed, size: int, **options: bool) -> BatchSamplerSpec:
    asked = read_asked(
        DataLoaderConfiguration(**options),  # pyright: ignore[reportArgumentType]
        size,
        DataLoader(data(99), batch_sampler=sampler),
    )
    assert isinstance(asked, BatchSamplerSpec)
    return asked


def samples(source: DataLoader[Any], size: int = 1) -> SamplerSpec:
    asked = read_asked(PLAIN, size, source)
    assert isinstance(asked, SamplerSpec)
    return asked


@given(st.integers(0, 40), st.integers(1, 5), st.integers(1, 4), st.booleans(), st.integers(0, 40))
def test_samples_are_planned_as_an_epoch(num: int, rows: int, size: int, drop_last: bool, start: int) -> None:
    asked = samples(DataLoader(data(num), batch_size=rows, drop_last=drop_last), size)
    start = min(start, num)
    assert asked.plan(start) == plan_epoch(num, rows, size, drop_last=drop_last, start=start)
    assert asked.batch_size == rows * size
    assert asked.what == repr(asked.plan(0))


def test_items_are_batches_of_one_without_a_batch_size() -> None:
    asked = samples(DataLoader(data(7), batch_size=None, shuffle=True), 2)
    assert asked.are_items
    assert asked.batch_size is None
    assert asked.plan(2) == plan_epoch(7, 1, 2, start=2)
    assert asked.what == f"{asked.order}, each a batch"
    with pytest.raises(ConfigurationError, match="batch_size=None"):
        read_asked(DataLoaderConfiguration(split_batches=True), 2, DataLoader(data(7), batch_size=None))


def test_a_sampler_that_draws_more_or_less_than_its_length_is_refused() -> None:
    asked = samples(DataLoader(data(9), sampler=Listed([3, 1, 2])))
    assert asked.take(0, 0, [3, 1, 2])(torch.arange(3)) == [3, 1, 2]
    with pytest.raises(ValueError, match="Listed has a length of 3, and drew 5 samples"):
        asked.take(0, 2, [3, 1, 2, 0, 0])
    # Of an order that is computed nothing is drawn.
    shuffled = samples(DataLoader(data(9), shuffle=True))
    assert shuffled.sampler is None
    assert shuffled.take(5, 1)(torch.arange(9)) == shuffled.order.taker(5, 1)(torch.arange(9))


@given(st.lists(st.integers(1, 4), max_size=7), st.integers(1, 4))
def test_batches_of_the_named_size_are_samples(sizes: list[int], named: int) -> None:
    drawn = [[0] * size for size in sizes]
    alike = all(size == named for size in sizes[:-1]) and all(size <= named for size in sizes[-1:])
    assert batches(Listed(drawn, named), 2).are_samples(drawn) == alike
    assert not batches(Listed(drawn), 2).are_samples(drawn)


@given(st.lists(st.integers(1, 4), max_size=7), st.integers(1, 3), st.integers(0, 28), st.integers(0, 4))
def test_whole_batches_go_on_behind_those_that_are_read(
    lengths: list[int], size: int, start: int, num_steps: int
) -> None:
    asked = batches(Listed([[0] * length for length in lengths]), size)
    plan = asked.plan_batches(lengths, start, num_steps)
    read = sum(end <= start for end in accumulate(lengths))
    left_out = min(len(lengths), read + num_steps * size)
    assert plan == plan_epoch(len(lengths), 1, size, start=left_out)
    assert asked.count(0, 0, True) == plan_epoch(len(lengths), 1, size).num_batches(0)
    assert asked.count(1, 0, True) is None


def test_what_a_batch_sampler_names_is_its_batch_size() -> None:
    asked = batches(Listed([[0, 1]], 4), 2, split_batches=True)
    assert (asked.named, asked.batch_size, asked.count(0, 1, True)) == (4, 4, 1)
    assert batches(Listed([[0, 1]], 4), 2).batch_size == 8
    assert batches(Listed([[0, 1]]), 2).batch_size is None
    with pytest.raises(ConfigurationError, match="divisible"):
        batches(Listed([[0, 1, 2]], 3), 2, split_batches=True)


def test_the_samplers_of_a_loader_are_those_that_are_asked() -> None:
    own = RandomSampler(data(4))
    inner = BatchSampler(SequentialSampler(data(4)), 2, False)
    assert sampler_of(DataLoader(data(4), sampler=own)) is own
    assert sampler_of(DataLoader(data(4), batch_sampler=inner)) is inner.sampler
    assert batch_sampler_of(DataLoader(data(4), batch_size=None)) is None
    assert batch_sampler_of(DataLoader(data(4), batch_size=None, sampler=inner)) is inner
