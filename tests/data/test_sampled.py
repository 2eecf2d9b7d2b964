# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from collections.abc import Iterator
from multiprocessing import get_context
from typing import Any, cast

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, get_worker_info

import accelfn as af
from accelfn import Context
from accelfn.data import next_plan
from accelfn.data.rebuild import Batches as Indices
from accelfn.data.rebuild import Keyed, rebuild
from accelfn.errors import ConfigurationError, RemoteRankError
from accelfn.testing import run_ranks
from tests.data.sources import Listed, consecutive, numbers

Batches = list[list[int]]


def by_batches(batch_sampler: Any, num: int = 200, **options: Any) -> DataLoader[Any]:
    return DataLoader(torch.arange(num), batch_sampler=batch_sampler, **options)  # pyright: ignore[reportArgumentType]


# --- batch samplers of one's own -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("even", "uneven", "drop_last"),
    [(True, "error", None), (False, "stop_first", None), (True, "error", True)],
)
def test_batches_of_different_sizes_are_taken_as_they_are_one_a_rank(
    even: bool, uneven: Any, drop_last: bool | None
) -> None:
    batches = consecutive([3, 2, 4, 3, 2])

    def run(ctx: Context) -> tuple[Batches, list[int]]:
        loader = af.prepare_data_loader(ctx, by_batches(Listed(batches, None, drop_last)))
        pairs = list(af.microbatches(ctx, loader, uneven))
        rows = [row for batch, micro in pairs for row in af.gather_for_metrics(ctx, batch, micro).tolist()]
        return [batch.tolist() for batch, _ in pairs], rows

    found = run_ranks(run, 2, dataloader_config=af.DataLoaderConfiguration(even_batches=even))
    last = [batches[4], batches[0]] if even and not drop_last else []  # completed with one from the start
    for rank, (own, rows) in enumerate(found):
        assert own == [*batches[rank:4:2], *last[rank : rank + 1]]
        assert rows == list(range(14 if last else 12))


def test_batches_are_drawn_on_rank_0_once_an_epoch() -> None:
    def run(ctx: Context) -> tuple[int, Batches]:
        sampler = Listed(consecutive([2, 1, 3, 1]) if ctx.is_main_process else [[50], [60]])
        loader = af.prepare_data_loader(ctx, by_batches(sampler))
        own: Batches = []
        for _ in range(2):
            own = [batch.tolist() for batch in loader]
        return sampler.drawn, own

    assert run_ranks(run, 2) == [(2, [[0, 1], [3, 4, 5]]), (0, [[2], [6]])]


@pytest.mark.parametrize("dispatch", [False, True])
def test_batches_that_cannot_be_cut_are_not_split(dispatch: bool) -> None:
    def run(ctx: Context) -> str:
        loader = af.prepare_data_loader(ctx, by_batches(Listed([[0, 1], [2], [3, 4]], batch_size=2)))
        with pytest.raises(ConfigurationError, match="Listed yields batches of different sizes"):
            next(iter(loader))
        return "refused"

    split = af.DataLoaderConfiguration(split_batches=True, dispatch_batches=dispatch)
    assert run_ranks(run, 2, dataloader_config=split) == ["refused"] * 2
    with pytest.raises(ConfigurationError, match="got batch_size=3 and 2 ranks"):
        run_ranks(
            lambda ctx: af.prepare_data_loader(ctx, by_batches(Listed([], batch_size=3))),
            2,
            dataloader_config=split,
        )


@pytest.mark.parametrize("even", [True, False])
def test_the_length_of_a_batched_loader_is_that_of_the_pass(even: bool) -> None:
    def run(ctx: Context) -> tuple[int, int, bool]:
        loader = af.prepare_data_loader(ctx, by_batches(Listed(consecutive([3, 2, 4, 3, 2]))))
        with pytest.raises(AttributeError, match="no batch size"):
            _ = loader.total_batch_size
        return len(loader), len(list(loader)), next_plan(loader) is None

    found = run_ranks(run, 2, dataloader_config=af.DataLoaderConfiguration(even_batches=even))
    assert found == [(3, 3, True), (3, 3, True) if even else (2, 2, True)]


def test_a_batch_sampler_without_a_length_or_of_torchs_kind_is_ones_own() -> None:
    class Generated:
        def __iter__(self) -> Iterator[list[int]]:
            return iter([[0, 1], [2], [3, 4, 5]])

    class Backwards(BatchSampler):
        def __iter__(self) -> Iterator[list[int]]:
            return iter(list(super().__iter__())[::-1])

    def run(ctx: Context) -> list[Batches]:
        loader = af.prepare_data_loader(ctx, by_batches(Generated()))
        with pytest.raises(TypeError, match="no length"):
            len(loader)
        other = af.prepare_data_loader(
            ctx, by_batches(Backwards(SequentialSampler(range(8)), 2, drop_last=False))
        )
        return [[batch.tolist() for batch, _ in af.microbatches(ctx, each)] for each in (loader, other)]

    assert run_ranks(run, 2) == [[[[0, 1], [3, 4, 5]], [[6, 7], [2, 3]]], [[[2], [0, 1]], [[4, 5], [0, 1]]]]


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
    loader = af.prepare_data_loader(Context(), source)
    assert [batch.tolist() for batch in loader] == [[0, 10, 20, 30], [40, 50]]
    assert dataset.asked == ([] if workers else [[0, 1, 2, 3], [4, 5]])


def first_thread(worker: int) -> None:
    torch.set_num_threads(1 + worker)


def test_all_options_of_the_loader_are_kept() -> None:
    options: dict[str, Any] = {
        "num_workers": 1,  # with more, batches have to come in order
        "collate_fn": list,
        "pin_memory": False,
        "timeout": 50,
        "worker_init_fn": first_thread,
        "multiprocessing_context": get_context("fork"),
        "generator": torch.Generator(),
        "prefetch_factor": 3,
        "persistent_workers": True,
        "in_order": False,
    }

    def inner(source: DataLoader[Any]) -> Any:
        return rebuild(source, Indices())

    kept = inner(numbers(8, **options))
    assert {name: getattr(kept, name) for name in options} == options
    assert inner(numbers(8, pin_memory=True)).pin_memory is True


# --- bad input -----------------------------------------------------------------------------------


def gather_all(ctx: Context, loader: af.data.PreparedDataLoader[Any]) -> list[Any]:
    return [af.gather_for_metrics(ctx, batch, micro) for batch, micro in af.microbatches(ctx, loader)]


class Growing(Dataset[int]):
    """A dataset whose length changes."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(("dispatch", "lengths"), [(False, (7, 7)), (True, (9, 9)), (False, (8, 9))])
def test_a_dataset_that_changes_its_length_is_an_error_on_every_rank(
    dispatch: bool, lengths: tuple[int, int]
) -> None:
    def run(ctx: Context) -> str:
        dataset = Growing(8)
        loader = af.prepare_data_loader(ctx, DataLoader(dataset, batch_size=2, shuffle=not dispatch))
        assert len(list(loader)) == 2
        dataset.length = lengths[ctx.rank]
        with pytest.raises((ValueError, RemoteRankError), match="Growing had length 8") as caught:
            gather_all(ctx, loader)
        return str(caught.value)

    found = run_ranks(run, 2, dataloader_config=af.DataLoaderConfiguration(dispatch_batches=dispatch))
    assert all(f"now has length {lengths[1]}" in text for text in found)


class Failing(Dataset[int]):
    """Rank 1's worker fails as it reads sample 6."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> int:
        if self.rank == 1 and index == 6:
            raise KeyError("sample 6 is broken")
        return index


def test_a_worker_that_fails_is_every_ranks_error() -> None:
    def run(ctx: Context) -> tuple[str, bool]:
        loader = af.prepare_data_loader(ctx, DataLoader(Failing(ctx.rank), batch_size=2, num_workers=1))
        with pytest.raises((KeyError, RemoteRankError)) as caught:
            list(af.microbatches(ctx, loader))
        return caught.type.__name__, "sample 6 is broken" in str(caught.value)

    assert run_ranks(run, 2, "processes") == [("RemoteRankError", True), ("KeyError", True)]


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
    prepared = af.prepare_data_loader(Context(), loader)
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
    (batch,) = af.prepare_data_loader(Context(), loader)
    assert cast("Any", batch).tolist() == [10, 11, 12]


class Bulk(Dataset[torch.Tensor]):
    """Is asked for all samples of a batch at once."""

    def __len__(self) -> int:
        return 11

    def __getitem__(self, index: list[int]) -> torch.Tensor:
        assert type(index) is list
        return torch.tensor(index)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_sampler_in_the_samplers_place_asks_for_lists(num_workers: int) -> None:
    def run(ctx: Context) -> tuple[list[list[int]], list[int]]:
        sampler = BatchSampler(SequentialSampler(range(11)), 2, drop_last=False)
        source = DataLoader(Bulk(), batch_size=None, sampler=sampler, num_workers=num_workers)
        own: list[list[int]] = []
        found: list[int] = []
        for batch, micro in af.microbatches(ctx, af.prepare_data_loader(ctx, source)):
            own.append(batch.tolist())
            found += af.gather_for_metrics(ctx, batch, micro).tolist()
        return own, found

    (first, gathered), (second, _) = run_ranks(run, 2, "processes" if num_workers else "memory")
    assert first == [[0, 1], [4, 5], [8, 9]]
    assert second == [[2, 3], [6, 7], [10, 0]]
    assert gathered == list(range(11))


def test_the_sampler_inside_of_a_batch_sampler_says_the_order() -> None:
    class Backwards(SequentialSampler):
        def __iter__(self) -> Any:
            return reversed(range(5))

    sampler = BatchSampler(Backwards(range(5)), 2, drop_last=False)
    source = DataLoader(range(5), batch_sampler=sampler)  # pyright: ignore[reportArgumentType]
    assert [batch.tolist() for batch in af.prepare_data_loader(Context(), source)] == [[4, 3], [2, 1], [0]]


def test_what_is_no_batch_can_not_be_split() -> None:
    items: Any = DataLoader(Bulk(), batch_size=None)
    ctx = Context().replace(dataloader_config=af.DataLoaderConfiguration(split_batches=True))
    with pytest.raises(ConfigurationError, match="batch_size=None"):
        af.prepare_data_loader(ctx, items)
    with pytest.raises(ConfigurationError, match="is map-style"):
        af.prepare_data_loader(Context(), items, "by_source")
