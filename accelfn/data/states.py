"""The states of what is the user's own: samplers, their generators, and streams."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Iterator, Mapping
from inspect import isfunction
from itertools import islice
from typing import Any, TypeAlias, TypeVar, cast

import torch

from accelfn.errors import ConfigurationError

__all__ = (
    "State",
    "StatefulIterator",
    "begun_once",
    "check_plain",
    "count_shards",
    "has_state",
    "restore_sampler",
    "rewound",
    "sampler_state",
    "take_shards",
)

T = TypeVar("T")
# Plain values by name; see check_plain.
State: TypeAlias = "Mapping[str, Any]"


def has_state(thing: Any) -> bool:
    """Return whether something has ``state_dict()`` and ``load_state_dict(state)``, and goes on exactly."""
    say, take = getattr(thing, "state_dict", None), getattr(thing, "load_state_dict", None)
    if not callable(say) or not callable(take) or (_is_hugging_face(thing) and not _is_exact(thing)):
        return False
    try:
        inspect.signature(say).bind()
    except TypeError:  # it takes arguments that are unknown here
        return False
    except ValueError:  # it is written in C and has no signature
        pass
    return True


def check_plain(value: object, path: str) -> None:
    """Refuse a state that a checkpoint couldn't hold without pickle.

    Raises:
        TypeError: Something in it is no number, text, bytes, None, tensor or array, and no list, tuple or
            dict of such; or a key is no text or whole number.
    """
    if isinstance(value, dict):
        for name, one in cast("dict[object, object]", value).items():
            if not isinstance(name, (str, int)):
                raise TypeError(f"{path} has a key {name!r}. Name what a state holds by texts.")
            check_plain(one, f"{path}[{name!r}]")
    elif isinstance(value, (list, tuple)):
        for place, one in enumerate(cast("list[object]", value)):
            check_plain(one, f"{path}[{place}]")
    # An array without an import: whoever has one has imported numpy.
    elif not isinstance(value, (int, float, str, bytes, torch.Tensor, type(None))) and not (
        type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "dtype")
    ):
        raise TypeError(
            f"{path} is of type {type(value).__name__}, which a checkpoint can't hold. A state_dict of your "
            "own has to give numbers, texts, bytes, tensors or arrays, and lists and dicts of them."
        )


def count_shards(dataset: Any) -> int | None:
    """Count the shards of a dataset; None where it offers none.

    Raises:
        ConfigurationError: It was split between ranks already.
    """
    if _is_hugging_face(dataset) and getattr(dataset, "_distributed", None) is not None:
        raise ConfigurationError(
            "the dataset was split by split_dataset_by_node already, and splitting it again would leave out "
            'samples. Pass sharding="already_sharded", or the dataset as it was before.'
        )
    if not callable(getattr(dataset, "shard", None)):
        return None
    found = (getattr(dataset, name, None) for name in ("num_shards", "n_shards"))
    return next((number for number in found if isinstance(number, int)), None)


def take_shards(dataset: Any, rank: int, size: int) -> Any:
    """Return a dataset of the shards of ``rank``; each shard is that of one rank of ``size``."""
    if not _is_hugging_face(dataset):
        return dataset.shard(num_shards=size, index=rank)
    split: Any = importlib.import_module("datasets.distributed").split_dataset_by_node
    # Where the shards can't be dealt out equally, it would let every rank read all and skip most.
    options = {"strategy": "shards"} if "strategy" in inspect.signature(split).parameters else {}
    return split(dataset, rank=rank, world_size=size, **options)


def _is_hugging_face(dataset: Any) -> bool:
    # Without an import: whoever has such a dataset has imported its package.
    return any(base.__module__.partition(".")[0] == "datasets" for base in type(dataset).__mro__)


def _is_exact(dataset: Any) -> bool:
    """Return whether a dataset of Hugging Face gives what it would have given, after its state was restored.

    Its state leaves out what waits in a shuffle buffer, and may leave out a batch where batches of tables are
    mapped. Nothing public says whether there is such a part.
    """
    is_table = bool(getattr(getattr(dataset, "_formatting", None), "is_table", False))
    waiting: list[Any] = [getattr(dataset, "_ex_iterable", None)]
    while waiting:
        part = waiting.pop()
        if (
            part is None
            or "Shuffled" in type(part).__name__
            or (is_table and getattr(part, "batched", False))
        ):
            return False
        for child in cast("dict[str, Any]", vars(part)).values():
            children = cast("list[Any]", child if isinstance(child, list) else [child])
            waiting += [one for one in children if hasattr(one, "_init_state_dict")]
    return True


def sampler_state(sampler: Any) -> State | None:
    """Return the state of a sampler, of the sampler inside of it, and of their generators.

    Args:
        sampler: Of samples or of batches.

    Returns:
        None where none of them has one.
    """
    found: dict[str, Any] = {}
    for name, thing in _parts_of(sampler):
        if has_state(thing):
            found[name] = copy.deepcopy(thing.state_dict())
        generator = getattr(thing, "generator", None)
        if isinstance(generator, torch.Generator):
            # As a text: it compares, and JSON can hold it.
            found[f"{name}.generator"] = _bytes_of(generator.get_state()).hex()
    return found or None


def restore_sampler(sampler: Any, state: State) -> None:
    """Set a sampler to a state that :func:`sampler_state` returned."""
    for name, thing in _parts_of(sampler):
        if name in state and has_state(thing):
            thing.load_state_dict(copy.deepcopy(state[name]))
        generator, numbers = getattr(thing, "generator", None), state.get(f"{name}.generator")
        if numbers is not None and isinstance(generator, torch.Generator):
            generator.set_state(torch.tensor(list(bytes.fromhex(numbers)), dtype=torch.uint8))


def _parts_of(sampler: Any) -> list[tuple[str, Any]]:
    return [("outer", sampler), ("inner", getattr(sampler, "sampler", None))]


def _bytes_of(numbers: torch.Tensor) -> bytes:
    return bytes(cast("list[int]", numbers.tolist()))  # pyright: ignore[reportUnknownMemberType]


def rewound(state: State | None) -> State | None:
    """Return the state of a stream as its epoch began, where that is known. Pure."""
    return _stream_state(state["begin"], state["begin"]) if state is not None and "begin" in state else None


def _stream_state(
    begin: Any, dataset: Any, iterator: Any = None, *, begun: bool = False, ended: bool = False
) -> State:
    return {"begin": begin, "dataset": dataset, "iterator": iterator, "begun": begun, "ended": ended}


def begun_once(samples: Iterator[T]) -> Iterator[T]:
    """Return what ``samples`` gives, without asking it for an iterator again.

    One of the user's own may begin anew whenever it is asked.
    """
    return _stepped(samples) if isfunction(getattr(type(samples), "__iter__", None)) else samples


def _stepped(samples: Iterator[T]) -> Iterator[T]:
    while True:
        try:
            sample = next(samples)
        except StopIteration:
            return
        yield sample


class StatefulIterator:
    """Goes through a stream of the user's own, pass after pass, and says its state at any place.

    A state is ``begin``, the dataset's as the pass began; ``dataset`` and ``iterator``, theirs now;
    ``begun``, whether a pass is under way; and ``ended``, whether nothing is left in it.

    Attributes:
        dataset: The user's.
        has_state: Whether the dataset has one; an iterator of it may have one all the same.
        is_amid: Whether the dataset stands where no pass begins.
    """

    def __init__(self, dataset: Any, *, follows: bool = True) -> None:
        """Go through ``dataset``; unless it ``follows``, no state is looked for."""
        self.dataset: Any = dataset
        self._follows = follows
        self.has_state: bool = follows and has_state(dataset)
        self._begin: Any = None
        self._final: Any = None  # state at the end of the pass, where the dataset is asked no more
        self._iterator: Any = None  # of the pass, where it has a state of its own
        self.is_amid: bool = False

    @property
    def is_stateful(self) -> bool:
        """Whether the pass that was begun last can be gone on with by its state."""
        return self.has_state or self._iterator is not None

    def can_take(self, state: State) -> bool:
        """Return whether a state that another has said is of use to this one."""
        if "dataset" not in state:
            return False
        if state["dataset"] is None:  # its iterators had one
            return has_state(iter(self.dataset))
        return self.has_state

    def begin(self, state: State | None = None) -> Iterator[Any]:
        """Begin a pass: from its start, or where ``state`` was taken."""
        dataset, self._final, self._iterator = self.dataset, None, None
        if self.has_state:
            if state is not None and state["dataset"] is not None:
                self._begin = state["begin"]
                dataset.load_state_dict(copy.deepcopy(state["dataset"]))
            else:
                self.rewind()
                self._begin = self._fresh()
            self.is_amid = True
        if state is not None and state["ended"]:
            self._final = state["dataset"]
            return iter(())
        samples: Iterator[Any] = iter(dataset)
        if self._follows and has_state(samples) and samples is not dataset:
            self._iterator = samples
            if state is not None and state["iterator"] is not None:
                self._iterator.load_state_dict(copy.deepcopy(state["iterator"]))
        elif self.has_state and isinstance(dataset, Iterator) and state is not None and state["begun"]:
            cast("Any", dataset).load_state_dict(
                copy.deepcopy(state["dataset"])
            )  # beginning may have reset it
        return samples

    def first(self, number: int) -> list[Any]:
        """Read the first samples of a pass again, behind its end."""
        if self.has_state:
            self._final = copy.deepcopy(self.dataset.state_dict())
            self.dataset.load_state_dict(copy.deepcopy(self._begin))
        samples: Iterator[Any] = iter(self.dataset)
        found = list(islice(begun_once(samples), number))
        close = getattr(samples, "close", None)
        if callable(close):
            close()
        if self.has_state:
            self.dataset.load_state_dict(copy.deepcopy(self._final))
        return found

    def end(self) -> None:
        """Note that the pass is over."""
        # What was loaded may come back in the next pass, and is forgotten then.
        self.is_amid = self.is_amid and _is_hugging_face(self.dataset)

    def state(self, ended: bool) -> State | None:
        """Return where the pass is; ``ended``: nothing is left in it."""
        if not self.has_state and self._iterator is None:
            return None
        own = self._final
        if self.has_state and own is None:
            own = copy.deepcopy(self.dataset.state_dict())
        of_iterator = None if self._iterator is None or ended else copy.deepcopy(self._iterator.state_dict())
        return _stream_state(self._begin, own, of_iterator, begun=True, ended=ended)

    def rest(self) -> State | None:
        """Return the state between passes."""
        if not self.has_state or _is_hugging_face(self.dataset):
            return None  # a pass begins alike after any other
        own = self._begin if self.is_amid else copy.deepcopy(self.dataset.state_dict())
        return _stream_state(own, own)

    def _fresh(self) -> Any:
        # A dataset of Hugging Face begins anew in any epoch with an empty state.
        return {} if _is_hugging_face(self.dataset) else copy.deepcopy(self.dataset.state_dict())

    def rewind(self) -> None:
        """Let a pass begin where the latest one did, if that one wasn't gone through."""
        if self.is_amid:
            self.dataset.load_state_dict(copy.deepcopy(self._begin))
            self.is_amid = False
