"""Samplers, streams and workers with a state of their own: a run goes on with what it would have read."""

# torch leaves DataLoader and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import dataclasses
import gc
import importlib
import json
import random
import sys
import weakref
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)

import accelfn as af
from accelfn import Context
from accelfn.errors import ConfigurationError, MissingExtraError
from accelfn.testing import run_ranks
from tests.data.sources import Numbers

pytestmark = [
    pytest.mark.filterwarnings("ignore:each of . ranks reads the full stream"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than cores
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # of torch, for which torchdata asks
]

NUM_EPOCHS = 3

# --- samplers of one's own ------------------------------------------------------------------------


class Shuffler:
    """A sampler with a state, by which each epoch is another."""

    def __init__(self, num: int) -> None:
        self.num, self.seed = num, 3

    def __len__(self) -> int:
        return self.num

    def __iter__(self) -> Iterator[int]:
        self.seed += 1
        return iter(random.Random(self.seed).sample(range(self.num), self.num))

    def state_dict(self) -> dict[str, Any]:
        return {"seed": self.seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed = state["seed"]


class Drawn(Sampler[int]):
    """Draws from a generator of the program, and keeps nothing."""

    def __init__(self, num: int, permute: Callable[[int], Any]) -> None:
        self.num, self.permute = num, permute

    def __len__(self) -> int:
        return self.num

    def __iter__(self) -> Iterator[int]:
        return iter([int(number) for number in self.permute(self.num)])


class Uneven:
    """Batches of different sizes, by a sampler that has a state."""

    def __init__(self, num: int) -> None:
        self.sampler = Shuffler(num)

    def __iter__(self) -> Iterator[list[int]]:
        order, size = iter(self.sampler), 1
        while batch := list(islice(order, size)):
            yield batch
            size = size % 3 + 1


class OwnBatches(BatchSampler):
    pass


def generator(seed: int = 4) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def weighted(num: int) -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0 + place for place in range(num)], num, generator=generator())


def indexed(num: int, batch_size: int | None = 2, **options: Any) -> DataLoader[Any]:
    data = torch.arange(num) if batch_size else torch.arange(num).view(-1, 1)
    if "batch_sampler" in options:
        return DataLoader(cast("Any", data), **options)
    return DataLoader(cast("Any", data), batch_size=batch_size, **options)


# --- streams of one's own -------------------------------------------------------------------------


class Counter(IterableDataset[Any]):
    """Says where it is, and counts what was read of it. Stands where it was left, as many do."""

    def __init__(self, num: int) -> None:
        self.num, self.place = num, 0
        self.read: list[int] = []

    def __iter__(self) -> Iterator[Any]:
        while self.place < self.num:
            self.place += 1
            self.read.append(self.place - 1)
            yield self.place - 1
        self.place = 0

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Drawing(Counter):
    """Its order is drawn as it goes, by random numbers that go on from epoch to epoch."""

    number = 7

    def __iter__(self) -> Iterator[Any]:
        for place in super().__iter__():
            self.number = self.number * 1103515245 % 2**31
            yield 100 * place + self.number % 89

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place, self.number = state["place"], state["number"]


class SizedCounter(Counter):
    def __len__(self) -> int:
        return self.num


class SizedDrawing(Drawing):
    def __len__(self) -> int:
        return self.num


class Itself(Counter):
    """Is its own iterator, and begins anew each time."""

    def __iter__(self) -> Iterator[Any]:
        self.place = 0
        return self

    def __next__(self) -> int:
        if self.place >= self.num:
            raise StopIteration
        self.place += 1
        return self.place - 1


class Batches(Drawing):
    """No dataset of torch's but an iterable of batches."""

    def __iter__(self) -> Iterator[Any]:
        return (torch.tensor([number, -number]) for number in super().__iter__())


class Shards(Drawing):
    """Offers its numbers by remainders."""

    num_shards = 4

    def __init__(self, num: int, shards: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        super().__init__(num)
        self.shards = shards

    def shard(self, num_shards: int, index: int) -> "Shards":
        return Shards(self.num, self.shards[index::num_shards])

    def __iter__(self) -> Iterator[Any]:
        return (number for number in super().__iter__() if number // 100 % 4 in self.shards)


def stream(kind: Callable[[int], Any], batch_size: int | None = 2, **options: Any) -> Callable[[int], Any]:
    return lambda num: DataLoader(kind(num), batch_size, **options)


def as_row(number: Any) -> torch.Tensor:
    return torch.tensor([number])


SOURCES: dict[str, Callable[[int], Any]] = {
    "shuffled": lambda num: indexed(num, shuffle=True),
    "generator": lambda num: indexed(num, sampler=weighted(num)),
    "torch's": lambda num: indexed(num, sampler=WeightedRandomSampler([1.0] * num, num)),
    "Python's": lambda num: indexed(num, sampler=Drawn(num, lambda n: random.sample(range(n), n))),
    "NumPy's": lambda num: indexed(num, sampler=Drawn(num, np.random.permutation)),
    "state": lambda num: indexed(num, sampler=Shuffler(num)),
    "inside": lambda num: indexed(
        num, batch_sampler=OwnBatches(RandomSampler(range(num), generator=generator()), 2, False)
    ),
    "uneven": lambda num: indexed(num, batch_sampler=Uneven(num)),
    "items": lambda num: indexed(num, None, sampler=Shuffler(num)),
    "counter": stream(Counter),
    "sized": stream(SizedCounter),
    "drawing": stream(Drawing),
    "sized drawing": stream(SizedDrawing),
    "dropped": stream(SizedDrawing, drop_last=True),
    "itself": stream(Itself),
    "plain": stream(Numbers),
    "whole": stream(Drawing, batch_size=None, collate_fn=as_row),
    "iterable": Batches,
}


class Run(NamedTuple):
    batches: list[list[int]]  # in all epochs
    valid: list[list[int]]  # without padding
    state: af.data.LoaderState
    read: list[int] | None  # by the dataset


def go(ctx: Context, source: Any, state: dict[str, Any] | None, stop: int | None, sharding: Any) -> Run:
    """Go on from ``state`` with all things new, until ``stop`` batches are read or three epochs are over."""
    loader = af.prepare_data_loader(ctx, source, sharding)
    if state is not None:
        loader.load_state_dict(state)
        same = loader.state_dict()
        if ctx.loading.dispatch_batches and ctx.rank:
            same["stream"] = state["stream"]
        assert same == state
    batches: list[list[int]] = []
    valid: list[list[int]] = []
    while loader.epoch < NUM_EPOCHS and len(batches) != stop:
        # A rank that has none of what is left can repeat nothing.
        uneven = "pad" if ctx.loading.even_batches and sharding == "global" else "stop_first"
        for batch, micro in af.microbatches(ctx, loader, uneven):
            batches.append(batch.tolist())
            valid.append(batch[: micro.own_valid].tolist())
            if len(batches) == stop:
                break
    return Run(
        batches, valid, af.loader_state(loader), getattr(getattr(source, "dataset", None), "read", None)
    )


def in_order(runs: list[Run]) -> list[int]:
    longest = max(len(run.valid) for run in runs)
    steps = [valid for step in range(longest) for run in runs for valid in run.valid[step : step + 1]]
    return [row for valid in steps for row in valid]


def through_json(state: af.data.LoaderState) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(state)))


def check_exact(
    make: Callable[[], Any],
    world: int,
    stops: list[int],
    sharding: str = "global",
    window: int = 1,
    **config: Any,
) -> None:
    """The rest is what it would have been, wherever the run stops."""
    loading = af.DataLoaderConfiguration(data_seed=1, **config)

    def ranks(states: list[dict[str, Any]] | None, stop: int | None) -> list[Run]:
        return run_ranks(
            lambda ctx: go(ctx, make(), None if states is None else states[ctx.rank], stop, sharding),
            world,
            dataloader_config=loading,
            gradient_accumulation_steps=window,
        )

    whole = ranks(None, None)
    batches: list[list[list[int]]] = [[] for _ in range(world)]
    states: list[dict[str, Any]] | None = None
    for stop in [*stops, None]:
        runs = ranks(states, stop)
        for own, run in zip(batches, runs, strict=True):
            own += run.batches
        states = [through_json(run.state) for run in runs]
        if sharding == "global":
            # Of a stream that rank 0 reads for all, it alone knows the state.
            known = {"stream": None} if loading.dispatch_batches else {}
            assert all({**state, **known} == {**states[0], **known} for state in states)
            states = states[:1] * world
    assert batches == [run.batches for run in whole]


@pytest.mark.parametrize("name", SOURCES)
@settings(max_examples=3)
@given(
    num=st.integers(4, 11),
    world=st.integers(1, 3),
    stops=st.lists(st.integers(0, 7), min_size=1, max_size=2),
    window=st.integers(1, 2),
    dispatch=st.booleans(),
    even=st.booleans(),
)
def test_samplers_and_streams_of_ones_own_come_back_the_same(
    name: str, num: int, world: int, stops: list[int], window: int, dispatch: bool, even: bool
) -> None:
    def make() -> Any:
        return SOURCES[name](max(num, 2 * world))

    check_exact(make, world, stops, window=window, dispatch_batches=dispatch, even_batches=even)


def hugging_face(num: int, num_shards: int = 1) -> Any:
    datasets: Any = importlib.import_module("datasets")
    return datasets.Dataset.from_dict({"a": list(range(num))}).to_iterable_dataset(num_shards=num_shards)


def numbers_of(rows: list[dict[str, int]]) -> torch.Tensor:
    return torch.tensor([row["a"] for row in rows])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "mapped", "buffer"])
@pytest.mark.parametrize("world", [1, 2])
def test_streams_of_datasets_come_back_the_same(name: str, world: int) -> None:
    def make() -> Any:
        data = hugging_face(11, 1 if name == "plain" else 3)
        if name == "mapped":
            data = data.map(lambda row: {"a": 2 * row["a"]})
        elif name == "buffer":
            data = data.shuffle(seed=1, buffer_size=4)
        return DataLoader(data, batch_size=2, collate_fn=numbers_of)

    check_exact(make, world, [2, 1], "global" if world == 1 or name == "plain" else "by_source")


@pytest.mark.parametrize("sharding", ["by_source", "already_sharded"])
@pytest.mark.parametrize(("world", "stops"), [(1, [2, 1]), (3, [0]), (3, [2, 1])])
def test_ranks_with_their_own_streams_come_back_the_same(sharding: str, world: int, stops: list[int]) -> None:
    check_exact(lambda: DataLoader(Shards(29), batch_size=2), world, stops, sharding)


@pytest.mark.parametrize(
    "name", ["generator", "state", "uneven", "items", "sized drawing", "whole", "iterable"]
)
@pytest.mark.parametrize("stops", [[2, 1], [6]])
def test_data_that_is_already_sharded_resumes_exactly(name: str, stops: list[int]) -> None:
    check_exact(lambda: SOURCES[name](9), 2, stops, "already_sharded")


@pytest.mark.parametrize("kind", ["generator", "state", "uneven", "drawing", "sized drawing", "itself"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (3, 2)])
def test_states_of_ones_own_hold_in_any_world(kind: str, before: int, after: int) -> None:
    make = SOURCES[kind]
    (alone,) = run_ranks(lambda ctx: go(ctx, make(13), None, None, "global"), 1)
    first = run_ranks(lambda ctx: go(ctx, make(13), None, 2, "global"), before)
    state = through_json(first[0].state)
    rest = run_ranks(lambda ctx: go(ctx, make(13), state, None, "global"), after)
    assert in_order(first) + in_order(rest) == in_order([alone])


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize("dispatch", [False, True])
def test_a_loop_that_was_left_at_the_last_batch_goes_on_with_the_next_epoch(
    name: str, dispatch: bool
) -> None:
    check_exact(lambda: SOURCES[name](8), 2, [2], dispatch_batches=dispatch)


@pytest.mark.parametrize("name", SOURCES)
@pytest.mark.parametrize(("dispatch", "world"), [(False, 1), (True, 2)])
def test_between_epochs_the_next_is_what_it_would_have_been(name: str, dispatch: bool, world: int) -> None:
    def run(
        ctx: Context, state: dict[str, Any] | None, num_epochs: int
    ) -> tuple[list[Any], af.data.LoaderState]:
        loader = af.prepare_data_loader(ctx, SOURCES[name](9))
        if state is not None:
            loader.load_state_dict(state)
        epochs = [[batch.tolist() for batch, _ in af.microbatches(ctx, loader)] for _ in range(num_epochs)]
        return epochs, af.loader_state(loader)

    def ranks(state: dict[str, Any] | None, num_epochs: int) -> list[tuple[list[Any], af.data.LoaderState]]:
        config = af.DataLoaderConfiguration(dispatch_batches=dispatch, data_seed=1)
        return run_ranks(lambda ctx: run(ctx, state, num_epochs), world, dataloader_config=config)

    whole = ranks(None, 3)
    state = through_json(ranks(None, 2)[0][1])
    assert (state["epoch"], state["consumed"]) == (2, 0)
    again = ranks(through_json(ranks(state, 0)[0][1]), 1)
    assert [epochs for epochs, _ in again] == [epochs[2:] for epochs, _ in whole]


# --- what is read ---------------------------------------------------------------------------------


@pytest.mark.parametrize("sharding", ["global", "already_sharded"])
@pytest.mark.parametrize("kind", [Counter, SizedCounter])
def test_a_stream_with_a_state_is_not_read_again(sharding: Any, kind: type[Counter]) -> None:
    def run(ctx: Context) -> list[int]:
        first = go(ctx, stream(kind)(16), None, 2, sharding)
        return cast("list[int]", go(ctx, stream(kind)(16), through_json(first.state), 2, sharding).read)

    here = 4 * 2 if sharding == "global" else 4
    for read in run_ranks(run, 2):
        assert read == list(range(here, 2 * here))


def test_for_padding_only_the_first_samples_are_read_again() -> None:
    def run(ctx: Context) -> tuple[list[int], list[list[int]]]:
        state = through_json(go(ctx, stream(Counter)(9), None, 2, "global").state)
        source = stream(Counter)(9)
        loader = af.prepare_data_loader(ctx, source)
        loader.load_state_dict(state)
        batches = [batch.tolist() for batch in loader]
        return source.dataset.read, batches

    assert run_ranks(run, 2) == [([8, 0], [[8, 0]]), ([8, 0, 1, 2], [[1, 2]])]


@pytest.mark.parametrize("sharding", ["global", "already_sharded"])
def test_behind_a_left_pass_a_stream_begins_anew(sharding: Any) -> None:
    loader = af.prepare_data_loader(Context(), stream(Drawing)(6), sharding)
    left = [batch.tolist() for batch in islice(loader, 2)]
    first, second = ([batch.tolist() for batch in loader] for _ in range(2))
    assert first[:2] == left
    assert first != second


@pytest.mark.parametrize(("sharding", "num_workers"), [("global", 1), ("already_sharded", 0)])
def test_what_is_left_of_a_pass_ends_when_nobody_goes_through_it(
    sharding: Any, num_workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Noting(DataLoader[Any]):
        def __iter__(self) -> Any:
            iterator = super().__iter__()
            ends.append(weakref.ref(iterator))
            return iterator

    ends: list[weakref.ref[Any]] = []
    loader = af.prepare_data_loader(Context(), Noting(Counter(9), 2, num_workers=num_workers), sharding)
    gc.disable()
    try:
        batches = iter(loader)
        next(batches)
        assert [end() is None for end in ends] == [False]
        del batches
        assert [end() for end in ends] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize(("steps", "dispatch"), [(1, False), (2, True), (3, False)])
@pytest.mark.parametrize("kind", ["plain", "counter", "items"])
def test_ranks_say_one_place_in_a_step_that_is_padding_for_some(
    steps: int, dispatch: bool, kind: str
) -> None:
    def run(ctx: Context) -> list[af.data.LoaderState]:
        source = indexed(5, None) if kind == "items" else SOURCES[kind](5)
        loader = af.prepare_data_loader(ctx, source)
        places = (af.loader_state(loader) for _ in af.microbatches(ctx, loader, "pad"))
        return [dataclasses.replace(place, stream=None) for place in places]

    config = af.DataLoaderConfiguration(even_batches=False, dispatch_batches=dispatch)
    first, second = run_ranks(run, 2, dataloader_config=config, gradient_accumulation_steps=steps)
    assert first == second
    assert first[-1].consumed == 5


# --- workers --------------------------------------------------------------------------------------


class InWorkers(Drawing):
    """Each worker has its remainder, and draws by torch's own random numbers too."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in super().__iter__():
            if number // 100 % step == first:
                yield 1000 * number + (0 if info is None else int(torch.randint(1000, ())))


class Slow(Counter):
    """Says by its samples how many came before them in this process."""

    def __iter__(self) -> Iterator[Any]:
        return (100 * place + count for count, place in enumerate(super().__iter__()))


STATEFUL = af.DataLoaderConfiguration(use_stateful_dataloader=True, data_seed=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_workers", "sharding", "world"),
    [(2, "global", 1), (1, "global", 2), (2, "already_sharded", 1), (0, "global", 1)],
)
@pytest.mark.parametrize("kind", [InWorkers, Numbers])
def test_torchdatas_loader_restores_workers(num_workers: int, sharding: Any, world: int, kind: Any) -> None:
    if sharding != "global" and kind is InWorkers:
        kind = Counter  # that workers draw by the place is for loaders that are cut here

    def run(ctx: Context) -> None:
        def make() -> af.data.PreparedDataLoader[Any]:
            loader = af.prepare_data_loader(ctx, stream(kind, num_workers=num_workers)(11), sharding)
            if begun:
                loader.load_state_dict(begun[0])  # the seed of the first, though others are there
            return loader

        begun: list[Any] = []
        begun.append(through_json(af.loader_state(make())))
        whole = [batch.tolist() for batch in make()]
        for stop in (1, 2):
            stopped = make()
            parts = [batch.tolist() for batch in islice(stopped, stop)]
            state = through_json(af.loader_state(stopped))
            del stopped
            again = make()
            again.load_state_dict(state)
            assert parts + [batch.tolist() for batch in again] == whole

    run_ranks(run, world, dataloader_config=STATEFUL)


@pytest.mark.slow
@pytest.mark.parametrize("is_users", [False, True])
def test_workers_that_were_brought_back_read_nothing_again(is_users: bool) -> None:
    kind: Any = DataLoader
    if is_users:
        kind = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    ctx = Context() if is_users else Context().replace(dataloader_config=STATEFUL)

    def make() -> af.data.PreparedDataLoader[Any]:
        return af.prepare_data_loader(ctx, kind(Slow(8), batch_size=2, num_workers=1))

    stopped, again = make(), make()
    assert [batch.tolist() for batch in islice(stopped, 2)] == [[0, 101], [202, 303]]
    again.load_state_dict(stopped.state_dict())
    assert [batch.tolist() for batch in again] == [[400, 501], [602, 703]]


def test_without_torchdata_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", None)
    with pytest.raises(MissingExtraError, match=r"needs torchdata. .* pip install 'accelfn\[data\]'"):
        af.prepare_data_loader(Context().replace(dataloader_config=STATEFUL), DataLoader(Numbers(3)))


def place(num_workers: int, kind: Any = Numbers, stop: int = 2, **config: Any) -> af.data.LoaderState:
    ctx = Context().replace(dataloader_config=af.DataLoaderConfiguration(**config))
    loader = af.prepare_data_loader(ctx, stream(kind, num_workers=num_workers)(12))
    list(islice(loader, stop))
    return af.loader_state(loader)


def going_on(state: af.data.LoaderState, num_workers: int, kind: Any = Numbers, **config: Any) -> list[int]:
    ctx = Context().replace(dataloader_config=af.DataLoaderConfiguration(**config))
    loader = af.prepare_data_loader(ctx, stream(kind, num_workers=num_workers)(12))
    af.restore_loader(loader, state)
    return [row for batch in loader for row in batch.tolist()]


@pytest.mark.parametrize(("before", "after", "batch_size"), [(2, 0, 2), (2, 1, 2), (0, 2, 2), (2, 2, 4)])
def test_what_workers_read_in_another_order_is_refused(before: int, after: int, batch_size: int) -> None:
    loader = af.prepare_data_loader(Context(), stream(Numbers, batch_size=batch_size, num_workers=after)(12))
    fresh = af.loader_state(loader)
    said = r"workers? .*had read the stream, .* reads it with .* worker.* any world"
    with pytest.raises(ConfigurationError, match=said):
        af.restore_loader(loader, place(before))
    assert af.loader_state(loader) == fresh
    assert sorted(going_on(place(before, stop=0), after)) == list(range(12))  # at the start any will do


@pytest.mark.slow
def test_by_its_place_alone_a_stream_goes_on_with_a_state_or_without() -> None:
    rest = list(range(4, 12))
    stateful = {"use_stateful_dataloader": True}
    assert place(0, Counter).stream is not None
    assert going_on(place(0, Counter), 1, Counter) == rest
    assert going_on(place(0, Counter), 1, Counter, **stateful) == rest
    assert going_on(place(1, Counter, **stateful), 0, Counter) == rest
    assert going_on(place(1, Counter, **stateful), 1, Counter) == rest
    assert going_on(place(0, Counter), 0) == going_on(place(0), 0, Counter) == rest


def test_streams_of_ones_own_are_restored_by_their_own_rank_in_their_own_world() -> None:
    def state(ctx: Context) -> af.data.LoaderState:
        loader = af.prepare_data_loader(ctx, stream(Shards)(29))
        list(islice(loader, 1))
        return af.loader_state(loader)

    def restore(ctx: Context, mine: af.data.LoaderState) -> None:
        loader = af.prepare_data_loader(ctx, stream(Shards)(29))
        said = r"the state is of the data of rank \d of 2, but the loader reads"
        with pytest.raises(ConfigurationError, match=said):
            af.restore_loader(loader, mine)
        assert af.loader_state(loader).consumed == 0

    states = run_ranks(state, 2)
    assert [(own.num_processes, own.rank) for own in states] == [(2, 0), (2, 1)]
    run_ranks(lambda ctx: restore(ctx, states[1 - ctx.rank]), 2)
    for world in (1, 3):
        run_ranks(lambda ctx: restore(ctx, states[0]), world)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([object()], r"\['value'\]\[0\] is of type object"),
        ({(1, 2): 3}, r"\['value'\] has a key \(1, 2\)"),
        ({1, 2}, r"\['value'\] is of type set"),
    ],
)
def test_what_a_checkpoint_can_not_hold_is_refused_when_it_is_asked_for(value: Any, text: str) -> None:
    class Odd(Counter):
        def state_dict(self) -> dict[str, Any]:
            return {"place": self.place, "value": value}

    loader = af.prepare_data_loader(Context(), stream(Odd)(4))
    next(iter(loader))
    with pytest.raises(TypeError, match=rf"the state of the stream\['begin'\]{text}"):
        af.loader_state(loader)
