"""Where a model's weights are: on this rank's device, spread by a device map, or quantised."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelfn.comm import check_replicas
from accelfn.context import Context
from accelfn.errors import ConfigurationError
from accelfn.tree import is_dtensor

# Attribute that dispatch_model and its like set on a model: its weights must not be moved.
_DISPATCHED = "_accelfn_dispatched"


def verify_device_map(model: nn.Module) -> bool:
    """Return whether a device map has spread a model, or a module inside of it, over several devices.

    Ranks: local.

    Args:
        model: With the map in ``hf_device_map``, as loaders set it.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    >>> verify_device_map(model)
    False
    >>> model.hf_device_map = {"0": "cpu", "1": "disk"}
    >>> verify_device_map(model)
    True
    """
    return any(len(_device_map_of(module)) > 1 for module in model.modules())


def is_placed(model: nn.Module) -> bool:
    """Return whether a model must not be moved: a device map has spread it, or it is offloaded.

    Ranks: local.
    """
    return verify_device_map(model) or any(_DISPATCHED in vars(module) for module in model.modules())


def check_devices(ctx: Context, model: nn.Module, *, is_spread: bool = False) -> None:
    """Refuse a model on several devices if there are several ranks, and a quantised one on another device.

    Ranks: local.

    Args:
        ctx: The world.
        model: Not prepared yet.
        is_spread: Whether ranks share it.

    Raises:
        ConfigurationError: It is on several devices, there are several ranks, and the variable
            ``ACCELFN_BYPASS_DEVICE_MAP`` isn't true. Or it is quantised, on another device than the
            context's.
    """
    _check_quantised(ctx, model)
    if ctx.num_processes == 1 or ctx.strategy.bypass_device_map:
        return
    gets_memory = is_spread or not is_placed(model)
    places: dict[str, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not (gets_memory and tensor.is_meta):  # on this rank's device
            places.setdefault(str(tensor.device), name)
    if verify_device_map(model):
        found = "a device map has spread it over several"
    elif len(places) > 1:
        found = ", ".join(f"{name} is on {device}" for device, name in places.items())
    else:
        return
    raise ConfigurationError(
        f"prepare_model: each of the {ctx.num_processes} ranks holds the full model on one device, but this "
        f"model is on several: {found}. Load it without a device map (device_map=None) and move it to one "
        "device, or run a single process. If each rank has several devices for it, set the variable "
        "ACCELFN_BYPASS_DEVICE_MAP=true."
    )


def _check_quantised(ctx: Context, model: nn.Module) -> None:
    """Refuse quantised weights on another device than this rank's: they can't be moved."""
    places = {_device_of(place) for place in _device_map_of(model).values()}
    if not is_quantized(model):
        return
    wrong = sorted(place for place in places if place != _device_of(ctx.device))
    if wrong and (len(places) == 1 or {"cpu", "disk"} & set(wrong)):
        raise ConfigurationError(
            f"prepare_model: the model is quantised, and its device map puts weights on "
            f"{', '.join(wrong)}, while this rank trains on {ctx.device}. Load it with "
            f"device_map={{'': {str(ctx.device)!r}}}."
        )


def _device_of(place: object) -> str:
    """Normalise a device's name: ``0``, ``"cuda"`` and ``"cuda:0"`` are the same."""
    text = str(place)
    return text if text in ("cpu", "disk", "mps") else text.rpartition(":")[2] if text[-1:].isdigit() else "0"


def is_quantized(model: nn.Module) -> bool:
    """Return whether a model, or a module inside it, was loaded in 8 or 4 bits."""
    return any(
        bool(vars(module).get("is_loaded_in_8bit") or vars(module).get("is_loaded_in_4bit"))
        for module in model.modules()
    )


def check_packed(ctx: Context, model: nn.Module) -> None:
    """Refuse quantised weights that differ between ranks, since preparing doesn't make them equal.

    Engines broadcast tensors, but scales of quantised weights aren't tensors of a module: ranks would have
    one rank's numbers with the scales of another. Shards aren't compared.

    Ranks: every rank of ``ctx``; one digest of each such tensor is compared. Models without any don't
    communicate.

    Raises:
        ReplicaDriftError: They differ; with names and ranks.
    """
    if ctx.num_processes == 1 or not is_quantized(model):
        return
    plain = {
        name
        for name, parameter in (*model.named_parameters(), *model.named_buffers())
        if type(parameter) in (torch.Tensor, nn.Parameter)
    }
    packed = {
        name: _parts_of(one)
        for name, one in cast("Mapping[str, object]", model.state_dict(keep_vars=True)).items()
        if name not in plain and isinstance(one, torch.Tensor) and not is_dtensor(one)
    }
    check_replicas(ctx, packed, name="quantized")


def _parts_of(tensor: torch.Tensor) -> Any:
    """Return the tensors inside a wrapper subclass, by name; or the tensor itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.detach()
    names, _ = cast("tuple[list[str], object]", tensor.__tensor_flatten__())
    return {name: _parts_of(getattr(tensor, name)) for name in names}


def _device_map_of(module: nn.Module) -> Mapping[str, Any]:
    found = getattr(module, "hf_device_map", None)
    return cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else {}
