"""Make a loader like the user's, with other batches or another dataset."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar, cast

from torch.utils.data import BatchSampler, DataLoader

from accelfn.context import Context
from accelfn.data.draws import seed_from
from accelfn.data.plan import EpochPlan
from accelfn.errors import MissingExtraError

__all__ = (
    "Batches",
    "Keyed",
    "ListsOf",
    "Seeded",
    "batch_sampler_of",
    "import_stateful",
    "is_stateful",
    "num_workers_of",
    "rebuild",
    "remake",
    "sampler_of",
    "twin_of",
)

T = TypeVar("T")

# What a DataLoader was made with, batching apart.
_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "persistent_workers", "in_order", "pin_memory_device"),
)
# torchdata's StatefulDataLoader knows the states of datasets that its workers read.
_STATEFUL = "torchdata.stateful_dataloader"


def batch_sampler_of(source: DataLoader[Any]) -> Any:
    """Return what draws the batches of ``source``, None where its items are batches.

    With ``batch_size=None`` it may stand in the sampler's place: the dataset is asked for a list of indices.
    """
    loader = cast("Any", source)
    if loader.batch_sampler is None and isinstance(loader.sampler, BatchSampler):
        return loader.sampler
    return loader.batch_sampler


def sampler_of(source: DataLoader[Any]) -> Any:
    """Return what draws the samples of ``source``.

    That of its batch sampler, where it has one: a loader that was given a batch sampler has another sampler,
    which nobody asked for, beside.
    """
    return getattr(batch_sampler_of(source), "sampler", cast("Any", source).sampler)


class Keyed(list[Any]):
    """Indices of one batch, with what its randomness is derived from."""

    def __init__(self, items: Sequence[Any], key: tuple[int, ...]) -> None:
        """Hold ``items``."""
        super().__init__(items)
        self.key = key

    def __reduce__(self) -> tuple[type[Keyed], tuple[list[Any], tuple[int, ...]]]:
        """Travel to a worker."""
        return Keyed, (list(self), self.key)


# Gives the batches of consecutive ranks, step by step.
ListsOf: TypeAlias = Callable[[EpochPlan, range], Iterator[Keyed]]


class Batches:
    """What torch's DataLoader takes for a batch sampler: the batches of the pass that was begun last."""

    def __init__(self) -> None:
        """Hold no batches."""
        self._make: Callable[[], Iterator[Any]] = lambda: iter(())

    def begin(self, make: Callable[[], Iterator[Any]]) -> None:
        """Return these from the next pass on."""
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return self._make()


class Seeded:
    """A dataset that draws the same random numbers for a batch, whichever process reads it.

    So neither the number of workers nor a resumption changes an augmentation, and no two ranks share one.
    """

    _dataset: Any
    _one: bool

    def __init__(self, dataset: Any, one: bool = False) -> None:
        """Read ``dataset``; ``one``: a batch is one item of it."""
        vars(self).update(_dataset=dataset, _one=one)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, indices: Keyed) -> Any:
        """Seed the generators for this batch, and ask for it where torch makes none of samples."""
        seed_from(indices.key)
        return self._dataset[indices[0] if self._one else list(indices)]

    def __getitems__(self, indices: Keyed) -> Any:
        """Seed the generators for this batch, and read it as torch would."""
        seed_from(indices.key)
        read = getattr(self._dataset, "__getitems__", None)
        return read(list(indices)) if read else [self._dataset[index] for index in indices]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dataset, name, value)  # as a worker_init_fn does


def rebuild(source: DataLoader[T], batches: Any) -> DataLoader[T]:
    """Make a loader like ``source`` that reads ``batches``, which it takes for a batch sampler."""
    if cast("Any", source).batch_sampler is None:
        dataset: Any = Seeded(source.dataset, one=batch_sampler_of(source) is None)
        return remake(source, dataset, sampler=batches)
    return remake(source, Seeded(source.dataset), batch_sampler=batches)


def remake(
    source: DataLoader[Any], dataset: Any, *, stateful: bool = False, **changes: Any
) -> DataLoader[Any]:
    """Make a loader of the class and with the options of ``source``, over another dataset.

    Args:
        source: The user's loader.
        dataset: What the new one reads.
        stateful: Make torchdata's StatefulDataLoader.
        **changes: Its batching or ``collate_fn``. Without a batch sampler or size it makes no batches.

    Raises:
        MissingExtraError: torchdata isn't installed.
    """
    kind: Any = import_stateful() if stateful else DataLoader
    if type(source) in (DataLoader, kind) or not isinstance(source, kind):
        options: dict[str, Any] = {name: getattr(source, name) for name in _OPTIONS if hasattr(source, name)}
        if source.num_workers > 0:
            options["prefetch_factor"] = source.prefetch_factor
        if stateful:
            options["snapshot_every_n_steps"] = getattr(source, "snapshot_every_n_steps", 1)
        size: dict[str, Any] = {} if "batch_sampler" in changes else {"batch_size": None}
        return kind(dataset, **{**options, **size, **changes})
    # It is unknown how a class of the user's own is made: a copy keeps what it has.
    batching = {"batch_size": None, "drop_last": False, "batch_sampler": None}
    return twin_of(source, **{"dataset": dataset, **batching, **changes})


def twin_of(source: DataLoader[T], **changes: Any) -> DataLoader[T]:
    """Copy a loader and change attributes of the copy, which torch lets nobody change in a loader.

    The copy has all options, and the class; it holds no workers.
    """
    twin = copy.copy(source)
    vars(twin).update({"_iterator": None, **changes})
    return twin


def is_stateful(ctx: Context, source: DataLoader[Any]) -> bool:
    """Return whether the states of workers are kept: it was asked for, or the loader is of that class."""
    # Without an import: whoever has such a loader has imported its package.
    kind = getattr(sys.modules.get(_STATEFUL), "StatefulDataLoader", None)
    return ctx.loading.use_stateful_dataloader or (kind is not None and isinstance(source, kind))


def num_workers_of(state: Any) -> int | None:
    """Return how many workers a state of a StatefulDataLoader is of; None where it is no such state."""
    snapshot: Any = state.get("_snapshot")
    return None if snapshot is None else len(snapshot["_worker_snapshots"])


def import_stateful() -> type[DataLoader[Any]]:
    """Return torchdata's StatefulDataLoader.

    Raises:
        MissingExtraError: torchdata isn't installed.
    """
    try:
        return importlib.import_module(_STATEFUL).StatefulDataLoader
    except ImportError as error:
        raise MissingExtraError(
            "DataLoaderConfiguration(use_stateful_dataloader=True) needs torchdata. Install it: "
            "pip install 'accelfn[data]'"
        ) from error
