# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import dataclasses
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
)

from accelfn import Context, DataLoaderConfiguration
from accelfn.data import (
    LoaderState,
    PreparedDataLoader,
    loader_state,
    microbatches,
    next_plan,
    prepare_data_loader,
    restore_loader,
    skip_first_batches,
)
from accelfn.data.loader import passes_of
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.testing import run_ranks
from tests.data.sources import Counting, Numbers, Shards, numbers


class Leg(NamedTuple):
    """A part of a run: in which world, and after how many batches it stops."""

    world: int
    batch_size: int
    num_batches: int | None  # None: at the end of the epoch


class Read(NamedTuple):
    samples: list[int]  # in global order, without padding
    state: LoaderState
    epoch: int


def read(leg: Leg, num: int, state: LoaderState | None, bare: bool, options: dict[str, Any]) -> Read:
    """Go through one leg; all ranks must come to one state."""

    def run(ctx: Context) -> tuple[list[list[int]], LoaderState]:
        source = numbers(num, leg.batch_size, shuffle=options["shuffle"], drop_last=options["drop_last"])
        loader = prepare_data_loader(ctx, source)
        if state is not None:
            restore_loader(loader, state)
            assert loader_state(loader) == state
        found: list[list[int]] = []
        if bare:
            # What is padding shows in how far the pass has come: the rows beyond it, in rank order.
            before = loader_state(loader).consumed
            for batch in islice(loader, leg.num_batches):
                valid = loader_state(loader).consumed - before - ctx.rank * leg.batch_size
                found.append(batch[: max(0, valid)].tolist())
                before = loader_state(loader).consumed
        else:
            micros = microbatches(ctx, loader, "pad" if options["even"] else "stop_first")
            for batch, micro in islice(micros, leg.num_batches):
                found.append(batch[: micro.own_valid].tolist())
        return found, loader_state(loader)

    ranks = run_ranks(
        run,
        leg.world,
        dataloader_config=DataLoaderConfiguration(even_batches=options["even"], data_seed=7),
        gradient_accumulation_steps=options["window"],
    )
    steps = max(len(found) for found, _ in ranks)
    samples = [
        sample
        for step in range(steps)
        for found, _ in ranks
        for sample in (found[step : step + 1] or [[]])[0]
    ]
    states = [one for _, one in ranks]
    return Read(samples, states[0], states[0].epoch)


def epoch_of(num: int, shuffle: bool, seed: int = 7, epoch: int = 0) -> list[int]:
    loader = prepare_data_loader(
        Context().replace(dataloader_config=DataLoaderConfiguration(data_seed=seed)),
        numbers(num, 1, shuffle=shuffle),
    )
    loader.set_epoch(epoch)
    return [int(batch) for batch in loader]


legs = st.builds(Leg, st.integers(1, 4), st.integers(1, 5), st.integers(0, 6))


@given(
    num=st.integers(0, 60),
    stops=st.lists(legs, min_size=1, max_size=3),
    last=st.builds(Leg, st.integers(1, 4), st.integers(1, 5), st.none()),
    bare=st.booleans(),
    options=st.fixed_dictionaries(
        {
            "shuffle": st.booleans(),
            "even": st.booleans(),
            "drop_last": st.just(False),
            "window": st.integers(1, 3),
        }
    ),
)
def test_wherever_a_run_stops_each_remaining_sample_comes_once_and_in_order(
    num: int, stops: list[Leg], last: Leg, bare: bool, options: dict[str, Any]
) -> None:
    options["even"] = options["even"] or not bare  # stopping at the first rank leaves samples over by design
    state: LoaderState | None = None
    samples: list[int] = []
    for leg in [*stops, last]:
        # A pass that was read to its end has moved on to the next epoch, and that is another test.
        if state is not None and state.epoch:
            break
        part = read(leg, num, state, bare, options)
        samples += part.samples
        state = part.state
    assert state is not None
    assert samples == epoch_of(num, options["shuffle"])
    assert (state.epoch, state.consumed) in ((1, 0), (0, num))


@given(
    num=st.integers(0, 60),
    stop=legs,
    last=st.builds(Leg, st.integers(1, 4), st.integers(1, 5), st.none()),
    shuffle=st.booleans(),
)
def test_with_drop_last_what_is_read_is_a_beginning_of_the_order_and_only_a_short_step_is_missing(
    num: int, stop: Leg, last: Leg, shuffle: bool
) -> None:
    options = {"shuffle": shuffle, "even": True, "drop_last": True, "window": 1}
    first = read(stop, num, None, True, options)
    samples = first.samples
    if not first.epoch:
        samples = samples + read(last, num, first.state, True, options).samples
        assert num - len(samples) < last.world * last.batch_size
    assert samples == epoch_of(num, shuffle)[: len(samples)]


@pytest.mark.parametrize(("world", "stop"), [(1, 3), (2, 0), (3, 1), (2, 4)])
def test_in_the_same_world_the_batches_themselves_are_what_they_would_have_been(
    world: int, stop: int
) -> None:
    def run(ctx: Context) -> tuple[list[list[int]], list[list[int]]]:
        source = numbers(4 * 3 * world - 1, 3, shuffle=True)
        whole = prepare_data_loader(ctx, source)
        through = [batch.tolist() for _ in range(2) for batch in whole]
        stopped = prepare_data_loader(ctx, source)
        parts = [batch.tolist() for batch in islice(stopped, stop)]
        again = prepare_data_loader(ctx, source)
        restore_loader(again, loader_state(stopped))
        assert len(again) == 4
        parts += [batch.tolist() for batch in again]
        assert (again.epoch, loader_state(again).consumed) == (1, 0)
        parts += [batch.tolist() for batch in again]
        return through, parts

    config = DataLoaderConfiguration(data_seed=3)
    for through, parts in run_ranks(run, world, dataloader_config=config):
        assert through == parts


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_a_pass_that_goes_on_leaves_random_numbers_to_the_program(workers: int, stream: bool) -> None:
    def new() -> Any:
        data: Any = Numbers(8) if stream else torch.arange(8)
        return prepare_data_loader(Context(), DataLoader(data, batch_size=2, num_workers=workers))

    loader = new()
    drawn: list[float] = []
    state, place = torch.get_rng_state(), loader_state(loader)
    for epoch in range(2):
        for step, _ in enumerate(loader):
            drawn.append(float(torch.rand(())))
            if (epoch, step) == (0, 1):
                state, place = torch.get_rng_state(), loader_state(loader)
    again = new()
    torch.set_rng_state(state)
    restore_loader(again, place)
    assert [float(torch.rand(())) for _ in range(2) for _ in again] == drawn[2:]


def test_the_seed_travels_with_the_state() -> None:
    def state(seed: int) -> tuple[LoaderState, PreparedDataLoader[Any]]:
        ctx = Context().replace(dataloader_config=DataLoaderConfiguration(data_seed=seed))
        loader = prepare_data_loader(ctx, numbers(20, 4, shuffle=True))
        loader.set_epoch(3)
        list(islice(loader, 2))
        return loader_state(loader), loader

    (taken, _), (_, other) = state(1), state(2)
    restore_loader(other, taken)
    rest = [one for batch in other for one in batch.tolist()]
    assert rest == epoch_of(20, True, seed=1, epoch=3)[8:]
    following = [one for batch in other for one in batch.tolist()]
    assert following == epoch_of(20, True, seed=1, epoch=4)


class Noisy(Dataset[Any]):
    """A dataset with an augmentation: a random number beside each sample."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[int, float, float]:
        return index, random.random(), float(torch.rand(()))


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_workers_that_read_ahead_change_nothing(before: int, after: int) -> None:
    ctx = Context().replace(dataloader_config=DataLoaderConfiguration(data_seed=1))

    def make(num_workers: int) -> PreparedDataLoader[Any]:
        return prepare_data_loader(
            ctx, DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=num_workers, collate_fn=list)
        )

    whole = list(make(1))
    stopped = make(before)
    parts = list(islice(stopped, 2))
    again = make(after)
    restore_loader(again, loader_state(stopped))
    parts += list(again)
    assert parts == whole


class Uneven:
    """A batch sampler whose batches have different sizes."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[0, 1, 2], [3, 4], [5, 6, 7, 8], [9], [10, 11]])

    def __len__(self) -> int:
        return 5


def test_batches_of_different_sizes_keep_their_random_numbers_too() -> None:
    def run(ctx: Context, state: LoaderState | None, number: int | None) -> Any:
        source: Any = DataLoader(Noisy(), batch_sampler=cast("Any", Uneven()), num_workers=1, collate_fn=list)
        loader = prepare_data_loader(ctx, source)
        if state is not None:
            restore_loader(loader, state)
        return [(batch, loader_state(loader)) for batch in islice(loader, number)]

    config = DataLoaderConfiguration(data_seed=1)
    (alone,) = run_ranks(lambda ctx: run(ctx, None, None), 1, dataloader_config=config)
    ((_, state),) = alone[:1]
    first, second = run_ranks(lambda ctx: run(ctx, state, None), 2, "processes", dataloader_config=config)
    assert len({row[1] for batch, _ in alone for row in batch}) == 12
    assert [batch for batch, _ in first] == [batch for batch, _ in alone[1::2]]
    assert [batch for batch, _ in second] == [batch for batch, _ in alone[2::2]]


def test_data_that_was_sharded_already_resumes_in_its_world() -> None:
    def run(ctx: Context) -> tuple[list[Any], list[Any]]:
        data: Any = torch.arange(20)
        sampler = DistributedSampler(data, num_replicas=2, rank=ctx.rank, shuffle=True)
        source = DataLoader(data, batch_size=3, sampler=sampler)
        loader = prepare_data_loader(ctx, source, "already_sharded")
        whole = [batch.tolist() for batch in loader]
        loader.set_epoch(0)
        parts = [batch.tolist() for batch in islice(loader, 2)]
        state = loader_state(loader)
        again = prepare_data_loader(ctx, source, "already_sharded")
        restore_loader(again, state)
        return whole, parts + [batch.tolist() for batch in again]

    for whole, parts in run_ranks(run, 2):
        assert whole == parts


# --- states that don't fit -----------------------------------------------------------------------


def unchanged(loader: PreparedDataLoader[Any]) -> tuple[LoaderState, Any]:
    return loader_state(loader), next_plan(loader)


@pytest.mark.parametrize(
    ("state", "error", "text"),
    [
        (
            LoaderState(epoch=1, consumed=2, seed=3, length=11),
            ValueError,
            "11 samples, but the loader has 10",
        ),
        (LoaderState(epoch=1, consumed=11, seed=3), ValueError, "consumed 11 samples of an epoch of 10"),
        (
            LoaderState(version=3, epoch=1, consumed=2, seed=3, length=10),
            NotAvailableError,
            "has version 3, but this accelfn reads versions up to 2",
        ),
        ({"epoch": 1}, TypeError, "must be a LoaderState, got dict"),
    ],
    ids=["length", "consumed", "version", "type"],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(
    state: Any, error: type[Exception], text: str
) -> None:
    loader = prepare_data_loader(Context(), numbers(10))
    loader.set_epoch(5)
    before = unchanged(loader)
    with pytest.raises(error, match=text):
        restore_loader(loader, state)
    assert unchanged(loader) == before


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"consumed": -1}, ValueError, "consumed must not be negative, got -1"),
        ({"epoch": -1}, ValueError, "epoch must not be negative"),
        ({"consumed": 11}, ValueError, "consumed 11 samples of an epoch of 10"),
        ({"consumed": 1.0}, TypeError, "consumed must be an int, got 1.0"),
        ({"epoch": True}, TypeError, "epoch must be an int"),
        ({"seed": None}, TypeError, "seed must be an int"),
    ],
)
def test_a_state_that_can_be_no_place_can_not_be_made(
    change: dict[str, Any], error: type[Exception], text: str
) -> None:
    state = LoaderState(epoch=0, consumed=10, seed=0, length=10)
    with pytest.raises(error, match=text):
        dataclasses.replace(state, **change)


def test_a_state_is_plain_numbers() -> None:
    state = loader_state(prepare_data_loader(Context(), numbers(4)))
    as_numbers = dataclasses.asdict(state)
    assert LoaderState(**as_numbers) == state
    known = {name: value for name, value in as_numbers.items() if value is not None}
    assert set(known) == {"version", "epoch", "consumed", "seed", "length", "order"}


@pytest.mark.parametrize("thing", [[1, 2], numbers(4)], ids=["list", "torch"])
def test_only_prepared_loaders_have_a_state(thing: Any) -> None:
    with pytest.raises(TypeError, match="loader_state takes a loader from prepare_data_loader"):
        loader_state(thing)
    with pytest.raises(TypeError, match="restore_loader takes a loader"):
        restore_loader(thing, LoaderState(epoch=0, consumed=0, seed=0))


# --- skip_first_batches ----------------------------------------------------------------------------


def test_a_skipped_pass_moves_the_original_on_and_its_states_are_the_originals() -> None:
    ctx = Context().replace(dataloader_config=DataLoaderConfiguration(data_seed=5))
    loader = prepare_data_loader(ctx, numbers(12, 3, shuffle=True))
    rest = skip_first_batches(loader, 2)
    assert isinstance(rest, PreparedDataLoader)
    assert (len(loader), len(rest)) == (4, 2)
    batches = iter(rest)
    first = next(batches).tolist()
    state = loader_state(rest)
    assert (
        state == loader_state(loader) == LoaderState(epoch=0, consumed=9, seed=5, length=12, order="shuffled")
    )
    second = next(batches).tolist()
    assert list(batches) == []
    assert (loader.epoch, rest.epoch) == (1, 1)
    assert first + second == epoch_of(12, True, seed=5)[6:]
    assert [one for batch in loader for one in batch.tolist()] == epoch_of(12, True, seed=5, epoch=1)
    for one in (rest, loader):  # a state says where to go on, so nothing is skipped again
        restore_loader(one, state)
        assert [batch.tolist() for batch in one] == [second]


def test_skipping_in_a_restored_epoch_counts_from_the_start_of_it() -> None:
    loader = prepare_data_loader(Context(), numbers(12))
    restore_loader(loader, LoaderState(epoch=0, consumed=4, seed=0, length=12))
    rest = skip_first_batches(skip_first_batches(loader, 2), 1)
    assert [batch.tolist() for batch in rest] == [[6, 7], [8, 9], [10, 11]]
    assert [batch.tolist() for batch in rest] == [[6, 7], [8, 9], [10, 11]]


def test_microbatches_of_a_skipped_loader_know_their_place() -> None:
    def run(ctx: Context) -> list[Any]:
        rest = skip_first_batches(prepare_data_loader(ctx, numbers(11)), 1)
        micros = microbatches(ctx, rest)
        return [(batch.tolist(), micro.own_valid, micro.is_last, micro.window) for batch, micro in micros]

    assert run_ranks(run, 2, gradient_accumulation_steps=3) == [
        [([4, 5], 2, False, 2), ([8, 9], 2, True, 2)],
        [([6, 7], 2, False, 2), ([10, 0], 1, True, 2)],
    ]


def test_shards_are_skipped_too() -> None:
    def run(ctx: Context) -> None:
        loader = prepare_data_loader(ctx, DataLoader(Shards([0, 1, 2]), batch_size=3))
        micros = [(batch.tolist(), micro.own_valid) for batch, micro in microbatches(ctx, loader, "pad")]
        loader.set_epoch(0)
        rest = skip_first_batches(loader, 1)
        found = [(batch.tolist(), micro.own_valid) for batch, micro in microbatches(ctx, rest, "pad")]
        assert found == micros[1:]

    run_ranks(run, 2)


def test_data_that_was_sharded_already_is_skipped_too() -> None:
    def run(ctx: Context) -> list[Any]:
        own = prepare_data_loader(ctx, numbers(5 + 2 * ctx.rank), "already_sharded")
        rest = skip_first_batches(own, 2)
        micros = microbatches(ctx, rest, "pad")
        return [len(rest), *((batch.tolist(), micro.own_valid) for batch, micro in micros)]

    assert run_ranks(run, 2) == [[1, ([4], None), ([4], 0)], [2, ([4, 5], None), ([6], None)]]


def test_how_items_are_shared_out_can_be_chosen() -> None:
    def run(ctx: Context) -> list[int]:
        source: Any = DataLoader(cast("Any", torch.arange(10).reshape(5, 2)), batch_size=None)
        loader = prepare_data_loader(ctx, source)
        lengths: list[int] = []
        for even in (True, False):
            passes_of(loader).choose_even(even)
            assert passes_of(loader).even_batches is even
            lengths += [len(loader), len(list(loader))]
        return lengths

    assert run_ranks(run, 2) == [[3, 3, 3, 3], [3, 3, 2, 2]]


class Sub(DataLoader[Any]):
    """A loader of a class of the user's own."""


@pytest.mark.parametrize(("skipped", "num_workers"), [(1, 0), (4, 1), (9, 0)])
def test_a_torch_loader_keeps_its_options_and_loads_nothing_of_what_is_skipped(
    skipped: int, num_workers: int
) -> None:
    data = Counting(9)
    source = Sub(
        cast("Any", data),
        batch_size=2,
        shuffle=True,
        generator=torch.Generator().manual_seed(1),
        num_workers=num_workers,
    )
    whole = [batch.tolist() for batch in source]
    data.read.clear()
    cast("torch.Generator", source.generator).manual_seed(1)
    rest = cast("DataLoader[Any]", skip_first_batches(source, skipped))
    assert type(rest) is Sub
    assert len(rest) == max(0, 5 - skipped)
    assert [batch.tolist() for batch in rest] == whole[skipped:]
    if not num_workers:
        assert data.read == [index for batch in whole[skipped:] for index in batch]
    for name in (
        "dataset",
        "batch_size",
        "num_workers",
        "collate_fn",
        "generator",
        "drop_last",
        "pin_memory",
    ):
        assert getattr(rest, name) is getattr(source, name)
    assert len(source) == 5


def test_a_torch_loader_with_living_workers_keeps_them_for_itself() -> None:
    source = numbers(8, num_workers=1, persistent_workers=True)
    whole = [batch.tolist() for batch in source]
    rest = skip_first_batches(source, 3)
    assert [batch.tolist() for batch in rest] == whole[3:]
    assert [batch.tolist() for batch in source] == whole
    for loader in (source, rest):
        cast("Any", loader)._iterator._shutdown_workers()


def test_a_torch_loader_without_batches_skips_samples() -> None:
    data = Counting(5)
    rest = skip_first_batches(DataLoader(data, batch_size=None), 3)
    assert list(rest) == [3, 4]
    assert data.read == [3, 4]


def test_a_loader_that_iterates_in_its_own_way_is_read_and_thrown_away() -> None:
    class Own(DataLoader[Any]):
        def __iter__(self) -> Any:
            return iter(["a", "b", "c"])

        def __len__(self) -> int:
            return 3

    rest = cast("Any", skip_first_batches(Own(Counting(8)), 1))
    assert (list(rest), len(rest), rest.batch_size) == (["b", "c"], 2, 1)


def test_a_skipped_torch_loader_can_be_prepared() -> None:
    def run(ctx: Context) -> list[Any]:
        return [batch.tolist() for batch in prepare_data_loader(ctx, cast("Any", rest))]

    rest = skip_first_batches(numbers(11), 1)
    assert run_ranks(run, 2) == [[[2, 3], [6, 7], [10, 2]], [[4, 5], [8, 9], [3, 4]]]
    sampler = DistributedSampler(cast("Any", range(8)), num_replicas=2, rank=0)
    sharded = skip_first_batches(numbers(8, sampler=sampler), 1)
    with pytest.raises(ConfigurationError, match="DistributedSampler"):
        prepare_data_loader(Context(), cast("Any", sharded))


def test_a_stream_is_read_and_thrown_away() -> None:
    rest = skip_first_batches(DataLoader(Numbers(7), batch_size=2), 2)
    assert [batch.tolist() for batch in rest] == [[4, 5], [6]]
    assert [batch.tolist() for batch in rest] == [[4, 5], [6]]
    with pytest.raises(TypeError, match="has no len"):
        len(cast("Any", rest))
    assert cast("Any", rest).batch_size == 2


def test_any_iterable_is_skipped_when_it_is_read() -> None:
    taken: list[int] = []

    def source() -> Iterator[int]:
        for number in range(4):
            taken.append(number)
            yield number

    rest = skip_first_batches(source(), 2)
    assert taken == []
    assert next(iter(rest)) == 2
    assert taken == [0, 1, 2]
    sized = skip_first_batches([1, 2, 3], 1)
    assert (len(cast("Any", sized)), list(sized)) == (2, [2, 3])
    assert (len(cast("Any", skip_first_batches([1], 3))), list(skip_first_batches([1], 3))) == (0, [])
    assert list(skip_first_batches(iter([1]), 3)) == []


def test_what_knows_how_to_skip_is_asked_itself() -> None:
    class Knows:
        def skip_first_batches(self, num_batches: int = 0, /) -> str:
            return f"without {num_batches}"

    assert skip_first_batches(Knows(), 2) == "without 2"


@pytest.mark.parametrize("source", [[1], numbers(2), prepare_data_loader(Context(), numbers(2))])
def test_numbers_of_batches_are_checked_at_the_call(source: Any) -> None:
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        skip_first_batches(source, -1)
    for number in (1.0, True, None):
        with pytest.raises(TypeError, match="must be an int"):
            skip_first_batches(source, cast("Any", number))


def test_what_can_not_be_iterated_over_is_refused() -> None:
    with pytest.raises(TypeError, match="another iterable, got int"):
        skip_first_batches(cast("Any", 3), 1)


@pytest.mark.parametrize("dispatch", [False, True])
def test_a_place_in_another_order_is_refused_and_nothing_changes(dispatch: bool) -> None:
    ctx = Context().replace(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    data = cast("Any", torch.arange(8))
    shuffled = prepare_data_loader(ctx, DataLoader(data, batch_size=2, shuffle=True))
    ordered = prepare_data_loader(ctx, DataLoader(data, batch_size=2))
    fresh = loader_state(shuffled)
    next(iter(shuffled))
    with pytest.raises(ConfigurationError, match="order 'shuffled', but the loader reads"):
        restore_loader(ordered, loader_state(shuffled))
    assert [batch.tolist() for batch in ordered] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    restore_loader(ordered, fresh)  # at the start of an epoch nothing is left out
