# torch leaves DataLoader and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import importlib
import random
import warnings
from collections import UserDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from accelfn import Context, DataLoaderConfiguration
from accelfn.data import (
    gather_for_metrics,
    loader_state,
    microbatches,
    next_plan,
    plan_epoch,
    prepare_data_loader,
)
from accelfn.data.loader import passes_of
from accelfn.errors import ConfigurationError, RemoteRankError, UnevenDataError
from accelfn.testing import run_ranks
from tests.data.sources import Numbers, Shards, Sized

# Said once a world, and tested below.
pytestmark = [
    pytest.mark.filterwarnings("ignore:each of . ranks reads the full stream"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),  # more workers than cores
]

Uneven = Literal["error", "stop_first", "pad"]


def numbers(number: int, batch_size: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(Numbers(number), batch_size=batch_size, **options)


def data_config(**options: Any) -> Context:
    return Context().replace(dataloader_config=DataLoaderConfiguration(**options))


def evaluate(ctx: Context, loader: Any, uneven: Uneven = "error") -> list[int]:
    """One pass, gathered."""
    found: list[int] = []
    for batch, micro in microbatches(ctx, loader, uneven):
        found += gather_for_metrics(ctx, batch, micro).tolist()
    return found


def rows_of_pass(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@settings(max_examples=6)
@given(
    st.integers(0, 40),
    st.integers(1, 4),
    st.integers(1, 2),
    st.integers(1, 2),
    st.booleans(),
    st.booleans(),
)
def test_each_sample_is_read_once_by_workers(
    number: int, batch_size: int, size: int, num_workers: int, even: bool, drop_last: bool
) -> None:
    def run(ctx: Context) -> tuple[list[int], int]:
        source = numbers(number, batch_size, num_workers=num_workers, drop_last=drop_last)
        found: list[int] = []
        micros = 0
        for batch, micro in microbatches(ctx, prepare_data_loader(ctx, source), "pad"):
            found += gather_for_metrics(ctx, batch, micro).tolist()
            micros += 1
        return found, micros

    config = DataLoaderConfiguration(even_batches=even)
    parts = [len(range(worker, number, num_workers)) for worker in range(num_workers)]
    plans = [plan_epoch(part, batch_size, size, even_batches=even, drop_last=drop_last) for part in parts]
    counts = [sum(plan.num_batches(rank) for plan in plans) for rank in range(size)]
    if 0 == min(counts) < max(counts):
        with pytest.raises(ValueError, match="a rank has no batch"):
            run_ranks(run, size, "processes", dataloader_config=config)
        return
    read = sum(plan.consumed(plan.num_steps - 1) if plan.num_steps else 0 for plan in plans)
    for found, steps in run_ranks(run, size, "processes", dataloader_config=config):
        assert steps == max(counts)
        assert len(found) == len(set(found)) == read
        if not drop_last:
            assert sorted(found) == list(range(number))
        if num_workers == 1 and (even or drop_last):
            assert found == list(range(read))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_is_handed_out_when_its_group_is_complete(num_workers: int) -> None:
    class EndsBadly(Numbers):
        def __iter__(self) -> Iterator[int]:
            yield from range(self.number)
            raise OSError("the line is dead")

    def run(ctx: Context) -> list[list[int]]:
        source = DataLoader(EndsBadly(8), batch_size=2, num_workers=num_workers)
        batches = iter(prepare_data_loader(ctx, source))
        own = [batch.tolist() for batch in islice(batches, 8 // (2 * ctx.num_processes))]
        with pytest.raises((OSError, RemoteRankError), match="the line is dead"):
            next(batches)
        return own

    assert run_ranks(run, 1) == [[[0, 1], [2, 3], [4, 5], [6, 7]]]
    assert run_ranks(run, 2, "processes") == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@pytest.mark.parametrize("uneven", ["error", "pad"])
def test_streams_of_different_length_are_an_error_on_all_ranks(
    uneven: Uneven,
) -> None:
    def run(ctx: Context) -> str:
        loader = prepare_data_loader(ctx, numbers(8 + 4 * ctx.rank))
        with pytest.raises(UnevenDataError) as caught:
            evaluate(ctx, loader, uneven)
        return str(caught.value)

    first, second = run_ranks(run, 2)
    assert first == second
    assert "2" in first
    assert "3" in first

    # A death is told by a signal or by a broken connection, in the midst of whatever the rank does.


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("groups", [0, 1, 4, 7])
def test_a_pass_goes_on_where_a_group_ended(num_workers: int, groups: int) -> None:
    class Uneven(Numbers):
        """The first of two workers has 12 numbers, the other one 3."""

        def __iter__(self) -> Iterator[int]:
            info = get_worker_info()
            last = 12 if info is None or info.id == 0 else 3
            return iter(range(100 * (0 if info is None else info.id), 100 * (info.id if info else 0) + last))

    source = DataLoader(Uneven(0), batch_size=2, num_workers=num_workers)
    loader = prepare_data_loader(Context(), source)
    whole: list[list[int]] = []
    ends: list[int] = [0]
    for batch in loader:
        whole.append(batch.tolist())
        ends.append(loader_state(loader).consumed)
    assert ends[-1] == sum(map(len, whole))
    groups = min(groups, len(whole))
    passes_of(loader).move_to(0, ends[groups])
    assert loader_state(loader).consumed == ends[groups]
    assert rows_of_pass(loader) == whole[groups:]


def test_a_start_that_is_no_end_of_a_group_of_several_workers_is_refused() -> None:
    loader = prepare_data_loader(Context(), numbers(12, num_workers=2))
    passes_of(loader).move_to(0, 3)
    with pytest.raises(ConfigurationError, match=r"sample 3, .* group .* samples 2 to 3"):
        list(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_start_behind_the_end_is_refused(num_workers: int) -> None:
    loader = prepare_data_loader(Context(), numbers(4, num_workers=num_workers))
    passes_of(loader).move_to(0, 10)
    with pytest.raises(ValueError, match="can't resume at sample 10: the stream ended after 4"):
        list(loader)
    loader = prepare_data_loader(Context(), DataLoader(Sized(4)))
    passes_of(loader).move_to(0, 10)
    with pytest.raises(ValueError, match="has only 4"):
        list(loader)


@pytest.mark.parametrize(
    ("number", "length", "what"),
    [
        (8, 7, "yields more"),
        (7, 8, "ended after 7"),
        (8, 12, "ended after 8"),
    ],
)
def test_a_length_that_is_none_is_refused(number: int, length: int, what: str) -> None:
    loader = prepare_data_loader(Context(), DataLoader(Sized(number, length), batch_size=2))
    with pytest.raises(ValueError, match=f"Sized has length {length}, but {what}"):
        list(loader)


def test_lengths_are_those_of_the_plan() -> None:
    def run(ctx: Context) -> tuple[int, int, int]:
        loader = prepare_data_loader(ctx, DataLoader(Sized(9), batch_size=2))
        assert next_plan(loader) is not None
        return len(loader), loader.total_batch_size, loader.total_dataset_length

    assert run_ranks(run, 2) == [(3, 4, 9)] * 2
    for source in (numbers(9), DataLoader(Sized(9), num_workers=2)):
        unknown = prepare_data_loader(Context(), source)
        assert next_plan(unknown) is None
        with pytest.raises(TypeError, match="no length"):
            len(unknown)


# Randomness and epochs


class Shuffled(Numbers):
    """Shuffled by the worker's own randomness, and told the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[int, float, int]]:
        order = list(range(self.number))
        random.shuffle(order)
        for index in order:
            yield index, torch.rand(()).item(), self.epoch


def as_columns(samples: list[tuple[int, float, int]]) -> list[torch.Tensor]:
    return [torch.tensor(column) for column in zip(*samples, strict=True)]


def with_draw(samples: list[tuple[int, float, int]]) -> tuple[torch.Tensor, ...]:
    torch.rand(samples[0][0] + 1)  # as many numbers as the data says: not the same on all ranks
    return (*as_columns(samples), torch.rand(len(samples)))


def test_ranks_read_one_shuffled_stream_and_collate_apart() -> None:
    def run(ctx: Context) -> tuple[list[list[list[float]]], list[list[list[float]]]]:
        torch.manual_seed(ctx.rank)
        random.seed(ctx.rank)
        source = DataLoader(Shuffled(24), batch_size=2, num_workers=1, collate_fn=with_draw)
        loader = prepare_data_loader(ctx, source)
        passes = [[[column.tolist() for column in batch] for batch in loader] for _ in range(2)]
        passes_of(loader).move_to(0, 4 * ctx.num_processes)
        rest = [[column.tolist() for column in batch] for batch in loader]
        assert rest == passes[0][2:]
        return passes[0], passes[1]

    config = DataLoaderConfiguration(data_seed=3)
    for first, second in (zip(*run_ranks(run, 2, "processes", dataloader_config=config), strict=True),):
        for one, other in (first, second):
            assert sorted(x for batch in [*one, *other] for x in batch[0]) == list(range(24))
            for place in (1, 3):  # draws of the stream, and of collation
                drawn = [x for batch in [*one, *other] for x in batch[place]]
                assert len(set(drawn)) == len(drawn)
        assert first[0] != second[0]  # the second epoch
    alone = run_ranks(run, 1, "processes", dataloader_config=config)[0][0]
    pieces = [batch[0] for batch in alone]
    both = run_ranks(run, 2, "processes", dataloader_config=config)
    dealt = [batch[0] for step in zip(both[0][0], both[1][0], strict=True) for batch in step]
    assert dealt == pieces


def test_a_shuffled_stream_is_the_same_on_all_ranks_without_workers_too() -> None:
    def run(ctx: Context) -> list[list[list[float]]]:
        torch.manual_seed(ctx.rank)
        random.seed(ctx.rank)
        loader = prepare_data_loader(ctx, DataLoader(Shuffled(24), batch_size=2, collate_fn=with_draw))
        return [[column.tolist() for column in batch] for batch in loader]

    ranks = run_ranks(run, 2, "processes", dataloader_config=DataLoaderConfiguration(data_seed=3))
    assert sorted(x for rank in ranks for batch in rank for x in batch[0]) == list(range(24))
    for place in (1, 3):  # draws of the stream, and of collation
        drawn = [x for rank in ranks for batch in rank for x in batch[place]]
        assert len(set(drawn)) == len(drawn)


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_workers_that_outlive_a_pass_hear_of_the_next_epoch(start_method: str) -> None:
    source = DataLoader(
        Shuffled(4),
        batch_size=4,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context=start_method,
    )
    loader = prepare_data_loader(data_config(data_seed=3), source)
    passes = [[column.tolist() for column in next(iter(loader))] for _ in range(2)]
    assert passes[0] != passes[1]  # broken off: the next epoch
    loader.set_epoch(0)
    epochs = [[column.tolist() for batch in loader for column in batch] for _ in range(3)]
    assert epochs[:2] == passes
    assert [epoch[2] for epoch in epochs] == [[0] * 4, [1] * 4, [2] * 4]
    assert len({tuple(epoch[1]) for epoch in epochs}) == 3
    passes_of(loader).move_to(1, 2)
    (rest,) = [[column.tolist() for column in batch] for batch in loader]
    assert rest == [column[2:] for column in epochs[1]]


def test_the_epoch_is_told_to_shards_too() -> None:
    def run(ctx: Context) -> list[list[int]]:
        loader = prepare_data_loader(ctx, DataLoader(Shards([0, 1]), batch_size=4))
        return [*rows_of_pass(loader), *rows_of_pass(loader)]

    assert run_ranks(run, 2) == [
        [[0, 1, 2, 3], [1000, 1001, 1002, 1003]],
        [[10, 11, 12, 13], [1010, 1011, 1012, 1013]],
    ]


# The user's loader is kept


def test_the_users_collate_function_sees_samples_alone() -> None:
    def collate(samples: Any) -> list[int]:
        assert type(samples) is list
        assert all(type(sample) is int for sample in samples)
        return samples

    assert list(prepare_data_loader(Context(), numbers(3, collate_fn=collate))) == [[0, 1], [2]]


@dataclass
class Pair:
    x: torch.Tensor
    names: list[str]


class Tokens(IterableDataset[dict[str, Any]]):
    """Samples as dicts with a key, in the manner of WebDataset; of different lengths."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for index in range(9):
            yield {"__key__": f"{index:03}", "input_ids": [index] * (1 + index % 3), "label": index}


def padded(samples: list[dict[str, Any]]) -> Any:
    """Pads in the manner of transformers' collators, which take things out of samples."""
    labels = [sample.pop("label") for sample in samples]
    longest = max(len(sample["input_ids"]) for sample in samples)
    rows = [sample["input_ids"] + [-1] * (longest - len(sample["input_ids"])) for sample in samples]
    batch: UserDict[str, Any] = UserDict()
    batch["input_ids"] = torch.tensor(rows)
    batch["labels"] = torch.tensor(labels)
    return batch.data


def paired(samples: list[dict[str, Any]]) -> Pair:
    return Pair(
        torch.tensor([sample["label"] for sample in samples]), [sample["__key__"] for sample in samples]
    )


@pytest.mark.parametrize("size", [1, 2, 3])
def test_dicts_with_keys_are_batched_and_gathered(size: int) -> None:
    def run(ctx: Context) -> tuple[list[int], list[str]]:
        labels: list[int] = []
        keys: list[str] = []
        for batch, micro in microbatches(
            ctx, prepare_data_loader(ctx, DataLoader(Tokens(), 2, collate_fn=padded))
        ):
            assert batch["input_ids"].shape[0] == micro.num_rows
            labels += gather_for_metrics(ctx, batch["labels"], micro).tolist()
        for batch, micro in microbatches(
            ctx, prepare_data_loader(ctx, DataLoader(Tokens(), 2, collate_fn=paired))
        ):
            assert isinstance(batch, Pair)
            keys += gather_for_metrics(ctx, batch.names, micro)
        return labels, keys

    for labels, keys in run_ranks(run, size):
        assert labels == list(range(9))
        assert keys == [f"{index:03}" for index in range(9)]


# Elements that are batches


class Elements(IterableDataset[torch.Tensor]):
    """Element ``k`` is a batch of ``k + 1`` rows."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.full((index + 1,), index) for index in range(self.number))


# Shards


@pytest.mark.parametrize("sharding", ["global", "by_source"])
@pytest.mark.parametrize("num_workers", [0, 1])
def test_each_rank_reads_shards_of_its_own(
    sharding: Literal["global", "by_source"], num_workers: int
) -> None:
    def run(ctx: Context) -> tuple[list[list[int]], list[int], int]:
        source = DataLoader(Shards([0, 1, 2]), batch_size=3, num_workers=num_workers)
        loader = prepare_data_loader(ctx, source, sharding)
        own = rows_of_pass(loader)
        loader.set_epoch(0)
        with pytest.raises(UnevenDataError, match="3, 2 by rank"):
            list(microbatches(ctx, loader))
        return own, [], loader.total_batch_size

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_ranks(run, 2, "processes" if num_workers else "memory") == [
            ([[0, 1, 2], [3, 20, 21], [22, 23]], [], 6),
            ([[10, 11, 12], [13]], [], 6),
        ]


def test_shards_are_padded_and_gathered_exactly() -> None:
    def run(ctx: Context) -> list[int]:
        loader = prepare_data_loader(ctx, DataLoader(Shards([0, 1, 2]), batch_size=3))
        # A short batch says that this rank has no more, and nothing of the others.
        lasts = [micro.is_last for _, micro in microbatches(ctx, loader, "pad")]
        assert lasts == [None] * 3
        loader.set_epoch(0)
        return evaluate(ctx, loader, "pad")

    first, second = run_ranks(run, 2)
    assert first == second == [0, 1, 2, 10, 11, 12, 3, 20, 21, 13, 22, 23]


def test_shards_are_gone_on_with_by_each_ranks_own_count() -> None:
    def run(ctx: Context) -> list[list[int]]:
        loader = prepare_data_loader(ctx, DataLoader(Shards([0, 1, 2]), batch_size=3))
        next(iter(loader))
        assert loader_state(loader).consumed == 3
        passes_of(loader).move_to(0, loader_state(loader).consumed)
        return rows_of_pass(loader)

    assert run_ranks(run, 2) == [[[3, 20, 21], [22, 23]], [[13]]]


def test_a_batch_is_split_between_ranks_with_shards_too() -> None:
    def run(ctx: Context) -> tuple[list[list[int]], int]:
        loader = prepare_data_loader(ctx, DataLoader(Shards([0, 1]), batch_size=4))
        return rows_of_pass(loader), loader.total_batch_size

    config = DataLoaderConfiguration(split_batches=True)
    assert run_ranks(run, 2, dataloader_config=config) == [
        ([[0, 1], [2, 3]], 4),
        ([[10, 11], [12, 13]], 4),
    ]


@pytest.mark.parametrize("dataset", [Shards([0, 1]), Numbers(4)])
def test_too_few_shards_are_refused_where_each_rank_must_have_its_own(dataset: Any) -> None:
    def run(ctx: Context) -> None:
        prepare_data_loader(ctx, DataLoader(dataset), "by_source")

    what = "2 shards" if isinstance(dataset, Shards) else "no shards"
    with pytest.raises(ConfigurationError, match=f"different shards on each of 3 ranks, .* has {what}"):
        run_ranks(run, 3)


def test_reading_the_same_several_times_is_said_once_a_line() -> None:
    def run(ctx: Context) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(2):
                prepare_data_loader(ctx, DataLoader(Shards([0, 1])))
            prepare_data_loader(ctx, numbers(4))
        assert all("each of 3 ranks reads the full stream" in str(one.message) for one in caught)
        assert all(one.filename == __file__ for one in caught)
        return len(caught)

    assert run_ranks(run, 3, "processes") == [2, 0, 0]
    assert run_ranks(run, 1, "processes") == [0]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_shards", [1, 4])
def test_hugging_face_streams_are_read_once_by_their_shards(num_shards: int, num_workers: int) -> None:
    datasets: Any = importlib.import_module("datasets")
    table = datasets.Dataset.from_dict({"x": list(range(22))})

    def run(ctx: Context) -> list[list[int]]:
        made = table.to_iterable_dataset(num_shards=num_shards).shuffle(seed=1, buffer_size=3)
        source = DataLoader(made, batch_size=2, num_workers=num_workers if num_shards > 1 else 0)
        loader = prepare_data_loader(ctx, source)
        epochs: list[list[int]] = []
        for _ in range(2):
            epochs.append([])
            for batch, micro in microbatches(ctx, loader, "pad"):
                epochs[-1] += gather_for_metrics(ctx, batch["x"], micro).tolist()
        return epochs

    first, second = run_ranks(run, 2, "processes")[0]
    assert sorted(first) == sorted(second) == list(range(22))
    assert first != second


# Bad input


def test_what_can_not_be_shared_out_is_refused() -> None:
    def prepare(ctx: Context, source: DataLoader[Any], what: str) -> None:
        with pytest.raises(ConfigurationError, match=what):
            prepare_data_loader(ctx, source)

    split = DataLoaderConfiguration(split_batches=True)
    run_ranks(lambda ctx: prepare(ctx, numbers(8, 3), "divisible"), 2, dataloader_config=split)
    whole = DataLoader(Elements(3), batch_size=None)
    run_ranks(lambda ctx: prepare(ctx, whole, "batch_size=None"), 2, dataloader_config=split)
    loose = numbers(8, num_workers=2, in_order=False)
    run_ranks(lambda ctx: prepare(ctx, loose, "in_order=False"), 2)
    assert isinstance(prepare_data_loader(Context(), loose).dataset, Numbers)
