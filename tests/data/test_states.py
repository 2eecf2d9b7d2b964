# torch leaves DataLoader and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import dataclasses
import json
import random
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
)

from accelfn import Context, DataLoaderConfiguration
from accelfn.data import (
    LoaderState,
    loader_state,
    microbatches,
    prepare_data_loader,
)
from accelfn.testing import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore:each of . ranks reads the whole stream"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than cores
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


def as_row(number: int) -> torch.Tensor:
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
        uneven = "pad" if ctx.loading.even_batches else "stop_first"
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
@settings(max_examples=int(__import__("os").environ.get("EX","12")))
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
@settings(max_examples=int(__import__("os").environ.get("EX","12")))
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
