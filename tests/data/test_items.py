# torch leaves DataLoader and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, SequentialSampler

from accelfn import Context, DataLoaderConfiguration
from accelfn.data import gather_for_metrics, microbatches, next_plan, plan_epoch, prepare_data_loader
from accelfn.data.loader import passes_of
from accelfn.errors import ConfigurationError, MismatchError
from accelfn.testing import run_ranks


class Batches(Dataset[torch.Tensor]):
    """Item ``k`` is a batch of ``k + 1`` rows."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> torch.Tensor:
        assert isinstance(index, int)
        return torch.full((index + 1,), index)


class Bulk(Dataset[torch.Tensor]):
    """Is asked for all samples of a batch at once."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: list[int]) -> torch.Tensor:
        assert type(index) is list
        return torch.tensor(index)


def items(number: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Batches(number), batch_size=None, **options)


@given(st.integers(0, 20), st.integers(1, 5), st.sampled_from(["pad", "stop_first", "error"]))
def test_each_rank_gets_one_item_a_step_and_gathering_gives_all_rows_once(
    number: int, size: int, uneven: Literal["pad", "stop_first", "error"]
) -> None:
    def run(ctx: Context) -> tuple[list[int], list[int]]:
        own: list[int] = []
        found: list[int] = []
        for batch, micro in microbatches(ctx, prepare_data_loader(ctx, items(number)), uneven):
            own.append(len(batch) - 1)
            found += gather_for_metrics(ctx, batch, micro).tolist()
        return own, found

    config = DataLoaderConfiguration(even_batches=uneven == "error")
    plan = plan_epoch(number, 1, size, even_batches=uneven == "error")
    if uneven == "pad" and 0 < number < size:
        with pytest.raises(ValueError, match="has none at all"):
            run_ranks(run, size, dataloader_config=config)
        return
    shared = number // size * size if uneven == "stop_first" else number
    for rank, (own, found) in enumerate(run_ranks(run, size, dataloader_config=config)):
        planned = [plan.positions(step, rank)[0] for step in range(plan.num_batches(rank))]
        if uneven != "pad":
            assert own == planned[: len(own)]
        assert found == [index for index in range(shared) for _ in range(index + 1)]


def test_a_shuffled_order_is_the_same_for_any_number_of_ranks_and_workers() -> None:
    def run(ctx: Context) -> list[int]:
        source = items(6, shuffle=True, num_workers=ctx.num_processes % 2)
        return [len(batch) for batch in prepare_data_loader(ctx, source)]

    config = DataLoaderConfiguration(data_seed=1)
    (alone,) = run_ranks(run, 1, "processes", dataloader_config=config)
    assert sorted(alone) == [1, 2, 3, 4, 5, 6] != alone
    for size in (2, 3):
        found = run_ranks(run, size, "processes" if size == 3 else "memory", dataloader_config=config)
        assert [number for step in zip(*found, strict=True) for number in step] == alone


def test_a_pass_goes_on_at_an_item() -> None:
    loader = prepare_data_loader(Context(), items(5))
    passes_of(loader).move_to(0, 3)
    assert [len(batch) for batch in loader] == [4, 5]
    assert len(loader) == 5
    plan = next_plan(loader)
    assert plan is not None
    assert plan.num_samples == 5


def test_a_restored_seed_brings_its_order() -> None:
    def order(data_seed: int, seed: int | None) -> list[int]:
        ctx = Context().replace(dataloader_config=DataLoaderConfiguration(data_seed=data_seed))
        loader = prepare_data_loader(ctx, items(8, shuffle=True))
        passes_of(loader).move_to(0, 0, seed)
        return [len(batch) for batch in loader]

    assert order(1, None) == order(2, 1) != order(2, None)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_sampler_in_the_samplers_place_asks_for_lists(num_workers: int) -> None:
    def run(ctx: Context) -> tuple[list[list[int]], list[int]]:
        sampler = BatchSampler(SequentialSampler(range(11)), 2, drop_last=False)
        source = DataLoader(Bulk(), batch_size=None, sampler=sampler, num_workers=num_workers)
        own: list[list[int]] = []
        found: list[int] = []
        for batch, micro in microbatches(ctx, prepare_data_loader(ctx, source)):
            own.append(batch.tolist())
            found += gather_for_metrics(ctx, batch, micro).tolist()
        return own, found

    (first, gathered), (second, _) = run_ranks(run, 2, "processes" if num_workers else "memory")
    assert first == [[0, 1], [4, 5], [8, 9]]
    assert second == [[2, 3], [6, 7], [10, 0]]
    assert gathered == list(range(11))


def test_the_seed_of_a_sampler_inside_of_a_batch_sampler_is_kept() -> None:
    def order(seed: int) -> list[int]:
        sampler = RandomSampler(range(8), generator=torch.Generator().manual_seed(seed))
        source = DataLoader(range(8), batch_sampler=BatchSampler(sampler, 4, drop_last=False))  # pyright: ignore[reportArgumentType]
        return torch.cat(list(prepare_data_loader(Context(), source))).tolist()

    assert order(1) == order(1) != order(2)


def test_the_sampler_inside_of_a_batch_sampler_says_the_order() -> None:
    class Backwards(SequentialSampler):
        def __iter__(self) -> Any:
            return reversed(range(5))

    sampler = BatchSampler(Backwards(range(5)), 2, drop_last=False)
    source = DataLoader(range(5), batch_sampler=sampler)  # pyright: ignore[reportArgumentType]
    assert [batch.tolist() for batch in prepare_data_loader(Context(), source)] == [[4, 3], [2, 1], [0]]


def test_workers_draw_apart_for_each_item() -> None:
    class Drawn(Batches):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.rand(1)

    def run(num_workers: int) -> list[float]:
        ctx = Context().replace(dataloader_config=DataLoaderConfiguration(data_seed=1))
        source = DataLoader(Drawn(6), batch_size=None, num_workers=num_workers)
        return torch.cat(list(prepare_data_loader(ctx, source))).tolist()

    assert run(1) == run(2)
    assert len(set(run(1))) == 6


def test_what_is_no_batch_can_not_be_split_and_ranks_read_the_same() -> None:
    ctx = Context().replace(dataloader_config=DataLoaderConfiguration(split_batches=True))
    with pytest.raises(ConfigurationError, match="batch_size=None"):
        prepare_data_loader(ctx, items(4))
    with pytest.raises(ConfigurationError, match="by its indices"):
        prepare_data_loader(Context(), items(4), "by_source")

    def prepare(ctx: Context) -> None:
        with pytest.raises(MismatchError):
            prepare_data_loader(ctx, items(4 + ctx.rank))

    run_ranks(prepare, 2)
