"""A stand-in for torch_xla 2.9: the functions that accelfn calls, with their documented signatures.

Devices are simulated by the CPU: under :class:`OnHost` a tensor that is made on "xla" is on the CPU. What was
called is in ``calls``. The variables ``XLA_STAND_IN_RANK``, ``_SIZE`` and ``_PORT`` describe a world of
several processes.
"""

import os
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

calls: list[tuple[Any, ...]] = []
RANK = int(os.environ.get("XLA_STAND_IN_RANK", "0"))
SIZE = int(os.environ.get("XLA_STAND_IN_SIZE", "1"))


class OnHost(TorchFunctionMode):
    """Keeps on the CPU what would be on XLA's device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def host(value: Any) -> Any:
            is_xla = isinstance(value, torch.device) and value.type == "xla"
            return torch.device("cpu") if is_xla else value

        named: dict[str, Any] = kwargs or {}
        return func(*map(host, args), **{name: host(value) for name, value in named.items()})


def device(index: int | None = None) -> torch.device:
    return torch.device("xla:0")


def sync(wait: bool = False, reset_scope: bool = True) -> None:
    calls.append(("sync", wait))


def manual_seed(seed: int, device: torch.device | None = None) -> None:
    from .core import xla_model

    xla_model.set_rng_state(seed, device)
