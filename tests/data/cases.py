"""Loaders of every kind over the numbers from 0 on, and the options that they are read with."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from accelfn import Context, DataLoaderConfiguration, ParallelismConfig
from accelfn.data import prepare_data_loader
from tests.data.sources import Counting, Listed, Numbers, Sized, consecutive

__all__ = ("BATCHES", "SAMPLES", "STREAMS", "Case", "cases", "joined")

# Samples that a loader or its batch sampler puts together to batches, and batches that stay as they are.
SAMPLES = ("map", "shuffled", "sampler", "named batches", "stream", "sized")
BATCHES = ("batches", "items", "elements", "sized elements")
STREAMS = ("stream", "sized", "elements", "sized elements")


class Elements(IterableDataset[torch.Tensor]):
    """A stream whose elements are batches."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        return map(torch.tensor, self.batches)


class SizedElements(Elements):
    def __len__(self) -> int:
        return len(self.batches)


class Case(NamedTuple):
    """How the numbers below ``num`` are read."""

    kind: str
    num: int
    rows: int = 2  # in a batch of a rank
    size: int = 2
    dispatch: bool = False
    split: bool = False
    even: bool = True
    drop_last: bool = False
    window: int = 1
    tensor: int = 1  # ranks that share what they read

    @property
    def units(self) -> list[list[int]]:
        """The samples at each position of the order."""
        if self.kind in BATCHES:
            return consecutive([1 + number % 3 for number in range(self.num // 2)])
        if self.kind == "shuffled":
            ctx = Context().replace(**self.options(1))
            loader = prepare_data_loader(ctx, self.source(Counting(self.num)))
            return [[int(sample)] for batch in loader for sample in batch]
        samples = range(self.num)
        return [[sample] for sample in (reversed(samples) if self.kind == "sampler" else samples)]

    @property
    def batch_size(self) -> int:
        return self.rows * self.size if self.split else self.rows

    def source(self, data: Counting) -> DataLoader[Any]:
        """The user's loader, which reads ``data`` where it reads by index."""
        options: dict[str, Any] = {"batch_size": self.batch_size, "drop_last": self.drop_last}
        if self.kind == "shuffled":
            options["shuffle"] = self.num > 0
        elif self.kind == "sampler":
            options["sampler"] = list(reversed(range(self.num)))
        elif self.kind == "named batches":
            full, rest = divmod(self.num, self.batch_size)
            sizes = [self.batch_size] * full + [rest] * bool(rest)
            options = {"batch_sampler": Listed(consecutive(sizes), self.batch_size, self.drop_last)}
        elif self.kind == "batches":
            options = {"batch_sampler": Listed(self.units)}
        elif self.kind in BATCHES:
            options = {"batch_size": None}
        datasets: dict[str, Any] = {
            "stream": lambda: Numbers(self.num),
            "sized": lambda: Sized(self.num),
            "items": lambda: [torch.tensor(batch) for batch in self.units],
            "elements": lambda: Elements(self.units),
            "sized elements": lambda: SizedElements(self.units),
        }
        return DataLoader(datasets.get(self.kind, lambda: data)(), **options)

    def options(self, size: int | None = None) -> dict[str, Any]:
        """The options of a context; those of a world of ``size`` that reads for itself where it is given."""
        loading = DataLoaderConfiguration(
            data_seed=7,
            even_batches=self.even,
            dispatch_batches=self.dispatch and size is None,
            split_batches=self.split and size is None,
        )
        options: dict[str, Any] = {"dataloader_config": loading, "gradient_accumulation_steps": self.window}
        if size is None and self.tensor > 1:
            options["parallelism_config"] = ParallelismConfig(self.size, tp_size=self.tensor)
        return options


@st.composite
def cases(draw: st.DrawFn, *, even: bool | None = None) -> Case:
    """Draw a case."""
    kind = draw(st.sampled_from(SAMPLES + BATCHES))
    return Case(
        kind=kind,
        num=draw(st.integers(0, 60)),
        rows=draw(st.integers(1, 4)),
        size=draw(st.integers(1, 4)),
        dispatch=draw(st.booleans()),
        split=kind in SAMPLES and draw(st.booleans()),
        even=draw(st.booleans()) if even is None else even,
        drop_last=kind in SAMPLES and draw(st.booleans()),
        window=draw(st.integers(1, 3)),
        tensor=draw(st.integers(1, 2)),
    )


def joined(parts: Iterable[Iterable[int]]) -> list[int]:
    """Join lists of numbers."""
    return list(chain.from_iterable(parts))
