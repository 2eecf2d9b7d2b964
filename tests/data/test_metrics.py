# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from accelfn import Context, DataLoaderConfiguration
from accelfn.data import (
    MicroBatch,
    Order,
    gather_for_metrics,
    microbatches,
    plan_epoch,
    plan_microbatch,
    prepare_data_loader,
)
from accelfn.errors import MismatchError
from accelfn.testing import run_ranks
from tests.data.streams import make_source


def numbers(num: int, batch_size: int | None = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(num), batch_size=batch_size, **options)  # pyright: ignore[reportArgumentType]


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


@st.composite
def options(draw: st.DrawFn) -> dict[str, Any]:
    world = draw(st.integers(1, 7))
    split = draw(st.booleans())
    return {
        "world": world,
        "num": draw(st.integers(0, 60)),
        "batch_size": draw(st.integers(1, 4)) * (world if split else 1),
        "split": split,
        "even": draw(st.booleans()),
        "drop_last": draw(st.booleans()),
        "shuffle": draw(st.booleans()),
        "uneven": draw(st.sampled_from(["pad", "stop_first"])),
    }


@given(options(), st.integers(1, 4))
def test_gathering_is_exact_for_every_option(drawn: dict[str, Any], steps: int) -> None:
    world, num = drawn["world"], drawn["num"]

    def run(ctx: Context) -> tuple[list[int], list[str], list[bool]]:
        source = numbers(
            num, drawn["batch_size"], shuffle=drawn["shuffle"] and num > 0, drop_last=drawn["drop_last"]
        )
        rows: list[int] = []
        names: list[str] = []
        syncs: list[bool] = []
        for batch, micro in microbatches(ctx, prepare_data_loader(ctx, source), uneven):
            tree: dict[str, torch.Tensor] = {
                "x": batch,
                "loss": batch.sum(),
                "twice": batch * 2,
                "classes": torch.ones(100),
            }
            found = gather_for_metrics(ctx, tree, micro)
            rows += found["x"].tolist()
            assert found["twice"].tolist() == [2 * row for row in found["x"].tolist()]
            assert found["loss"].shape == (world,)
            assert found["classes"].shape == (100 * world,)
            names += gather_for_metrics(ctx, [str(int(one)) for one in batch], micro)
            syncs.append(micro.sync)
        return rows, names, syncs

    order = list(range(num))
    if drawn["shuffle"] and num:
        order = (
            Order(kind="shuffled", num_samples=num, num_items=num, seed=5).at(0, torch.arange(num)).tolist()
        )
    plan = plan_epoch(
        num,
        drawn["batch_size"],
        world,
        split_batches=drawn["split"],
        even_batches=drawn["even"],
        drop_last=drawn["drop_last"],
    )
    counts = [plan.num_batches(rank) for rank in range(world)]
    # A rank without any batch has none to repeat.
    uneven: Any = "stop_first" if min(counts) == 0 < max(counts) else drawn["uneven"]
    num_steps = max(counts) if uneven == "pad" else min(counts)
    expected = order[: plan.consumed(num_steps - 1) if num_steps else 0]
    config = DataLoaderConfiguration(data_seed=5, split_batches=drawn["split"], even_batches=drawn["even"])
    for rows, names, syncs in run_ranks(
        run, world, dataloader_config=config, gradient_accumulation_steps=steps
    ):
        assert rows == expected
        assert names == [str(one) for one in expected]
        assert syncs == [(step + 1) % steps == 0 or step + 1 == num_steps for step in range(num_steps)]


@st.composite
def parts(draw: st.DrawFn) -> list[list[torch.Tensor]]:
    """Batches of each rank, as many and as long as they happen to be."""
    world = draw(st.integers(1, 5))
    sizes = draw(
        st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=7), min_size=world, max_size=world)
    )
    batches: list[list[torch.Tensor]] = []
    start = 0
    for lengths in sizes:
        batches.append([])
        for length in lengths:
            batches[-1].append(torch.arange(start, start + length))
            start += length
    return batches


@pytest.mark.parametrize("kind", ["list", "generator", "loader"])
@given(parts(), st.sampled_from(["pad", "stop_first"]), st.integers(1, 4))
def test_data_of_their_own_is_gathered_as_the_ranks_have_it(
    kind: str, batches: list[list[torch.Tensor]], uneven: Any, steps: int
) -> None:
    counts = list(map(len, batches))
    number = max(counts) if uneven == "pad" else min(counts)
    expected = [
        row
        for step in range(number)
        for own in batches
        for one in own[step : step + 1]
        for row in one.tolist()
    ]

    def run(ctx: Context) -> tuple[list[int], list[str], list[MicroBatch]]:
        reads: list[int] = []
        source = make_source(kind, batches[ctx.rank], reads)
        if kind == "loader":
            source = prepare_data_loader(ctx, source, "already_sharded")
        rows: list[int] = []
        names: list[str] = []
        micros: list[MicroBatch] = []
        for batch, micro in microbatches(ctx, source, uneven):
            if kind == "generator":
                # A window is read before its first batch is handed out, and nothing behind it.
                assert len(reads) <= micro.index - micro.place + steps
            found = gather_for_metrics(ctx, {"x": batch, "loss": batch.sum()}, micro)
            rows += found["x"].tolist()
            assert found["loss"].shape == (len(batches),)
            names += gather_for_metrics(ctx, [str(int(one)) for one in batch], micro)
            micros.append(micro)
        return rows, names, micros

    for rows, names, micros in run_ranks(run, len(batches), gradient_accumulation_steps=steps):
        assert rows == expected
        assert names == [str(one) for one in expected]
        planned = [plan_microbatch(index, 0, number, steps) for index in range(number)]
        for micro, meant in zip(micros, planned, strict=True):
            assert (micro.index, micro.place, micro.window, micro.sync) == (
                meant.index,
                meant.place,
                meant.window,
                meant.sync,
            )
            assert micro.is_last in (meant.is_last, None)
            if kind != "generator":
                assert micro.is_last is meant.is_last


def test_padding_with_a_batch_of_no_known_rows_gathers_no_object_twice() -> None:
    def run(ctx: Context) -> list[list[str]]:
        texts = [[f"rank {ctx.rank} batch {number}"] for number in range(2 - ctx.rank)]
        return [
            gather_for_metrics(ctx, [text.upper() for text in batch], micro)
            for batch, micro in microbatches(ctx, texts, "pad")
        ]

    assert run_ranks(run, 2)[1] == [["RANK 0 BATCH 0", "RANK 1 BATCH 0"], ["RANK 0 BATCH 1"]]


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


def leaving_out(samples: list[int]) -> torch.Tensor:
    return torch.tensor([one for one in samples if one != 2])


@pytest.mark.parametrize("dispatched", [False, True])
def test_rows_that_a_collate_function_has_left_out_are_told_with_those_that_were_planned(
    dispatched: bool,
) -> None:
    def run(ctx: Context) -> str:
        source = DataLoader(cast("Any", list(range(8))), batch_size=2, collate_fn=leaving_out)
        loader = prepare_data_loader(ctx, source)
        for batch, micro in microbatches(ctx, loader):
            gather_for_metrics(ctx, batch.sum(), micro)
            with pytest.raises(MismatchError) as caught:
                gather_for_metrics(ctx, {"of each": batch}, micro)
            return str(caught.value)
        raise AssertionError("no batch")

    config = DataLoaderConfiguration(dispatch_batches=dispatched)
    first, second = run_ranks(run, 2, dataloader_config=config)
    assert first == second
    assert "tree['of each']  int64 (1,)  int64 (2,)" in first
    assert "the longest batch of this step has 2 rows. If collate_fn leaves samples out" in first


def test_of_rows_that_nobody_has_planned_nothing_is_said() -> None:
    def run(ctx: Context) -> str:
        (_, micro), *_ = microbatches(ctx, [torch.zeros(2)])
        with pytest.raises(MismatchError) as caught:
            gather_for_metrics(ctx, torch.zeros(3 + ctx.rank), micro)
        return str(caught.value)

    assert all("collate_fn" not in text for text in run_ranks(run, 2))
