"""What holds of every kind of loader, whether ranks read for themselves or rank 0 reads for all."""

# torch leaves DataLoader and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, Literal, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import accelfn as af
from accelfn import Context
from accelfn.data import plan_epoch
from accelfn.errors import MismatchError, RemoteRankError
from accelfn.testing import run_ranks
from tests.data.cases import BATCHES, SAMPLES, STREAMS, Case, cases, joined
from tests.data.sources import Counting

pytestmark = pytest.mark.filterwarnings("ignore:each of . ranks reads the full stream")  # tested elsewhere


@given(cases(), st.sampled_from(["pad", "stop_first"]))
@example(Case("stream", 5, rows=4, size=1), "pad")
@example(Case("stream", 5, rows=4, window=2), "pad")
@example(Case("elements", 3, size=3, even=False, dispatch=True, window=2), "pad")
def test_each_sample_is_read_once_and_gathered_in_order(
    case: Case, way: Literal["pad", "stop_first"]
) -> None:
    units = case.units
    rows = 1 if case.kind in BATCHES else case.rows
    plan = plan_epoch(len(units), rows, case.size, even_batches=case.even, drop_last=case.drop_last)
    counts = plan.counts
    uneven: Any = "error" if min(counts) == max(counts) else way if min(counts) else "stop_first"
    steps = max(counts) if uneven == "pad" else min(counts)

    def run(ctx: Context) -> tuple[list[list[int]], list[int], list[int], list[af.MicroBatch]]:
        loader = af.prepare_data_loader(ctx, case.source(Counting(case.num)))
        plain = [batch.tolist() for batch in loader]
        loader.set_epoch(0)
        gathered: list[int] = []
        valid: list[int] = []
        micros: list[af.MicroBatch] = []
        for batch, micro in af.microbatches(ctx, loader, uneven):
            assert micro.num_rows == len(batch)
            found = af.gather_for_metrics(ctx, {"x": batch, "twice": 2 * batch, "loss": batch.sum()}, micro)
            assert found["twice"].tolist() == (2 * found["x"]).tolist()
            assert found["loss"].shape == (case.size,)  # one of a rank, and no row of a sample
            names = af.gather_for_metrics(ctx, [str(int(one)) for one in batch], micro)
            assert names == [str(int(one)) for one in found["x"]]
            gathered += found["x"].tolist()
            valid += batch[: micro.own_valid].tolist()
            micros.append(micro)
            if case.kind not in (*STREAMS, "items"):
                assert af.loader_state(loader).consumed == len(gathered)
        assert loader.epoch == 1
        return plain, gathered, valid, micros

    read = joined(units[: plan.consumed(steps - 1) if steps else 0])
    ranks = run_ranks(run, case.size * case.tensor, **case.options())
    assert all(ranks[index] == ranks[index - index % case.tensor] for index in range(len(ranks)))
    ranks = ranks[:: case.tensor]
    for rank, (plain, gathered, _, micros) in enumerate(ranks):
        assert plain == [
            joined(units[position] for position in plan.positions(step, rank)) for step in range(counts[rank])
        ]
        assert gathered == read
        assert [micro.place for micro in micros] == [step % case.window for step in range(steps)]
        assert all(micro.window == min(case.window, steps - micro.index + micro.place) for micro in micros)
        assert all(micro.sync == (micro.place == micro.window - 1) for micro in micros)
        lasts = [micro.is_last for micro in micros]
        if case.kind in ("stream", "elements"):  # never wrong, and said where it can be known
            assert all(last in (None, step == steps - 1) for step, last in enumerate(lasts))
        else:
            assert lasts == [step == steps - 1 for step in range(steps)]
    assert sorted(one for _, _, valid, _ in ranks for one in valid) == sorted(read)


@given(
    cases(even=True),
    st.lists(
        st.tuples(*[st.integers(1, 4)] * 2, st.integers(1, 2), st.integers(0, 6)), min_size=1, max_size=3
    ),
)
def test_a_pass_goes_on_in_other_worlds(case: Case, legs: list[tuple[int, int, int, int]]) -> None:
    def run(ctx: Context, case: Case, state: af.data.LoaderState | None, number: int | None) -> Any:
        loader, bare = (af.prepare_data_loader(ctx, case.source(Counting(case.num))) for _ in "ab")

        def restore(loader: Any) -> None:
            if state is not None:
                af.restore_loader(loader, state)
                assert af.loader_state(loader) == state

        restore(loader)
        gathered: list[int] = []
        for batch, micro in islice(af.microbatches(ctx, loader), number):
            gathered += af.gather_for_metrics(ctx, batch, micro).tolist()
        restore(bare)  # only now: loaders that are restored at their ends share one empty pass
        for _ in islice(bare, number):
            pass
        reached, of_bare = af.loader_state(loader), af.loader_state(bare)
        assert replace(of_bare, seed=reached.seed) == reached  # each has its own seed
        return gathered, reached

    gathered: list[int] = []
    state: Any = None
    for index, (size, rows, tensor, stop) in enumerate(legs):
        case = case._replace(size=size, rows=rows, tensor=tensor, drop_last=False)
        number = stop if index < len(legs) - 1 else None
        ranks = run_ranks(
            partial(run, case=case, state=state, number=number), size * tensor, **case.options()
        )
        assert all(rank == ranks[0] for rank in ranks)
        gathered += ranks[0][0]
        state = ranks[0][1]
        if state.epoch:
            break
    assert gathered == joined(case.units)


@given(cases(), st.integers(0, 8), st.integers(0, 3), st.integers(0, 3))
def test_a_loader_begins_behind_what_is_skipped_and_loads_nothing_of_it(
    case: Case, skipped: int, more: int, before: int
) -> None:
    """Counted from the start of the epoch, also where a state was loaded amid it."""

    def run(ctx: Context) -> None:
        data = Counting(case.num)
        loader = af.prepare_data_loader(ctx, case.source(data))
        epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
        loader.set_epoch(0)
        shortest = min(af.gather_object(ctx, [len(epochs[0])]))
        for _ in islice(loader, before % max(1, shortest)):
            pass
        af.restore_loader(loader, af.loader_state(loader))
        data.read.clear()
        rest = af.skip_first_batches(af.skip_first_batches(loader, skipped), more)
        for number, whole in enumerate(epochs):
            assert rest.epoch == loader.epoch == number
            # Of a batch sampler's last batch nobody knows beforehand whether it is full, or has rows for all.
            is_unknown = case.kind == "named batches" and (case.drop_last or (case.split and not case.even))
            if case.kind not in ("stream", "elements") and not is_unknown:
                assert len(rest) == max(0, len(whole) - skipped - more)
            assert [batch.tolist() for batch in rest] == whole[skipped + more :]
        state = af.loader_state(rest)
        af.restore_loader(rest, state)
        assert af.loader_state(loader) == state
        if not case.dispatch and case.kind not in (*STREAMS, "items"):
            assert sorted(data.read) == sorted(joined(joined(whole[skipped + more :]) for whole in epochs))
        elif not ctx.is_main_process:
            assert data.read == []

    run_ranks(run, case.size * case.tensor, **case.options())


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize("kind", SAMPLES + BATCHES)
def test_what_one_rank_can_not_read_is_every_ranks_error(kind: str, dispatch: bool) -> None:
    def fail(*_: Any) -> Any:
        raise OSError("the disk is gone")

    case = Case(kind, 16, dispatch=dispatch)

    def run(ctx: Context) -> str:
        source = case.source(Counting(case.num))
        if ctx.is_main_process:
            source.collate_fn = fail
        loader = af.prepare_data_loader(ctx, source)
        with pytest.raises(OSError if ctx.is_main_process else RemoteRankError) as caught:
            list(af.microbatches(ctx, loader))
        return str(caught.value)

    assert all("the disk is gone" in text for text in run_ranks(run, 2, **case.options()))


@pytest.mark.parametrize("dispatch", [False, True])
@pytest.mark.parametrize(
    ("kind", "other"),
    [
        *((kind, {"num": 18}) for kind in ("map", "sampler", "sized", "items", "sized elements")),
        *((kind, {"rows": 3}) for kind in ("map", "stream", "named batches")),
        *((kind, {"drop_last": True}) for kind in ("map", "stream")),
    ],
)
def test_ranks_with_different_loaders_are_told(kind: str, other: dict[str, Any], dispatch: bool) -> None:
    case = Case(kind, 16, dispatch=dispatch)

    def prepare(ctx: Context) -> str:
        own = case._replace(**cast("Any", other)) if ctx.rank else case
        with pytest.raises(MismatchError) as caught:
            af.prepare_data_loader(ctx, own.source(Counting(own.num)))
        return str(caught.value)

    first, second = run_ranks(prepare, 2, **case.options())
    assert first == second
