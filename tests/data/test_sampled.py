# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import os
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    get_worker_info,
)

from accelfn import Context, DataLoaderConfiguration
from accelfn.data import (
    MicroBatch,
    PreparedDataLoader,
    gather_for_metrics,
    loader_state,
    microbatches,
    next_plan,
    prepare_data_loader,
)
from accelfn.data.loader import passes_of
from accelfn.data.rebuild import Keyed
from accelfn.errors import ConfigurationError, MismatchError, RemoteRankError
from accelfn.testing import run_ranks
from tests.data.sources import Listed, consecutive, numbers

Batches = list[list[int]]


def by_batches(batch_sampler: Any, num: int = 200, **options: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(num), batch_sampler=batch_sampler, **options)  # pyright: ignore[reportArgumentType]


def read(
    make: Callable[[], DataLoader[Any]], world: int, uneven: Any = "error", **config: Any
) -> list[Batches]:
    """The batches of each rank, and a check that what is gathered is exactly what was drawn."""

    def run(ctx: Context) -> tuple[Batches, list[int], list[MicroBatch]]:
        source = make()
        loader = prepare_data_loader(ctx, source)
        found: list[int] = []
        own: Batches = []
        micros: list[MicroBatch] = []
        for batch, micro in microbatches(ctx, loader, uneven):
            own.append(batch.tolist())
            micros.append(micro)
            found += gather_for_metrics(ctx, batch, micro).tolist()
            assert loader_state(loader).consumed == len(found)
        return own, found, micros

    ranks = run_ranks(run, world, dataloader_config=DataLoaderConfiguration(**config))
    assert all(found == ranks[0][1] for _, found, _ in ranks)
    for own, _, micros in ranks:
        assert [micro.is_last for micro in micros] == [index == len(own) - 1 for index in range(len(own))]
    return [own for own, _, _ in ranks]


def read_all(ctx: Context, loader: PreparedDataLoader[Any], uneven: Any = "error") -> list[int]:
    return [
        row
        for batch, micro in microbatches(ctx, loader, uneven)
        for row in gather_for_metrics(ctx, batch, micro).tolist()
    ]


def gathered(
    make: Callable[[], DataLoader[Any]], world: int, uneven: Any = "error", **config: Any
) -> list[int]:
    first, *others = run_ranks(
        lambda ctx: read_all(ctx, prepare_data_loader(ctx, make()), uneven),
        world,
        dataloader_config=DataLoaderConfiguration(**config),
    )
    assert all(other == first for other in others)
    return first


# --- batch samplers of one's own -----------------------------------------------------------------


def test_batches_of_different_sizes_are_taken_as_they_are_one_a_rank() -> None:
    batches = consecutive([3, 2, 4, 3, 2])
    first, second = read(lambda: by_batches(Listed(batches)), 2)
    assert first == [batches[0], batches[2], batches[4]]
    assert second == [batches[1], batches[3], batches[0]]  # completed with a whole batch from the start
    first, second = read(lambda: by_batches(Listed(batches)), 2, "stop_first", even_batches=False)
    assert (first, second) == ([batches[0], batches[2]], [batches[1], batches[3]])
    first, second = read(lambda: by_batches(Listed(batches, drop_last=True)), 2)
    assert (first, second) == ([batches[0], batches[2]], [batches[1], batches[3]])


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("even", [True, False])
def test_a_named_size_that_batches_do_not_have_loses_no_sample(world: int, even: bool) -> None:
    batches = [[0, 1, 2], [3, 4], [5, 6, 7], [8], [9, 10]]  # the second and fourth are shorter than 3
    uneven = "error" if even else "pad"
    found = gathered(lambda: by_batches(Listed(batches, batch_size=3)), world, uneven, even_batches=even)
    assert found == list(range(11))


@given(
    st.lists(st.integers(1, 4), max_size=12),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([None, 1, 2, 3, 4]),
)
def test_every_sample_of_any_batches_is_gathered_once_in_order(
    sizes: list[int], world: int, even: bool, named: int | None
) -> None:
    batches = consecutive(sizes)
    uneven = "error" if even else "pad"
    if not even and 0 < len(batches) < world:
        uneven = "stop_first"  # a rank without any batch has none to repeat
    found = gathered(lambda: by_batches(Listed(batches, named)), world, uneven, even_batches=even)
    if uneven == "stop_first":
        samples_stepped = named is not None and set(sizes[:-1]) <= {named} and sizes[-1] <= named
        assert found == ([] if not samples_stepped or world > 1 else list(range(sum(sizes))))
    else:
        assert found == list(range(sum(sizes)))


def test_batches_are_drawn_on_rank_0_once_an_epoch() -> None:
    def run(ctx: Context) -> tuple[int, Batches]:
        sampler = Listed(consecutive([2, 1, 3, 1]) if ctx.is_main_process else [[50], [60]])
        loader = prepare_data_loader(ctx, by_batches(sampler))
        own: Batches = []
        for _ in range(2):
            own = [batch.tolist() for batch in loader]
        return sampler.drawn, own

    assert run_ranks(run, 2) == [(2, [[0, 1], [3, 4, 5]]), (0, [[2], [6]])]


@pytest.mark.parametrize("dispatch", [False, True])
def test_batches_that_cannot_be_cut_are_not_split(dispatch: bool) -> None:
    def run(ctx: Context) -> str:
        loader = prepare_data_loader(ctx, by_batches(Listed([[0, 1], [2], [3, 4]], batch_size=2)))
        with pytest.raises(ConfigurationError, match="Listed yields batches of different sizes"):
            next(iter(loader))
        return "refused"

    split = DataLoaderConfiguration(split_batches=True, dispatch_batches=dispatch)
    assert run_ranks(run, 2, dataloader_config=split) == ["refused"] * 2
    with pytest.raises(ConfigurationError, match="got batch_size=3 and 2 ranks"):
        run_ranks(
            lambda ctx: prepare_data_loader(ctx, by_batches(Listed([], batch_size=3))),
            2,
            dataloader_config=split,
        )


def test_the_length_of_a_batched_loader_is_that_of_the_pass() -> None:
    def run(ctx: Context) -> tuple[int, int, bool]:
        loader = prepare_data_loader(ctx, by_batches(Listed(consecutive([3, 2, 4, 3, 2]))))
        with pytest.raises(AttributeError, match="no batch size"):
            _ = loader.total_batch_size
        return len(loader), len(list(loader)), next_plan(loader) is None

    assert run_ranks(run, 2) == [(3, 3, True)] * 2
    assert run_ranks(run, 2, dataloader_config=DataLoaderConfiguration(even_batches=False)) == [
        (3, 3, True),
        (2, 2, True),
    ]


def test_a_batch_sampler_without_a_length_works_too() -> None:
    class Generated:
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0, 1], [2], [3, 4, 5]])

    def run(ctx: Context) -> Batches:
        loader = prepare_data_loader(ctx, by_batches(Generated()))
        with pytest.raises(TypeError, match="no length"):
            len(loader)
        return [batch.tolist() for batch, _ in microbatches(ctx, loader)]

    assert run_ranks(run, 2) == [[[0, 1], [3, 4, 5]], [[2], [0, 1]]]


def test_a_subclass_of_torchs_batch_sampler_is_ones_own() -> None:
    class Backwards(BatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            return iter(list(super().__iter__())[::-1])

    def make() -> DataLoader[Any]:
        return by_batches(Backwards(SequentialSampler(range(8)), 2, drop_last=False))

    assert read(make, 2) == [[[6, 7], [2, 3]], [[4, 5], [0, 1]]]


# --- what of the loader is kept ------------------------------------------------------------------


class ReadsMany(Dataset[int]):
    """A dataset that reads a batch at once."""

    def __init__(self) -> None:
        self.asked: Batches = []

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        raise AssertionError("asked for one sample")

    def __getitems__(self, indices: list[int]) -> list[int]:
        assert type(indices) in (list, Keyed)
        self.asked.append(list(indices))
        return [10 * index for index in indices]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataset_that_reads_batches_at_once_does(workers: int) -> None:
    dataset = ReadsMany()
    source = cast("DataLoader[Any]", DataLoader(dataset, batch_size=4, num_workers=workers))
    loader = prepare_data_loader(Context(), source)
    assert [batch.tolist() for batch in loader] == [[0, 10, 20, 30], [40, 50]]
    assert dataset.asked == ([] if workers else [[0, 1, 2, 3], [4, 5]])


def first_thread(worker: int) -> None:
    torch.set_num_threads(1 + worker)


def test_all_options_of_the_loader_are_kept() -> None:
    generator = torch.Generator()
    source = numbers(
        8,
        num_workers=1,  # with more, batches have to come in order
        collate_fn=list,
        pin_memory=False,
        timeout=50,
        worker_init_fn=first_thread,
        multiprocessing_context=get_context("fork"),
        generator=generator,
        prefetch_factor=3,
        persistent_workers=True,
        in_order=False,
    )
    inner = vars(vars(passes_of(prepare_data_loader(Context(), source)).reader)["_steps"])["_loader"]
    names = (
        *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
        *("generator", "prefetch_factor", "persistent_workers", "in_order"),
    )
    for name in names:
        assert getattr(inner, name) is getattr(source, name), name
    pinned = prepare_data_loader(Context(), numbers(8, pin_memory=True))
    assert vars(vars(passes_of(pinned).reader)["_steps"])["_loader"].pin_memory is True


# --- bad input -----------------------------------------------------------------------------------


class Growing(Dataset[int]):
    """A dataset whose length changes."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(("dispatch", "shuffle", "length"), [(False, True, 7), (True, False, 9)])
def test_a_dataset_that_changes_its_length_is_an_error_on_every_rank(
    dispatch: bool, shuffle: bool, length: int
) -> None:
    def run(ctx: Context) -> str:
        dataset = Growing(8)
        loader = prepare_data_loader(ctx, DataLoader(dataset, batch_size=2, shuffle=shuffle))
        assert len(list(loader)) == 2
        dataset.length = length
        with pytest.raises(ValueError, match="Growing had length 8") as caught:
            next(iter(loader))
        return str(caught.value)

    messages = run_ranks(run, 2, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
    assert messages[0] == messages[1]
    assert f"now has length {length}" in messages[0]


def test_a_length_that_changes_on_one_rank_is_every_ranks_error() -> None:
    def run(ctx: Context) -> str:
        dataset = Growing(8)
        loader = prepare_data_loader(ctx, DataLoader(dataset, batch_size=2))
        dataset.length = 8 + ctx.rank
        with pytest.raises((ValueError, RemoteRankError)) as caught:
            read_all(ctx, loader)
        return str(caught.value)

    for message in run_ranks(run, 2):
        assert "had length 8" in message
        assert "now has length 9" in message


class Failing(Dataset[int]):
    """Rank 1's worker fails as it reads sample 6."""

    def __init__(self, rank: int, how: str) -> None:
        self.rank = rank
        self.how = how

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        if self.rank == 1 and index == 6:
            if self.how == "dies":
                os._exit(3)
            raise KeyError("sample 6 is broken")
        return index


@pytest.mark.parametrize(
    ("how", "workers", "message"),
    [("raises", 1, "sample 6 is broken"), ("dies", 1, "exited unexpectedly")],
)
def test_a_reader_that_fails_is_every_ranks_error(how: str, workers: int, message: str) -> None:
    def run(ctx: Context) -> tuple[str, str]:
        source = DataLoader(Failing(ctx.rank, how), batch_size=2, num_workers=workers)
        loader = prepare_data_loader(ctx, source)
        with pytest.raises((KeyError, RuntimeError)) as caught:
            read_all(ctx, loader)
        return caught.type.__name__, str(caught.value)

    (kind, told), (_, raised) = run_ranks(run, 2, "processes")
    assert kind == "RemoteRankError"
    assert message in told
    assert message in raised


class Doubling(DataLoader[Any]):
    """A loader of the user's own, which is made in its own way."""

    def __init__(self, number: int, **options: Any) -> None:
        super().__init__(cast("Any", torch.arange(number)), **options)
        self.factor = 2

    def __iter__(self) -> Any:
        return (batch * self.factor for batch in super().__iter__())


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_loader_of_the_users_own_class_keeps_what_it_does(num_workers: int) -> None:
    loader = Doubling(5, batch_size=2, num_workers=num_workers)
    prepared = prepare_data_loader(Context(), loader)
    assert [batch.tolist() for batch in prepared] == [[0, 2], [4, 6], [8]]
    assert [batch.tolist() for batch in prepared] == [[0, 2], [4, 6], [8]]
    assert [batch.tolist() for batch in loader] == [[0, 2], [4, 6], [8]]


class Offset(Dataset[int]):
    offset = 0

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index + self.offset


def add_ten(worker: int) -> None:
    del worker
    info = get_worker_info()
    assert info is not None
    cast("Any", info.dataset).offset = 10


def test_what_a_worker_sets_on_its_dataset_reaches_the_users() -> None:
    loader = DataLoader(Offset(), batch_size=3, num_workers=1, worker_init_fn=add_ten)
    assert [cast("Any", batch).tolist() for batch in prepare_data_loader(Context(), loader)] == [[10, 11, 12]]


class Items(Dataset[torch.Tensor]):
    """Item ``k`` is a batch of ``k + 1`` rows."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return self.number

    def __getitem__(self, index: int) -> torch.Tensor:
        assert isinstance(index, int)
        return torch.full((index + 1,), index)


class Bulk(Dataset[torch.Tensor]):
    """Is asked for all samples of a batch at once."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: list[int]) -> torch.Tensor:
        assert type(index) is list
        return torch.tensor(index)


def items(number: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Items(number), batch_size=None, **options)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_sampler_in_the_samplers_place_asks_for_lists(num_workers: int) -> None:
    def run(ctx: Context) -> tuple[list[list[int]], list[int]]:
        sampler = BatchSampler(SequentialSampler(range(11)), 2, drop_last=False)
        source = DataLoader(Bulk(), batch_size=None, sampler=sampler, num_workers=num_workers)
        own: list[list[int]] = []
        found: list[int] = []
        for batch, micro in microbatches(ctx, prepare_data_loader(ctx, source)):
            own.append(batch.tolist())
            found += gather_for_metrics(ctx, batch, micro).tolist()
        return own, found

    (first, gathered), (second, _) = run_ranks(run, 2, "processes" if num_workers else "memory")
    assert first == [[0, 1], [4, 5], [8, 9]]
    assert second == [[2, 3], [6, 7], [10, 0]]
    assert gathered == list(range(11))


def test_the_seed_of_a_sampler_inside_of_a_batch_sampler_is_kept() -> None:
    def order(seed: int) -> list[int]:
        sampler = RandomSampler(range(8), generator=torch.Generator().manual_seed(seed))
        source = DataLoader(range(8), batch_sampler=BatchSampler(sampler, 4, drop_last=False))  # pyright: ignore[reportArgumentType]
        return torch.cat(list(prepare_data_loader(Context(), source))).tolist()

    assert order(1) == order(1) != order(2)


def test_the_sampler_inside_of_a_batch_sampler_says_the_order() -> None:
    class Backwards(SequentialSampler):
        def __iter__(self) -> Any:
            return reversed(range(5))

    sampler = BatchSampler(Backwards(range(5)), 2, drop_last=False)
    source = DataLoader(range(5), batch_sampler=sampler)  # pyright: ignore[reportArgumentType]
    assert [batch.tolist() for batch in prepare_data_loader(Context(), source)] == [[4, 3], [2, 1], [0]]


def test_what_is_no_batch_can_not_be_split_and_ranks_read_the_same() -> None:
    ctx = Context().replace(dataloader_config=DataLoaderConfiguration(split_batches=True))
    with pytest.raises(ConfigurationError, match="batch_size=None"):
        prepare_data_loader(ctx, items(4))
    with pytest.raises(ConfigurationError, match="is map-style"):
        prepare_data_loader(Context(), items(4), "by_source")

    def prepare(ctx: Context) -> None:
        with pytest.raises(MismatchError):
            prepare_data_loader(ctx, items(4 + ctx.rank))

    run_ranks(prepare, 2)
