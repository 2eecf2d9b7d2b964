"""The states of the user's objects: samplers, their generators, and streams."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, TypeAlias, TypeVar, cast

import torch

from accelfn.comm.agreement import as_bytes, as_tensor
from accelfn.errors import ConfigurationError

__all__ = (
    "State",
    "TrackedStream",
    "check_plain",
    "count_shards",
    "has_state",
    "iterate_once",
    "restore_sampler",
    "rewind_state",
    "sampler_state",
    "select_shards",
)

T = TypeVar("T")
# Plain values by name; see check_plain.
State: TypeAlias = "Mapping[str, Any]"


def has_state(thing: Any) -> bool:
    """Return whether an object has ``state_dict()`` and ``load_state_dict(state)``, and resumes exactly."""
    get_state, set_state = getattr(thing, "state_dict", None), getattr(thing, "load_state_dict", None)
    # The state of a Hugging Face dataset leaves out what a shuffle buffer holds, and may skip a batch of a
    # mapped table. No public attribute tells whether it does.
    if not callable(get_state) or not callable(set_state) or _is_hugging_face(thing):
        return False
    try:
        inspect.signature(get_state).bind()
    except TypeError:  # it has required arguments
        return False
    except ValueError:  # it is implemented in C and has no signature
        pass
    return True


def check_plain(value: object, path: str) -> None:
    """Check that a checkpoint can store a state without pickle.

    Raises:
        TypeError: The state contains something other than numbers, str, bytes, None, tensors, arrays, and
            lists, tuples and dicts of them; or a key that isn't a str or int.
    """
    if isinstance(value, dict):
        for name, item in cast("dict[object, object]", value).items():
            if not isinstance(name, (str, int)):
                raise TypeError(f"{path} has a key {name!r}. Use str or int keys.")
            check_plain(item, f"{path}[{name!r}]")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(cast("list[object]", value)):
            check_plain(item, f"{path}[{index}]")
    # numpy arrays are recognized without importing numpy.
    elif not isinstance(value, (int, float, str, bytes, torch.Tensor, type(None))) and not (
        type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "dtype")
    ):
        raise TypeError(
            f"{path} is of type {type(value).__name__}, which a checkpoint can't store. state_dict() must "
            "return numbers, str, bytes, tensors or arrays, or lists and dicts of them."
        )


def count_shards(dataset: Any) -> int | None:
    """Return the number of shards of a dataset; None if it has no shards.

    Raises:
        ConfigurationError: The dataset was already split between ranks.
    """
    if _is_hugging_face(dataset) and getattr(dataset, "_distributed", None) is not None:
        raise ConfigurationError(
            "the dataset was already split by split_dataset_by_node, and splitting it again would lose "
            'samples. Pass sharding="already_sharded", or the unsplit dataset.'
        )
    if not callable(getattr(dataset, "shard", None)):
        return None
    counts = (getattr(dataset, name, None) for name in ("num_shards", "n_shards"))
    return next((count for count in counts if isinstance(count, int)), None)


def select_shards(dataset: Any, rank: int, size: int) -> Any:
    """Return a dataset of the shards of ``rank``; each shard belongs to one of ``size`` ranks."""
    if not _is_hugging_face(dataset):
        return dataset.shard(num_shards=size, index=rank)
    split: Any = importlib.import_module("datasets.distributed").split_dataset_by_node
    # By default, if the shards can't be divided equally, every rank would read all of them and skip most.
    options = {"strategy": "shards"} if "strategy" in inspect.signature(split).parameters else {}
    return split(dataset, rank=rank, world_size=size, **options)


def _is_hugging_face(dataset: Any) -> bool:
    # Recognized without importing the package.
    return any(base.__module__.partition(".")[0] == "datasets" for base in type(dataset).__mro__)


def sampler_state(sampler: Any) -> State | None:
    """Return the states of a sampler, of its inner sampler, and of their generators.

    Args:
        sampler: A sampler or batch sampler.

    Returns:
        The states by name; None if none of them has a state.
    """
    states: dict[str, Any] = {}
    for name, thing in _parts_of(sampler):
        if has_state(thing):
            states[name] = copy.deepcopy(thing.state_dict())
        generator = getattr(thing, "generator", None)
        if isinstance(generator, torch.Generator):
            # As text, which compares equal and fits into JSON.
            states[f"{name}.generator"] = as_bytes(generator.get_state()).hex()
    return states or None


def restore_sampler(sampler: Any, state: State) -> None:
    """Set a sampler to a state that :func:`sampler_state` returned."""
    for name, thing in _parts_of(sampler):
        if name in state and has_state(thing):
            thing.load_state_dict(copy.deepcopy(state[name]))
        generator, numbers = getattr(thing, "generator", None), state.get(f"{name}.generator")
        if numbers is not None and isinstance(generator, torch.Generator):
            generator.set_state(as_tensor(bytes.fromhex(numbers)))


def _parts_of(sampler: Any) -> list[tuple[str, Any]]:
    return [("outer", sampler), ("inner", getattr(sampler, "sampler", None))]


def rewind_state(state: State | None) -> State | None:
    """Return the state of a stream at the start of its epoch, if it is known. Pure."""
    return _stream_state(state["begin"], state["begin"]) if state is not None and "begin" in state else None


def _stream_state(begin: Any, dataset: Any, *, begun: bool = False, ended: bool = False) -> State:
    return {"begin": begin, "dataset": dataset, "begun": begun, "ended": ended}


def iterate_once(samples: Iterator[T]) -> Iterator[T]:
    """Return an iterator over ``samples`` that doesn't call its ``__iter__``, which may restart it."""
    while True:
        try:
            sample = next(samples)
        except StopIteration:
            return
        yield sample


class TrackedStream:
    """Iterates over a user's stream, pass after pass, and returns its state at any position.

    A state consists of ``begin``, the dataset's state at the start of the pass; ``dataset``, its current
    state; ``begun``, whether a pass is in progress; and ``ended``, whether it is exhausted. If workers read
    the stream, each has a copy of this object, and torchdata keeps their states with each batch, since they
    prefetch.

    Attributes:
        dataset: The user's stream.
        of_workers: Workers read the stream, and torchdata keeps their states.
        has_state: Whether the dataset has a state, from which a pass can be resumed.
        in_progress: Whether the dataset is in the middle of a pass.
    """

    def __init__(self, dataset: Any, num_workers: int, of_workers: bool) -> None:
        """Iterate over ``dataset``, which ``num_workers`` read."""
        self.dataset: Any = dataset
        self.of_workers: bool = of_workers
        self._num_workers = num_workers
        self.has_state: bool = (of_workers or not num_workers) and has_state(dataset)
        self._begin: Any = None
        self._final: Any = None  # state at the end of the pass, after which the dataset isn't queried
        self.in_progress: bool = False

    def accepts(self, state: State) -> bool:
        """Return whether this stream can restore ``state``, in the process that reads it."""
        return self.has_state and state.get("dataset") is not None

    def can_restore(self, state: State) -> bool:
        """Return whether ``state`` is one of this kind of loader."""
        if not self.of_workers:
            return not self._num_workers and self.accepts(state)
        snapshot: Any = state.get("_snapshot")  # of a StatefulDataLoader
        return snapshot is not None and len(snapshot["_worker_snapshots"]) == self._num_workers

    def begin(self, state: State | None = None) -> Iterator[Any]:
        """Begin a pass, from its start or from ``state``."""
        dataset, self._final = self.dataset, None
        if self.has_state:
            if state is not None:
                self._begin = state["begin"]
                dataset.load_state_dict(copy.deepcopy(state["dataset"]))
            else:
                self.rewind()
                self._begin = copy.deepcopy(dataset.state_dict())
            self.in_progress = True
        if state is not None and state["ended"]:
            self._final = state["dataset"]
            return iter(())
        samples: Iterator[Any] = iter(dataset)
        if self.has_state and isinstance(dataset, Iterator) and state is not None and state["begun"]:
            # Calling iter() may have reset it.
            cast("Any", dataset).load_state_dict(copy.deepcopy(state["dataset"]))
        return samples

    def read_first(self, number: int) -> list[Any]:
        """Read the first samples of a pass again, after its end."""
        if self.has_state:
            self._final = copy.deepcopy(self.dataset.state_dict())
            self.dataset.load_state_dict(copy.deepcopy(self._begin))
        samples: Iterator[Any] = iter(self.dataset)
        first = list(islice(iterate_once(samples), number))
        close = getattr(samples, "close", None)
        if callable(close):
            close()
        if self.has_state:
            self.dataset.load_state_dict(copy.deepcopy(self._final))
        return first

    def end(self) -> None:
        """End the pass."""
        self.in_progress = False

    def state(self, ended: bool) -> State | None:
        """Return the current state of the pass; ``ended``: it is exhausted."""
        if not self.has_state:
            return None
        current = copy.deepcopy(self.dataset.state_dict()) if self._final is None else self._final
        return _stream_state(self._begin, current, begun=True, ended=ended)

    def idle_state(self) -> State | None:
        """Return the state between passes, if this process reads the stream."""
        if self._num_workers or not self.has_state:
            return None
        state = self._begin if self.in_progress else copy.deepcopy(self.dataset.state_dict())
        return _stream_state(state, state)

    def rewind(self) -> None:
        """Return to the start of the latest pass, if that wasn't completed."""
        if self.in_progress:
            self.dataset.load_state_dict(copy.deepcopy(self._begin))
            self.in_progress = False
