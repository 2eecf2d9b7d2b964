"""Properties of this machine that a plan needs, read without torch."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from accelfn.devices import DEVICE_TYPES, has_false_peers


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Properties of a machine.

    Attributes:
        cores: Number of available CPU cores.
        devices: Number of accelerators; None if they can't be counted without torch.
        device_variable: Variable that selects accelerators.
        has_false_peers: Whether the accelerators wrongly report peer-to-peer access: several GeForce RTX 40
            cards with a driver before 550.40.07.
        python: Path of the interpreter.
    """

    cores: int = 1
    devices: int | None = None
    device_variable: str = "CUDA_VISIBLE_DEVICES"
    has_false_peers: bool = False
    python: str = "python"


def count_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def read_machine(environment: Mapping[str, str], *, root: str = "/") -> Machine:
    """Inspect this machine. Effect: reads /dev and /sys.

    Args:
        environment: Variables, for those that select accelerators.
        root: Root directory of /dev and /sys.
    """
    devices = _read_devices(root)
    variable = "CUDA_VISIBLE_DEVICES" if devices else _device_variable(root)
    return Machine(
        cores=count_cores(),
        devices=count_devices(devices, environment),
        device_variable=variable,
        has_false_peers=has_false_peers(root),
        python=sys.executable,
    )


def count_devices(total: int | None, environment: Mapping[str, str]) -> int | None:
    """Return the number of visible accelerators, given the number in the machine. Pure.

    >>> count_devices(8, {"CUDA_VISIBLE_DEVICES": "0,3"}), count_devices(8, {}), count_devices(None, {})
    (2, 8, None)
    """
    if not total:
        return total
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in environment:
            ids = [part for part in environment[name].split(",") if part.strip()]
            return len(ids[: ids.index("-1")] if "-1" in ids else ids)
    return total


def _read_devices(root: str) -> int | None:
    """Count the accelerators of NVIDIA or AMD; None if there may be others, which only torch can count."""
    cards = [path for path in Path(root, "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    if cards:
        return len(cards)
    kfd = Path(root, "sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    count = sum(_read_text(path).strip() not in ("", "0") for path in kfd)
    is_wsl = Path(root, "dev/dxg").exists()  # which has no /dev/nvidia0
    may_have_others = is_wsl or sys.platform != "linux" or _device_variable(root) != "CUDA_VISIBLE_DEVICES"
    return None if may_have_others and not count else count


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _device_variable(root: str) -> str:
    """Return the variable that selects accelerators, depending on the vendor."""
    kind = "cuda"
    for row in DEVICE_TYPES.values():
        if any(True for pattern in row.files for _ in Path(root, "dev").glob(pattern)):
            kind = row.name
            break
    else:
        for path in Path(root, "sys/class/drm").glob("renderD*/device/vendor"):
            if _read_text(path).strip() == "0x8086":
                kind = "xpu"
    return DEVICE_TYPES[kind].visible or ""
