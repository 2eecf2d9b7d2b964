# torch leaves DataLoader and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler

from accelfn import Accelerator, Context, DataLoaderConfiguration
from accelfn.data import gather_for_metrics, microbatches, prepare_data_loader
from accelfn.errors import ConfigurationError, RemoteRankError
from accelfn.testing import run_ranks
from accelfn.testing.strategies import rank_trees
from tests.comm.seam import counted
from tests.data.sources import Numbers, Sized
from tests.trees import values


def numbers(kind: str, num: int, batch_size: int | None, **options: Any) -> DataLoader[Any]:
    data: Any = {"map": torch.arange, "stream": Numbers, "sized": Sized}[kind](num)
    return DataLoader(data, batch_size=batch_size, **options)


def config(**options: Any) -> Any:
    return DataLoaderConfiguration(dispatch_batches=True, **options)


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


@given(
    st.integers(2, 4).flatmap(lambda size: st.lists(rank_trees(size, float8=True), min_size=1, max_size=4))
)
def test_each_rank_has_its_own_batch_of_any_containers_and_dtypes(steps: list[list[Any]]) -> None:
    size = len(steps[0])
    trees = [tree for step in steps for tree in step]
    batches = [{"tree": tree, "name": "a", "number": 1.5, "none": None} for tree in trees]

    def run(ctx: Context) -> list[Any]:
        data: Any = range(len(batches))
        source = DataLoader(data, batch_size=1, collate_fn=lambda samples: batches[samples[0]])
        return list(prepare_data_loader(ctx, source))

    for rank, own in enumerate(run_ranks(run, size, dataloader_config=config())):
        assert [values(batch) for batch in own] == [values(batch) for batch in batches[rank::size]]
        assert [type(batch["tree"]) for batch in own] == [type(tree) for tree in trees[rank::size]]


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
        return {
            "ids": torch.tensor(samples),
            "text": [f"n{sample}" for sample in samples],
            "of": max(samples),
        }

    def run(ctx: Context) -> list[Any]:
        data: Any = list(range(8))
        loader = prepare_data_loader(ctx, DataLoader(data, batch_size=4 if split else 2, collate_fn=collate))
        return [(batch["ids"].tolist(), batch["text"], batch["of"]) for batch in loader]

    of = ((3, 7), (3, 7)) if split else ((1, 5), (3, 7))
    samples = ([0, 1], [4, 5]), ([2, 3], [6, 7])
    assert run_ranks(run, 2, dataloader_config=config(split_batches=split)) == [
        [(ids, [f"n{sample}" for sample in ids], last) for ids, last in zip(own, lasts, strict=True)]
        for own, lasts in zip(samples, of, strict=True)
    ]


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


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("kind", ["map", "stream", "sized"])
def test_a_slice_function_cuts_the_batch_of_a_whole_step(kind: str, split: bool) -> None:
    calls: list[tuple[list[str], slice, int, int]] = []

    def cut(batch: Any, part: slice, /, *, process_index: int, num_processes: int) -> Any:
        calls.append((batch, part, process_index, num_processes))
        return torch.tensor([int(text) for text in batch[part]])

    def as_texts(samples: list[Any]) -> list[str]:
        return [str(int(sample)) for sample in samples]

    def run(ctx: Context) -> list[Any]:
        source = numbers(kind, 7, 4 if split else 2, collate_fn=as_texts)
        return [batch.tolist() for batch in prepare_data_loader(ctx, source, slice_fn=cut)]

    found = run_ranks(run, 2, dataloader_config=config(split_batches=split))
    assert found == [[[0, 1], [4, 5]], [[2, 3], [6, 0]]]
    parts = [(slice(0, 2), 0, 2), (slice(2, 4), 1, 2)]
    assert calls == [(list(batch), *part) for batch in ("0123", "4560") for part in parts]


def test_the_accelerator_takes_a_slice_function() -> None:
    def cut(batch: Any, part: slice, process_index: int, num_processes: int) -> Any:
        del process_index, num_processes
        return batch[part] + 100

    accelerator = Accelerator(context=Context().replace(dataloader_config=config()))
    loader = accelerator.prepare_data_loader(numbers("map", 3, 2), slice_fn_for_dispatch=cut)
    assert [batch.tolist() for batch in loader] == [[100, 101], [102]]


def raises(batch: Any, part: slice, **_: Any) -> Any:
    raise TypeError("mine")


def has_another_signature(batch: Any, part: slice) -> Any:
    return batch[part]


def forgets(batch: Any, part: slice, **_: Any) -> Any:
    del batch, part


def unpicklable(batch: Any, part: slice, **_: Any) -> Any:
    return type("Local", (dict,), {})(x=batch[part])


@pytest.mark.parametrize(
    ("slice_fn", "said"),
    [
        (raises, "mine"),
        (has_another_signature, "unexpected keyword argument 'process_index'"),
        (forgets, "must return these rows of the batch, but it returned None"),
        (unpicklable, "Local"),
    ],
)
def test_what_a_slice_function_does_wrong_is_every_ranks_error(slice_fn: Any, said: str) -> None:
    def run(ctx: Context) -> str:
        loader = prepare_data_loader(ctx, numbers("map", 8, 2), slice_fn=slice_fn)
        with pytest.raises(Exception, match=said) as caught:
            list(loader)
        assert ctx.is_main_process != isinstance(caught.value, RemoteRankError)
        return str(caught.value)

    assert all(said in text for text in run_ranks(run, 2, dataloader_config=config()))


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


@pytest.mark.parametrize("rows", [4, 40_000])
@pytest.mark.parametrize(("kind", "extra"), [("map", 0), ("sized", 0), ("stream", 1)])
def test_a_step_is_one_exchange_and_at_most_one_scatter_and_the_end_at_most_one_more(
    kind: str, extra: int, rows: int
) -> None:
    def collate(samples: list[int]) -> Any:
        return {"x": torch.zeros(rows), "y": torch.zeros(rows, dtype=torch.int64), "z": torch.ones(rows) > 0}

    def run(ctx: Context, num: int) -> dict[str, int]:
        watched, calls = counted(ctx)
        loader = prepare_data_loader(watched, numbers(kind, num, 2, collate_fn=collate))
        calls.clear()
        assert len(list(loader)) == 2
        return dict(calls)

    # A short group says by itself that it is the last one.
    # With a seed of its own: otherwise the ranks agree on one as the first pass begins.
    for num, end in ((8, extra), (7, 0)):
        steps = {"all_gather_bytes": 2 + end} | ({"scatter": 2} if rows > 4 else {})
        found = run_ranks(lambda ctx, num=num: run(ctx, num), 2, dataloader_config=config(data_seed=0))
        assert found == [steps] * 2


def test_large_objects_without_tensors_are_broadcast_and_nothing_is_scattered() -> None:
    def run(ctx: Context) -> tuple[list[Any], dict[str, int]]:
        watched, calls = counted(ctx)
        texts: Any = [str(number) * 200_000 for number in range(6)]
        loader = prepare_data_loader(watched, DataLoader(texts, batch_size=1, collate_fn=list))
        calls.clear()
        return [(batch[0][0], len(batch[0])) for batch in loader], dict(calls)

    calls = {"all_gather_bytes": 2, "broadcast": 2}
    assert run_ranks(run, 3, dataloader_config=config(data_seed=0)) == [
        ([(str(rank), 200_000), (str(rank + 3), 200_000)], calls) for rank in range(3)
    ]
