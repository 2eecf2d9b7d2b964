# torch leaves DataLoader and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
)

from accelfn import Accelerator, Context, DataLoaderConfiguration
from accelfn.data import gather_for_metrics, loader_state, microbatches, plan_epoch, prepare_data_loader
from accelfn.data.loader import passes_of
from accelfn.errors import ConfigurationError, MismatchError, RemoteRankError
from accelfn.testing import run_ranks
from tests.data.streams import Numbers, Sized

Batches = list[list[int]]


def numbers(kind: str, num: int, batch_size: int | None, **options: Any) -> DataLoader[Any]:
    data: Any = {"map": torch.arange, "stream": Numbers, "sized": Sized}[kind](num)
    return DataLoader(data, batch_size=batch_size, **options)


def config(**options: Any) -> Any:
    return DataLoaderConfiguration(dispatch_batches=True, **options)


def dispatched(source: Any, size: int, on: Any = "memory", **options: Any) -> list[list[Any]]:
    """Give what each rank reads, each batch as a list."""

    def read(ctx: Context) -> list[Any]:
        return [batch.tolist() for batch in prepare_data_loader(ctx, source())]

    return run_ranks(read, size, on, dataloader_config=config(**options))


kinds = st.sampled_from(["map", "stream", "sized"])


@given(
    kinds,
    st.integers(0, 100),
    st.integers(1, 5),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_index_lists_are_those_of_the_plan(
    kind: str, num: int, rows: int, size: int, split: bool, even: bool, drop_last: bool
) -> None:
    batch_size = rows * size if split else rows
    got = dispatched(
        lambda: numbers(kind, num, batch_size, drop_last=drop_last),
        size,
        split_batches=split,
        even_batches=even,
    )
    plan = plan_epoch(num, rows, size, even_batches=even, drop_last=drop_last)
    assert got == [
        [plan.positions(step, rank) for step in range(plan.num_batches(rank))] for rank in range(size)
    ]


# As Accelerate 1.15 dispatches, where it does so well; each row was observed there.
TABLE: tuple[tuple[int, bool, Batches, Batches], ...] = (
    (8, False, [[0, 1], [4, 5]], [[2, 3], [6, 7]]),
    (11, False, [[0, 1], [4, 5], [8, 9]], [[2, 3], [6, 7], [10, 0]]),
    (3, False, [[0, 1]], [[2, 0]]),
    (11, True, [[0, 1], [4, 5]], [[2, 3], [6, 7]]),
    (9, True, [[0, 1], [4, 5]], [[2, 3], [6, 7]]),
    # It gives [8] and [0] there, and empty batches with more ranks.
    (9, False, [[0, 1], [4, 5], [8, 0]], [[2, 3], [6, 7], [1, 2]]),
    # And raises a TypeError there.
    (3, True, [], []),
    (1, True, [], []),
    (0, False, [], []),
)


@pytest.mark.parametrize("kind", ["map", "stream", "sized"])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_batches_are_those_of_accelerate_where_they_are_well_defined(split: bool, kind: str) -> None:
    for num, drop_last, *expected in TABLE:
        batch_size = 4 if split else 2

        def source(num: int = num, batch_size: int = batch_size, drop_last: bool = drop_last) -> Any:
            return numbers(kind, num, batch_size, drop_last=drop_last)

        assert dispatched(source, 2, split_batches=split) == expected


@given(kinds, st.integers(0, 60), st.integers(1, 4), st.integers(1, 4), st.booleans(), st.integers(1, 3))
def test_gathering_for_metrics_gives_the_dataset_in_order(
    kind: str, num: int, rows: int, size: int, split: bool, window: int
) -> None:
    def run(ctx: Context) -> tuple[list[int], list[tuple[int, bool, Any]]]:
        loader = prepare_data_loader(ctx, numbers(kind, num, rows * size if split else rows))
        seen: list[int] = []
        facts: list[tuple[int, bool, Any]] = []
        for batch, micro in microbatches(ctx, loader):
            assert len(batch) == micro.num_rows
            seen += gather_for_metrics(ctx, batch, micro).tolist()
            facts.append((micro.window, micro.sync, micro.is_last))
            assert loader_state(loader).consumed == len(seen)
        return seen, facts

    results = run_ranks(
        run, size, dataloader_config=config(split_batches=split), gradient_accumulation_steps=window
    )
    steps = -(-num // (rows * size))
    for seen, facts in results:
        assert seen == list(range(num))
        assert [one[0] for one in facts] == [
            min(window, steps - step // window * window) for step in range(steps)
        ]
        assert all(last in (None, False) for *_, last in facts[:-1])
        assert not facts or kind == "stream" or facts[-1][2] is True


@given(kinds, st.integers(1, 40), st.integers(1, 3), st.integers(2, 4), st.booleans())
def test_uneven_data_can_be_padded_and_is_still_gathered_exactly(
    kind: str, num: int, rows: int, size: int, split: bool
) -> None:
    num += rows * size  # a rank without any batch has none that it could repeat

    def run(ctx: Context) -> list[int]:
        loader = prepare_data_loader(ctx, numbers(kind, num, rows * size if split else rows))
        return [
            one
            for batch, micro in microbatches(ctx, loader, "pad")
            for one in gather_for_metrics(ctx, batch, micro).tolist()
        ]

    options = config(split_batches=split, even_batches=False)
    assert run_ranks(run, size, dataloader_config=options) == [list(range(num))] * size


@given(
    kinds,
    st.integers(0, 60),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.integers(0, 5),
)
def test_a_pass_can_go_on_in_another_world(
    kind: str, num: int, before: tuple[int, int], after: tuple[int, int], stop: int
) -> None:
    def begin(ctx: Context) -> tuple[list[int], int]:
        loader = prepare_data_loader(ctx, numbers(kind, num, before[0]))
        seen: list[int] = []
        for index, (batch, micro) in enumerate(microbatches(ctx, loader)):
            if index == stop:
                break
            seen += gather_for_metrics(ctx, batch, micro).tolist()
        return seen, len(seen)

    seen, place = run_ranks(begin, before[1], dataloader_config=config())[0]

    def go_on(ctx: Context) -> list[int]:
        loader = prepare_data_loader(ctx, numbers(kind, num, after[0]))
        passes_of(loader).move_to(0, place)
        return [
            one
            for batch, micro in microbatches(ctx, loader)
            for one in gather_for_metrics(ctx, batch, micro).tolist()
        ]

    assert seen + run_ranks(go_on, after[1], dataloader_config=config())[0] == list(range(num))


def test_a_shuffled_order_is_that_of_ranks_that_read_for_themselves() -> None:
    def read(ctx: Context) -> list[Any]:
        loader = prepare_data_loader(ctx, numbers("map", 23, 3, shuffle=True))
        return [[batch.tolist() for batch in loader] for _ in range(2)]

    for even in (True, False):
        plain = DataLoaderConfiguration(data_seed=4, even_batches=even)
        through_rank_zero = replace(plain, dispatch_batches=True)
        assert run_ranks(read, 3, dataloader_config=through_rank_zero) == run_ranks(
            read, 3, dataloader_config=plain
        )


class Draws(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(2)


class DrawingStream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.rand(2) for _ in range(7))


@pytest.mark.parametrize("kind", ["map", "batches", "stream"])
def test_workers_draw_what_they_draw_for_ranks_that_read_for_themselves(kind: str) -> None:
    def read(ctx: Context, seed: int | None) -> list[Any]:
        options: dict[str, Any] = {"batch_size": 2}
        if kind == "batches":
            options = {"batch_sampler": Listed([[0, 1], [2], [3, 4], [5, 6]])}
        data: Any = DrawingStream() if kind == "stream" else Draws()
        loader = prepare_data_loader(ctx, DataLoader(data, num_workers=1, **options))
        passes_of(loader).move_to(0, 0, seed)
        return [batch.tolist() for batch in loader]

    for seed in (None, 9):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that all ranks read the stream
            plain = run_ranks(
                lambda ctx, seed=seed: read(ctx, seed),
                2,
                "processes",
                dataloader_config=DataLoaderConfiguration(data_seed=4),
            )
        through = run_ranks(
            lambda ctx, seed=seed: read(ctx, seed), 2, "processes", dataloader_config=config(data_seed=4)
        )
        assert through == plain
        firsts = [batch[0][0] for rank in through for batch in rank]
        assert len(set(firsts)) == len(firsts)


class OnRankZero(Dataset[int]):
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> int:
        assert self.rank == 0
        return index


@pytest.mark.parametrize("num_workers", [0, 1])
def test_only_rank_zero_reads_and_has_workers(num_workers: int) -> None:
    def run(ctx: Context) -> list[Any]:
        source: Any = DataLoader(OnRankZero(ctx.rank), batch_size=2, num_workers=num_workers)
        return [batch.tolist() for batch in prepare_data_loader(ctx, source)]

    assert run_ranks(run, 2, "processes", dataloader_config=config()) == [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]


def test_several_workers_of_a_stream_give_each_sample_once() -> None:
    def run(ctx: Context) -> tuple[list[int], int]:
        loader = prepare_data_loader(ctx, numbers("sized", 23, 2, num_workers=2))
        with pytest.raises(TypeError, match="no length"):  # each worker may cut its part short
            len(loader)
        pairs = list(microbatches(ctx, loader))
        return sorted(
            one for batch, micro in pairs for one in gather_for_metrics(ctx, batch, micro).tolist()
        ), len(pairs)

    assert run_ranks(run, 2, "processes", dataloader_config=config()) == [(list(range(23)), 6)] * 2


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_other_ways_of_making_batches(kind: str, split: bool) -> None:
    if kind == "map":  # a sampler and batch samplers of one's own, asked on rank 0 alone
        order = [5, 3, 8, 1, 2, 0, 7]

        def sampled(sampler: Any) -> Any:
            return lambda: DataLoader(cast("Any", torch.arange(9)), **sampler)

        expected = [[[5, 3], [2, 0]], [[8, 1], [7, 5]]]
        rows = 4 if split else 2
        assert dispatched(sampled({"batch_size": rows, "sampler": order}), 2, split_batches=split) == expected
        batches = [order[start : start + rows] for start in range(0, 7, rows)]
        even = Listed(batches, rows)
        assert dispatched(sampled({"batch_sampler": even}), 2, split_batches=split) == expected
    else:
        expected = [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]
        got = dispatched(lambda: numbers("stream", 7, 4 if split else 2), 2, split_batches=split)
        assert got == expected


class Listed(Sampler[list[int]]):
    def __init__(self, batches: list[list[int]], batch_size: int | None = None) -> None:
        self.batches = batches
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


@given(st.lists(st.integers(1, 4), max_size=8), st.integers(1, 3))
def test_batches_of_different_sizes_go_one_to_a_rank(sizes: list[int], size: int) -> None:
    num = sum(sizes)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    batches = [list(range(start, start + one)) for start, one in zip(starts, sizes, strict=True)]

    def run(ctx: Context) -> list[int]:
        data: Any = torch.arange(num)
        source = DataLoader(data, batch_sampler=Listed(batches))
        loader = prepare_data_loader(ctx, source)
        assert len(loader) == -(-len(sizes) // size)
        return [
            one
            for batch, micro in microbatches(ctx, loader)
            for one in gather_for_metrics(ctx, batch, micro).tolist()
        ]

    if num:
        assert run_ranks(run, size, dataloader_config=config()) == [list(range(num))] * size


@pytest.mark.parametrize("kind", ["map", "stream", "sized"])
def test_samples_that_are_batches_go_one_to_a_rank(kind: str) -> None:
    class Rows(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter([torch.arange(start, start + 1 + start % 3) for start in (0, 1, 3)])

    class SizedRows(Rows):
        def __len__(self) -> int:
            return 3

    data: Any = {"map": list(Rows()), "stream": Rows(), "sized": SizedRows()}[kind]

    def run(ctx: Context) -> tuple[list[Any], list[int]]:
        loader = prepare_data_loader(ctx, DataLoader(data, batch_size=None))
        own = [batch.tolist() for batch in loader]
        gathered = [
            one
            for batch, micro in microbatches(ctx, loader)
            for one in gather_for_metrics(ctx, batch, micro).tolist()
        ]
        return own, gathered

    assert run_ranks(run, 2, dataloader_config=config()) == [
        ([[0], [3]], [0, 1, 2, 3]),
        ([[1, 2], [0]], [0, 1, 2, 3]),
    ]


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Record:
    ids: Any
    weight: Any
    name: str


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("num", [2, 200])
@pytest.mark.parametrize("on", ["memory", "processes"])
def test_batches_of_any_containers_and_dtypes(on: Any, num: int, split: bool) -> None:
    def collate(samples: list[int]) -> Any:
        ids = torch.tensor(samples)
        return {
            "record": Record(ids, ids.to(torch.bfloat16)[:, None].expand(-1, num), "a"),
            "pair": Pair(ids % 2 == 0, [ids.to(torch.float64), None]),
            "scale": torch.tensor(0.5),
            "kind": "train",
        }

    def run(ctx: Context) -> list[int]:
        data: Any = list(range(10))
        source = DataLoader(data, batch_size=4 if split else 2, collate_fn=collate)
        seen: list[int] = []
        for batch in prepare_data_loader(ctx, source):
            record: Record = batch["record"]
            assert isinstance(record, Record)
            assert isinstance(batch["pair"], Pair)
            ids = record.ids
            assert record.name == "a"
            assert torch.equal(record.weight, ids.to(torch.bfloat16)[:, None].expand(-1, num))
            assert torch.equal(batch["pair"].x, ids % 2 == 0)
            assert torch.equal(batch["pair"].y[0], ids.to(torch.float64))
            assert batch["pair"].y[1] is None
            assert batch["scale"].shape == ()
            assert float(batch["scale"]) == 0.5
            assert batch["kind"] == "train"
            seen += ids.tolist()
        return seen

    options = config(split_batches=split)
    assert run_ranks(run, 2, on, dataloader_config=options) == [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 0, 1]]


def test_batches_that_differ_in_length_between_ranks_need_no_padding() -> None:
    def run(ctx: Context) -> list[tuple[int, ...]]:
        data: Any = list(range(1, 9))

        def collate(samples: list[int]) -> torch.Tensor:
            return torch.ones(len(samples), max(samples))

        source = DataLoader(data, batch_size=2, collate_fn=collate)
        return [tuple(batch.shape) for batch in prepare_data_loader(ctx, source)]

    assert run_ranks(run, 2, dataloader_config=config()) == [[(2, 2), (2, 6)], [(2, 4), (2, 8)]]


def test_packed_sequences_travel_whole_but_are_not_cut() -> None:
    data: Any = [torch.ones(3), torch.ones(2)] * 4

    def run(ctx: Context) -> Any:
        loader = prepare_data_loader(ctx, DataLoader(data, batch_size=2, collate_fn=pack_sequence))
        return next(iter(loader))

    first, second = run_ranks(run, 2, dataloader_config=config())
    assert isinstance(second, PackedSequence)
    assert torch.equal(first.batch_sizes, second.batch_sizes)
    with pytest.raises(TypeError, match="a PackedSequence"):
        run_ranks(run, 2, dataloader_config=config(split_batches=True))


@pytest.mark.parametrize("split", [False, True])
def test_texts_and_objects_go_to_the_rank_whose_they_are(split: bool) -> None:
    def collate(samples: list[int]) -> Any:
        return {"ids": torch.tensor(samples), "text": [f"n{one}" for one in samples], "of": max(samples)}

    def run(ctx: Context) -> list[Any]:
        data: Any = list(range(8))
        loader = prepare_data_loader(ctx, DataLoader(data, batch_size=4 if split else 2, collate_fn=collate))
        return [(batch["ids"].tolist(), batch["text"], batch["of"]) for batch in loader]

    got = run_ranks(run, 2, dataloader_config=config(split_batches=split))
    assert [[ids for ids, _, _ in rank] for rank in got] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    assert all(text == [f"n{one}" for one in ids] for rank in got for ids, text, _ in rank)
    assert [one for _, _, one in got[0]] == ([3, 7] if split else [1, 5])


@pytest.mark.parametrize(
    ("collate", "path"),
    [
        (lambda _: {"table": torch.ones(3, 2)}, "tree['table']"),
        (lambda _: [[torch.ones(1)] * 4], "tree[0][0]"),
    ],
)
def test_what_can_not_be_cut_is_named_by_its_path_on_every_rank(collate: Any, path: str) -> None:
    def run(ctx: Context) -> str:
        data: Any = list(range(8))
        loader = prepare_data_loader(ctx, DataLoader(data, batch_size=4, collate_fn=collate))
        with pytest.raises(TypeError if ctx.is_main_process else RemoteRankError) as caught:
            list(loader)
        return str(caught.value)

    for text in run_ranks(run, 2, dataloader_config=config(split_batches=True)):
        assert all(one in text for one in (path, "one row for each of its 4 samples", "slice_fn"))


def test_a_slice_function_cuts_the_batch_of_a_whole_step() -> None:
    calls: list[tuple[list[str], slice, int, int]] = []

    def cut(batch: Any, part: slice, /, *, process_index: int, num_processes: int) -> Any:
        calls.append((batch, part, process_index, num_processes))
        return torch.tensor([int(one) for one in batch[part]])

    def run(ctx: Context, kind: str, rows: int) -> list[Any]:
        source = numbers(kind, 7, rows, collate_fn=lambda samples: [str(int(one)) for one in samples])
        return [batch.tolist() for batch in prepare_data_loader(ctx, source, slice_fn=cut)]

    for split in (False, True):
        for kind in ("map", "stream", "sized"):
            calls.clear()
            got = run_ranks(
                lambda ctx, kind=kind, split=split: run(ctx, kind, 4 if split else 2),
                2,
                dataloader_config=config(split_batches=split),
            )
            assert got == [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]
            assert calls == [
                (["0", "1", "2", "3"], slice(0, 2), 0, 2),
                (["0", "1", "2", "3"], slice(2, 4), 1, 2),
                (["4", "5", "6", "0"], slice(0, 2), 0, 2),
                (["4", "5", "6", "0"], slice(2, 4), 1, 2),
            ]


def test_the_accelerator_takes_a_slice_function() -> None:
    def cut(batch: Any, part: slice, process_index: int, num_processes: int) -> Any:
        del process_index, num_processes
        return batch[part] + 100

    accelerator = Accelerator(context=Context().replace(dataloader_config=config()))
    loader = accelerator.prepare_data_loader(numbers("map", 3, 2), slice_fn_for_dispatch=cut)
    assert [batch.tolist() for batch in loader] == [[100, 101], [102]]


@pytest.mark.parametrize(
    "wrong",
    [lambda batch: batch, lambda batch, part: batch[part], lambda batch, part, rank, size: batch[part], 5],
    ids=["batch", "no ranks", "other names", "no function"],
)
@pytest.mark.parametrize("where", [(0, 1), (0,), (1,)])
def test_a_slice_function_of_another_signature_is_every_ranks_error(
    wrong: Any, where: tuple[int, ...]
) -> None:
    def run(ctx: Context) -> str:
        slice_fn = wrong if ctx.rank in where else right
        with pytest.raises(TypeError if ctx.rank in where else RemoteRankError) as caught:
            prepare_data_loader(ctx, numbers("map", 8, 2), slice_fn=slice_fn)
        return str(caught.value)

    for text in run_ranks(run, 2, dataloader_config=config()):
        assert "slice_fn(batch, rows, *, process_index, num_processes)" in text


def right(batch: Any, part: slice, process_index: int, num_processes: int) -> Any:
    return batch[part]


def test_type_errors_of_a_slice_function_and_nothing_at_all_are_every_ranks_errors() -> None:
    def raises(batch: Any, part: slice, **_: Any) -> Any:
        raise TypeError("mine")

    def forgets(batch: Any, part: slice, **_: Any) -> Any:
        right(batch, part, 0, 1)

    def run(ctx: Context, slice_fn: Any) -> str:
        loader = prepare_data_loader(ctx, numbers("map", 8, 2), slice_fn=slice_fn)
        with pytest.raises(TypeError if ctx.is_main_process else RemoteRankError) as caught:
            list(loader)
        return str(caught.value)

    own, other = run_ranks(lambda ctx: run(ctx, raises), 2, dataloader_config=config())
    assert own == "mine"
    assert "TypeError: mine" in other
    for text in run_ranks(lambda ctx: run(ctx, forgets), 2, dataloader_config=config()):
        assert "must return these rows of the batch, and it returned None" in text


class Fails(Dataset[int]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == 5:
            raise OSError("the disk is gone")
        return index


def fail(*_: Any, **__: Any) -> Any:
    raise OSError("the disk is gone")


@pytest.mark.parametrize("where", ["dataset", "collate_fn", "slice_fn"])
def test_an_error_of_rank_zero_is_every_ranks(where: str) -> None:
    def run(ctx: Context) -> str:
        data: Any = Fails() if where == "dataset" else list(range(8))
        collate = fail if where == "collate_fn" else None
        loader = prepare_data_loader(
            ctx,
            DataLoader(data, batch_size=2, collate_fn=collate),
            slice_fn=fail if where == "slice_fn" else None,
        )
        with pytest.raises(OSError if ctx.is_main_process else RemoteRankError) as caught:
            list(loader)
        return str(caught.value)

    assert all("the disk is gone" in text for text in run_ranks(run, 2, dataloader_config=config()))


@pytest.mark.parametrize("says", [3, 4, 5, 9, 30])
def test_a_stream_of_another_length_than_it_says_is_every_ranks_error(says: int) -> None:
    def run(ctx: Context) -> str:
        loader = prepare_data_loader(ctx, DataLoader(Sized(7, says), batch_size=2))
        with pytest.raises(ValueError if ctx.is_main_process else RemoteRankError) as caught:
            list(loader)
        return str(caught.value)

    assert all(f"length of {says}" in text for text in run_ranks(run, 2, dataloader_config=config()))


def test_a_sampler_of_another_length_than_it_says_is_every_ranks_error() -> None:
    class Short(Sampler[int]):
        def __len__(self) -> int:
            return 8

        def __iter__(self) -> Iterator[int]:
            return iter(range(6))

    def run(ctx: Context) -> str:
        source = DataLoader(cast("Any", torch.arange(8)), batch_size=2, sampler=Short())
        loader = prepare_data_loader(ctx, source)
        with pytest.raises(ValueError, match="drew 6 samples") as caught:
            list(loader)
        return str(caught.value)

    assert all("drew 6 samples" in text for text in run_ranks(run, 2, dataloader_config=config()))


def test_what_contradicts_dispatching_is_refused() -> None:
    ctx = Context().replace(dataloader_config=config())
    with pytest.raises(ConfigurationError, match="Use one of the two"):
        prepare_data_loader(ctx, numbers("map", 4, 2), "already_sharded")
    with pytest.raises(ConfigurationError, match="dispatch_batches=True"):
        prepare_data_loader(Context(), numbers("map", 4, 2), slice_fn=fail)
    for kind in ("map", "stream"):
        with pytest.raises(ConfigurationError, match="batch_size=None"):
            prepare_data_loader(ctx, numbers(kind, 4, None), slice_fn=fail)

        def split(ctx: Context, kind: str = kind) -> None:
            with pytest.raises(ConfigurationError, match="divisible"):
                prepare_data_loader(ctx, numbers(kind, 4, 3))

        run_ranks(split, 2, dataloader_config=config(split_batches=True))


def test_a_batch_sampler_over_samples_that_are_dealt_out_already_is_refused() -> None:
    class Own(BatchSampler):
        """Not torch's own, so it is asked for its batches."""

    data: Any = torch.arange(8)
    samples = DistributedSampler(data, num_replicas=2, rank=0)
    source = DataLoader(data, batch_sampler=Own(samples, 2, drop_last=False))
    for ctx in (Context(), Context().replace(dataloader_config=config())):
        with pytest.raises(ConfigurationError, match="DistributedSampler"):
            prepare_data_loader(ctx, source)


def test_batches_of_different_sizes_are_not_cut() -> None:
    def run(ctx: Context) -> None:
        data: Any = torch.arange(4)
        loader = prepare_data_loader(ctx, DataLoader(data, batch_sampler=Listed([[0], [1, 2, 3]])))
        with pytest.raises(ConfigurationError, match="Listed gives batches of different sizes"):
            list(loader)

    run_ranks(run, 2, dataloader_config=config(split_batches=True))


def test_ranks_with_different_loaders_are_told() -> None:
    def prepare(ctx: Context) -> str:
        with pytest.raises(MismatchError) as caught:
            prepare_data_loader(ctx, numbers("sized", 8 + ctx.rank, 2))
        return str(caught.value)

    first, second = run_ranks(prepare, 2, dataloader_config=config())
    assert first == second
    assert "stream of 9 samples" in first


@pytest.mark.parametrize(("kind", "extra"), [("map", 0), ("sized", 0), ("stream", 1)])
def test_the_end_costs_at_most_one_exchange(kind: str, extra: int) -> None:
    def run(ctx: Context) -> tuple[int, int]:
        counts: list[int] = []
        seam = ctx.collectives
        calls: list[int] = []

        def all_gather_bytes(message: torch.Tensor) -> tuple[torch.Tensor, ...]:
            calls.append(1)
            return seam.all_gather_bytes(message)

        seen = replace(ctx, collectives=replace(seam, all_gather_bytes=all_gather_bytes))
        for num in (8, 7):
            loader = prepare_data_loader(seen, numbers(kind, num, 2))
            calls.clear()
            assert len(list(loader)) == 2
            counts.append(len(calls))
        return counts[0], counts[1]

    # A short group says by itself that it is the last one.
    # With a seed of its own: otherwise the ranks agree on one as the first pass begins.
    assert run_ranks(run, 2, dataloader_config=config(data_seed=0)) == [(2 + extra, 2)] * 2


def test_a_pass_that_was_left_early_can_be_begun_again() -> None:
    def run(ctx: Context) -> list[Any]:
        loader = prepare_data_loader(ctx, numbers("stream", 9, 2))
        for _ in loader:
            break
        return [batch.tolist() for batch in chain(loader, loader)]

    batches = [[0, 1], [4, 5], [8, 0]]
    assert run_ranks(run, 2, dataloader_config=config())[0] == batches + batches


class Batched(IterableDataset[torch.Tensor]):
    """A stream whose elements are batches of given sizes."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(sum(self.sizes)).split(self.sizes))


@pytest.mark.parametrize("sizes", [[2, 2, 2], [3, 1, 5], [3, 1, 3, 5, 5], [1]])
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_repeated_batches_of_the_users_own_are_cut_exactly(sizes: list[int], steps: int, size: int) -> None:
    def work(ctx: Context) -> list[int]:
        loader = prepare_data_loader(ctx, DataLoader(Batched(sizes), batch_size=None))
        found: list[int] = []
        for batch, micro in microbatches(ctx, loader, "pad"):
            found += gather_for_metrics(ctx, batch, micro).tolist()
        return found

    if len(sizes) < size:
        with pytest.raises((ValueError, RemoteRankError)):
            run_ranks(work, size, dataloader_config=config(even_batches=False))
        return
    seen = run_ranks(
        work, size, dataloader_config=config(even_batches=False), gradient_accumulation_steps=steps
    )
    assert [sorted(one) for one in seen] == [list(range(sum(sizes)))] * size


@pytest.mark.parametrize("then", [6, 12])
def test_a_dataset_that_changed_its_length_is_refused(then: int) -> None:
    def work(ctx: Context) -> str:
        items = list(range(8))
        loader = prepare_data_loader(ctx, DataLoader(cast("Any", items), batch_size=2))
        list(loader)
        items[:] = range(then)
        with pytest.raises(ValueError, match=f"had a length of 8 when .* one of {then}") as caught:
            list(loader)
        return str(caught.value)

    assert len(set(run_ranks(work, 2, dataloader_config=config()))) == 1
