"""Build loaders like the user's, with other batches or another dataset, and stand-ins for their datasets."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from operator import getitem
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch.utils import data
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

from accelfn.context import Context
from accelfn.data.draws import seed_from
from accelfn.data.order import set_epoch_of
from accelfn.data.plan import EpochPlan
from accelfn.errors import MissingExtraError

__all__ = (
    "Batches",
    "Keyed",
    "ListsOf",
    "Proxy",
    "batch_sampler_of",
    "follow_epochs",
    "import_stateful",
    "keeps_states",
    "may_draw",
    "rebuild",
    "remake",
    "sampler_of",
    "twin_of",
)

T = TypeVar("T")

# Arguments of a DataLoader apart from its dataset and batching.
_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "persistent_workers", "in_order", "pin_memory_device"),
)
# Its StatefulDataLoader returns the states of datasets that its workers read.
_STATEFUL = "torchdata.stateful_dataloader"


def batch_sampler_of(source: DataLoader[Any]) -> Any:
    """Return the batch sampler of ``source``; None if it makes no batches.

    With ``batch_size=None`` it may be passed as the sampler: then the dataset is indexed with lists.
    """
    loader = cast("Any", source)
    if loader.batch_sampler is None and isinstance(loader.sampler, BatchSampler):
        return loader.sampler
    return loader.batch_sampler


def sampler_of(source: DataLoader[Any]) -> Any:
    """Return the sampler of ``source``: its batch sampler's if that has one.

    The ``sampler`` of a loader that was built with a batch sampler is a default that isn't used.
    """
    return getattr(batch_sampler_of(source), "sampler", cast("Any", source).sampler)


class Keyed(list[Any]):
    """The indices of one batch.

    Attributes:
        key: What its random numbers are seeded from. Set afterwards: a constructor would cost a call a batch.
    """

    key: tuple[int, ...]


# Yields the batches of consecutive ranks, step by step.
ListsOf: TypeAlias = Callable[[EpochPlan, range], Iterator[Keyed]]


class Batches:
    """A batch sampler for torch's DataLoader: yields the batches that were set last.

    Attributes:
        epoch: ``()`` int64: their epoch.
    """

    def __init__(self) -> None:
        """Start without batches."""
        self.epoch: torch.Tensor = torch.zeros((), dtype=torch.int64, device="cpu")
        self._make: Callable[[], Iterator[Any]] = lambda: iter(())

    def begin(self, epoch: int, make: Callable[[], Iterator[Any]]) -> None:
        """Yield what ``make`` returns, from the next pass on, which is one of ``epoch``."""
        self.epoch.fill_(epoch)
        self._make = make

    def __iter__(self) -> Iterator[Any]:
        return self._make()


class Proxy:
    """Stands in for an object of the user's, such as a dataset.

    Attributes that the proxy wasn't built with are read from the user's object and set on it, as a
    ``worker_init_fn`` does.
    """

    _target: Any

    def __init__(self, target: Any, **attributes: Any) -> None:
        """Stand in for ``target``, with ``attributes`` of the proxy itself."""
        vars(self).update(_target=target, **attributes)

    def __len__(self) -> int:
        return len(self._target)

    def __getattr__(self, name: str) -> Any:
        if name == "_target" or name.startswith("__"):  # copy and pickle look these up before __init__
            raise AttributeError(name)
        return getattr(self._target, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self):
            vars(self)[name] = value
        else:
            setattr(self._target, name, value)


class _SeededDataset(Proxy):
    """A map-style dataset that draws the same random numbers for a batch, whichever process reads it.

    So neither the number of workers nor a resumption changes an augmentation, and no two ranks share one.
    """

    _unbatched: bool  # a batch is a single item of the dataset

    def __getitem__(self, indices: Keyed) -> Any:
        """Return a batch that the dataset makes itself."""
        seed_from(indices.key)
        return self._target[indices[0] if self._unbatched else list(indices)]

    def __getitems__(self, indices: Keyed) -> Any:
        """Return the samples of a batch, read as torch would."""
        seed_from(indices.key)
        target = self._target
        read = getattr(target, "__getitems__", None)
        return read(list(indices)) if read else list(map(partial(getitem, target), indices))


class _FollowingDataset(Proxy):
    """A map-style dataset in workers that stay alive: tells their copies each epoch."""

    _epoch: torch.Tensor  # in shared memory
    _epoch_told: int

    def __getitem__(self, index: Any) -> Any:
        self._follow()
        return self._target[index]

    def __getitems__(self, indices: list[Any]) -> Any:
        self._follow()
        target = self._target
        read = getattr(target, "__getitems__", None)
        return read(indices) if read else list(map(partial(getitem, target), indices))

    def _follow(self) -> None:
        epoch = int(self._epoch)
        if epoch != self._epoch_told:
            self._epoch_told = epoch
            set_epoch_of(self._target, epoch)


class _FollowingStream(_FollowingDataset, data.IterableDataset[Any]):
    """The same for a stream."""

    def __iter__(self) -> Iterator[Any]:
        self._follow()
        return iter(self._target)


def follow_epochs(source: DataLoader[Any], epoch: torch.Tensor) -> Any:
    """Return the dataset of ``source`` for a loader whose workers, if they stay alive, are told each epoch.

    Args:
        source: The user's loader.
        epoch: ``()`` int64: the number of the epoch, set when a pass begins.
    """
    dataset: Any = source.dataset
    if not source.persistent_workers or not callable(getattr(dataset, "set_epoch", None)):
        return dataset
    kind = _FollowingStream if isinstance(dataset, data.IterableDataset) else _FollowingDataset
    return kind(dataset, _epoch=epoch.share_memory_(), _epoch_told=int(epoch))


def may_draw(source: DataLoader[Any]) -> bool:
    """Return whether random numbers may be drawn while a batch is made: not of torch's tensors in memory."""
    loader = cast("Any", source)
    is_plain = type(source) is DataLoader and type(loader.dataset) is TensorDataset
    collates = loader.batch_sampler is None or loader.collate_fn is not cast("Any", data).default_collate
    return collates or not is_plain


def rebuild(source: DataLoader[T], batches: Batches) -> DataLoader[T]:
    """Build a loader like ``source`` that reads ``batches``."""
    dataset: Any = follow_epochs(source, batches.epoch)
    if may_draw(source):
        dataset = _SeededDataset(dataset, _unbatched=batch_sampler_of(source) is None)
    if cast("Any", source).batch_sampler is None:
        return remake(source, dataset, sampler=batches)
    return remake(source, dataset, batch_sampler=batches)


def remake(
    source: DataLoader[Any], dataset: Any, *, stateful: bool = False, **changes: Any
) -> DataLoader[Any]:
    """Build a loader of the class and with the options of ``source``, over another dataset.

    Args:
        source: The user's loader.
        dataset: Replaces its dataset.
        stateful: Build torchdata's StatefulDataLoader.
        **changes: Batching or ``collate_fn``. Without a batch sampler or size, the loader makes no batches.

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
    # The arguments of a user's class are unknown, so it is copied.
    batching = {"batch_size": None, "drop_last": False, "batch_sampler": None}
    return twin_of(source, **{"dataset": dataset, **batching, **changes})


def twin_of(source: DataLoader[T], **changes: Any) -> DataLoader[T]:
    """Return a copy of a loader with changed attributes, without its workers.

    The attributes are written directly, since a DataLoader refuses to change them.
    """
    twin = copy.copy(source)
    vars(twin).update({"_iterator": None, **changes})
    return twin


def keeps_states(ctx: Context, source: DataLoader[Any]) -> bool:
    """Return whether its workers' states are kept: by configuration, or since the loader is of that class."""
    # Not imported: a loader of this class exists only if its package has been imported.
    kind = getattr(sys.modules.get(_STATEFUL), "StatefulDataLoader", None)
    is_kept = ctx.loading.use_stateful_dataloader or (kind is not None and isinstance(source, kind))
    return is_kept and source.num_workers > 0


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
