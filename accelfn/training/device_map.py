"""Models that are spread over several devices of one process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import nn

from accelfn.context import Context
from accelfn.errors import ConfigurationError

__all__ = ("check_devices", "verify_device_map")


def verify_device_map(model: nn.Module) -> bool:
    """Say whether a device map has spread a model, or a module inside of it, over several devices.

    Ranks: local.

    Args:
        model: Whatever loaded it left its map in ``hf_device_map``.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    >>> verify_device_map(model)
    False
    >>> model.hf_device_map = {"0": "cpu", "1": "disk"}
    >>> verify_device_map(model)
    True
    """
    return any(len(_device_map_of(module)) > 1 for module in model.modules())


def check_devices(ctx: Context, model: nn.Module) -> None:
    """Refuse a model on several devices where every rank has one of its own.

    Ranks: local.

    Raises:
        ConfigurationError: It is on several devices, and there are several ranks.
    """
    if ctx.num_processes == 1:
        return
    places: dict[str, str] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        places.setdefault(str(tensor.device), name)
    if verify_device_map(model):
        found = "a device map has spread it over several"
    elif len(places) > 1:
        found = ", ".join(f"{name} is on {device}" for device, name in places.items())
    else:
        return
    raise ConfigurationError(
        f"prepare_model: each of the {ctx.num_processes} ranks holds the whole model on one device, and this "
        f"model is on several: {found}. Load it without a device map (device_map=None) and move it to one "
        "device, or run a single process."
    )


def _device_map_of(module: nn.Module) -> Mapping[str, Any]:
    found = getattr(module, "hf_device_map", None)
    return cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else {}
