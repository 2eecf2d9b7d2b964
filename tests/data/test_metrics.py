# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import accelfn as af
from accelfn import Context
from accelfn.data import plan_microbatch
from accelfn.errors import MismatchError
from accelfn.testing import run_ranks
from tests.data.cases import Case, cases
from tests.data.sources import Counting, make_source, numbers


@pytest.mark.parametrize("even", [True, False])
def test_another_loop_inside_changes_nothing_of_what_is_known_of_the_batch_outside(even: bool) -> None:
    def run(ctx: Context) -> list[int]:
        rows: list[int] = []
        for batch, micro in af.microbatches(ctx, af.prepare_data_loader(ctx, numbers(11)), "pad"):
            inner = af.prepare_data_loader(ctx, numbers(5))
            for other, its in af.microbatches(ctx, inner, "stop_first"):
                af.gather_for_metrics(ctx, other, its)
            rows += af.gather_for_metrics(ctx, batch, micro).tolist()
        return rows

    config = af.DataLoaderConfiguration(even_batches=even)
    assert run_ranks(run, 2, dataloader_config=config) == [list(range(11))] * 2


@pytest.mark.filterwarnings("ignore:each of . ranks reads the full stream")
@settings(max_examples=12)
@given(cases(), st.sampled_from(["pad", "stop_first"]), st.integers(2, 4))
def test_what_was_collected_over_a_pass_is_gathered_once(case: Case, uneven: Any, times: int) -> None:
    """At any batch: as a loop that is left has it, or one that ends."""
    world = case.size

    def run(ctx: Context) -> None:
        loader = af.prepare_data_loader(ctx, case.source(Counting(case.num)))
        rows: list[torch.Tensor] = []
        names: list[str] = []
        by_batch: list[int] = []
        by_rank: list[list[int]] = [[] for _ in range(world)]
        for batch, micro in af.microbatches(ctx, loader, uneven):
            tree = {"x": batch, "rank": torch.full((len(batch),), ctx.coordinate("dp")), "loss": batch.sum()}
            found = af.gather_for_metrics(ctx, tree, micro)
            by_batch += found["x"].tolist()
            for row, rank in zip(found["x"].tolist(), found["rank"].tolist(), strict=True):
                by_rank[rank].append(row)
            rows.append(batch)
            names += [str(int(row)) for row in batch]
            expected = [row for own in by_rank for row in own]
            # A list is joined as a tensor is, and both know what the other ranks have.
            collected: dict[str, Any] = {"x": torch.cat(rows), "names": names, "scalar": batch.sum()}
            collected["several"] = collected["x"].repeat_interleave(times)
            once = af.gather_for_metrics(ctx, collected, micro, of="pass")
            assert once["x"].tolist() == expected
            assert once["names"] == [str(row) for row in expected]
            assert once["scalar"].shape == (world,)
            assert once["several"].tolist() == once["x"].repeat_interleave(times).tolist()
            several = af.gather_for_metrics(ctx, batch.repeat_interleave(times), micro, of="batch")
            assert several.tolist() == found["x"].repeat_interleave(times).tolist()
        assert len(set(by_batch)) == len(by_batch)

    try:
        run_ranks(run, world * case.tensor, **case.options())
    except ValueError as error:
        if "a rank has no batch" not in str(error) or uneven != "pad":
            raise


def test_several_rows_for_each_sample_are_those_of_the_batch_with_any_batch() -> None:
    def run(ctx: Context) -> list[list[int]]:
        loader = af.prepare_data_loader(ctx, numbers(13))
        flat: list[int] = []
        names: list[str] = []
        lengths: list[int] = []
        for batch, micro in af.microbatches(ctx, loader):
            several = batch.repeat_interleave(4)
            flat += (found := af.gather_for_metrics(ctx, several, micro, of="batch")).tolist()
            lengths.append(len(found))
            names += af.gather_for_metrics(ctx, [str(int(row)) for row in several], micro, of="batch")
        assert names == [str(row) for row in flat]
        return [lengths, flat]

    expected = [[16, 16, 16, 4], [row for row in range(13) for _ in range(4)]]
    assert run_ranks(run, 2) == [expected] * 2


@pytest.mark.parametrize("before", [(), (2, 3, 2)])
def test_rows_of_a_batch_do_not_depend_on_earlier_calls(before: tuple[int, ...]) -> None:
    def run(ctx: Context) -> list[list[int]]:
        rows, micros = zip(*af.microbatches(ctx, af.prepare_data_loader(ctx, numbers(13))), strict=True)
        for batch, micro, times in zip(rows, micros, before, strict=False):
            af.gather_for_metrics(ctx, batch.repeat_interleave(times), micro)
        several = rows[3].repeat_interleave(4)  # as many as the pass has
        for ambiguous in (several, torch.cat(rows)):
            with pytest.raises(ValueError, match=r'collected over the pass, use of="pass"; .* of="batch"'):
                af.gather_for_metrics(ctx, ambiguous, micros[3])
        named = af.gather_for_metrics(ctx, several, micros[3], of="batch")
        return [named.tolist(), af.gather_for_metrics(ctx, torch.cat(rows), micros[3], of="pass").tolist()]

    collected = [0, 1, 4, 5, 8, 9, 12, 2, 3, 6, 7, 10, 11]
    assert run_ranks(run, 2) == [[[12] * 4, collected]] * 2


def test_rows_of_a_pass_are_told_to_be_gathered_so() -> None:
    def run(ctx: Context) -> str:
        loader = af.prepare_data_loader(ctx, numbers(9, 2))
        rows, micros = zip(*af.microbatches(ctx, loader, "pad"), strict=True)
        held = {"x": torch.cat(rows), "other": torch.zeros(7)}
        assert len(held["x"]) == 5 + ctx.rank
        with pytest.raises(ValueError, match=r"\[5, 6\] rows .* use of=\"pass\"") as told:
            af.gather_for_metrics(ctx, held, micros[-1])
        found = af.gather_for_metrics(ctx, held, micros[-1], of="pass")
        assert found["x"].tolist() == [0, 1, 4, 5, 8, 2, 3, 6, 7]
        assert len(found["other"]) == 14
        return str(told.value)

    config = af.DataLoaderConfiguration(even_batches=False)
    first, second = run_ranks(run, 2, dataloader_config=config)
    assert first == second


def test_rows_belong_to_a_batch_or_to_a_pass() -> None:
    ((batch, micro),) = list(af.microbatches(Context(), [torch.zeros(3)]))
    for function in (af.gather_for_metrics, af.data.gather_objects_for_metrics):
        with pytest.raises(ValueError, match=r'of must be "batch" or "pass", got \'epoch\''):
            cast("Any", function)(Context(), batch, micro, of="epoch")


def test_a_pass_that_goes_on_in_an_epoch_counts_its_own_rows() -> None:
    def run(ctx: Context) -> list[int]:
        loader, again = (af.prepare_data_loader(ctx, numbers(21, 2)) for _ in "ab")
        next(iter(loader))
        af.restore_loader(again, af.loader_state(loader))
        rows, micros = zip(*af.microbatches(ctx, again), strict=True)
        assert micros[-1].consumed == 21
        return sorted(af.gather_for_metrics(ctx, torch.cat(rows), micros[-1], of="pass").tolist())

    assert run_ranks(run, 2) == [list(range(4, 21))] * 2


def test_ranks_that_have_joined_unevenly_gather_their_passes() -> None:
    def run(ctx: Context) -> list[int]:
        loader = af.prepare_data_loader(ctx, numbers(9, 2))
        rows, micros = zip(*af.microbatches(ctx, loader, "join"), strict=True)
        assert len(rows) == 3 - ctx.rank
        return af.gather_for_metrics(ctx, torch.cat(rows), micros[-1], of="pass").tolist()

    config = af.DataLoaderConfiguration(even_batches=False)
    assert run_ranks(run, 2, dataloader_config=config) == [[0, 1, 4, 5, 8, 2, 3, 6, 7]] * 2


def test_a_tensor_is_not_of_the_batch_on_one_rank_and_of_none_on_another() -> None:
    def run(ctx: Context) -> list[int]:
        loader = af.prepare_data_loader(ctx, numbers(13, 8))
        ((batch, micro),) = list(af.microbatches(ctx, loader))
        assert len(batch) == (8, 5)[ctx.rank]
        # As many rows as the first rank has samples, on both.
        return [len(found) for found in af.gather_for_metrics(ctx, (torch.ones(8), batch), micro)]

    config = af.DataLoaderConfiguration(even_batches=False)
    assert run_ranks(run, 2, dataloader_config=config) == [[16, 13]] * 2


def test_tensors_and_objects_are_gathered_together() -> None:
    def run(ctx: Context) -> list[Any]:
        found: list[Any] = []
        for batch, micro in af.microbatches(ctx, af.prepare_data_loader(ctx, numbers(5))):
            texts = [str(int(row)) for row in batch]
            tensors = {"x": batch, "half": batch.bfloat16()}
            lists = {"texts": texts, "boxes": [[text] * int(text) for text in texts], "none": []}
            others = {
                "pair": (batch * 2, tuple(texts)),
                "nothing": None,
                "step": micro.index,
                "model": "tiny",
            }
            found.append(af.gather_for_metrics(ctx, {**tensors, **lists, **others}, micro))
        return found

    (first, last), other = run_ranks(run, 2)
    assert str(other) == str([first, last])
    assert first["texts"] == ["0", "1", "2", "3"]
    assert (last["half"].dtype, last["half"].tolist(), last["x"].tolist()) == (torch.bfloat16, [4.0], [4])
    assert (last["pair"][0].tolist(), last["pair"][1]) == ([8], ("4",))
    assert [last[name] for name in ("texts", "boxes", "none", "nothing")] == [["4"], [["4"] * 4], [], None]
    assert (last["step"], last["model"]) == ([1, 1], ["tiny", "tiny"])


def test_one_gather_of_the_tensors_and_one_exchange_beside_it() -> None:
    def run(ctx: Context) -> list[int]:
        call_log = ctx.collectives.call_log
        (batch, micro), *_ = af.microbatches(ctx, af.prepare_data_loader(ctx, numbers(5)))
        numbers_before = [call_log.number]
        for tree in ({"x": batch, "y": batch * 2.0, "z": batch.sum()}, {"x": batch, "s": ["a", "b"]}):
            af.gather_for_metrics(ctx, cast("Any", tree), micro)
            numbers_before.append(call_log.number)
        return [after - before for before, after in pairwise(numbers_before)]

    assert run_ranks(run, 2) == [[1, 2]] * 2


def test_objects_with_tensors_and_none_are_gathered_as_objects() -> None:
    def run(ctx: Context) -> list[Any]:
        ((batch, micro),) = list(af.microbatches(ctx, af.prepare_data_loader(ctx, numbers(3))))
        boxes = [{"box": torch.full((int(row),), ctx.rank)} for row in batch]
        by_rank: list[Any] = [None if ctx.rank else "a", (ctx.rank,), batch]
        gathered = [af.data.gather_objects_for_metrics(ctx, item, micro) for item in (boxes, *by_rank)]
        return [
            [list(row["box"].shape) for row in gathered[0]],
            *gathered[1:3],
            [t.tolist() for t in gathered[3]],
        ]

    assert run_ranks(run, 2) == [[[[0], [1], [2]], ["a", None], [(0,), (1,)], [[0, 1], [2, 0]]]] * 2


class Array:
    shape = (3,)


@pytest.mark.parametrize("world", [1, 2])
def test_an_array_that_is_no_tensor_is_refused(world: int) -> None:
    def run(ctx: Context) -> None:
        ((batch, micro),) = list(af.microbatches(ctx, [torch.zeros(3)]))
        af.gather_for_metrics(ctx, {"x": batch, "y": Array()}, micro)

    with pytest.raises(TypeError, match=r"tree\['y'\] is a Array of shape \(3,\).*torch.as_tensor"):
        run_ranks(run, world)


def test_ranks_with_other_trees_are_told_where_they_differ() -> None:
    def run(ctx: Context) -> str:
        ((batch, micro),) = list(af.microbatches(ctx, [torch.zeros(3)]))
        with pytest.raises(MismatchError) as caught:
            af.gather_for_metrics(ctx, {"x": batch, "y": ["a"] if ctx.rank else "a"}, micro)
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


@given(
    st.sampled_from(["list", "generator", "loader"]),
    parts(),
    st.sampled_from(["pad", "stop_first"]),
    st.integers(1, 4),
)
def test_data_of_their_own_is_gathered_as_the_ranks_have_it(
    kind: str, batches: list[list[torch.Tensor]], uneven: Any, steps: int
) -> None:
    counts = list(map(len, batches))
    number = max(counts) if uneven == "pad" else min(counts)
    by_step = [batch for step in range(number) for own in batches for batch in own[step : step + 1]]
    expected = [row for batch in by_step for row in batch.tolist()]

    def run(ctx: Context) -> tuple[list[int], list[str]]:
        reads: list[int] = []
        source = make_source(kind, batches[ctx.rank], reads)
        if kind == "loader":
            source = af.prepare_data_loader(ctx, source, "already_sharded")
        rows: list[int] = []
        names: list[str] = []
        collected: list[torch.Tensor] = []
        for index, (batch, micro) in enumerate(af.microbatches(ctx, source, uneven)):
            # A window of a generator is read before its first batch is handed out, and nothing behind it.
            assert len(reads) <= micro.index - micro.place + steps
            found = af.gather_for_metrics(ctx, {"x": batch, "loss": batch.sum()}, micro)
            rows += found["x"].tolist()
            assert found["loss"].shape == (len(batches),)
            names += af.gather_for_metrics(ctx, [str(int(row)) for row in batch], micro)
            collected.append(batch)
            once = af.gather_for_metrics(ctx, torch.cat(collected), micro, of="pass")
            assert sorted(once.tolist()) == sorted(rows)
            meant = plan_microbatch(index, 0, number, steps)
            assert micro[:5] == meant[:5]
            assert micro.is_last in ((meant.is_last, None) if kind == "generator" else (meant.is_last,))
        return rows, names

    found = run_ranks(run, len(batches), gradient_accumulation_steps=steps)
    assert found == [(expected, [str(row) for row in expected])] * len(batches)


def test_padding_with_a_batch_of_no_known_rows_gathers_no_object_twice() -> None:
    def run(ctx: Context) -> list[list[str]]:
        texts = [[f"rank {ctx.rank} batch {number}"] for number in range(2 - ctx.rank)]
        return [
            af.gather_for_metrics(ctx, [text.upper() for text in batch], micro)
            for batch, micro in af.microbatches(ctx, texts, "pad")
        ]

    assert run_ranks(run, 2)[1] == [["RANK 0 BATCH 0", "RANK 1 BATCH 0"], ["RANK 0 BATCH 1"]]


def test_rows_are_counted_by_the_plan_where_the_first_dim_is_something_else() -> None:
    def collate(samples: list[Any]) -> torch.Tensor:
        return torch.stack(samples).expand(7, -1)  # (time, batch)

    def run(ctx: Context) -> list[int]:
        loader = af.prepare_data_loader(ctx, numbers(5, collate_fn=collate))
        found: list[int] = []
        for batch, micro in af.microbatches(ctx, loader):
            found += af.gather_for_metrics(ctx, batch[0], micro).tolist()
        return found

    assert run_ranks(run, 2) == [[0, 1, 2, 3, 4]] * 2


def test_objects_that_are_not_one_for_each_row_are_all_kept() -> None:
    def run(ctx: Context) -> list[object]:
        loader = af.prepare_data_loader(ctx, numbers(1))
        ((_, micro),) = list(af.microbatches(ctx, loader))
        return cast("list[object]", af.gather_for_metrics(ctx, [f"rank {ctx.rank}"], micro))

    assert run_ranks(run, 2) == [["rank 0", "rank 1"]] * 2


def leaving_out(samples: list[int]) -> torch.Tensor:
    return torch.tensor([one for one in samples if one != 2])


@pytest.mark.parametrize("dispatched", [False, True])
def test_rows_that_collate_fn_has_left_out_are_told_with_those_that_were_planned(dispatched: bool) -> None:
    def run(ctx: Context) -> str:
        source = DataLoader(cast("Any", list(range(8))), batch_size=2, collate_fn=leaving_out)
        loader = af.prepare_data_loader(ctx, source)
        for batch, micro in af.microbatches(ctx, loader):
            af.gather_for_metrics(ctx, batch.sum(), micro)
            with pytest.raises(MismatchError) as caught:
                af.gather_for_metrics(ctx, {"of each": batch}, micro)
            return str(caught.value)
        raise AssertionError("no batch")

    config = af.DataLoaderConfiguration(dispatch_batches=dispatched)
    first, second = run_ranks(run, 2, dataloader_config=config)
    assert first == second
    assert "tree['of each']  int64 (1,)  int64 (2,)" in first
    assert "the longest batch of this step has 2 rows. If collate_fn drops samples" in first
