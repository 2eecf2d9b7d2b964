# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    WeightedRandomSampler,
)

from accelfn import Context, DataLoaderConfiguration
from accelfn.data import order_of
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


def shuffling(num: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(num), shuffle=True, **options)  # pyright: ignore[reportArgumentType]


def order(ctx: Context, loader: DataLoader[Any], epoch: int = 0) -> list[int]:
    return list(order_of(ctx, loader).indices(ctx, epoch))


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_a_shuffled_order_is_a_function_of_seed_and_epoch_alone(world: int, epoch: int) -> None:
    ranks = run_ranks(
        lambda ctx: order(ctx, shuffling(8), epoch),
        world,
        dataloader_config=DataLoaderConfiguration(data_seed=5),
    )
    expected = torch.randperm(8, generator=torch.Generator().manual_seed(5 + epoch)).tolist()
    assert ranks == [expected] * world
    if epoch == 0:
        assert expected == [3, 6, 0, 2, 1, 4, 5, 7]


def test_the_seed_is_that_of_the_samplers_generator_on_rank_0() -> None:
    def run(ctx: Context) -> list[int]:
        generator = torch.Generator().manual_seed(5 + 100 * ctx.rank)
        return order(ctx, shuffling(8, generator=generator))

    assert run_ranks(run, 2) == [[3, 6, 0, 2, 1, 4, 5, 7]] * 2


def test_samples_may_be_drawn_with_replacement_or_more_often_than_they_are() -> None:
    items = torch.arange(3)
    ctx = Context().replace(dataloader_config=DataLoaderConfiguration(data_seed=1))
    drawn = order(ctx, DataLoader(items, sampler=RandomSampler(items, replacement=True, num_samples=50)))  # pyright: ignore[reportArgumentType]
    assert len(drawn) == 50
    assert set(drawn) == {0, 1, 2}
    longer = order(ctx, DataLoader(items, sampler=RandomSampler(items, num_samples=7)))  # pyright: ignore[reportArgumentType]
    assert [sorted(longer[:3]), sorted(longer[3:6]), len(longer)] == [[0, 1, 2], [0, 1, 2], 7]


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_sampler_of_ones_own_is_followed_as_rank_0_draws_it(epoch: int) -> None:
    def run(ctx: Context) -> list[int]:
        sampler = Evens() if ctx.is_main_process else SequentialSamplerOfFour()
        return order(ctx, DataLoader(torch.arange(8), sampler=sampler), epoch)  # pyright: ignore[reportArgumentType]

    assert run_ranks(run, 3) == [[0, 2, 4, 6] if epoch == 0 else [6, 4, 2, 0]] * 3


class SequentialSamplerOfFour(SequentialSampler):
    """A kind of SequentialSampler with an order of its own, which must not be taken for one."""

    def __init__(self) -> None:
        super().__init__(range(4))

    def __iter__(self) -> Iterator[int]:
        return iter([3, 2, 1, 0])


def test_a_subclass_of_a_known_sampler_is_a_sampler_of_ones_own() -> None:
    loader = DataLoader(torch.arange(4), sampler=SequentialSamplerOfFour())  # pyright: ignore[reportArgumentType]
    assert order(Context(), loader) == [3, 2, 1, 0]


def test_a_weighted_sampler_is_drawn_once_for_all_ranks() -> None:
    def run(ctx: Context) -> list[int]:
        generator = torch.Generator().manual_seed(ctx.rank)
        sampler = WeightedRandomSampler([1.0] * 8, 6, generator=generator)
        return order(ctx, DataLoader(torch.arange(8), sampler=sampler))  # pyright: ignore[reportArgumentType]

    ranks = run_ranks(run, 2)
    assert ranks[0] == ranks[1]


def test_a_sampler_that_draws_another_number_than_it_says_is_refused_on_every_rank() -> None:
    loader = DataLoader(torch.arange(8), sampler=Evens(promised=5))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="Evens has a length of 5, and drew 4 samples"):
        run_ranks(lambda ctx: order(ctx, loader), 2)


def test_a_sampler_that_deals_out_between_ranks_is_refused() -> None:
    data = torch.arange(8)
    loader = DataLoader(data, sampler=DistributedSampler(data, num_replicas=2, rank=0))  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigurationError, match="already_sharded"):
        order_of(Context(), loader)
