# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from accelfn import Context, DataLoaderConfiguration, GradientAccumulationPlugin, gather, reduce
from accelfn.data import microbatches, plan_microbatch, prepare_data_loader
from accelfn.errors import ConfigurationError, MismatchError, UnevenDataError
from accelfn.testing import run_ranks
from tests.data.sources import Numbers, Shards, Sized, make_source, numbers


@given(st.integers(1, 40), st.integers(1, 7))
def test_windows_cover_an_epoch_and_know_their_true_size(num_batches: int, num_steps: int) -> None:
    micros = [plan_microbatch(index, 0, num_batches, num_steps) for index in range(num_batches)]
    ends = [micro.index for micro in micros if micro.closes_window]
    assert ends == [micro.index for micro in micros if micro.sync]
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
    with pytest.raises(ConfigurationError, match="windows of 2 batches"):  # which needs a length
        next(microbatches(ctx, iter([torch.zeros(1)])))


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
        source = iter([torch.zeros(1)] * num)
        return [micro.is_last for _, micro in microbatches(ctx, source)]

    assert lastness(3, 1) == [None, None, None]
    assert lastness(3, 2) == [False, None, True]
    assert lastness(4, 2) == [False, None, False, None]
    assert lastness(0, 2) == []


# Of a rank that has more than its window, what it has read is known, and not what follows.
@pytest.mark.parametrize(("steps", "counts"), [(1, (2, 3, 3)), (2, (2, 3, 4)), (3, (2, 3, 3))])
def test_ranks_that_run_out_without_a_length_are_told_the_counts(steps: int, counts: tuple[int, ...]) -> None:
    def run(ctx: Context) -> tuple[str, tuple[int, ...]]:
        source = iter([torch.zeros(1)] * (2 + ctx.rank))
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
        source = make_source(kind, [torch.zeros(1)] * (0 if ctx.rank == 2 else 1), [])
        if kind == "loader":
            source = prepare_data_loader(ctx, source, "already_sharded")
        elif kind == "shared":
            source = prepare_data_loader(ctx, numbers(3))
        with pytest.raises(ValueError, match="by rank are 1, 1, 0") as caught:
            list(microbatches(ctx, source, "pad"))
        return str(caught.value)

    found = run_ranks(run, 3, dataloader_config=DataLoaderConfiguration(even_batches=False))
    assert found == [found[0]] * 3


def test_uneven_ranks_are_an_error_that_names_the_counts() -> None:
    def run(ctx: Context) -> None:
        next(microbatches(ctx, prepare_data_loader(ctx, numbers(9))))

    with pytest.raises(UnevenDataError, match="different numbers of batches: 3, 2 by rank"):
        run_ranks(run, 2, dataloader_config=DataLoaderConfiguration(even_batches=False))


OWN_BATCHES = [[0, 1], [2], [3, 4]]
USE = 'uneven="stop_first" or "pad" (of microbatches, or accelerator.uneven).'
EVEN_OR_DROP, EVEN = f"Use even_batches=True, drop_last=True, {USE}", f"Use even_batches=True, {USE}"
SOME = "Give each rank some data, or use even_batches=True."
EQUALLY, NONE = f"Give each rank equally many batches, or use {USE}", "Give each rank some data."


def batched(batches: list[list[int]]) -> DataLoader[Any]:
    return DataLoader(torch.arange(9), batch_sampler=batches)  # pyright: ignore[reportArgumentType]


SHARED: tuple[tuple[Callable[[], Any], str], ...] = (
    (lambda: numbers(9), EVEN_OR_DROP),
    (lambda: numbers(1), SOME),
    (lambda: numbers(3, None), EVEN),
    (lambda: DataLoader(Numbers(9), batch_size=2), EVEN_OR_DROP),
    (lambda: DataLoader(Numbers(3), batch_size=None, collate_fn=torch.tensor), EVEN),
    (lambda: batched(OWN_BATCHES), EVEN),
    (lambda: batched(OWN_BATCHES[:1]), SOME),
)
OWN: tuple[tuple[Callable[[Context], Any], str], ...] = (
    (lambda ctx: [0] * (1 + ctx.rank), EQUALLY),
    (lambda ctx: [0] * ctx.rank, NONE),
    (lambda ctx: iter([0] * (1 + ctx.rank)), EQUALLY),
    (lambda ctx: iter([0] * ctx.rank), NONE),
    (lambda ctx: prepare_data_loader(ctx, numbers(1 + ctx.rank, 1), "already_sharded"), EQUALLY),
    (lambda ctx: prepare_data_loader(ctx, numbers(ctx.rank, 1), "already_sharded"), NONE),
    (lambda ctx: prepare_data_loader(ctx, DataLoader(Shards([0, 1, 2], rows=1), batch_size=1)), EQUALLY),
)


@pytest.mark.filterwarnings("ignore:each of . ranks reads the full stream")
def test_uneven_ranks_are_told_what_would_help() -> None:
    def advice(ctx: Context, source: Any) -> str:
        with pytest.raises(UnevenDataError) as caught:
            list(microbatches(ctx, source))
        return str(caught.value).splitlines()[-1]

    def run(ctx: Context) -> list[str]:
        shared = [prepare_data_loader(ctx, make()) for make, _ in SHARED]
        own = [] if ctx.loading.dispatch_batches else [make(ctx) for make, _ in OWN]
        return [advice(ctx, source) for source in [*shared, *own]]

    for dispatched in (False, True):
        config = DataLoaderConfiguration(even_batches=False, dispatch_batches=dispatched)
        expected = [said for _, said in (SHARED if dispatched else SHARED + OWN)]
        assert run_ranks(run, 2, dataloader_config=config) == [expected] * 2


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


def test_a_batch_knows_the_rows_of_its_pass() -> None:
    def run(ctx: Context) -> list[tuple[int | None, int | None, bool]]:
        loader = prepare_data_loader(ctx, numbers(9))
        return [
            (micro.pass_rows, micro.pass_valid, micro.pass_is_full) for _, micro in microbatches(ctx, loader)
        ]

    first, second = run_ranks(run, 2)
    assert first == [(2, 2, True), (4, 4, True), (6, 5, False)]
    assert second == [(2, 2, True), (4, 4, True), (6, 4, False)]
    *_, (_, micro) = microbatches(Context(), [torch.zeros(3), "text", torch.zeros(3)])
    assert (micro.num_rows, micro.pass_rows, micro.pass_valid) == (3, None, None)


def is_no_uneven_data(run: Callable[[Context], None]) -> None:
    with pytest.raises(MismatchError) as caught:
        run_ranks(run, 2)
    assert not isinstance(caught.value, UnevenDataError)
    assert "had no more" not in str(caught.value)


@pytest.mark.parametrize("left", [False, True])
def test_an_evaluation_that_has_ended_is_not_what_ranks_differ_in_later(left: bool) -> None:
    def run(ctx: Context) -> None:
        for _, micro in microbatches(ctx, [torch.zeros(1)] * 4):
            if micro.index == 0:
                for _ in microbatches(ctx, [torch.zeros(1)] * 3):
                    if left:
                        break
            if micro.index == 2 - ctx.rank:  # not in the same batch, and not the same call
                (gather if ctx.rank else reduce)(ctx, torch.zeros(1))

    is_no_uneven_data(run)


def test_ranks_in_different_epochs_hear_of_it() -> None:
    def run(ctx: Context) -> None:
        loader = prepare_data_loader(ctx, numbers(8))
        loader.set_epoch(ctx.rank)
        for _ in microbatches(ctx, loader):
            pass

    is_no_uneven_data(run)


def test_an_evaluation_on_one_rank_is_not_taken_for_uneven_data() -> None:
    def run(ctx: Context) -> None:
        own = ctx.replace(rng_types=[])
        evaluation = prepare_data_loader(own, numbers(4, 1))
        list(evaluation)  # the first pass agrees on a seed, and nothing is sent as a later one begins
        for _, micro in microbatches(ctx, [torch.zeros(1)] * 4):
            if micro.index == 2 and ctx.is_main_process:
                for _ in microbatches(own, evaluation):
                    pass
            reduce(ctx, torch.zeros(1))

    is_no_uneven_data(run)


@pytest.mark.parametrize("guard", ["full", "off"])
def test_passes_over_plain_data_draw_what_the_seed_of_the_program_says(guard: str) -> None:
    def run(ctx: Context) -> tuple[list[str], int]:
        own = ctx.replace(reduction="canonical", guard=guard)
        torch.manual_seed(7)
        names = [str(micro.draws) for _ in range(2) for _, micro in microbatches(own, [torch.zeros(1)])]
        return names, int(torch.randint(10**9, ()))

    alone = run_ranks(run, 1)[0]
    assert len(set(alone[0])) == 2
    for found in run_ranks(run, 2):
        assert found[1] == alone[1]  # every rank's generator is where that of one process is
        assert [name.split(" of ")[1] for name in found[0]] == [name.split(" of ")[1] for name in alone[0]]


def test_a_pass_that_was_left_open_is_not_what_ranks_differ_in_later() -> None:
    def run(ctx: Context) -> None:
        data = [torch.zeros(1)]
        first, second = microbatches(ctx, data * 3), microbatches(ctx.replace(), data * (3 - ctx.rank), "pad")
        for _ in zip(first, second, strict=False):  # the first one ends while the second is open
            pass
        second.close()  # pyright: ignore[reportAttributeAccessIssue] -- it is a generator
        assert ctx.collectives.call_log.open_passes == []

    run_ranks(run, 2)


class Promising(Sized):
    """Says that it has three batches."""

    def __len__(self) -> int:
        return 3


def test_a_rank_that_ran_out_in_a_loop_is_told_beside_the_other_counts() -> None:
    def run(ctx: Context) -> None:
        for _ in microbatches(ctx, [torch.zeros(1)] * 2):
            pass
        for _ in microbatches(ctx.replace(), cast("Any", Promising(3 - ctx.rank))):
            gather(ctx, torch.zeros(1))

    with pytest.raises(UnevenDataError, match=r"rank\(s\) 1 had no more") as caught:
        run_ranks(run, 2)
    assert caught.value.counts == (3, 2)
