"""Where a loader is in its data, as a value that is checked when a loader goes on from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

from accelfn.data.reader import ReadSettings
from accelfn.data.states import State, check_plain
from accelfn.errors import ConfigurationError, NotAvailableError

__all__ = ("LoaderState", "check_state", "read_state")

_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderState:
    """How far the ranks together have come in the data, as plain values that need no pickle.

    Attributes:
        version: Of this record.
        epoch: Number of the epoch, from 0.
        consumed: Samples of it that have been read, over all ranks. Where each rank has data of its own, what
            this one has read: samples of its shards of a source, or batches of what was sharded already.
        seed: Of the order.
        length: Samples in an epoch; None where it is unknown.
        num_workers: That read a stream; None of other data.
        group: Samples of a step, where several workers read a stream.
        num_processes: Ranks, where each has data of its own.
        rank: Whose data it is then.
        order: How samples are ordered: ``"sequential"``, ``"shuffled"``, ``"drawn"`` or by a ``"sampler"``;
            None of batches of your own and of streams.
        sampler: State of a sampler of your own, before it drew the epoch.
        stream: State of a stream of your own, in this place.

    Raises:
        TypeError: A number is no whole number, or a state holds what a checkpoint can't.
        ValueError: A number is negative, or more samples were read than there are.
    """

    version: int = _VERSION
    epoch: int
    consumed: int
    seed: int
    length: int | None = None
    num_workers: int | None = None
    group: int | None = None
    num_processes: int | None = None
    rank: int | None = None
    order: str | None = None
    # A dict has no hash; equal states have equal numbers.
    sampler: State | None = field(default=None, hash=False)
    stream: State | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        """Refuse what can be no place in any data."""
        for one in fields(self):
            value: object = getattr(self, one.name)
            if one.name in ("sampler", "stream"):
                check_plain(value, f"the state of the {one.name}")
            elif value is None and one.default is None:
                continue
            elif one.name == "order" and not isinstance(value, str):
                raise TypeError(f"LoaderState: order must be a text, got {value!r}.")
            elif one.name != "order" and (not isinstance(value, int) or isinstance(value, bool)):
                raise TypeError(f"LoaderState: {one.name} must be a whole number, got {value!r}.")
            elif isinstance(value, int) and value < 0:
                raise ValueError(f"LoaderState: {one.name} must not be negative, got {value}.")
        _check_consumed(self.consumed, self.length)


def read_state(values: Mapping[str, Any]) -> LoaderState:
    """Read a state from the dict that ``dataclasses.asdict`` has made of one.

    Raises:
        NotAvailableError: A newer version of accelfn has written it.
        TypeError, ValueError: It is no state of a loader.
    """
    if not isinstance(cast("object", values), Mapping):
        raise TypeError(
            f"load_state_dict takes what state_dict() has given, got {type(cast('object', values)).__name__}."
        )
    version = values.get("version")
    if isinstance(version, int):
        _check_version(version)
    unknown = sorted(str(name) for name in values.keys() - {one.name for one in fields(LoaderState)})
    missing = sorted({"epoch", "consumed", "seed"} - values.keys())
    if unknown or missing:
        parts = (("lacks", missing), ("has", unknown))
        wrong = [f"it {verb} {', '.join(names)}" for verb, names in parts if names]
        raise ValueError(
            f"load_state_dict: this is no state of a prepared loader: {' and '.join(wrong)}. Pass what its "
            "state_dict() has given."
        )
    return LoaderState(**values)


def check_state(state: LoaderState, length: int | None, now: ReadSettings, by_state: bool) -> bool:
    """Refuse a state that doesn't fit a loader; say whether the state of its stream can be restored.

    Args:
        state: Taken before.
        length: Samples in an epoch of the loader, where that is known.
        now: How its data is read.
        by_state: Whether the state has one of a stream, of a kind that the loader can take up.

    Raises:
        NotAvailableError: A newer version of accelfn has written it.
        ValueError: It is of a dataset of another length.
        ConfigurationError: The data was read in another way, or in another order.
    """
    _check_version(state.version)
    if length is not None and state.length is not None and length != state.length:
        raise ValueError(
            f"restore_loader: the state is of {state.length} samples in an epoch, and the loader has "
            f"{length}. Restore it with the data that it was taken with, or begin anew."
        )
    _check_consumed(state.consumed, length)
    is_others = state.version > 1 and (state.num_processes, state.rank) != (now.num_processes, now.rank)
    if not state.consumed:  # all begin an epoch from its start
        return by_state and not is_others
    if is_others:
        raise ConfigurationError(
            f"restore_loader: the state is of {_whose(state.num_processes, state.rank)}, and the loader of "
            f"{_whose(now.num_processes, now.rank)}. Where each rank reads data of its own, go on with as "
            "many ranks, each with the state that it has saved, or restore a state from the end of an epoch."
        )
    if None not in (state.order, now.order) and state.order != now.order:
        raise ConfigurationError(
            f"restore_loader: the state is of samples in the order {state.order!r}, and the loader reads "
            f"them in the order {now.order!r}, so what is left is another part of the data. Restore it with "
            "a loader that orders them alike (shuffle=, sampler=), or begin an epoch anew."
        )
    if by_state or state.num_workers is None or now.num_workers is None:
        return by_state
    is_same_group = state.group is None or state.group == now.group
    if max(1, state.num_workers) != max(1, now.num_workers) or not is_same_group:
        raise ConfigurationError(
            f"restore_loader: the state is of a stream that {_readers(state.num_workers, state.group)} had "
            f"read, and the loader's is read by {_readers(now.num_workers, now.group)}, in another order. Go "
            "on with as many workers, and the same batch size times ranks, or restore a state from the end "
            "of an epoch. With num_workers=0 or 1, any world goes on."
        )
    return False


def _check_version(version: int) -> None:
    if version > _VERSION:
        raise NotAvailableError(
            f"restore_loader: the state has version {version}, and this accelfn knows versions up to "
            f"{_VERSION}. Use the accelfn that wrote it, or a newer one."
        )


def _whose(num_processes: int | None, rank: int | None) -> str:
    return "data that all ranks share" if rank is None else f"rank {rank} of {num_processes}"


def _readers(num_workers: int, group: int | None) -> str:
    number = f"{num_workers} worker{'' if num_workers == 1 else 's'}"
    return number if group is None else f"{number} in steps of {group} samples"


def _check_consumed(consumed: int, length: int | None) -> None:
    if length is not None and consumed > length:
        raise ValueError(
            f"a loader's state can't have read {consumed} samples of an epoch that has {length}. "
            "Take it by loader_state, and change nothing in it."
        )
