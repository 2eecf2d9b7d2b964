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
    gather_for_metrics,
    gather_objects_for_metrics,
    loader_state,
    microbatches,
    plan_microbatch,
    prepare_data_loader,
    restore_loader,
)
from accelfn.errors import MismatchError
from accelfn.testing import run_ranks
from tests.data.cases import Case, cases
from tests.data.sources import Counting, make_source, numbers


@pytest.mark.parametrize(("world", "even"), [(3, True), (2, False)])
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


@pytest.mark.filterwarnings("ignore:each of . ranks reads the full stream")
@given(cases(), st.sampled_from(["pad", "stop_first"]), st.integers(2, 4))
def test_what_was_collected_over_a_pass_is_gathered_once(case: Case, uneven: Any, times: int) -> None:
    """At any batch: as a loop that is left has it, or one that ends."""
    world = case.size

    def run(ctx: Context) -> None:
        loader = prepare_data_loader(ctx, case.source(Counting(case.num)))
        rows: list[torch.Tensor] = []
        names: list[str] = []
        by_batch: list[int] = []
        by_rank: list[list[int]] = [[] for _ in range(world)]
        for batch, micro in microbatches(ctx, loader, uneven):
            tree = {"x": batch, "rank": torch.full((len(batch),), ctx.rank), "loss": batch.sum()}
            found = gather_for_metrics(ctx, tree, micro)
            by_batch += found["x"].tolist()
            for row, rank in zip(found["x"].tolist(), found["rank"].tolist(), strict=True):
                by_rank[rank].append(row)
            rows.append(batch)
            names += [str(int(one)) for one in batch]
            expected = [row for own in by_rank for row in own]
            # A list is joined as a tensor is, and both know what the other ranks have.
            collected: dict[str, Any] = {"x": torch.cat(rows), "names": names, "scalar": batch.sum()}
            once = gather_for_metrics(ctx, collected, micro)
            assert once["x"].tolist() == expected
            assert once["names"] == [str(one) for one in expected]
            assert once["scalar"].shape == (world,)
            # More rows than any pass has; beside the batch, any multiple.
            many = gather_for_metrics(ctx, batch.repeat_interleave(97), micro)
            several = gather_for_metrics(ctx, (batch, batch.repeat_interleave(times)), micro)
            assert many.tolist() == found["x"].repeat_interleave(97).tolist()
            assert several[1].tolist() == several[0].repeat_interleave(times).tolist()
        assert len(set(by_batch)) == len(by_batch)

    try:
        run_ranks(run, world, **case.options())
    except ValueError as error:
        if "a rank has no batch" not in str(error) or uneven != "pad":
            raise


def test_a_pass_that_goes_on_in_an_epoch_counts_its_own_rows() -> None:
    def run(ctx: Context) -> list[int]:
        loader = prepare_data_loader(ctx, numbers(21, 2))
        batches = iter(loader)
        next(batches)
        state = loader_state(loader)
        again = prepare_data_loader(ctx, numbers(21, 2))
        restore_loader(again, state)
        rows, micros = zip(*microbatches(ctx, again), strict=True)
        assert micros[-1].consumed == 21
        return sorted(gather_for_metrics(ctx, torch.cat(rows), micros[-1]).tolist())

    assert run_ranks(run, 2) == [list(range(4, 21))] * 2


def test_ranks_that_have_joined_unevenly_gather_their_passes() -> None:
    def run(ctx: Context) -> list[int]:
        loader = prepare_data_loader(ctx, numbers(9, 2))
        rows, micros = zip(*microbatches(ctx, loader, "join"), strict=True)
        assert len(rows) == 3 - ctx.rank
        return gather_for_metrics(ctx, torch.cat(rows), micros[-1]).tolist()

    config = DataLoaderConfiguration(even_batches=False)
    assert run_ranks(run, 2, dataloader_config=config) == [[0, 1, 4, 5, 8, 2, 3, 6, 7]] * 2


def test_a_tensor_is_not_of_the_batch_on_one_rank_and_of_none_on_another() -> None:
    def run(ctx: Context) -> list[int]:
        loader = prepare_data_loader(ctx, numbers(13, 8))
        ((batch, micro),) = list(microbatches(ctx, loader))
        assert len(batch) == (8, 5)[ctx.rank]
        # As many rows as the first rank has samples, on both.
        return [len(found) for found in gather_for_metrics(ctx, (torch.ones(8), batch), micro)]

    config = DataLoaderConfiguration(even_batches=False)
    assert run_ranks(run, 2, dataloader_config=config) == [[16, 13]] * 2


@pytest.mark.parametrize("even", [True, False])
def test_a_loss_is_weighed_right_by_the_rows_or_by_its_weight(even: bool) -> None:
    def run(ctx: Context) -> list[float]:
        loader = prepare_data_loader(ctx, DataLoader(cast("Any", torch.arange(18.0)), batch_size=5))
        repeated: list[torch.Tensor] = []
        sums: list[torch.Tensor] = []
        micro = None
        for batch, micro in microbatches(ctx, loader):
            repeated.append(batch.mean().repeat(micro.num_rows))
            valid = batch[: micro.own_valid]
            parts = gather_for_metrics(ctx, (valid.sum(), torch.tensor(len(valid))), micro)
            sums.append(torch.stack([part.sum() for part in parts]))
        assert micro is not None
        losses = gather_for_metrics(ctx, torch.cat(repeated), micro)
        total, weight = torch.stack(sums).sum(0).tolist()
        return [len(losses), total / weight]

    config = DataLoaderConfiguration(even_batches=even)
    assert run_ranks(run, 2, dataloader_config=config) == [[18, 8.5]] * 2


def test_tensors_and_objects_are_gathered_together() -> None:
    def run(ctx: Context) -> list[Any]:
        loader = prepare_data_loader(ctx, numbers(5))
        found: list[Any] = []
        for batch, micro in microbatches(ctx, loader):
            texts = [str(int(one)) for one in batch]
            tree = {
                "x": batch,
                "texts": texts,
                "pair": (batch * 2, tuple(texts)),
                "nothing": None,
                "step": micro.index,
                "model": "tiny",
                "boxes": [[one] * int(one) for one in texts],
                "none": [],
                "half": batch.bfloat16(),
            }
            found.append(gather_for_metrics(ctx, tree, micro))
        return found

    (first, last), other = run_ranks(run, 2)
    assert str(other) == str([first, last])
    assert first["texts"] == ["0", "1", "2", "3"]
    assert last["x"].tolist() == [4]
    assert last["half"].dtype == torch.bfloat16
    assert last["half"].tolist() == [4.0]
    assert last["pair"][0].tolist() == [8]
    assert last["pair"][1] == ("4",)
    assert last["boxes"] == [["4"] * 4]
    assert {name: last[name] for name in ("texts", "nothing", "step", "model", "none")} == {
        "texts": ["4"],
        "nothing": None,
        "step": [1, 1],
        "model": ["tiny", "tiny"],
        "none": [],
    }


def test_one_gather_of_the_tensors_and_one_exchange_beside_it() -> None:
    def run(ctx: Context) -> list[list[int]]:
        call_log = ctx.collectives.call_log
        loader = prepare_data_loader(ctx, numbers(5))
        calls: list[list[int]] = []
        for batch, micro in microbatches(ctx, loader):
            calls.append([])
            for tree in (
                {"x": batch, "y": batch * 2.0, "z": batch.sum()},
                {"x": batch, "s": ["a", "b"]},
                batch.sum(),
            ):
                before = call_log.number
                gather_for_metrics(ctx, cast("Any", tree), micro)
                calls[-1].append(call_log.number - before)
        return calls

    assert run_ranks(run, 2) == [[[1, 2, 1], [2, 2, 1]]] * 2


def test_objects_with_tensors_and_none_are_gathered_as_objects() -> None:
    def run(ctx: Context) -> list[Any]:
        loader = prepare_data_loader(ctx, numbers(3))
        ((batch, micro),) = list(microbatches(ctx, loader))
        boxes = [{"box": torch.full((int(one),), ctx.rank)} for one in batch]
        by_rank: list[Any] = [None if ctx.rank else "a", batch, (ctx.rank,)]
        return [
            [list(one["box"].shape) for one in gather_objects_for_metrics(ctx, boxes, micro)],
            *(gather_objects_for_metrics(ctx, one, micro) for one in by_rank),
            gather_objects_for_metrics(ctx, boxes[:1], None),
        ]

    for boxes, first, second, third, last in run_ranks(run, 2):
        assert boxes == [[0], [1], [2]]
        assert (first, third) == (["a", None], [(0,), (1,)])
        assert [one.tolist() for one in second] == [[0, 1], [2, 0]]
        assert len(last) == 2


class Array:
    shape = (3,)


@pytest.mark.parametrize("world", [1, 2])
def test_an_array_that_is_no_tensor_is_refused(world: int) -> None:
    def run(ctx: Context) -> None:
        ((batch, micro),) = list(microbatches(ctx, [torch.zeros(3)]))
        gather_for_metrics(ctx, {"x": batch, "y": Array()}, micro)

    with pytest.raises(TypeError, match=r"tree\['y'\] is a Array of shape \(3,\).*torch.as_tensor"):
        run_ranks(run, world)


def test_ranks_with_other_trees_are_told_where_they_differ() -> None:
    def run(ctx: Context) -> str:
        ((batch, micro),) = list(microbatches(ctx, [torch.zeros(3)]))
        with pytest.raises(MismatchError) as caught:
            gather_for_metrics(ctx, {"x": batch, "y": ["a"] if ctx.rank else "a"}, micro)
        return str(caught.value)

    first, second = run_ranks(run, 2)
    assert first == second
    assert "tree['y']" in first
    assert "a list of objects" in first


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
        collected: list[torch.Tensor] = []
        for batch, micro in microbatches(ctx, source, uneven):
            if kind == "generator":
                # A window is read before its first batch is handed out, and nothing behind it.
                assert len(reads) <= micro.index - micro.place + steps
            found = gather_for_metrics(ctx, {"x": batch, "loss": batch.sum()}, micro)
            rows += found["x"].tolist()
            assert found["loss"].shape == (len(batches),)
            names += gather_for_metrics(ctx, [str(int(one)) for one in batch], micro)
            micros.append(micro)
            collected.append(batch)
            once = gather_for_metrics(ctx, torch.cat(collected), micro)
            assert sorted(once.tolist()) == sorted(rows)
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
    assert "the longest batch of this step has 2 rows. If collate_fn drops samples" in first


def test_of_rows_that_nobody_has_planned_nothing_is_said() -> None:
    def run(ctx: Context) -> str:
        (_, micro), *_ = microbatches(ctx, [torch.zeros(2)])
        with pytest.raises(MismatchError) as caught:
            gather_for_metrics(ctx, torch.zeros(3 + ctx.rank), micro)
        return str(caught.value)

    assert all("collate_fn" not in text for text in run_ranks(run, 2))
