"""Where the weights of a hooked module rest: in the host's memory, or in what gives them for each forward."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from accelfn.bigmodel.load.offload_files import OffloadedWeightsLoader, PrefixedDataset
from accelfn.bigmodel.load.placing import replaced, set_data
from accelfn.bigmodel.offload.blocks import Block, Slot, slots_of

__all__ = (
    "AtRest",
    "Replaced",
    "check_values",
    "given_by",
    "install",
    "lay_to_rest",
    "move_in_place",
    "travelling",
    "values_for",
)


class Replaced(NamedTuple):
    """A tensor without values, and the one with values that took its place.

    Attributes:
        tensor: Kept, so that no other object gets its ``id``.
        by: The new one.
    """

    tensor: torch.Tensor
    by: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AtRest:
    """A block whose weights rest on the host, and where they were before.

    Attributes:
        block: What travels.
        origins: Devices of the slots' tensors before.
    """

    block: Block
    origins: tuple[torch.device, ...]

    def bring_back(self) -> None:
        """Move the weights where they were before, in place. Those that were on meta stay as they are."""
        for position, (slot, origin) in enumerate(zip(self.block.slots, self.origins, strict=True)):
            if origin.type == "meta":
                continue
            if position in self.block.sources:
                slot.write(replaced(slot.read(), self.block.sources[position]().to(origin)))
            else:
                move_in_place(slot.read(), origin)


def travelling(
    module: nn.Module, *, offload_buffers: bool, recurse: bool
) -> tuple[dict[str, Slot], dict[str, Slot]]:
    """Return which tensors of a module travel, and which stay where it computes.

    Args:
        module: Any.
        offload_buffers: Whether buffers travel. Those that aren't in the state_dict never do.
        recurse: Whether those of the modules inside of it count as well.

    Returns:
        The slots of both, by their names within ``module``.
    """
    travels: dict[str, Slot] = {}
    stays: dict[str, Slot] = {}
    for name, slot in slots_of(module):
        if recurse or "." not in name:
            hidden = slot.key in cast("set[str]", vars(slot.owner)["_non_persistent_buffers_set"])
            is_travelling = slot.is_parameter or (offload_buffers and not hidden)
            (travels if is_travelling else stays)[name] = slot
    return travels, stays


def given_by(slots: Mapping[str, Slot], weights_map: Mapping[str, Any] | None) -> set[int]:
    """Return which tensors have values, by their ``id``: in the mapping, or without one in themselves."""
    if weights_map is None:
        return {id(slot.read()) for slot in slots.values() if not slot.read().is_meta}
    return {id(slot.read()) for key, slot in slots.items() if key in weights_map}


def check_values(
    module: nn.Module,
    travels: Mapping[str, Slot],
    stays: Mapping[str, Slot],
    weights_map: Mapping[str, Any] | None,
    given: set[int],
) -> None:
    """Refuse what couldn't be laid to rest; nothing is changed.

    Args:
        module: That has the tensors.
        travels: Those that travel, by their names in the mapping.
        stays: Buffers that don't.
        weights_map: Values; None for those that the tensors have.
        given: Tensors, by their ``id``, that get values under another name, since they are tied.

    Raises:
        ValueError: Values are missing, or have other shapes.
    """
    kind = type(module).__name__
    for key, slot in stays.items():
        if slot.read().is_meta and (weights_map is None or key not in weights_map):
            raise ValueError(
                f"AlignDevicesHook: the buffer {key!r} of the {kind} is on the meta device and has no "
                "values. Load it first, or name it in weights_map."
            )
    if weights_map is None:
        empty = [key for key, slot in travels.items() if slot.read().is_meta]
        if empty:
            raise ValueError(
                f"AlignDevicesHook: {_listed(empty)} of the {kind} are on the meta device and have no "
                "values. Load the weights first (load_checkpoint_in_model), or pass weights_map and offload."
            )
        return
    is_held = _is_held(weights_map)
    missing = [
        key
        for key, slot in travels.items()
        if key not in weights_map and not (is_held and id(slot.read()) in given)
    ]
    if missing:
        raise ValueError(
            f"AlignDevicesHook: weights_map has no {_listed(missing)}, which the {kind} needs. Its keys are "
            "the names of tensors within the module that has the hook."
        )
    for key, slot in {**travels, **stays}.items():
        if is_held and key in weights_map:
            _check_value(weights_map[key], slot.read(), key)


def lay_to_rest(
    name: str,
    module: nn.Module,
    slots: Mapping[str, Slot],
    weights_map: Mapping[str, Any] | None,
    installed: dict[int, Replaced],
) -> AtRest:
    """Let the tensors of a module rest on the host, after :func:`check_values`.

    Args:
        name: Of the block.
        module: Whose forward needs them.
        slots: Of the tensors, by their names within the module. Changed.
        weights_map: Their values, by the same names; None keeps those that the module holds. The tensors
            of a dict or of an offload folder become the parameters' memory, without a copy if they have the
            parameter's dtype. Any other mapping is asked for parameters at each forward, for buffers once.
        installed: What took the place of tensors without values, by their ``id``: tied ones stay tied. Grows.
    """
    origins = tuple(slot.read().device for slot in slots.values())
    sources: dict[int, Callable[[], torch.Tensor]] = {}
    # Modules write into their buffers, so these are always held.
    is_held = weights_map is not None and _is_held(weights_map)
    for position, (key, slot) in enumerate(slots.items()):
        current = slot.read()
        if weights_map is None:
            move_in_place(current, torch.device("cpu"))
        elif key not in weights_map:  # tied to one that has values
            install(slot, current, installed)
        elif is_held or not slot.is_parameter:
            install(slot, _on_host(weights_map[key], current, key), installed)
        else:
            empty = replaced(current, current.detach().to("meta"))
            slot.write(empty)
            sources[position] = functools.partial(_fetched, weights_map, key, empty)
    block = Block(name=name, module=module, slots=tuple(slots.values()), sources=sources)
    return AtRest(block=block, origins=origins)


def _is_held(weights_map: Mapping[str, Any]) -> bool:
    """Whether the values of a mapping may become a module's own memory, as they stay what they are."""
    if isinstance(weights_map, PrefixedDataset):
        return _is_held(weights_map.dataset)
    if isinstance(weights_map, OffloadedWeightsLoader):
        return _is_held(weights_map.state_dict)
    return isinstance(weights_map, dict)


def move_in_place(tensor: torch.Tensor, device: torch.device) -> None:
    """Move a tensor and its gradient; it stays the same object, so optimizers and ties know it still."""
    if tensor.device != device:
        set_data(tensor, tensor.data.to(device))


def values_for(slots: Mapping[str, Slot], weights_map: Mapping[str, Any] | None) -> dict[str, torch.Tensor]:
    """Return copies of what a mapping has for tensors, by their names; nothing for those that it lacks."""
    found = {} if weights_map is None else {key: slot for key, slot in slots.items() if key in weights_map}
    return {key: _on_host((weights_map or {})[key], slot.read(), key).clone() for key, slot in found.items()}


def install(slot: Slot, value: torch.Tensor, installed: dict[int, Replaced]) -> None:
    """Let ``value`` be the memory of a tensor, which stays the same object unless it was on meta.

    Args:
        slot: Of the tensor.
        value: On the host, of the same shape and dtype; the tensor itself if it needs none.
        installed: What took the place of tensors without values, by their ``id``. Grows.
    """
    current = slot.read()
    if not current.is_meta:
        if value is not current:
            set_data(current, value)
        return
    # It can't get memory, so another takes its place, in all modules that share it.
    if id(current) not in installed:
        installed[id(current)] = Replaced(current, replaced(current, value))
    slot.write(installed[id(current)].by)


def _check_value(value: Any, current: torch.Tensor, key: str) -> None:
    if not isinstance(value, torch.Tensor):
        raise ValueError(
            f"AlignDevicesHook: weights_map[{key!r}] is no tensor, but a {type(value).__name__}."
        )
    if value.shape != current.shape:
        raise ValueError(
            f"AlignDevicesHook: weights_map[{key!r}] has shape {tuple(value.shape)}, and the module needs "
            f"{tuple(current.shape)}."
        )
    if value.is_meta:
        raise ValueError(f"AlignDevicesHook: weights_map[{key!r}] is on the meta device and has no values.")


def _on_host(value: Any, current: torch.Tensor, key: str) -> torch.Tensor:
    _check_value(value, current, key)
    return cast("torch.Tensor", value).detach().to("cpu", current.dtype)


def _fetched(weights_map: Mapping[str, Any], key: str, current: torch.Tensor) -> torch.Tensor:
    return _on_host(weights_map[key], current, key)


def _listed(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:5])
    return shown + (f" and {len(names) - 5} more" if len(names) > 5 else "")
