# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from accelfn import Context, DataLoaderConfiguration, GradientAccumulationPlugin
from accelfn.data import (
    MicroBatch,
    Order,
    gather_for_metrics,
    microbatches,
    plan_epoch,
    plan_microbatch,
    prepare_data_loader,
)
from accelfn.errors import ConfigurationError, UnevenDataError
from accelfn.testing import run_ranks
from tests.data.streams import Numbers, Shards


def numbers(num: int, batch_size: int | None = 2, **options: Any) -> DataLoader[Any]:
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


def make_source(kind: str, batches: list[torch.Tensor], reads: list[int]) -> Any:
    def read() -> Iterator[torch.Tensor]:
        for batch in batches:
            reads.append(len(reads))
            yield batch

    if kind == "generator":
        return read()
    return batches if kind == "list" else own_loader(batches)


def own_loader(batches: list[torch.Tensor]) -> DataLoader[Any]:
    """A loader that gives these batches."""
    items = [row for batch in batches for row in batch]
    ends = [sum(map(len, batches[: number + 1])) for number in range(len(batches))]
    indices = [list(range(end - len(batch), end)) for end, batch in zip(ends, batches, strict=True)]
    return DataLoader(cast("Any", items), batch_sampler=indices)


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


def test_a_batch_of_a_source_without_length_is_handed_out_before_the_next_one_is_read() -> None:
    def run(ctx: Context) -> list[tuple[int, int]]:
        reads: list[int] = []
        source = make_source("generator", [torch.zeros(1)] * 4, reads)
        return [(micro.index, len(reads)) for _, micro in microbatches(ctx, source)]

    for world in (1, 2):
        assert run_ranks(run, world) == [[(0, 1), (1, 2), (2, 3), (3, 4)]] * world


def test_lastness_is_told_where_it_is_known() -> None:
    def lastness(num: int, steps: int) -> list[bool | None]:
        ctx = Context().replace(gradient_accumulation_steps=steps)
        source = (one for one in [torch.zeros(1)] * num)
        return [micro.is_last for _, micro in microbatches(ctx, source)]

    assert lastness(3, 1) == [None, None, None]
    assert lastness(3, 2) == [False, None, True]
    assert lastness(4, 2) == [False, None, False, None]
    assert lastness(0, 2) == []


def test_windows_that_go_on_into_the_next_epoch_need_a_length() -> None:
    plugin = GradientAccumulationPlugin(num_steps=2, sync_with_dataloader=False)
    ctx = Context().replace(gradient_accumulation_plugin=plugin)
    with pytest.raises(ConfigurationError, match="windows of 2 batches"):
        next(microbatches(ctx, (one for one in [torch.zeros(1)])))


# Of a rank that has more than its window, what it has read is known, and not what follows.
@pytest.mark.parametrize(("steps", "counts"), [(1, (2, 3, 3)), (2, (2, 3, 4)), (3, (2, 3, 3))])
def test_ranks_that_run_out_without_a_length_are_told_the_counts(steps: int, counts: tuple[int, ...]) -> None:
    def run(ctx: Context) -> tuple[str, tuple[int, ...]]:
        source = (one for one in [torch.zeros(1)] * (2 + ctx.rank))
        with pytest.raises(UnevenDataError) as caught:
            list(microbatches(ctx, source))
        return str(caught.value), tuple(caught.value.counts)

    found = run_ranks(run, 3, gradient_accumulation_steps=steps)
    assert found == [found[0]] * 3
    assert found[0][1] == counts
    assert ", ".join(map(str, counts)) in found[0][0]


@pytest.mark.parametrize("kind", ["list", "generator", "loader", "shared"])
def test_a_rank_with_nothing_to_repeat_is_every_ranks_error(kind: str) -> None:
    def run(ctx: Context) -> str:
        if kind == "shared":
            source: Any = prepare_data_loader(ctx, numbers(3))
        else:
            source = make_source(kind, [torch.zeros(1)] * (0 if ctx.rank == 2 else 1), [])
            if kind == "loader":
                source = prepare_data_loader(ctx, source, "already_sharded")
        with pytest.raises(ValueError, match="1, 1, 0 by rank") as caught:
            list(microbatches(ctx, source, "pad"))
        return str(caught.value)

    config = DataLoaderConfiguration(even_batches=False)
    found = run_ranks(run, 3, dataloader_config=config)
    assert found == [found[0]] * 3


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


OWN_BATCHES = [[0, 1], [2], [3, 4]]
USE = 'uneven="stop_first" or uneven="pad".'


def batched(batches: list[list[int]]) -> DataLoader[Any]:
    return DataLoader(torch.arange(9), batch_sampler=batches)  # pyright: ignore[reportArgumentType]


@pytest.mark.filterwarnings("ignore:each of . ranks reads the whole stream")
@pytest.mark.parametrize("dispatched", [False, True])
@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda: numbers(9), f"Use even_batches=True, drop_last=True, {USE}"),
        (lambda: numbers(1), "Give each rank some data, or use even_batches=True."),
        (lambda: numbers(3, None), f"Use even_batches=True, {USE}"),
        (lambda: DataLoader(Numbers(9), batch_size=2), f"Use even_batches=True, drop_last=True, {USE}"),
        (
            lambda: DataLoader(Numbers(3), batch_size=None, collate_fn=torch.tensor),
            f"Use even_batches=True, {USE}",
        ),
        (lambda: batched(OWN_BATCHES), f"Use even_batches=True, {USE}"),
        (lambda: batched(OWN_BATCHES[:1]), "Give each rank some data, or use even_batches=True."),
    ],
)
def test_ranks_that_share_data_out_unevenly_are_told_what_would_help(
    make: Callable[[], Any], advice: str, dispatched: bool
) -> None:
    def run(ctx: Context) -> str:
        with pytest.raises(UnevenDataError) as caught:
            list(microbatches(ctx, prepare_data_loader(ctx, make())))
        return str(caught.value).splitlines()[-1]

    config = DataLoaderConfiguration(even_batches=False, dispatch_batches=dispatched)
    assert run_ranks(run, 2, dataloader_config=config) == [advice] * 2


@pytest.mark.parametrize(
    ("kind", "least"),
    [(kind, least) for kind in ("list", "generator", "sharded") for least in (0, 1)] + [("shards", 1)],
)
def test_ranks_with_data_of_their_own_are_told_what_would_help(kind: str, least: int) -> None:
    def run(ctx: Context) -> str:
        number = least + ctx.rank
        source: Any = [torch.zeros(1)] * number
        if kind == "generator":
            source = iter(source)
        elif kind == "sharded":
            source = prepare_data_loader(ctx, numbers(number, 1), "already_sharded")
        elif kind == "shards":
            shards = DataLoader(Shards([0, 1, 2], rows=1), batch_size=1)
            source = prepare_data_loader(ctx, shards)
        with pytest.raises(UnevenDataError) as caught:
            list(microbatches(ctx, source))
        return str(caught.value).splitlines()[-1]

    some = f"Give each rank equally many batches, or use {USE}"
    assert run_ranks(run, 2) == [some if least else "Give each rank some data."] * 2


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


def test_policies_are_checked_at_the_call() -> None:
    with pytest.raises(ValueError, match="'never'"):
        microbatches(Context(), [], cast("Any", "never"))
