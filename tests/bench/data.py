"""Reading data: sharded and dispatched on two processes, beside Accelerate and plain torch.

Run by ``python -m tests.bench``; each rank runs :func:`measure` under torchrun.
"""

from __future__ import annotations

import importlib
import os
import sys
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

import accelfn as af
from accelfn.data.loader import passes_of
from accelfn.data.sampled import LocalSteps, SampledReader
from tests.bench.timing import Row, compare, print_table

plain: Any = cast("Any", dist)


class Listed(Dataset[torch.Tensor]):
    """20,000 samples of 16 numbers, each a tensor already: reading one costs nothing."""

    def __init__(self) -> None:
        self.samples = list(torch.rand(20_000, 16).unbind())

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.samples[index]


class Counted(Dataset[int]):
    """Samples that are their own number."""

    def __init__(self, num: int) -> None:
        self.num = num

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> int:
        return index


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Samples such as a language model takes: 512 tokens, a mask, a label."""

    def __init__(self, num: int, length: int) -> None:
        self.ids = torch.randint(30_000, (num, length))
        self.mask = torch.ones(num, length, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"ids": self.ids[index], "mask": self.mask[index], "label": self.ids[index, 0]}


class Made:
    """Collates to a batch that was made before."""

    def __init__(self, rows: int, length: int) -> None:
        shape = (rows, length)
        self.batch = {
            "ids": torch.zeros(shape, dtype=torch.int64),
            "mask": torch.ones(shape, dtype=torch.int64),
            "label": torch.zeros(rows, dtype=torch.int64),
            "weight": torch.ones(rows),
        }

    def __call__(self, samples: list[Any]) -> dict[str, torch.Tensor]:
        return self.batch


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


def measure(ctx: af.Context) -> list[Row]:
    """Compare on this rank; every rank must call it."""
    from accelerate import PartialState

    PartialState(cpu=True)
    peer: Any = importlib.import_module("accelerate.data_loader")
    rank, size = ctx.rank, ctx.num_processes
    rows: list[Row] = []

    def theirs(source: DataLoader[Any], dispatch: bool) -> Any:
        return peer.prepare_data_loader(
            source,
            device=torch.device("cpu"),
            num_processes=size,
            process_index=rank,
            put_on_device=True,
            dispatch_batches=dispatch,
        )

    def wait() -> None:
        plain.barrier()

    pairs = TensorDataset(torch.rand(20_000, 16), torch.randint(10, (20_000,)))
    for data, what in ((Listed(), "a list of tensors"), (pairs, "a TensorDataset of pairs")):
        for shuffle in (False, True):
            data = cast("Dataset[Any]", data)
            sampler = DistributedSampler[Any](data, size, rank, shuffle=shuffle)
            ways = {
                "ours": go_through(
                    af.prepare_data_loader(ctx, DataLoader(data, batch_size=32, shuffle=shuffle))
                ),
                "plain torch": go_through_epochs(DataLoader(data, batch_size=32, sampler=sampler), sampler),
                "Accelerate": go_through(theirs(DataLoader(data, batch_size=32, shuffle=shuffle), False)),
            }
            times = compare(ways, rounds=20, calls=1, before=wait)
            how = "shuffled" if shuffle else "in order"
            rows.append(Row(f"sharded, an epoch of {what}, 20,000 samples {how}", times.pop("ours"), times))

    dispatching = ctx.replace(dataloader_config=af.DataLoaderConfiguration(dispatch_batches=True))
    for name, source in (
        ("32 x 512 tokens, read and collated", lambda: DataLoader(Tokens(1280, 512), batch_size=32)),
        ("8 x 128 tokens, made before", lambda: ready(80, 8, 128)),
        ("32 x 512 tokens, made before", lambda: ready(80, 32, 512)),
        ("64 x 8192 tokens, made before", lambda: ready(20, 64, 8192)),
    ):
        ways = {
            "ours": go_through(af.prepare_data_loader(dispatching, source())),
            "Accelerate": go_through(theirs(source(), True)),
        }
        times = compare(ways, rounds=15, calls=1, before=wait)
        rows.append(Row(f"dispatch, an epoch of batches of {name}", times.pop("ours"), times))
    return rows


def ready(num_batches: int, rows: int, length: int) -> DataLoader[Any]:
    """Return a loader whose batches cost nothing: what remains is what handing them out costs."""
    # One sample a batch, since reading many that nobody looks at costs the same for all.
    return DataLoader(Counted(num_batches), batch_size=1, collate_fn=Made(rows, length))


def measure_alone() -> list[Row]:
    """Compare what begins and skips, as one rank of many that don't communicate."""
    peer: Any = importlib.import_module("accelerate.data_loader")
    rank, size, large, middle = 7, 1024, 10**9, 5 * 10**6

    def theirs(source: DataLoader[Any], rank: int, size: int) -> Any:
        return peer.prepare_data_loader(
            source, num_processes=size, process_index=rank, rng_types=[], put_on_device=False
        )

    def plain_start(num: int) -> Any:
        data = Counted(num)
        return DataLoader(data, batch_size=32, sampler=DistributedSampler(data, size, rank, shuffle=True))

    rows: list[Row] = []
    ours = reader_of(large, rank, size)
    num = 10**7  # a list of more of them takes gigabytes
    ways = {
        "ours": first_of(lambda: ours.begin(0, 0).batches),
        f"plain torch, {num:,} samples": first_of(lambda: plain_start(num)),
        f"Accelerate, {num:,} samples": first_of(lambda: theirs(counted(num), rank, size)),
    }
    for name, way in ways.items():
        print(f"first batch, {name}: {peak_of(way) / 2**20:.2f} MiB at its peak")
    print(flush=True)
    times = compare(ways, rounds=3, calls=1)
    rows.append(Row(f"first batch of {large:,} samples, rank {rank} of {size}", times.pop("ours"), times))

    def skip() -> Any:
        passes_of(loader).move_to(0, middle)
        return loader

    loader = af.prepare_data_loader(af.Context(), counted(10**7))
    other = theirs(counted(10**7), 0, 1)
    ways = {
        "ours": first_of(skip),
        "Accelerate": first_of(lambda: peer.skip_first_batches(other, middle // 32)),
    }
    times = compare(ways, rounds=3, calls=1)
    rows.append(Row("first batch after skipping 5,000,000 of 10,000,000 samples", times.pop("ours"), times))
    return rows


def counted(num: int) -> DataLoader[Any]:
    """Return a loader over so many samples, shuffled."""
    return DataLoader(Counted(num), batch_size=32, shuffle=True)


def reader_of(num: int, rank: int, size: int) -> SampledReader[Any]:
    """Return what reads for one rank of a large world; nothing is communicated by it."""
    source, ctx = counted(num), af.Context()
    return SampledReader(ctx, source, rank, size, LocalSteps(ctx, source, rank))


def first_of(make: Callable[[], Iterable[Any]]) -> Callable[[], object]:
    """Return what makes something and takes the first of it."""
    return lambda: next(iter(make()))


def peak_of(way: Callable[[], object]) -> int:
    """Count the bytes that ``way`` takes at most: by how much the process grew, or what Python asked for."""
    way()  # once before, so that what is loaded on first use doesn't count
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory_of("VmRSS")
    way()
    grown = memory_of("VmHWM") - before
    tracemalloc.start()
    way()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return max(peak, grown)


def memory_of(field: str) -> int:
    """Read bytes of this process from Linux."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def main() -> None:
    torch.set_num_threads(1)
    # The peer stays a world of one on the CPU unless it is told so by the environment.
    os.environ["ACCELERATE_USE_CPU"] = "true"
    with af.init_context(cpu=True) as ctx:
        rows = measure(ctx)
        is_first = ctx.is_main_process
    if is_first:  # the other one has ended, and its core is free
        print_table(rows)
        print(flush=True)
        print_table(measure_alone())
        sys.stdout.flush()


if __name__ == "__main__":
    main()
