# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from accelfn import Context, DataLoaderConfiguration, GradientAccumulationPlugin
from accelfn.data import gather_for_metrics, microbatches, plan_microbatch, prepare_data_loader
from accelfn.errors import NotAvailableError, UnevenDataError
from accelfn.testing import run_ranks


def numbers(num: int, batch_size: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(num), batch_size=batch_size, **options)  # pyright: ignore[reportArgumentType]


@given(st.integers(1, 40), st.integers(1, 7))
def test_windows_cover_an_epoch_and_know_their_true_size(num_batches: int, num_steps: int) -> None:
    micros = [plan_microbatch(index, 0, num_batches, num_steps) for index in range(num_batches)]
    ends = [micro.index for micro in micros if micro.sync]
    assert ends[-1] == num_batches - 1
    start = 0
    for end in ends:
        window = micros[start : end + 1]
        assert [micro.place for micro in window] == list(range(len(window)))
        assert {micro.window for micro in window} == {len(window)}
        assert len(window) == num_steps or end == num_batches - 1
        start = end + 1
    assert [micro.is_last for micro in micros] == [False] * (num_batches - 1) + [True]


def test_windows_go_on_into_the_next_epoch_where_the_data_does_not_close_them() -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    ctx = Context().replace(gradient_accumulation_plugin=plugin)
    loader = prepare_data_loader(ctx, numbers(5, 1))
    syncs = [[micro.sync for _, micro in microbatches(ctx, loader)] for _ in range(2)]
    assert syncs == [[False, True, False, True, False], [True, False, True, False, True]]


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("even", [True, False])
def test_gathering_over_an_epoch_gives_exactly_the_dataset(world: int, even: bool) -> None:
    def run(ctx: Context) -> tuple[list[int], list[str], list[int]]:
        loader = prepare_data_loader(ctx, numbers(world * 6 - 1))
        rows: list[int] = []
        names: list[str] = []
        scalars: list[int] = []
        for batch, micro in microbatches(ctx, loader):
            # Another loop inside must not change what is known of the batch outside.
            inner = prepare_data_loader(ctx, numbers(2 * world + 1))
            for other, its in microbatches(ctx, inner, "stop_first"):
                gather_for_metrics(ctx, other, its)
            found = gather_for_metrics(ctx, {"x": batch, "loss": batch.sum()}, micro)
            rows += found["x"].tolist()
            scalars.append(len(found["loss"]))
            names += gather_for_metrics(ctx, [str(int(one)) for one in batch], micro)
        return rows, names, scalars

    expected = list(range(world * 6 - 1))
    for rows, names, scalars in run_ranks(
        run, world, dataloader_config=DataLoaderConfiguration(even_batches=even)
    ):
        assert rows == expected
        assert names == [str(one) for one in expected]
        assert scalars == [world] * 3


@given(st.integers(1, 3), st.integers(0, 25), st.integers(1, 4))
def test_gathering_is_exact_for_any_length(world: int, num: int, batch_size: int) -> None:
    def run(ctx: Context) -> list[int]:
        loader = prepare_data_loader(ctx, numbers(num, batch_size, shuffle=True) if num else numbers(num))
        found: list[int] = []
        for batch, micro in microbatches(ctx, loader):
            found += gather_for_metrics(ctx, batch, micro).tolist()
        return found

    for found in run_ranks(run, world):
        assert sorted(found) == list(range(num))


def test_rows_are_counted_by_the_plan_where_the_first_dim_is_something_else() -> None:
    def collate(samples: list[Any]) -> torch.Tensor:
        return torch.stack(samples).expand(7, -1)  # (time, batch)

    def run(ctx: Context) -> list[int]:
        loader = prepare_data_loader(ctx, numbers(5, collate_fn=collate))
        found: list[int] = []
        for batch, micro in microbatches(ctx, loader):
            found += gather_for_metrics(ctx, batch[0], micro).tolist()
        return found

    assert run_ranks(run, 2) == [[0, 1, 2, 3, 4]] * 2


def test_objects_that_are_not_one_for_each_row_are_all_kept() -> None:
    def run(ctx: Context) -> list[object]:
        loader = prepare_data_loader(ctx, numbers(1))
        ((_, micro),) = list(microbatches(ctx, loader))
        return cast("list[object]", gather_for_metrics(ctx, [f"rank {ctx.rank}"], micro))

    assert run_ranks(run, 2) == [["rank 0", "rank 1"]] * 2


def test_uneven_ranks_are_an_error_that_names_the_counts() -> None:
    def run(ctx: Context) -> None:
        next(microbatches(ctx, prepare_data_loader(ctx, numbers(9))))

    with pytest.raises(UnevenDataError, match="different numbers of batches: 3, 2 by rank"):
        run_ranks(run, 2, dataloader_config=DataLoaderConfiguration(even_batches=False))


def test_ranks_with_unequal_data_of_their_own_are_an_error_too() -> None:
    def run(ctx: Context) -> None:
        own = prepare_data_loader(ctx, numbers(4 + 2 * ctx.rank), "already_sharded")
        next(microbatches(ctx, own))

    with pytest.raises(UnevenDataError, match="2, 3 by rank"):
        run_ranks(run, 2)


@pytest.mark.parametrize("num", [1, 9])
def test_stopping_at_the_first_keeps_all_ranks_in_one_epoch(num: int) -> None:
    def run(ctx: Context) -> tuple[int, list[int]]:
        loader = prepare_data_loader(ctx, numbers(num, shuffle=True))
        for _ in range(2):
            micros = [micro for _, micro in microbatches(ctx, loader, "stop_first")]
            assert all(micro.is_last == (micro is micros[-1]) for micro in micros)
        return loader.epoch, list(next(iter(loader), torch.empty(0)).shape)

    config = DataLoaderConfiguration(even_batches=False)
    assert [epoch for epoch, _ in run_ranks(run, 2, dataloader_config=config)] == [2, 2]


def test_any_sized_iterable_of_trees_is_a_loader() -> None:
    batches = [{"x": torch.zeros(3)}, {"x": torch.zeros(1)}]
    micros = [micro for _, micro in microbatches(Context(), batches)]
    assert [(micro.num_rows, micro.num_valid, micro.is_last) for micro in micros] == [
        (3, None, False),
        (1, None, True),
    ]
    assert next(microbatches(Context(), ["text"]))[1].num_rows is None


def test_a_loader_without_length_is_refused() -> None:
    with pytest.raises(TypeError, match="must have a length, got generator"):
        microbatches(Context(), (one for one in [torch.zeros(1)]))


def test_policies_are_checked_at_the_call() -> None:
    with pytest.raises(ValueError, match="'never'"):
        microbatches(Context(), [], cast("Any", "never"))
    with pytest.raises(NotAvailableError, match="pad"):
        microbatches(Context(), [], "pad")
