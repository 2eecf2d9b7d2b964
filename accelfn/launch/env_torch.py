"""The part of ``accelfn env`` that torch knows."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist

from accelfn.context import read_hardware

__all__ = ("describe_torch",)

_GIB = 1 << 30


def describe_torch() -> dict[str, Any]:
    """Ask torch for what it was built with and what it sees. Effect: may set up the accelerator's driver.

    Returns:
        Facts by name, as JSON has them.
    """
    hardware = read_hardware()
    version: Any = torch.version
    facts: dict[str, Any] = {
        "version": torch.__version__,
        "threads": torch.get_num_threads(),
        "backends": sorted(hardware.backends),
        "distributed": "there" if dist.is_available() else "this build has none",
    }
    for name in ("cuda", "hip", "xpu"):
        if getattr(version, name, None):
            facts[f"built for {name}"] = getattr(version, name)
    if torch.cuda.is_available():
        facts["NCCL"] = ".".join(map(str, _nccl_version()))
        facts["cuDNN"] = torch.backends.cudnn.version()
    kind = hardware.devices[0]
    if kind.type == "cpu":
        facts["accelerators"] = []
        return facts
    facts["accelerators"] = [_describe_device(kind.type, index) for index in range(kind.count)]
    facts["autocast"] = sorted(kind.precisions)
    if kind.type == "cuda" and kind.count > 1:
        facts["reach each other directly"] = _describe_peers(kind.count)
    return facts


def _nccl_version() -> tuple[int, ...]:
    module: Any = importlib.import_module("torch.cuda.nccl")
    return tuple(module.version())


def _describe_device(kind: str, index: int) -> str:
    module: Any = torch.get_device_module(kind)
    properties = getattr(module, "get_device_properties", None)
    if not callable(properties):
        return f"{kind}:{index}"
    told: Any = properties(index)
    parts = [f"{kind}:{index} {getattr(told, 'name', '')}".strip()]
    if getattr(told, "total_memory", None):
        parts.append(f"{told.total_memory / _GIB:.1f} GiB")
    if getattr(told, "major", None) is not None:
        parts.append(f"capability {told.major}.{told.minor}")
    return ", ".join(parts)


def _describe_peers(count: int) -> list[str]:
    rows: list[str] = []
    for one in range(count):
        others = [
            other for other in range(count) if other != one and torch.cuda.can_device_access_peer(one, other)
        ]
        rows.append(f"cuda:{one} to {', '.join(map(str, others)) or 'none'}")
    return rows
