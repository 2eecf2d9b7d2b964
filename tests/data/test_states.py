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

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter  # pyright: ignore[reportPrivateUsage]

from accelfn import Context, DataLoaderConfiguration
from accelfn.data import (
    LoaderState,
    PreparedDataLoader,
    loader_state,
    microbatches,
    prepare_data_loader,
    restore_loader,
    skip_first_batches,
)
from accelfn.data.states import check_plain, count_shards, has_state, select_shards
from accelfn.errors import ConfigurationError, MissingExtraError, NotAvailableError
from accelfn.testing import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:each of . ranks reads the full stream"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than cores
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),  # of torch, for which torchdata asks
]

Make = Callable[[], Any]
NUM_EPOCHS = 3


# --- samplers of one's own ------------------------------------------------------------------------


def indices(num: int) -> Any:
    return torch.arange(num)


def generator(seed: int = 4) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Shuffler:
    """A sampler whose random numbers go on from epoch to epoch, and which says its state."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.random = random.Random(3)

    def __len__(self) -> int:
        return self.num

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.num))
        self.random.shuffle(order)
        return iter(order)

    def state_dict(self) -> dict[str, Any]:
        version, numbers, rest = self.random.getstate()
        return {"version": version, "numbers": list(numbers), "rest": rest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.random.setstate((state["version"], tuple(state["numbers"]), state["rest"]))


class Uneven:
    """Batches of different sizes, by a sampler that has a state."""

    def __init__(self, num: int) -> None:
        self.sampler = Shuffler(num)

    def __iter__(self) -> Iterator[list[int]]:
        order = iter(self.sampler)
        size = 1
        while batch := list(islice(order, size)):
            yield batch
            size = size % 3 + 1


class OwnBatches(BatchSampler):
    pass


def weighted(num: int) -> WeightedRandomSampler:
    return WeightedRandomSampler([1.0 + place for place in range(num)], num, generator=generator())


def with_one_generator(num: int) -> DataLoader[Any]:
    sampler = weighted(num)
    return DataLoader(indices(num), batch_size=2, sampler=sampler, generator=sampler.generator)


SAMPLED: dict[str, Callable[[int], Any]] = {
    "generator": lambda num: DataLoader(indices(num), batch_size=2, sampler=weighted(num)),
    "one generator": with_one_generator,
    "state": lambda num: DataLoader(indices(num), batch_size=2, sampler=cast("Any", Shuffler(num))),
    "inside": lambda num: DataLoader(
        indices(num),
        batch_sampler=OwnBatches(RandomSampler(range(num), generator=generator()), 2, False),
    ),
    "uneven": lambda num: DataLoader(indices(num), batch_sampler=cast("Any", Uneven(num))),
    "items": lambda num: DataLoader(
        indices(num).view(-1, 1), batch_size=None, sampler=cast("Any", Shuffler(num))
    ),
}


# --- streams of one's own -------------------------------------------------------------------------


class Counter(IterableDataset[Any]):
    """Says where it is, and counts what was read of it. Stands where it was left, as many do."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.place = 0
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


class SizedCounter(Counter):
    def __len__(self) -> int:
        return self.num


class Drawing(Counter):
    """Its order is drawn as it goes, by random numbers that go on from epoch to epoch."""

    def __init__(self, num: int) -> None:
        super().__init__(num)
        self.generator = generator()

    def __iter__(self) -> Iterator[Any]:
        for place in super().__iter__():
            yield 100 * place + int(torch.randint(100, (), generator=self.generator))

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "generator": self.generator.get_state().tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]
        self.generator.set_state(torch.tensor(state["generator"], dtype=torch.uint8))


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


class Going:
    """An iterator with a state."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.place = 0

    def __iter__(self) -> "Going":
        return self

    def __next__(self) -> int:
        if self.place >= self.num:
            raise StopIteration
        self.place += 1
        return self.place - 1

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


class Goes(IterableDataset[Any]):
    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self) -> Iterator[Any]:
        return Going(self.num)


class Plain(IterableDataset[Any]):
    def __init__(self, num: int) -> None:
        self.num = num

    def __iter__(self) -> Iterator[Any]:
        return iter(range(self.num))


class Batches(Drawing):
    """No dataset of torch's but an iterable of batches."""

    def __iter__(self) -> Iterator[Any]:
        return (torch.tensor([number, -number]) for number in super().__iter__())


def hugging_face(num: int, num_shards: int = 1) -> Any:
    datasets = pytest.importorskip("datasets")
    return datasets.Dataset.from_dict({"a": list(range(num))}).to_iterable_dataset(num_shards=num_shards)


def numbers_of(rows: list[dict[str, int]]) -> torch.Tensor:
    return torch.tensor([row["a"] for row in rows])


def as_row(number: Any) -> torch.Tensor:
    return torch.tensor([number])


STREAMS: dict[str, Callable[[int], Any]] = {
    "counter": lambda num: DataLoader(Counter(num), batch_size=2),
    "sized": lambda num: DataLoader(SizedCounter(num), batch_size=2),
    "drawing": lambda num: DataLoader(Drawing(num), batch_size=2),
    "sized drawing": lambda num: DataLoader(SizedDrawing(num), batch_size=2),
    "dropped": lambda num: DataLoader(SizedDrawing(num), batch_size=2, drop_last=True),
    "itself": lambda num: DataLoader(Itself(num), batch_size=2),
    "iterator": lambda num: DataLoader(Goes(num), batch_size=2),
    "plain": lambda num: DataLoader(Plain(num), batch_size=2),
    "whole": lambda num: DataLoader(Drawing(num), batch_size=None, collate_fn=as_row),
    "iterable": Batches,
}
HUGGING_FACE: dict[str, Callable[[int], Any]] = {
    "plain": lambda num: DataLoader(hugging_face(num), batch_size=2, collate_fn=numbers_of),
    "mapped": lambda num: DataLoader(
        hugging_face(num, 3).map(lambda row: {"a": 2 * row["a"]}), batch_size=2, collate_fn=numbers_of
    ),
    "buffer": lambda num: DataLoader(
        hugging_face(num, 3).shuffle(seed=1, buffer_size=4), batch_size=2, collate_fn=numbers_of
    ),
}


class Run(NamedTuple):
    batches: list[list[int]]  # in all epochs
    valid: list[list[int]]  # without padding
    state: LoaderState
    read: list[int] | None  # by the dataset


def go(ctx: Context, make: Make, state: dict[str, Any] | None, stop: int | None, sharding: Any) -> Run:
    """Go on from ``state`` with all things new, until ``stop`` batches are read or three epochs are over."""
    source = make()
    loader = prepare_data_loader(ctx, source, sharding)
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
        for batch, micro in microbatches(ctx, loader, uneven):
            batches.append(batch.tolist())
            valid.append(batch[: micro.own_valid].tolist())
            if len(batches) == stop:
                break
    return Run(batches, valid, loader_state(loader), getattr(getattr(source, "dataset", None), "read", None))


def in_order(runs: list[Run]) -> list[int]:
    longest = max(len(run.valid) for run in runs)
    return [
        row for step in range(longest) for run in runs for one in run.valid[step : step + 1] for row in one
    ]


def through_json(state: LoaderState) -> dict[str, Any]:
    return json.loads(json.dumps(dataclasses.asdict(state)))


def check_exact(make: Make, world: int, stops: list[int], sharding: str = "global", **config: Any) -> None:
    """The rest is what it would have been, wherever the run stops."""
    window = config.pop("window", 1)
    options: dict[str, Any] = {
        "dataloader_config": DataLoaderConfiguration(data_seed=1, **config),
        "gradient_accumulation_steps": window,
    }
    whole = run_ranks(lambda ctx: go(ctx, make, None, None, sharding), world, **options)
    batches: list[list[list[int]]] = [[] for _ in range(world)]
    states: list[dict[str, Any]] | None = None
    for stop in [*stops, None]:
        runs = run_ranks(
            lambda ctx, states=states, stop=stop: go(
                ctx, make, None if states is None else states[ctx.rank], stop, sharding
            ),
            world,
            **options,
        )
        for own, run in zip(batches, runs, strict=True):
            own += run.batches
        if sharding == "global":
            # Of a stream that rank 0 reads for all, it alone knows the state.
            stream = None if config.get("dispatch_batches") else runs[0].state.stream
            known = {"stream": stream}
            first = dataclasses.replace(runs[0].state, **known)
            assert all(dataclasses.replace(run.state, **known) == first for run in runs)
            assert config.get("dispatch_batches") or all(run.state == first for run in runs)
            states = [through_json(runs[0].state)] * world
        else:
            states = [through_json(run.state) for run in runs]
    assert batches == [run.batches for run in whole]


stops = st.lists(st.integers(0, 7), min_size=1, max_size=2)


@pytest.mark.parametrize("name", list(SAMPLED))
@settings(max_examples=6)
@given(
    num=st.integers(4, 11),
    world=st.integers(1, 3),
    stops=stops,
    window=st.integers(1, 2),
    dispatch=st.booleans(),
    even=st.booleans(),
)
def test_samplers_of_ones_own_come_back_the_same(
    name: str, num: int, world: int, stops: list[int], window: int, dispatch: bool, even: bool
) -> None:
    def make() -> Any:
        return SAMPLED[name](num)

    check_exact(make, world, stops, window=window, dispatch_batches=dispatch, even_batches=even)


@pytest.mark.parametrize("name", list(STREAMS))
@settings(max_examples=6)
@given(
    num=st.integers(4, 11),
    world=st.integers(1, 3),
    stops=stops,
    window=st.integers(1, 2),
    dispatch=st.booleans(),
    even=st.booleans(),
)
def test_streams_of_ones_own_come_back_the_same(
    name: str, num: int, world: int, stops: list[int], window: int, dispatch: bool, even: bool
) -> None:
    def make() -> Any:
        return STREAMS[name](max(num, 2 * world))

    check_exact(make, world, stops, window=window, dispatch_batches=dispatch, even_batches=even)


@pytest.mark.parametrize("name", list(HUGGING_FACE))
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stops", [[1], [2, 1]])
def test_streams_of_datasets_come_back_the_same(name: str, world: int, stops: list[int]) -> None:
    sharding = "global" if world == 1 or name == "plain" else "by_source"
    check_exact(lambda: HUGGING_FACE[name](11), world, stops, sharding)


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


@pytest.mark.parametrize("sharding", ["by_source", "already_sharded"])
@pytest.mark.parametrize("world", [1, 3])
@pytest.mark.parametrize("stops", [[0], [2, 1]])
def test_ranks_with_streams_of_their_own_come_back_the_same(
    sharding: str, world: int, stops: list[int]
) -> None:
    check_exact(lambda: DataLoader(Shards(29), batch_size=2), world, stops, sharding)


@pytest.mark.parametrize(
    "name", ["generator", "state", "uneven", "items", "sized drawing", "drawing", "whole", "iterable"]
)
@pytest.mark.parametrize("stops", [[0], [2, 1], [6]])
def test_data_that_is_already_sharded_resumes_exactly(name: str, stops: list[int]) -> None:
    check_exact(lambda: {**SAMPLED, **STREAMS}[name](9), 2, stops, "already_sharded")


# --- any world to any world -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["generator", "state", "uneven", "drawing", "sized drawing", "itself"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (3, 2)])
def test_states_of_ones_own_hold_in_any_world(kind: str, before: int, after: int) -> None:
    def make() -> Any:
        return {**SAMPLED, **STREAMS}[kind](13)

    (alone,) = run_ranks(lambda ctx: go(ctx, make, None, None, "global"), 1)
    first = run_ranks(lambda ctx: go(ctx, make, None, 2, "global"), before)
    state = through_json(first[0].state)
    rest = run_ranks(lambda ctx: go(ctx, make, state, None, "global"), after)
    assert in_order(first) + in_order(rest) == in_order([alone])


@pytest.mark.parametrize("name", [*SAMPLED, *STREAMS])
@pytest.mark.parametrize(("dispatch", "world"), [(False, 2), (True, 2), (False, 1)])
def test_between_epochs_the_next_one_is_what_it_would_have_been(
    name: str, dispatch: bool, world: int
) -> None:
    def run(ctx: Context, state: dict[str, Any] | None, num_epochs: int) -> tuple[list[Any], LoaderState]:
        loader = prepare_data_loader(ctx, {**SAMPLED, **STREAMS}[name](9))
        if state is not None:
            loader.load_state_dict(state)
        epochs = [[batch.tolist() for batch, _ in microbatches(ctx, loader)] for _ in range(num_epochs)]
        return epochs, loader_state(loader)

    def ranks(state: dict[str, Any] | None, num_epochs: int) -> list[tuple[list[Any], LoaderState]]:
        config = DataLoaderConfiguration(dispatch_batches=dispatch, data_seed=1)
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
    def make() -> Any:
        return DataLoader(kind(16), batch_size=2)

    def run(ctx: Context) -> list[int]:
        first = go(ctx, make, None, 2, sharding)
        return cast("list[int]", go(ctx, make, through_json(first.state), 2, sharding).read)

    here = 4 * 2 if sharding == "global" else 4
    for read in run_ranks(run, 2):
        assert read == list(range(here, 2 * here))


def test_for_padding_only_the_first_samples_are_read_again() -> None:
    def make() -> Any:
        return DataLoader(Counter(9), batch_size=2)

    def run(ctx: Context) -> tuple[list[int], list[list[int]]]:
        state = through_json(go(ctx, make, None, 2, "global").state)
        source = make()
        loader = prepare_data_loader(ctx, source)
        loader.load_state_dict(state)
        batches = [batch.tolist() for batch in loader]
        return source.dataset.read, batches

    (read, batches), (other_read, other_batches) = run_ranks(run, 2)
    assert (batches, other_batches) == ([[8, 0]], [[1, 2]])
    assert (read, other_read) == ([8, 0], [8, 0, 1, 2])


def test_a_left_pass_begins_anew_though_the_dataset_stands_where_it_was_left() -> None:
    loader = prepare_data_loader(Context(), DataLoader(Drawing(5), batch_size=2))
    first = [batch.tolist() for batch in islice(loader, 2)]
    again = [batch.tolist() for batch in loader]
    assert again[:2] == first
    assert [batch.tolist() for batch in loader] != again  # the next epoch is another


class Told(Counter):
    """Gives other samples in each epoch, which is part of its state too."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        for place in super().__iter__():
            yield 100 * self.epoch + place

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place, self.epoch = state["place"], state["epoch"]


@pytest.mark.parametrize("sharding", ["global", "already_sharded"])
def test_behind_a_left_pass_a_stream_begins_and_is_told_the_next_epoch(sharding: Any) -> None:
    loader = prepare_data_loader(Context(), DataLoader(Told(6), batch_size=2), sharding)
    found = [[batch.tolist() for batch in islice(loader, 2)] for _ in range(3)]
    assert found == [
        [[100 * epoch, 100 * epoch + 1], [100 * epoch + 2, 100 * epoch + 3]] for epoch in range(3)
    ]
    again = prepare_data_loader(Context(), DataLoader(Told(6), batch_size=2), sharding)
    restore_loader(again, loader_state(loader))
    assert [batch.tolist() for _ in range(2) for batch in again] == [
        [204, 205],
        *([300 + place, 301 + place] for place in (0, 2, 4)),
    ]


@pytest.mark.parametrize("sharding", ["global", "already_sharded"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_is_left_of_a_pass_ends_when_nobody_goes_through_it(sharding: Any, num_workers: int) -> None:
    loader = prepare_data_loader(
        Context(), DataLoader(Counter(9), batch_size=2, num_workers=num_workers), sharding
    )
    gc.collect()
    gc.disable()
    try:
        batches = iter(loader)
        next(batches)
        held = [one for one in gc.get_objects() if issubclass(type(one), _BaseDataLoaderIter)]
        assert held
        ends = [weakref.ref(one) for one in held]
        del batches, held
        assert [end() for end in ends] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize("skipped", [1, 4])
def test_batches_that_are_skipped_count_from_the_start_of_the_epoch_of_a_restored_state(skipped: int) -> None:
    def make() -> PreparedDataLoader[Any]:
        return prepare_data_loader(Context(), DataLoader(Drawing(12), batch_size=2))

    whole = [batch.tolist() for batch in make()]
    stopped = make()
    list(islice(stopped, 2))
    again = make()
    restore_loader(again, loader_state(stopped))
    assert [batch.tolist() for batch in skip_first_batches(again, skipped)] == whole[skipped:]


def test_an_epoch_that_is_chosen_after_restoring_begins_as_it_did() -> None:
    def make(name: str) -> PreparedDataLoader[Any]:
        return prepare_data_loader(Context(), {**SAMPLED, **STREAMS}[name](9))

    for name in ("generator", "drawing"):
        stopped = make(name)
        list(stopped)
        second = [batch.tolist() for batch in islice(stopped, 2)]
        again = make(name)
        restore_loader(again, loader_state(stopped))
        again.set_epoch(1)
        assert [batch.tolist() for batch in islice(again, 2)] == second


@pytest.mark.parametrize(("steps", "dispatch"), [(1, False), (2, True), (3, False)])
@pytest.mark.parametrize("kind", [Plain, Counter, "items"])
def test_ranks_say_the_same_place_in_a_step_that_is_padding_for_some(
    steps: int, dispatch: bool, kind: Any
) -> None:
    def run(ctx: Context) -> list[LoaderState]:
        source: Any = (
            DataLoader(indices(5), batch_size=None) if kind == "items" else DataLoader(kind(5), batch_size=2)
        )
        loader = prepare_data_loader(ctx, source)
        return [
            dataclasses.replace(loader_state(loader), stream=None) for _ in microbatches(ctx, loader, "pad")
        ]

    config = DataLoaderConfiguration(even_batches=False, dispatch_batches=dispatch)
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


class Slow(IterableDataset[Any]):
    """Says by its samples how many came before them in this process."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.place = 0

    def __iter__(self) -> Iterator[Any]:
        for count in range(self.num):
            if self.place < self.num:
                self.place += 1
                yield 100 * self.place + count

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


@pytest.mark.parametrize(
    ("num_workers", "sharding", "world"),
    [(2, "global", 1), (1, "global", 2), (2, "already_sharded", 1), (0, "global", 1)],
)
@pytest.mark.parametrize("kind", [InWorkers, Plain, Goes])
def test_torchdatas_loader_brings_workers_back(
    num_workers: int, sharding: Any, world: int, kind: Any
) -> None:
    pytest.importorskip("torchdata")
    if sharding != "global" and kind is InWorkers and num_workers:
        kind = Counter  # that workers draw by the place is for loaders that are cut here

    def make() -> Any:
        return DataLoader(kind(11), batch_size=2, num_workers=num_workers)

    config = DataLoaderConfiguration(use_stateful_dataloader=True, data_seed=1)

    def run(ctx: Context) -> None:
        whole = [batch.tolist() for batch in prepare_data_loader(ctx, make(), sharding)]
        for stop in (1, 2):
            stopped = prepare_data_loader(ctx, make(), sharding)
            parts = [batch.tolist() for batch in islice(stopped, stop)]
            state = through_json(loader_state(stopped))
            del stopped
            again = prepare_data_loader(ctx, make(), sharding)
            again.load_state_dict(state)
            parts += [batch.tolist() for batch in again]
            assert parts == whole

    run_ranks(run, world, dataloader_config=config)


def test_workers_that_were_brought_back_read_nothing_again() -> None:
    pytest.importorskip("torchdata")
    ctx = Context().replace(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))

    def make() -> PreparedDataLoader[Any]:
        return prepare_data_loader(ctx, DataLoader(Slow(8), batch_size=2, num_workers=1))

    stopped = make()
    assert [batch.tolist() for batch in islice(stopped, 2)] == [[100, 201], [302, 403]]
    again = make()
    restore_loader(again, loader_state(stopped))
    assert [batch.tolist() for batch in again] == [[500, 601], [702, 803]]


def test_a_loader_that_is_torchdatas_already_keeps_its_states() -> None:
    pytest.importorskip("torchdata")
    from torchdata.stateful_dataloader import StatefulDataLoader  # pyright: ignore[reportMissingTypeStubs]

    def make() -> PreparedDataLoader[Any]:
        return prepare_data_loader(Context(), StatefulDataLoader(Slow(8), batch_size=2, num_workers=1))

    stopped = make()
    list(islice(stopped, 1))
    again = make()
    again.load_state_dict(stopped.state_dict())
    assert [batch.tolist() for batch in again] == [[300, 401], [502, 603], [704, 805]]


def test_without_torchdata_one_sentence_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchdata.stateful_dataloader", None)
    ctx = Context().replace(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    with pytest.raises(
        MissingExtraError, match=r"needs torchdata. Install it: pip install 'accelfn\[data\]'"
    ):
        prepare_data_loader(ctx, DataLoader(Plain(3)))


def place(
    num_workers: int, batch_size: int = 2, world: int = 1, stop: int = 2, kind: Any = Plain, **config: Any
) -> Any:
    def run(ctx: Context) -> LoaderState:
        loader = prepare_data_loader(
            ctx, DataLoader(kind(12), batch_size=batch_size, num_workers=num_workers)
        )
        list(islice(loader, stop))
        return loader_state(loader)

    return run_ranks(run, world, dataloader_config=DataLoaderConfiguration(**config))[0]


def going_on(
    state: LoaderState, num_workers: int, batch_size: int = 2, kind: Any = Plain, **config: Any
) -> list[int]:
    ctx = Context().replace(dataloader_config=DataLoaderConfiguration(**config))
    loader = prepare_data_loader(ctx, DataLoader(kind(12), batch_size=batch_size, num_workers=num_workers))
    restore_loader(loader, state)
    return [row for batch in loader for row in batch.tolist()]


@pytest.mark.parametrize(
    ("state", "num_workers", "batch_size"),
    [
        (lambda: place(2), 0, 2),
        (lambda: place(2), 1, 2),
        (lambda: place(0), 2, 2),
        (lambda: place(2), 2, 4),
    ],
)
def test_what_several_workers_read_in_another_order_is_refused(
    state: Make, num_workers: int, batch_size: int
) -> None:
    ctx = Context()
    source = DataLoader(Plain(12), batch_size=batch_size, num_workers=num_workers)
    loader = prepare_data_loader(ctx, source)
    before = loader_state(loader)
    with pytest.raises(
        ConfigurationError, match=r"workers? .*had read the stream, .* reads it with .* worker.* any world"
    ):
        restore_loader(loader, state())
    assert loader_state(loader) == before


def test_at_the_start_of_an_epoch_any_number_of_workers_will_do() -> None:
    assert sorted(going_on(place(2, stop=0), 0)) == list(range(12))


def test_by_its_place_alone_a_stream_goes_on_with_a_state_or_without() -> None:
    pytest.importorskip("torchdata")
    stateful = {"use_stateful_dataloader": True}
    rest = list(range(4, 12))
    assert place(0, kind=Counter).stream is not None
    assert going_on(place(0, kind=Counter), 1, kind=Counter) == rest
    assert going_on(place(0, kind=Counter), 1, kind=Counter, **stateful) == rest
    assert going_on(place(1, kind=Counter, **stateful), 0, kind=Counter) == rest
    assert going_on(place(1, kind=Counter, **stateful), 1, kind=Counter) == rest
    assert going_on(place(0, kind=Counter), 0) == rest
    assert going_on(place(0), 0, kind=Counter) == rest


def test_streams_of_ones_own_are_restored_by_their_own_rank_in_their_own_world() -> None:
    def state(ctx: Context) -> LoaderState:
        loader = prepare_data_loader(ctx, DataLoader(Shards(29), batch_size=2))
        list(islice(loader, 1))
        return loader_state(loader)

    states = run_ranks(state, 2)
    assert [(one.num_processes, one.rank) for one in states] == [(2, 0), (2, 1)]

    def restore(ctx: Context, mine: LoaderState) -> None:
        loader = prepare_data_loader(ctx, DataLoader(Shards(29), batch_size=2))
        with pytest.raises(
            ConfigurationError, match=r"the state is of the data of rank \d of 2, but the loader reads"
        ):
            restore_loader(loader, mine)
        assert loader_state(loader).consumed == 0

    run_ranks(lambda ctx: restore(ctx, states[1 - ctx.rank]), 2)
    run_ranks(lambda ctx: restore(ctx, states[0]), 1)
    run_ranks(lambda ctx: restore(ctx, states[0]), 3)


# --- plain values ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [object()]}, r"it\['a'\]\[0\] is of type object"),
        ({(1, 2): 3}, r"it has a key \(1, 2\)"),
        ({"a": {1, 2}}, r"it\['a'\] is of type set"),
    ],
)
def test_what_a_checkpoint_can_not_hold_is_refused(value: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        check_plain(value, "it")


def test_a_state_that_is_not_plain_is_refused_when_it_is_asked_for_and_not_before() -> None:
    class Odd(Counter):
        def state_dict(self) -> dict[str, Any]:
            return {"place": self.place, "odd": {1, 2}}

    loader = prepare_data_loader(Context(), DataLoader(Odd(4), batch_size=2))
    next(iter(loader))
    with pytest.raises(TypeError, match=r"the state of the stream\['begin'\]\['odd'\] is of type set"):
        loader_state(loader)


def test_what_has_a_state_says_it_without_being_told_anything() -> None:
    class Told:
        def state_dict(self, num_samples: int) -> dict[str, Any]:
            return {"num": num_samples}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    assert has_state(Counter(1))
    assert not has_state(Told())
    assert not has_state(Plain(1))
    assert not has_state(None)


def test_what_is_no_state_of_a_loader_is_refused() -> None:
    loader = prepare_data_loader(Context(), DataLoader(Plain(3)))
    with pytest.raises(ValueError, match="it lacks consumed, epoch, seed and it has _snapshot"):
        loader.load_state_dict({"_snapshot": {}})
    newer = {**loader.state_dict(), "version": 9, "more": 1}
    with pytest.raises(NotAvailableError, match="has version 9"):
        loader.load_state_dict(newer)


class Sharded:
    """Shards that are numbers."""

    def __init__(self, shards: list[int]) -> None:
        self.shards = shards

    @property
    def n_shards(self) -> int:
        return len(self.shards)

    def shard(self, num_shards: int, index: int) -> "Sharded":
        return Sharded(self.shards[index::num_shards])


def test_shards_are_counted_where_they_can_be_taken() -> None:
    class OnlyCounted:
        num_shards = 4

    class CountedInWords:
        n_shards = "many"

        def shard(self, num_shards: int, index: int) -> None:
            raise AssertionError("taken")

    assert count_shards(Sharded([1, 2])) == 2
    assert count_shards(OnlyCounted()) is None
    assert count_shards(CountedInWords()) is None
    assert count_shards(object()) is None


@pytest.mark.parametrize("num_shards", [4, 5])
def test_shards_of_hugging_face_datasets_are_read_by_one_rank_each(num_shards: int) -> None:
    datasets: Any = importlib.import_module("datasets")
    made = datasets.Dataset.from_dict({"x": list(range(20))}).to_iterable_dataset(num_shards=num_shards)
    assert count_shards(made) == num_shards
    parts = [select_shards(made, rank, 2) for rank in (0, 1)]
    rows = [[row["x"] for row in part] for part in parts]
    assert sorted(rows[0] + rows[1]) == list(range(20))
    assert {len(one) * num_shards // 20 for one in rows} == {num_shards // 2, num_shards - num_shards // 2}
    with pytest.raises(ConfigurationError, match="already split by split_dataset_by_node"):
        count_shards(parts[0])
