# torch leaves DataLoader and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import importlib
import random
import warnings
from collections import UserDict
from collections.abc import Iterator
from functools import partial
from itertools import islice
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

import accelfn as af
from accelfn import Context
from accelfn.data import next_plan, plan_epoch
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


def listed(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def evaluate(ctx: Context, loader: Any, uneven: Uneven = "error") -> list[int]:
    """One pass, gathered."""
    found: list[int] = []
    for batch, micro in af.microbatches(ctx, loader, uneven):
        found += af.gather_for_metrics(ctx, batch, micro).tolist()
    return found


@settings(max_examples=4)
@given(st.integers(0, 40), st.integers(1, 4), st.integers(1, 2), st.integers(1, 2), st.booleans())
def test_each_sample_is_read_once_by_workers(
    number: int, batch_size: int, size: int, num_workers: int, drop_last: bool
) -> None:
    def run(ctx: Context) -> tuple[list[int], int]:
        source = numbers(number, batch_size, num_workers=num_workers, drop_last=drop_last)
        steps = list(af.microbatches(ctx, af.prepare_data_loader(ctx, source)))
        found = [row for batch, micro in steps for row in af.gather_for_metrics(ctx, batch, micro).tolist()]
        return found, len(steps)

    parts = [len(range(worker, number, num_workers)) for worker in range(num_workers)]
    plans = [plan_epoch(part, batch_size, size, drop_last=drop_last) for part in parts]
    read = sum(plan.consumed(plan.num_steps - 1) if plan.num_steps else 0 for plan in plans)
    for found, steps in run_ranks(run, size, "processes"):
        assert steps == sum(plan.num_steps for plan in plans)
        assert len(found) == len(set(found)) == read
        assert num_workers > 1 or found == list(range(read))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_is_handed_out_when_its_group_is_complete(num_workers: int) -> None:
    class EndsBadly(Numbers):
        def __iter__(self) -> Iterator[int]:
            yield from range(self.number)
            raise OSError("the line is dead")

    def run(ctx: Context) -> list[list[int]]:
        source = DataLoader(EndsBadly(8), batch_size=2, num_workers=num_workers)
        batches = iter(af.prepare_data_loader(ctx, source))
        own = [batch.tolist() for batch in islice(batches, 8 // (2 * ctx.num_processes))]
        with pytest.raises((OSError, RemoteRankError), match="the line is dead"):
            next(batches)
        return own

    # In processes of their own: here a collection of garbage would wait for the worker, for seconds.
    assert run_ranks(run, 1, "processes") == [[[0, 1], [2, 3], [4, 5], [6, 7]]]
    assert run_ranks(run, 2, "processes") == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


@pytest.mark.parametrize("uneven", ["error", "pad"])
def test_streams_of_different_length_are_an_error_on_all_ranks(uneven: Uneven) -> None:
    def run(ctx: Context) -> str:
        loader = af.prepare_data_loader(ctx, numbers(8 + 4 * ctx.rank))
        with pytest.raises(UnevenDataError) as caught:
            evaluate(ctx, loader, uneven)
        return str(caught.value)

    first, second = run_ranks(run, 2)
    assert first == second
    assert "2" in first
    assert "3" in first


@pytest.mark.parametrize(("num_workers", "groups"), [(0, 1), (1, 7), (2, 0), (2, 1), (2, 7)])
def test_a_pass_goes_on_where_a_group_ended(num_workers: int, groups: int) -> None:
    class Uneven(Numbers):
        """The first of two workers has 12 numbers, the other one 3."""

        def __iter__(self) -> Iterator[int]:
            info = get_worker_info()
            worker = 0 if info is None else info.id
            return iter(range(100 * worker, 100 * worker + (3 if worker else 12)))

    loader = af.prepare_data_loader(Context(), DataLoader(Uneven(0), batch_size=2, num_workers=num_workers))
    whole: list[list[int]] = []
    ends: list[int] = [0]
    for batch in loader:
        whole.append(batch.tolist())
        ends.append(af.loader_state(loader).consumed)
    assert ends[-1] == sum(map(len, whole))
    groups = min(groups, len(whole))
    passes_of(loader).move_to(0, ends[groups])
    assert af.loader_state(loader).consumed == ends[groups]
    assert listed(loader) == whole[groups:]


@pytest.mark.parametrize(
    ("source", "start", "error", "said"),
    [
        (numbers(12, num_workers=2), 3, ConfigurationError, r"sample 3, .* group .* samples 2 to 3"),
        (numbers(4), 10, ValueError, "can't resume at sample 10: the stream ended after 4"),
        (numbers(4, num_workers=2), 10, ValueError, "can't resume at sample 10: the stream ended after 4"),
        (DataLoader(Sized(4)), 10, ValueError, "has only 4"),
    ],
)
def test_a_start_behind_the_end_or_within_a_group_of_several_workers_is_refused(
    source: Any, start: int, error: type[Exception], said: str
) -> None:
    loader = af.prepare_data_loader(Context(), source)
    passes_of(loader).move_to(0, start)
    with pytest.raises(error, match=said):
        list(loader)


@pytest.mark.parametrize(
    ("number", "length", "what"), [(8, 7, "yields more"), (7, 8, "ended after 7"), (8, 12, "ended after 8")]
)
def test_a_length_that_is_none_is_refused(number: int, length: int, what: str) -> None:
    loader = af.prepare_data_loader(Context(), DataLoader(Sized(number, length), batch_size=2))
    with pytest.raises(ValueError, match=f"Sized has length {length}, but {what}"):
        list(loader)


def test_lengths_are_those_of_the_plan() -> None:
    def run(ctx: Context) -> tuple[int, int, int]:
        loader = af.prepare_data_loader(ctx, DataLoader(Sized(9), batch_size=2))
        assert next_plan(loader) is not None
        return len(loader), loader.total_batch_size, loader.total_dataset_length

    assert run_ranks(run, 2) == [(3, 4, 9)] * 2
    for source in (numbers(9), DataLoader(Sized(9), num_workers=2)):
        unknown = af.prepare_data_loader(Context(), source)
        assert next_plan(unknown) is None
        with pytest.raises(TypeError, match="no length"):
            len(unknown)


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


@pytest.mark.parametrize("num_workers", [0, 1])
def test_ranks_read_one_shuffled_stream_and_collate_apart(num_workers: int) -> None:
    def run(ctx: Context) -> list[list[list[list[float]]]]:
        torch.manual_seed(ctx.rank)
        random.seed(ctx.rank)
        source = DataLoader(Shuffled(24), batch_size=2, num_workers=num_workers, collate_fn=with_draw)
        loader = af.prepare_data_loader(ctx, source)
        passes = [[[column.tolist() for column in batch] for batch in loader] for _ in range(2)]
        passes_of(loader).move_to(0, 4 * ctx.num_processes)
        assert [[column.tolist() for column in batch] for batch in loader] == passes[0][2:]
        return passes

    def ranks(size: int) -> list[Any]:
        config = af.DataLoaderConfiguration(data_seed=3)
        return run_ranks(run, size, "processes", dataloader_config=config)

    both, (alone,) = ranks(2), ranks(1)
    for epoch in (0, 1):
        batches = [batch for rank in both for batch in rank[epoch]]
        assert sorted(x for batch in batches for x in batch[0]) == list(range(24))
        for place in (1, 3):  # draws of the stream, and of collation
            drawn = [x for batch in batches for x in batch[place]]
            assert len(set(drawn)) == len(drawn)
    assert both[0][0] != both[0][1]
    dealt = [batch[0] for step in zip(both[0][0], both[1][0], strict=True) for batch in step]
    assert dealt == [batch[0] for batch in alone[0]]


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_that_outlive_a_pass_hear_of_the_next_epoch(start_method: str) -> None:
    source = DataLoader(
        Shuffled(4),
        batch_size=4,
        num_workers=1,
        persistent_workers=True,
        multiprocessing_context=start_method,
    )
    loader = af.prepare_data_loader(
        Context().replace(dataloader_config=af.DataLoaderConfiguration(data_seed=3)), source
    )
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


class Curriculum(Dataset[int]):
    """Items that are the number of the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        return self.epoch


class CurriculumStream(Curriculum, IterableDataset[int]):
    """The same as a stream."""

    def __iter__(self) -> Iterator[int]:
        return iter([self.epoch] * 4)


@pytest.mark.parametrize(
    ("sharding", "dispatch", "dataset"),
    [
        ("global", None, Curriculum),
        ("global", True, Curriculum),
        ("already_sharded", None, Curriculum),
        ("already_sharded", None, CurriculumStream),
    ],
)
def test_datasets_in_workers_that_outlive_a_pass_hear_of_the_next_epoch(
    sharding: Any, dispatch: bool | None, dataset: Any
) -> None:
    ctx = Context().replace(dataloader_config=af.DataLoaderConfiguration(dispatch_batches=dispatch))
    source = DataLoader(dataset(), batch_size=2, num_workers=1, persistent_workers=True)
    loader = af.prepare_data_loader(ctx, source, sharding)
    assert [batch.tolist() for batch in loader] == [[0, 0]] * 2
    assert [batch.tolist() for batch, _ in af.microbatches(ctx, loader)] == [[1, 1]] * 2
    loader.set_epoch(5)
    assert [batch.tolist() for batch in loader] == [[5, 5]] * 2


class Mislabelled(IterableDataset[int]):
    """A stream whose length is another than it says."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter(range(13))


@pytest.mark.filterwarnings("ignore:Length of IterableDataset")  # torch's own words
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("prepared", ["global", "dispatched", "already_sharded", "no"])
def test_a_stream_that_is_longer_than_it_says_is_an_error_in_both_loops(prepared: str, world: int) -> None:
    def run(ctx: Context, by: str) -> str:
        loader: Any = DataLoader(Mislabelled(8), batch_size=4 // world)
        if prepared != "no":
            sharding: Any = "global" if prepared == "dispatched" else prepared
            loader = af.prepare_data_loader(ctx, loader, sharding)
        with pytest.raises((ValueError, RemoteRankError), match="yields more"):
            list(loader if by == "loop" else af.microbatches(ctx, loader))
        return "refused"

    config = af.DataLoaderConfiguration(dispatch_batches=prepared == "dispatched")
    for by in ("loop", "microbatches") if prepared != "no" else ("microbatches",):
        assert run_ranks(partial(run, by=by), world, dataloader_config=config) == ["refused"] * world


class Fewer(list[torch.Tensor]):
    """Batches whose number is smaller than their length."""

    def __len__(self) -> int:
        return 4


def test_a_window_that_its_loader_leaves_open_is_an_error() -> None:
    ctx = Context().replace(gradient_accumulation_steps=2)
    read: list[bool] = []
    with pytest.raises(ValueError, match="length of 4 batches, but ended after 3 batches, within a window"):
        read.extend(micro.sync for _, micro in af.microbatches(ctx, Fewer([torch.ones(1)] * 3)))
    assert len(list(af.microbatches(ctx, Fewer([torch.ones(1)] * 2)))) == 2


def test_the_epoch_is_told_to_shards_too() -> None:
    def run(ctx: Context) -> list[list[int]]:
        loader = af.prepare_data_loader(ctx, DataLoader(Shards([0, 1]), batch_size=4))
        return [*listed(loader), *listed(loader)]

    assert run_ranks(run, 2) == [
        [[0, 1, 2, 3], [1000, 1001, 1002, 1003]],
        [[10, 11, 12, 13], [1010, 1011, 1012, 1013]],
    ]


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
    return UserDict({"input_ids": torch.tensor(rows), "labels": torch.tensor(labels)})


@pytest.mark.parametrize("size", [1, 3])
def test_dicts_are_batched_and_gathered_though_the_collator_takes_things_out_of_them(size: int) -> None:
    def run(ctx: Context) -> list[int]:
        labels: list[int] = []
        loader = af.prepare_data_loader(ctx, DataLoader(Tokens(), 2, collate_fn=padded))
        for batch, micro in af.microbatches(ctx, loader):
            assert batch["input_ids"].shape[0] == micro.num_rows
            labels += af.gather_for_metrics(ctx, batch["labels"], micro).tolist()
        return labels

    assert run_ranks(run, size) == [list(range(9))] * size


# Shards


@pytest.mark.parametrize(
    ("sharding", "num_workers", "split"), [("global", 0, False), ("by_source", 1, False), ("global", 0, True)]
)
def test_each_rank_reads_shards_of_its_own(
    sharding: Literal["global", "by_source"], num_workers: int, split: bool
) -> None:
    def run(ctx: Context) -> tuple[list[list[int]], int]:
        source = DataLoader(Shards([0, 1, 2]), batch_size=6 if split else 3, num_workers=num_workers)
        loader = af.prepare_data_loader(ctx, source, sharding)
        own = listed(loader)
        loader.set_epoch(0)
        with pytest.raises(UnevenDataError, match="3, 2 by rank"):
            list(af.microbatches(ctx, loader))
        return own, loader.total_batch_size

    config = af.DataLoaderConfiguration(split_batches=split)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run_ranks(run, 2, "processes" if num_workers else "memory", dataloader_config=config) == [
            ([[0, 1, 2], [3, 20, 21], [22, 23]], 6),
            ([[10, 11, 12], [13]], 6),
        ]


def test_shards_are_padded_and_gathered_exactly() -> None:
    def run(ctx: Context) -> list[int]:
        loader = af.prepare_data_loader(ctx, DataLoader(Shards([0, 1, 2]), batch_size=3))
        # A short batch says that this rank has no more, and nothing of the others.
        lasts = [micro.is_last for _, micro in af.microbatches(ctx, loader, "pad")]
        assert lasts == [None] * 3
        loader.set_epoch(0)
        return evaluate(ctx, loader, "pad")

    first, second = run_ranks(run, 2)
    assert first == second == [0, 1, 2, 10, 11, 12, 3, 20, 21, 13, 22, 23]


@pytest.mark.parametrize("dataset", [Shards([0, 1]), Numbers(4)])
def test_too_few_shards_are_refused_where_each_rank_must_have_its_own(dataset: Any) -> None:
    def run(ctx: Context) -> None:
        af.prepare_data_loader(ctx, DataLoader(dataset), "by_source")

    what = "2 shards" if isinstance(dataset, Shards) else "no shards"
    with pytest.raises(ConfigurationError, match=f"different shards on each of 3 ranks, .* has {what}"):
        run_ranks(run, 3)


def test_reading_the_same_several_times_is_said_once_a_line() -> None:
    def run(ctx: Context) -> int:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(2):
                af.prepare_data_loader(ctx, DataLoader(Shards([0, 1])))
            af.prepare_data_loader(ctx, numbers(4))
        assert all("each of 3 ranks reads the full stream" in str(one.message) for one in caught)
        assert all(one.filename == __file__ for one in caught)
        return len(caught)

    assert run_ranks(run, 3, "processes") == [2, 0, 0]
    assert run_ranks(run, 1, "processes") == [0]


@pytest.mark.slow
@pytest.mark.parametrize(("num_shards", "num_workers"), [(1, 0), (4, 0), (4, 2), (5, 0)])
def test_hugging_face_streams_are_read_once_by_their_shards(num_shards: int, num_workers: int) -> None:
    datasets: Any = importlib.import_module("datasets")
    split: Any = importlib.import_module("datasets.distributed").split_dataset_by_node
    data = datasets.Dataset.from_dict({"x": list(range(22))}).to_iterable_dataset(num_shards=num_shards)
    data = data.shuffle(seed=1, buffer_size=3)

    def run(ctx: Context) -> list[list[int]]:
        twice = DataLoader(split(data, rank=ctx.rank, world_size=2))
        with pytest.raises(ConfigurationError, match="already split by split_dataset_by_node"):
            af.prepare_data_loader(ctx, twice)
        loader = af.prepare_data_loader(ctx, DataLoader(data, batch_size=2, num_workers=num_workers))
        epochs: list[list[int]] = []
        for _ in range(2):
            epochs.append([])
            for batch, micro in af.microbatches(ctx, loader, "pad"):
                epochs[-1] += af.gather_for_metrics(ctx, batch["x"], micro).tolist()
        return epochs

    first, second = run_ranks(run, 2, "processes")[0]
    assert sorted(first) == sorted(second) == list(range(22))
    assert first != second


def test_what_can_not_be_shared_out_is_refused() -> None:
    def prepare(ctx: Context, source: DataLoader[Any], what: str) -> None:
        with pytest.raises(ConfigurationError, match=what):
            af.prepare_data_loader(ctx, source)

    split = af.DataLoaderConfiguration(split_batches=True)
    run_ranks(lambda ctx: prepare(ctx, numbers(8, 3), "divisible"), 2, dataloader_config=split)
    whole = DataLoader(Numbers(3), batch_size=None)
    run_ranks(lambda ctx: prepare(ctx, whole, "batch_size=None"), 2, dataloader_config=split)
    loose = numbers(8, num_workers=2, in_order=False)
    run_ranks(lambda ctx: prepare(ctx, loose, "in_order=False"), 2)
    assert isinstance(af.prepare_data_loader(Context(), loose).dataset, Numbers)
