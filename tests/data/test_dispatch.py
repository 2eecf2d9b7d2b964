# torch leaves DataLoader and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
)

from accelfn import Accelerator, Context, DataLoaderConfiguration
from accelfn.data import gather_for_metrics, microbatches, prepare_data_loader
from accelfn.data.loader import passes_of
from accelfn.errors import ConfigurationError, RemoteRankError
from accelfn.testing import run_ranks
from tests.data.sources import Listed, Numbers, Sized


def numbers(kind: str, num: int, batch_size: int | None, **options: Any) -> DataLoader[Any]:
    data: Any = {"map": torch.arange, "stream": Numbers, "sized": Sized}[kind](num)
    return DataLoader(data, batch_size=batch_size, **options)


def config(**options: Any) -> Any:
    return DataLoaderConfiguration(dispatch_batches=True, **options)


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
    def read(ctx: Context) -> list[Any]:
        options: dict[str, Any] = {"batch_size": 2}
        if kind == "batches":
            options = {"batch_sampler": Listed([[0, 1], [2], [3, 4], [5, 6]])}
        data: Any = DrawingStream() if kind == "stream" else Draws()
        loader = prepare_data_loader(ctx, DataLoader(data, num_workers=1, **options))
        passes_of(loader).move_to(0, 0, seed=9)
        return [batch.tolist() for batch in loader]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that all ranks read the stream
        local_config = DataLoaderConfiguration(data_seed=4)
        local = run_ranks(read, 2, "processes", dataloader_config=local_config)
    dispatched = run_ranks(read, 2, "processes", dataloader_config=config(data_seed=4))
    assert dispatched == local
    firsts = [batch[0][0] for rank in dispatched for batch in rank]
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


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass
class Record:
    ids: Any
    weight: Any
    name: str


@pytest.mark.parametrize(
    ("on", "num", "split"), [("memory", 2, False), ("memory", 200, True), ("processes", 200, False)]
)
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


def test_type_errors_of_a_slice_function_and_nothing_at_all_are_every_ranks_errors() -> None:
    def raises(batch: Any, part: slice, **_: Any) -> Any:
        raise TypeError("mine")

    def has_another_signature(batch: Any, part: slice) -> Any:
        return batch[part]

    def forgets(batch: Any, part: slice, **_: Any) -> Any:
        del batch, part

    def run(ctx: Context, slice_fn: Any) -> str:
        loader = prepare_data_loader(ctx, numbers("map", 8, 2), slice_fn=slice_fn)
        with pytest.raises(TypeError if ctx.is_main_process else RemoteRankError) as caught:
            list(loader)
        return str(caught.value)

    own, other = run_ranks(lambda ctx: run(ctx, raises), 2, dataloader_config=config())
    assert own == "mine"
    assert "TypeError: mine" in other
    for text in run_ranks(lambda ctx: run(ctx, has_another_signature), 2, dataloader_config=config()):
        assert "unexpected keyword argument 'process_index'" in text
    for text in run_ranks(lambda ctx: run(ctx, forgets), 2, dataloader_config=config()):
        assert "must return these rows of the batch, but it returned None" in text


def fail(*_: Any, **__: Any) -> Any:
    raise OSError("the disk is gone")


@pytest.mark.parametrize("says", [4, 9])
def test_a_stream_of_another_length_than_it_says_is_every_ranks_error(says: int) -> None:
    def run(ctx: Context) -> str:
        loader = prepare_data_loader(ctx, DataLoader(Sized(7, says), batch_size=2))
        with pytest.raises(ValueError if ctx.is_main_process else RemoteRankError) as caught:
            list(loader)
        return str(caught.value)

    assert all(f"length {says}" in text for text in run_ranks(run, 2, dataloader_config=config()))


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
