"""Loaders under the alias: Accelerate's batches, torch's order and random numbers, flags at the end."""

# torch leaves these partly untyped.
# pyright: reportUnknownMemberType=false

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

import accelfn as af
from accelfn.compat.accelerator import Accelerator
from accelfn.compat.loaders import prepare_data_loader, prepare_loader
from accelfn.compat.records import DataLoaderConfiguration
from accelfn.compat.shards import BatchSamplerShard, IterableDatasetShard, SeedableRandomSampler
from accelfn.compat.states import GradientState
from accelfn.errors import ConfigurationError, MismatchError

Loader: Any = DataLoader  # of lists, which torch reads and its types refuse


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


@pytest.mark.slow
@given(data=st.data())
def test_the_batches_of_a_rank_are_the_peers(peer: Any, data: st.DataObject) -> None:
    size, number = data.draw(st.integers(2, 4)), data.draw(st.integers(0, 30))
    splits = data.draw(st.booleans())
    rows = data.draw(st.integers(1, 4)) * (size if splits else 1)
    even, drop_last = data.draw(st.booleans()), data.draw(st.booleans())
    batches = BatchSampler(SequentialSampler(range(number)), rows, drop_last)
    for rank in range(size):
        arguments = (batches, size, rank, splits, even)
        own = BatchSamplerShard(*arguments)
        theirs = [*peer.data_loader.BatchSamplerShard(*arguments)]
        assert [*own] == theirs
        if even or drop_last or not splits:  # theirs has a wrong length otherwise
            assert len(own) == len(theirs)


def test_batches_of_different_sizes_arent_lost() -> None:
    class Ragged(BatchSampler):
        batch_size = 3

        def __init__(self) -> None: ...
        def __len__(self) -> int:
            return 5

        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0, 1, 2], [3, 4], [5, 6, 7], [8], [9, 10]])

    read = [[*BatchSamplerShard(Ragged(), 2, rank, even_batches=False)] for rank in range(2)]
    assert read == [[[0, 1, 2], [5, 6, 7], [9, 10]], [[3, 4], [8]]]


class Endless(Sampler[list[int]]):
    batch_size = 2

    def __iter__(self) -> Iterator[list[int]]:
        return ([number % 20, number % 20 + 1] for number in itertools.count(step=2))


def test_a_batch_sampler_may_have_no_end() -> None:
    def run(ctx: af.Context) -> list[list[int]]:
        loader = prepare_loader(None, ctx, Loader(torch.arange(20), batch_sampler=Endless()))
        return [batch.tolist() for batch in itertools.islice(loader, 2)]

    assert af.testing.run_ranks(run, 2) == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    shard = BatchSamplerShard(Endless(), 2, 1, split_batches=True)  # pyright: ignore[reportArgumentType]
    assert [*itertools.islice(shard, 2)] == [[1], [3]]


@pytest.mark.slow
def test_a_seedable_order_is_the_peers(peer: Any) -> None:
    own = SeedableRandomSampler(range(9), data_seed=5)
    theirs = peer.data_loader.SeedableRandomSampler(range(9), data_seed=5)
    for _ in range(2):
        assert [*own] == [*theirs]
    own.set_epoch(7)
    theirs.set_epoch(7)
    assert [*own] == [*theirs]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("generator", [None, torch.Generator()], ids=["torch's", "of its own"])
def test_one_process_draws_what_torch_draws(workers: int, generator: torch.Generator | None) -> None:
    options = {"batch_size": 4, "shuffle": True, "num_workers": workers, "generator": generator}

    def read(prepare: bool) -> tuple[list[Any], float]:
        torch.manual_seed(3)
        if generator is not None:
            generator.manual_seed(42)
        loader: Any = Loader(list(range(10)), **options)
        if prepare:
            loader = Accelerator(cpu=True).prepare(loader)
        batches = [batch.tolist() for _ in range(3) for batch in loader]
        return batches, torch.rand(()).item()

    assert read(True) == read(False)


@pytest.mark.usefixtures("alone")
def test_the_last_batch_is_known_to_be_the_last() -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(Loader(list(range(10)), batch_size=4))
    state = GradientState()
    assert (len(loader), loader.total_batch_size) == (3, 4)
    assert issubclass(loader.__class__, DataLoader)
    seen = [(batch.tolist(), state.end_of_dataloader, state.remainder) for batch in loader]
    assert seen == [([0, 1, 2, 3], False, 2), ([4, 5, 6, 7], False, 2), ([8, 9], True, 2)]
    assert not state.in_dataloader
    skip: Any = af.skip_first_batches
    rest = skip(loader, 1)
    assert [(len(batch), state.end_of_dataloader) for batch in rest] == [(4, False), (2, True)]
    assert len(rest) == 2
    stream = accelerator.prepare(Loader(Numbers(), batch_size=7))  # without a length
    assert [(len(batch), state.end_of_dataloader) for batch in stream] == [(7, False), (5, True)]
    for _ in loader:
        for _ in accelerator.prepare(Loader([1, 2])):
            assert len(state.dataloader_references) == 3
        assert state.active_dataloader is loader
        break
    assert not state.in_dataloader, "also after a break"


@pytest.mark.usefixtures("alone")
def test_a_loader_can_be_prepared_without_an_accelerator() -> None:
    loader = prepare_data_loader(Loader([1, 2, 3]), num_processes=1, put_on_device=True)
    assert [batch.item() for batch in loader] == [1, 2, 3]
    assert loader.device == torch.device("cpu")
    accelerator = Accelerator(cpu=True)
    assert accelerator.prepare(loader) is loader
    assert [*accelerator.loaders] == [loader]
    with pytest.raises(ConfigurationError, match="num_processes isn't the current context's"):
        prepare_data_loader(Loader([1]), num_processes=4)


@pytest.mark.usefixtures("alone")
def test_a_seedable_loader_is_drawn_by_seed_and_epoch() -> None:
    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5)
    loader = Accelerator(cpu=True, dataloader_config=config).prepare(Loader(list(range(8)), shuffle=True))
    passes = [[batch.item() for batch in loader] for _ in range(2)]
    order = SeedableRandomSampler(range(8), data_seed=5)
    assert passes == [[*order], [*order]]
    assert passes[0] != passes[1]


def shuffled(ctx: af.Context) -> list[list[int]]:
    torch.manual_seed(ctx.rank)  # ranks that disagree: rank 0's order counts
    accelerator = Accelerator(cpu=True)
    sampler = RandomSampler(range(9))
    loader = accelerator.prepare(Loader(list(range(9)), sampler=sampler, batch_size=2))
    assert vars(sampler)["generator"] is None, "the program's sampler isn't changed"
    return [batch.tolist() for batch in loader]


@pytest.mark.filterwarnings("ignore")
def test_ranks_share_one_shuffled_order() -> None:
    first, second = af.testing.run_ranks(shuffled, 2, "processes", cpu=True)
    joined = [index for pair in zip(first, second, strict=True) for batch in pair for index in batch]
    assert sorted(joined[:9]) == list(range(9))
    assert joined[9:] == joined[:3]


@pytest.mark.slow
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("dataset", [Numbers(), list(range(12))], ids=["stream", "map"])
def test_the_state_of_a_stateful_loader_is_that_of_the_batch_it_yielded(dataset: Any) -> None:
    pytest.importorskip("torchdata")
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True)
    accelerator.dataloader_config = config
    assert accelerator.dataloader_config.use_stateful_dataloader
    loader = accelerator.prepare(Loader(dataset, batch_size=2))
    state: Any = None
    for number, _ in enumerate(loader):
        if number == 1:
            state = loader.state_dict()
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == [[4, 5], [6, 7], [8, 9], [10, 11]]
    for _ in loader:
        break
    loader.load_state_dict(loader.state_dict())
    assert next(iter(loader)).tolist() == [2, 3], "a loop that was left reads no batch twice, and loses none"


def uneven(ctx: af.Context) -> dict[str, Any]:
    config = DataLoaderConfiguration(even_batches=False)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    asked = accelerator.prepare(Loader(list(range(5)), batch_size=2))
    read = [batch.tolist() for batch in asked]
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(1, 1))
    loader, stream = accelerator.prepare(Loader(list(range(3))), Loader(Numbers()))
    joined: list[float] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for batch in loader:
                model(batch.float().unsqueeze(1)).sum().backward()
                joined.append(batch.item())
    del stream
    return {
        "asked": read,
        "joined": joined,
        "even": (loader.batch_sampler.even_batches, accelerator.even_batches),
        "warned": [str(one.message).partition(":")[0] for one in caught],
    }


@pytest.mark.filterwarnings("ignore")
def test_ranks_read_their_own_numbers_of_batches_where_a_program_asks_for_it() -> None:
    first, second = af.testing.run_ranks(uneven, 2, "processes", cpu=True)
    assert (first.pop("asked"), second.pop("asked")) == ([[0, 1], [4]], [[2, 3]])
    assert (first.pop("joined"), second.pop("joined")) == ([0, 2], [1])
    assert first == second == {"even": (True, True), "warned": ["join_uneven_inputs"]}


def test_a_rank_loops_alone_over_a_fixed_order() -> None:
    def run(ctx: af.Context) -> list[list[list[int]]]:
        loader = prepare_loader(None, ctx, Loader(list(range(7)), batch_size=2))
        read = [[batch.tolist() for batch in loader]] if ctx.rank == 0 else []
        for batch in loader if ctx.rank == 0 else ():
            read.append([batch.tolist()])
            break
        af.wait_for_everyone(ctx)
        return [*read, [batch.tolist() for batch in loader]]

    first, second = af.testing.run_ranks(run, 2)
    assert first == [[[0, 1], [4, 5]], [[0, 1]], [[0, 1], [4, 5]]]
    assert second == [[[2, 3], [6, 0]]]


def test_ranks_whose_fixed_orders_differ_are_told_when_they_prepare() -> None:
    def run(ctx: af.Context) -> None:
        with pytest.raises(MismatchError, match=r"8 batches"):
            prepare_loader(None, ctx, Loader(list(range(8 + 2 * ctx.rank))))

    af.testing.run_ranks(run, 2)


class Stream(IterableDataset[int]):
    def __init__(self, number: int) -> None:
        self.number = number
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.number

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.number))


@pytest.mark.slow
@given(
    number=st.integers(0, 30),
    rows=st.integers(1, 4),
    size=st.integers(1, 4),
    drop_last=st.booleans(),
    split=st.booleans(),
)
def test_samples_are_the_peers(
    peer: Any, number: int, rows: int, size: int, drop_last: bool, split: bool
) -> None:
    batch = rows * size if split else rows
    for rank in range(size):
        arguments = (Stream(number), batch, drop_last, size, rank, split)
        own = IterableDatasetShard(*arguments)
        samples = [*own]
        assert samples == [*peer.data_loader.IterableDatasetShard(*arguments)]
        assert len(samples) == len(own)


def test_the_last_round_of_a_stream_begins_again_and_the_epoch_is_passed_on() -> None:
    read = [[*IterableDatasetShard(Stream(5), 2, False, 2, rank)] for rank in range(2)]
    assert read == [[0, 1, 4, 0], [2, 3, 1, 2]]
    IterableDatasetShard(stream := Stream(3)).set_epoch(4)
    assert stream.epoch == 4
    with pytest.raises(ConfigurationError, match="batch_size=3 can't be split into parts for 2 processes"):
        IterableDatasetShard(Stream(4), 3, num_processes=2, split_batches=True)
