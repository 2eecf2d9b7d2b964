"""Weights found, and put where they lie."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from accelfn.bigmodel.load.mapped import mapped_from
from accelfn.bigmodel.load.offload_files import OffloadedWeightsLoader
from accelfn.bigmodel.load.placing import set_data
from accelfn.bigmodel.offload.blocks import Slot
from accelfn.bigmodel.offload.dispatch_plan import DispatchPlan
from accelfn.bigmodel.offload.folder import write_mapped
from accelfn.bigmodel.offload.packing import is_packable
from accelfn.bigmodel.places import check_device

__all__ = ("Sources", "find_ties", "find_values", "settle")


class Sources(NamedTuple):
    """Where values come from that the model itself doesn't have.

    Attributes:
        state_dict: In memory.
        folder: Of offloaded weights, which takes others, too.
        entries: What the folder has; None reads its own, if it has one.
    """

    state_dict: Mapping[str, torch.Tensor]
    folder: str | os.PathLike[str] | None = None
    entries: Mapping[str, Mapping[str, Any]] | None = None


def find_ties(slots: Mapping[str, Slot]) -> tuple[tuple[str, ...], ...]:
    """Return the groups of names that are one tensor."""
    groups: dict[int, list[str]] = {}
    for name, slot in slots.items():
        groups.setdefault(id(slot.read()), []).append(name)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def find_values(slots: Mapping[str, Slot], plan: DispatchPlan, sources: Sources) -> dict[int, torch.Tensor]:
    """Find values of what has none, and put on the disk what isn't there; the model isn't changed.

    Args:
        slots: Of the model, by full name of the tensor.
        plan: Where they go.
        sources: Of values.

    Returns:
        By the ``id`` of a tensor of the model: its value, where that isn't its own.

    Raises:
        ValueError: A tensor has no values, or ones of another shape or kind; or there is no folder to write
            to.
        OSError: The folder can't be written.
    """
    values: dict[int, torch.Tensor] = {}
    for name, slot in slots.items():
        given, now = sources.state_dict.get(name), slot.read()
        if given is not None and not given.is_meta and (now.is_meta or plan.lies[name].at == "cpu"):
            values[id(now)] = _fitting(name, given, now)
    _read_folder(slots, sources, values)
    bare = [name for name, slot in slots.items() if slot.read().is_meta and id(slot.read()) not in values]
    if bare:
        more = f" and {len(bare) - 5} more" if len(bare) > 5 else ""
        raise ValueError(
            f"{', '.join(map(repr, bare[:5]))}{more} have no values: they are on the meta device. Load "
            "them with load_checkpoint_and_dispatch, or pass state_dict=."
        )
    to_write: dict[int, tuple[str, torch.Tensor]] = {}
    for name in plan.at("disk"):
        now = slots[name].read()
        value = values.get(id(now), now)
        if value.numel() and mapped_from(value) is None:
            _check_plain(name, value)
            to_write.setdefault(id(now), (name, value))
    if to_write:
        first = next(iter(to_write.values()))[0]
        if sources.folder is None:
            raise ValueError(
                f"device_map puts {len(to_write)} tensors on the disk that lie in memory now, {first!r} "
                "among them, and there is no offload_dir. Pass one, or load the weights with "
                "load_checkpoint_and_dispatch, which uses a safetensors checkpoint where it lies."
            )
        written = write_mapped(sources.folder, dict(to_write.values()))
        values.update({number: written[name] for number, (name, _) in to_write.items()})
    return values


def _read_folder(slots: Mapping[str, Slot], sources: Sources, values: dict[int, torch.Tensor]) -> None:
    """Map offloaded weights for what has no values. Others aren't looked at: the folder may be an old one."""
    index, folder = sources.entries, sources.folder
    if index is None and (folder is None or not (Path(folder) / "index.json").is_file()):
        return
    stored = OffloadedWeightsLoader(save_folder=folder, index=index)
    for name, slot in slots.items():
        now = slot.read()
        if now.is_meta and id(now) not in values and name in stored.index:
            value = _fitting(name, stored[name], now)
            values[id(now)] = value if value.dtype == now.dtype else value.to(now.dtype)


def _fitting(name: str, value: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    if value.shape != now.shape:
        raise ValueError(
            f"{name!r} has shape {tuple(now.shape)} in the model, and {tuple(value.shape)} in what was "
            "given. Pass the weights of this model."
        )
    if _kind(value) != _kind(now):
        raise ValueError(
            f"{name!r} is {now.dtype} in the model, and {value.dtype} in what was given. Pass the weights of "
            "this model."
        )
    return value


def _kind(tensor: torch.Tensor) -> tuple[bool, bool]:
    return tensor.is_floating_point(), tensor.is_complex()


def _check_plain(name: str, value: torch.Tensor) -> None:
    if not is_packable(value):
        raise ValueError(
            f"{name!r} can't lie on the disk: it is a {type(value).__name__} of layout {value.layout}, which "
            "is more than bytes. Leave it on the CPU."
        )


def settle(slots: Mapping[str, Slot], plan: DispatchPlan, values: Mapping[int, torch.Tensor]) -> None:
    """Put every tensor where it lies. Tied names stay one tensor wherever they lie together.

    Args:
        slots: Of the model, by full name of the tensor. Effect: on their modules.
        plan: Where they go.
        values: As :func:`find_values` gives them.
    """
    settled: dict[tuple[int, torch.device], torch.Tensor] = {}
    moved: set[int] = set()
    before = {name: slot.read() for name, slot in slots.items()}
    for name, slot in slots.items():
        now = before[name]
        at = plan.lies[name].at
        device = check_device("cpu" if at == "disk" else at)
        key = (id(now), device)
        if key not in settled:
            settled[key] = _settled(now, values.get(id(now), now), device, reuse=id(now) not in moved)
            moved.add(id(now))
        if settled[key] is not now:
            slot.write(settled[key])


def _settled(now: torch.Tensor, value: torch.Tensor, device: torch.device, *, reuse: bool) -> torch.Tensor:
    """Return a tensor its value on a device: the same object where it can be, so that optimizers know it."""
    if value is now and now.device == device:
        return now
    data = value.detach().to(device)
    if reuse and not now.is_meta and is_packable(now):
        set_data(now, data)
        return now
    if not isinstance(now, nn.Parameter):
        return data
    kind = cast("Any", type(now))
    made = kind(data, requires_grad=now.requires_grad) if kind is nn.Parameter else now.to(device)
    vars(made).update({key: one for key, one in vars(now).items() if key not in vars(made)})
    return made
