"""What is logged, as plain values: numbers, texts, lists and mappings of these."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import operator
import os
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, cast

import torch

from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.tree import is_dtensor, local_of

__all__ = ("flatten_names", "plain_config", "read_numbers", "read_step")


def read_numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``values`` with numbers in place of tensors and arrays.

    What has one element becomes a number, all else a list of numbers, at any depth of mappings and lists.
    Everything that lies on one device is fetched at once, so the host waits for it once, however many tensors
    there are. All that is no tensor or array stays what it is.

    Ranks: local.

    Args:
        values: Names and values.

    Raises:
        NotAvailableError: A tensor is spread over ranks.

    >>> read_numbers({"loss": torch.tensor(0.5), "by_layer": [torch.ones(1), torch.zeros(2)], "lr": 1e-3})
    {'loss': 0.5, 'by_layer': [1.0, [0.0, 0.0]], 'lr': 0.001}
    """
    tensors: list[torch.Tensor] = []
    _collect(values, tensors, "")
    return _replace(values, iter(_fetch(tensors)))


def plain_config(config: object) -> dict[str, Any]:
    """Return a configuration as names and plain values, which any tracker can keep.

    Args:
        config: A mapping, a dataclass or an ``argparse.Namespace``; dataclasses, enums, paths, dtypes, sets
            and tensors inside of it become plain too, and of anything else its text is taken.

    Raises:
        TypeError: It is nothing of these.
        ConfigurationError: It contains itself.

    >>> plain_config({"dtype": torch.bfloat16, "sizes": (64, 10), "seed": None})
    {'dtype': 'torch.bfloat16', 'sizes': [64, 10], 'seed': None}
    """
    return _plain_mapping(config, ())


def read_step(step: Any, operation: str) -> int | None:
    """Return the number of a step as an int: of an integer, of torch's and numpy's kinds too.

    Raises:
        TypeError: It is no whole number.

    >>> read_step(torch.tensor(3), "log")
    3
    """
    if step is None or type(step) is int:
        return step
    try:
        return operator.index(step)
    except TypeError:
        raise TypeError(f"{operation}: step must be a whole number or None: got {step!r}.") from None


def flatten_names(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names and values of nested mappings, with ``/`` between the names.

    >>> dict(flatten_names({"model": {"layers": 2, "width": 64}, "lr": 0.1}))
    {'model/layers': 2, 'model/width': 64, 'lr': 0.1}
    """
    for name, value in values.items():
        path = f"{above}/{name}" if above else name
        if isinstance(value, Mapping):
            yield from flatten_names(cast("Mapping[str, Any]", value), path)
        else:
            yield path, value


def _plain_mapping(config: object, above: tuple[int, ...]) -> dict[str, Any]:
    if isinstance(config, argparse.Namespace):
        inside: object = vars(config)
    elif dataclasses.is_dataclass(config) and not isinstance(config, type):
        inside = {one.name: getattr(config, one.name) for one in dataclasses.fields(config)}
    else:
        inside = config
    if not isinstance(inside, Mapping):
        raise TypeError(
            f"config must be a mapping, a dataclass or an argparse.Namespace: got {type(config).__name__}."
        )
    items = cast("Mapping[object, object]", inside).items()
    return {str(name): _plain(value, _within(config, above, str(name))) for name, value in items}


def _within(container: object, above: tuple[int, ...], name: str) -> tuple[int, ...]:
    """Return what ``name`` lies in, unless that lies in itself."""
    if id(container) in above:
        raise ConfigurationError(
            f"config contains itself: the {type(container).__name__} that {name!r} is in lies inside of "
            "itself. Leave that entry out."
        )
    return (*above, id(container))


def _plain(value: Any, above: tuple[int, ...]) -> Any:
    if isinstance(value, enum.Enum):
        return _plain(value.value, above)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (Mapping, argparse.Namespace)) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    ):
        return _plain_mapping(cast("object", value), above)
    if isinstance(value, AbstractSet):
        inside = _within(cast("object", value), above, "")
        return sorted((_plain(one, inside) for one in cast("AbstractSet[Any]", value)), key=str)
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray)):
        values = cast("Sequence[Any]", value)
        return [_plain(one, _within(values, above, str(place))) for place, one in enumerate(values)]
    if isinstance(value, torch.Tensor) or _is_array(value):
        return read_numbers({"": value})[""]
    return str(os.fspath(cast("os.PathLike[str]", value)) if isinstance(value, os.PathLike) else value)


def _is_array(value: Any) -> bool:
    # Arrays and numbers of numpy, without importing it.
    return hasattr(value, "tolist") and hasattr(value, "dtype") and hasattr(value, "shape")


def _collect(value: Any, into: list[torch.Tensor], path: str) -> None:
    if isinstance(value, torch.Tensor):
        into.append(_local(value, path))
    elif isinstance(value, Mapping):
        for name, one in cast("Mapping[str, Any]", value).items():
            _collect(one, into, f"{path}/{name}" if path else str(name))
    elif isinstance(value, (list, tuple)):
        for number, one in enumerate(cast("Sequence[Any]", value)):
            _collect(one, into, f"{path}/{number}")


def _local(tensor: torch.Tensor, path: str) -> torch.Tensor:
    """Return what this rank has of a tensor, if that is all of it."""
    if is_dtensor(tensor) and not all(one.is_replicate() for one in cast("Any", tensor).placements):
        raise NotAvailableError(
            f"{path!r} is a tensor that is spread over ranks, and what is logged is read on one of them. "
            "Log .full_tensor() of it, which every rank must call."
        )
    return local_of(tensor).detach()


def _fetch(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return the numbers in each tensor; one copy to the host for each device."""
    on_host = list(tensors)
    devices = {one.device for one in tensors if one.device.type != "cpu"}
    for device in devices:
        places = [place for place, one in enumerate(tensors) if one.device == device]
        for place, fetched in zip(places, _through_bytes([tensors[one] for one in places]), strict=True):
            on_host[place] = fetched
    return [one.item() if one.numel() == 1 else cast("Any", one).tolist() for one in on_host]


def _through_bytes(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors of one device to the host, all dtypes in one buffer of bytes, so none is rounded."""
    parts = [one.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for one in tensors]
    buffer = torch.cat(parts).cpu()
    fetched: list[torch.Tensor] = []
    start = 0
    for part, one in zip(parts, tensors, strict=True):
        # clone: a part may lie where numbers of its dtype can't begin.
        fetched.append(buffer[start : start + len(part)].clone().view(one.dtype).reshape(one.shape))
        start += len(part)
    return fetched


def _replace(value: Any, numbers: Iterator[Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return next(numbers)
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {str(name): _replace(one, numbers) for name, one in items}
    if isinstance(value, (list, tuple)):
        return [_replace(one, numbers) for one in cast("Sequence[Any]", value)]
    if _is_array(value):
        return value.item() if value.size == 1 else value.tolist()
    return value
