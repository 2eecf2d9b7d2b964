"""LoaderState: a loader's position in its data, checked when it is restored."""

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
    """The position of all ranks in the data, as plain values that need no pickle.

    Attributes:
        version: Of this record.
        epoch: Number of the epoch, from 0.
        consumed: Samples of the epoch that all ranks have read. If each rank reads its own data, what this
            rank has read: samples of its shards of a source, or batches of data that is already sharded.
        seed: Of the order.
        length: Samples in an epoch; None if unknown.
        num_workers: Number of workers that read a stream; None for other data.
        group: Samples of a step, if several workers read a stream.
        num_processes: Number of ranks, if each rank reads its own data.
        rank: The rank whose data it is then.
        order: The order of samples: ``"sequential"``, ``"shuffled"``, ``"drawn"`` (with replacement) or
            ``"sampler"`` (a custom one); None for a batch sampler's batches and for streams.
        sampler: State of a custom sampler before it drew the epoch.
        stream: State of a stateful stream at this position.

    Raises:
        TypeError: A number isn't an int, or a state holds a value that a checkpoint can't store.
        ValueError: A number is negative, or ``consumed`` exceeds ``length``.
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
    # Dicts aren't hashable; equal states have equal hashes without them.
    sampler: State | None = field(default=None, hash=False)
    stream: State | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        """Check types and ranges."""
        for item in fields(self):
            value: object = getattr(self, item.name)
            if item.name in ("sampler", "stream"):
                check_plain(value, f"the state of the {item.name}")
            elif value is None and item.default is None:
                continue
            elif item.name == "order" and not isinstance(value, str):
                raise TypeError(f"LoaderState: order must be a str, got {value!r}.")
            elif item.name != "order" and (not isinstance(value, int) or isinstance(value, bool)):
                raise TypeError(f"LoaderState: {item.name} must be an int, got {value!r}.")
            elif isinstance(value, int) and value < 0:
                raise ValueError(f"LoaderState: {item.name} must not be negative, got {value}.")
        _check_consumed(self.consumed, self.length)


def read_state(values: Mapping[str, Any]) -> LoaderState:
    """Return the state from the dict that ``dataclasses.asdict`` returned for it.

    Raises:
        NotAvailableError: A newer version of accelfn wrote it.
        TypeError, ValueError: It isn't the state of a loader.
    """
    if not isinstance(cast("object", values), Mapping):
        raise TypeError(
            f"load_state_dict takes what state_dict() returned, got {type(cast('object', values)).__name__}."
        )
    version = values.get("version")
    if isinstance(version, int):
        _check_version(version)
    unknown = sorted(str(name) for name in values.keys() - {item.name for item in fields(LoaderState)})
    missing = sorted({"epoch", "consumed", "seed"} - values.keys())
    if unknown or missing:
        parts = (("lacks", missing), ("has", unknown))
        wrong = [f"it {verb} {', '.join(names)}" for verb, names in parts if names]
        raise ValueError(
            f"load_state_dict: this isn't the state of a prepared loader: {' and '.join(wrong)}. Pass what "
            "its state_dict() returned."
        )
    return LoaderState(**values)


def check_state(state: LoaderState, length: int | None, now: ReadSettings, can_restore: bool) -> bool:
    """Check that a state fits a loader, and return whether the state of its stream is to be restored.

    Args:
        state: The state.
        length: Samples in an epoch of the loader, if known.
        now: The loader's settings.
        can_restore: Whether the state includes a stream's state of a kind that the loader can restore.

    Raises:
        NotAvailableError: A newer version of accelfn wrote it.
        ValueError: It is of a dataset of another length.
        ConfigurationError: The data was read with other settings, or in another order.
    """
    _check_version(state.version)
    if length is not None and state.length is not None and length != state.length:
        raise ValueError(
            f"restore_loader: the state is of an epoch of {state.length} samples, but the loader has "
            f"{length}. Restore it with the data that it was taken from, or start a new epoch."
        )
    _check_consumed(state.consumed, length)
    is_foreign = state.version > 1 and (state.num_processes, state.rank) != (now.num_processes, now.rank)
    if not state.consumed:  # at the start of an epoch, the settings don't matter
        return can_restore and not is_foreign
    if is_foreign:
        raise ConfigurationError(
            f"restore_loader: the state is of {_whose(state.num_processes, state.rank)}, but the loader "
            f"reads {_whose(now.num_processes, now.rank)}. If each rank reads its own data, resume with the "
            "same number of ranks, each from the state that it saved, or from the end of an epoch."
        )
    if None not in (state.order, now.order) and state.order != now.order:
        raise ConfigurationError(
            f"restore_loader: the state is of samples in order {state.order!r}, but the loader reads them in "
            f"order {now.order!r}, so the remaining samples would differ. Restore it with a loader of the "
            "same order (shuffle=, sampler=), or start a new epoch."
        )
    if can_restore or state.num_workers is None or now.num_workers is None:
        return can_restore
    is_same_group = state.group is None or state.group == now.group
    if max(1, state.num_workers) != max(1, now.num_workers) or not is_same_group:
        raise ConfigurationError(
            f"restore_loader: {_readers(state.num_workers, state.group)} had read the stream, and the "
            f"loader reads it with {_readers(now.num_workers, now.group)}, in another order. Resume with the "
            "same number of workers, and the same batch size times ranks, or restore a state from the end of "
            "an epoch. With num_workers=0 or 1, any world can resume."
        )
    return False


def _check_version(version: int) -> None:
    if version > _VERSION:
        raise NotAvailableError(
            f"restore_loader: the state has version {version}, but this accelfn reads versions up to "
            f"{_VERSION}. Use the accelfn that wrote it, or a newer one."
        )


def _whose(num_processes: int | None, rank: int | None) -> str:
    return "data that all ranks share" if rank is None else f"the data of rank {rank} of {num_processes}"


def _readers(num_workers: int, group: int | None) -> str:
    number = f"{num_workers} worker{'' if num_workers == 1 else 's'}"
    return number if group is None else f"{number} in steps of {group} samples"


def _check_consumed(consumed: int, length: int | None) -> None:
    if length is not None and consumed > length:
        raise ValueError(
            f"a LoaderState can't have consumed {consumed} samples of an epoch of {length}. Pass an "
            "unchanged state from loader_state."
        )
