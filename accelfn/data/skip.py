"""Leave out the first batches of loaders that nobody has prepared."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sized
from itertools import islice
from typing import Any, Generic, TypeVar, cast

from torch.utils.data import DataLoader, IterableDataset

__all__ = (
    "SizedSkipped",
    "Skipped",
    "SkippedSampler",
    "check_num_batches",
    "skip_of_iterable",
    "skip_of_loader",
)

T = TypeVar("T")


class SkippedSampler:
    """A sampler without its first batches. All else is as in the one behind it."""

    def __init__(self, sampler: Any, number: int) -> None:
        """Leave out ``number`` of what ``sampler`` gives."""
        self._sampler = sampler
        self._number = number

    def __len__(self) -> int:
        return max(0, len(self._sampler) - self._number)

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self._sampler), self._number, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._sampler, name)


class Skipped(Generic[T]):
    """An iterable without its first items, which each pass reads and throws away.

    Attributes that are not named here are passed through.
    """

    def __init__(self, source: Iterable[T], number: int) -> None:
        """Leave out ``number`` items of ``source``."""
        self._source = source
        self._number = number

    def __iter__(self) -> Iterator[T]:
        return islice(iter(self._source), self._number, None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._source, name)


class SizedSkipped(Skipped[T]):
    """The same of an iterable that has a length."""

    def __len__(self) -> int:
        return max(0, len(cast("Sized", self._source)) - self._number)


def check_num_batches(num_batches: object) -> None:
    """Refuse what is no number of batches."""
    if not isinstance(num_batches, int) or isinstance(num_batches, bool):
        raise TypeError(f"skip_first_batches: num_batches must be a whole number, got {num_batches!r}.")
    if num_batches < 0:
        raise ValueError(f"skip_first_batches: num_batches must not be negative, got {num_batches}.")


def skip_of_loader(loader: DataLoader[T], num_batches: int) -> DataLoader[T] | Skipped[T]:
    """Leave out the first batches of a torch DataLoader; of a map-style dataset nothing skipped is loaded."""
    plain = cast("Any", DataLoader)
    own_way = cast("Any", type(loader)).__iter__ is not plain.__iter__  # it may not ask the sampler
    if isinstance(loader.dataset, IterableDataset) or own_way:
        return skip_of_iterable(loader, num_batches)
    # A copy has all options, and the class. Torch lets nobody exchange the sampler of a loader that is in
    # use; the copy isn't, and holds no workers.
    twin = copy.copy(loader)
    parts = vars(twin)
    parts["_iterator"] = None
    name = "sampler" if parts["batch_sampler"] is None else "batch_sampler"
    parts[name] = SkippedSampler(parts[name], num_batches)
    return twin


def skip_of_iterable(source: Iterable[T], num_batches: int) -> Skipped[T]:
    """Leave out the first items of anything, when it is read."""
    try:
        len(cast("Sized", source))
    except TypeError:
        return Skipped(source, num_batches)
    return SizedSkipped(source, num_batches)
