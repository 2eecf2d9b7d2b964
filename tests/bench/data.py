"""Reading data: sharded and dispatched on two processes, beside Accelerate and plain torch."""

from __future__ import annotations

import importlib
import tracemalloc
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import accelfn as af
from accelfn.context.world import World
from accelfn.data.loader import passes_of
from accelfn.data.reader import PassStart
from accelfn.data.sampled import SampledReader
from tests.bench.timing import Times, compare, growth_of, on_ranks, plain, show_beside, show_table


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Samples such as a language model takes: 512 tokens, a mask, a label."""

    def __init__(self, num: int, length: int) -> None:
        self.ids = torch.randint(30_000, (num, length))
        self.mask = torch.ones(num, length, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"ids": self.ids[index], "mask": self.mask[index], "label": self.ids[index, 0]}


def go_through(loader: Iterable[Any]) -> Callable[[], int]:
    """Return a pass over ``loader``, which counts its batches."""
    return lambda: sum(1 for _ in loader)


def go_through_epochs(loader: Iterable[Any], sampler: DistributedSampler[Any]) -> Callable[[], int]:
    """Return a pass over ``loader``, each of the next epoch.

    As the others move on by themselves: one that reads the same half of the samples again finds it in the
    processor's cache.
    """

    def go() -> int:
        sampler.set_epoch(sampler.epoch + 1)
        return sum(1 for _ in loader)

    return go


def measure(ctx: af.Context) -> None:
    """Compare on this rank; every rank must call it."""
    from accelerate import PartialState

    PartialState(cpu=True)
    peer: Any = importlib.import_module("accelerate.data_loader")
    rank, size = ctx.rank, ctx.num_processes
    rows: dict[str, Times] = {}

    def theirs(source: DataLoader[Any], dispatch: bool) -> Any:
        return peer.prepare_data_loader(
            source,
            device=torch.device("cpu"),
            num_processes=size,
            process_index=rank,
            put_on_device=True,
            dispatch_batches=dispatch,
        )

    pairs = TensorDataset(torch.rand(20_000, 16), torch.randint(10, (20_000,)))
    # Reading a tensor of a list costs nothing.
    listed: Any = list(torch.rand(20_000, 16).unbind())
    for data, what in ((listed, "a list of tensors"), (pairs, "a `TensorDataset` of pairs")):
        for shuffle in (False, True):
            data = cast("Dataset[Any]", data)
            sampler = DistributedSampler[Any](data, size, rank, shuffle=shuffle)
            ways = {
                "ours": go_through(
                    af.prepare_data_loader(ctx, DataLoader(data, batch_size=32, shuffle=shuffle))
                ),
                "plain torch, `DistributedSampler`": go_through_epochs(
                    DataLoader(data, batch_size=32, sampler=sampler), sampler
                ),
                "Accelerate": go_through(theirs(DataLoader(data, batch_size=32, shuffle=shuffle), False)),
            }
            how = "shuffled" if shuffle else "in order"
            rows[f"{what}, {how}"] = compare(ways, rounds=20, calls=1, before=plain.barrier)
    show_beside("data-sharded", rows)

    dispatching = ctx.replace(dataloader_config=af.DataLoaderConfiguration(dispatch_batches=True))
    rows = {}
    for name, source in (
        ("8 x 128 tokens, made before", lambda: ready(80, 8, 128)),
        ("32 x 512 tokens, made before", lambda: ready(80, 32, 512)),
        ("64 x 8192 tokens, made before", lambda: ready(20, 64, 8192)),
        (
            "32 x 512 tokens, read and collated on rank 0",
            lambda: DataLoader(Tokens(1280, 512), batch_size=32),
        ),
    ):
        ways = {
            "ours": go_through(af.prepare_data_loader(dispatching, source())),
            "Accelerate": go_through(theirs(source(), True)),
        }
        rows[name] = compare(ways, rounds=15, calls=1, before=plain.barrier)
    show_beside("data-dispatched", rows)
    if rank == 0:  # the other one ends, and its core is free
        measure_alone()


def ready(num_batches: int, rows: int, length: int) -> DataLoader[Any]:
    """Return a loader whose batches cost nothing: what remains is what handing them out costs."""
    batch = {
        "ids": torch.zeros(rows, length, dtype=torch.int64),
        "mask": torch.ones(rows, length, dtype=torch.int64),
        "label": torch.zeros(rows, dtype=torch.int64),
        "weight": torch.ones(rows),
    }

    def collate(samples: Any) -> Any:
        return batch

    # One sample a batch, since reading many that nobody looks at costs the same for all.
    return DataLoader(numbers(num_batches), batch_size=1, collate_fn=collate)


def numbers(num: int) -> Any:
    """Return samples that are their own number."""
    return range(num)


def measure_alone() -> None:
    """Compare what begins and skips, as one rank of many that don't communicate."""
    peer: Any = importlib.import_module("accelerate.data_loader")
    rank, size, large, middle = 7, 1024, 10**9, 5 * 10**6
    num = 10**7  # a list of more of them takes gigabytes

    def theirs(source: DataLoader[Any], rank: int, size: int) -> Any:
        return peer.prepare_data_loader(
            source, num_processes=size, process_index=rank, rng_types=[], put_on_device=False
        )

    def plain_start() -> Any:
        data = numbers(num)
        return DataLoader(data, batch_size=32, sampler=DistributedSampler(data, size, rank, shuffle=True))

    def skip() -> Any:
        passes_of(loader).move_to(0, middle)
        return loader

    ours = reader_of(large, rank, size)
    begin = {
        f"accelfn, {large:,} samples": first_of(lambda: ours.begin(PassStart(0)).batches),
        f"plain torch, {num:,} samples": first_of(plain_start),
        f"Accelerate, {num:,} samples": first_of(lambda: theirs(counted(num), rank, size)),
    }
    peaks = {name: f"{peak_of(way) / 2**20:.2f}" for name, way in begin.items()}
    times = compare(begin, rounds=3, calls=1)
    loader, other = af.prepare_data_loader(af.Context(), counted(num)), theirs(counted(num), 0, 1)
    skips = {
        "accelfn": first_of(skip),
        "Accelerate": first_of(lambda: peer.skip_first_batches(other, middle // 32)),
    }
    rows = [(f"beginning: {name}", one.ms(2), peaks[name]) for name, one in times.items()]
    found = compare(skips, rounds=3, calls=1)
    rows += [(f"skipping half of {num:,}: {name}", one.ms(2), "") for name, one in found.items()]
    columns = ("first batch of a shuffled epoch, as rank 7 of 1,024", "median (best) ms", ">at the peak, MiB")
    show_table("data-first", columns, rows)


def counted(num: int) -> DataLoader[Any]:
    """Return a loader over so many samples, shuffled."""
    return DataLoader(numbers(num), batch_size=32, shuffle=True)


def reader_of(num: int, rank: int, size: int) -> SampledReader[Any]:
    """Return what reads for one rank of a large world; nothing is communicated by it."""
    return SampledReader(af.Context(world=World(rank=rank, size=size, local_size=size)), counted(num))


def first_of(make: Callable[[], Iterable[Any]]) -> Callable[[], object]:
    """Return what makes something and takes the first of it."""
    return lambda: next(iter(make()))


def peak_of(way: Callable[[], object]) -> int:
    """Count the bytes that ``way`` takes at most: by how much the process grew, or what Python asked for."""
    way()  # once before, so that what is loaded on first use doesn't count
    grown = growth_of(way)
    tracemalloc.start()
    way()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return max(peak, grown)


if __name__ == "__main__":
    on_ranks(measure)
