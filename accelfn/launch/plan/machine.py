"""Facts about this machine that a plan needs, found without torch; and which cores each process gets."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class NumaNode:
    """Cores that share a part of the memory, of those that this process may use."""

    number: int
    cpus: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a plan has to know about a machine.

    Attributes:
        cores: Cores that its processes share.
        devices: Accelerators, as far as they can be counted without torch; None if they can't be.
        device_variable: Variable by which accelerators are chosen.
        numa: Its memory nodes; empty where the system doesn't say.
        device_numa: Node of each accelerator; -1 where the system doesn't say.
        has_false_peers: Whether its accelerators say that they reach each other's memory and don't: several
            GeForce RTX 40 cards with a driver before 550.40.07.
        python: The interpreter.
        mpirun: Path of mpirun or mpiexec, or None.
        is_open_mpi: Whether that is Open MPI's.
    """

    cores: int = 1
    devices: int | None = None
    device_variable: str = "CUDA_VISIBLE_DEVICES"
    numa: tuple[NumaNode, ...] = ()
    device_numa: tuple[int, ...] = ()
    has_false_peers: bool = False
    python: str = "python"
    mpirun: str | None = None
    is_open_mpi: bool = False


def read_machine(environment: Mapping[str, str], *, root: str = "/", wants_mpi: bool = False) -> Machine:
    """Look at this machine. Effect: reads /dev and /sys, and may start ``nvidia-smi`` and ``mpirun``.

    Args:
        environment: Variables; those that choose accelerators count.
        root: Where /dev and /sys lie.
        wants_mpi: Whether to look for mpirun.
    """
    usable = os.sched_getaffinity(0) if sys.platform == "linux" else frozenset(range(os.cpu_count() or 1))
    mpirun = (shutil.which("mpirun") or shutil.which("mpiexec")) if wants_mpi else None
    devices, device_numa = _read_devices(root)
    variable = "CUDA_VISIBLE_DEVICES" if devices else _device_variable(root)
    return Machine(
        cores=len(usable),
        devices=count_devices(devices, environment),
        device_variable=variable,
        numa=_read_numa(root, frozenset(usable)),
        device_numa=device_numa,
        has_false_peers=_has_false_peers(Path(root, "proc/driver/nvidia")),
        python=sys.executable,
        mpirun=mpirun,
        is_open_mpi=mpirun is not None and _is_open_mpi(mpirun),
    )


def count_devices(found: int | None, environment: Mapping[str, str]) -> int | None:
    """Count the accelerators that variables leave of those that were found. Pure.

    >>> count_devices(8, {"CUDA_VISIBLE_DEVICES": "0,3"}), count_devices(8, {}), count_devices(None, {})
    (2, 8, None)
    """
    if not found:
        return found
    for name in ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"):
        if name in environment:
            ids = [part for part in environment[name].split(",") if part.strip()]
            return len(ids[: ids.index("-1")] if "-1" in ids else ids)
    return found


def _read_devices(root: str) -> tuple[int | None, tuple[int, ...]]:
    """Count accelerators of NVIDIA or AMD; where there may be others, only torch knows."""
    cards = [path for path in Path(root, "dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    if cards:
        buses = sorted(Path(root, "proc/driver/nvidia/gpus").glob("*"))
        nodes = tuple(
            _read_number(Path(root, "sys/bus/pci/devices", bus.name.lower(), "numa_node")) for bus in buses
        )
        return len(cards), nodes
    if Path(root, "dev/dxg").exists():  # Windows' Linux, which has no /dev/nvidia0
        return _ask_nvidia_smi(), ()
    kfd = Path(root, "sys/class/kfd/kfd/topology/nodes").glob("*/gpu_id")
    found = sum(1 for path in kfd if _read_number(path) > 0)
    has_others = sys.platform != "linux" or _device_variable(root) != "CUDA_VISIBLE_DEVICES"
    return (None if has_others and not found else found), ()


def _has_false_peers(driver: Path) -> bool:
    models = [_read_text(path) for path in driver.glob("gpus/*/information")]
    cards = sum(re.search(r"GeForce RTX 40\d\d", model) is not None for model in models)
    version = re.search(r"Module\D*?(\d+)\.(\d+)(?:\.(\d+))?", _read_text(driver / "version"))
    if cards < 2 or version is None:
        return False
    return tuple(int(part or 0) for part in version.groups()) < (550, 40, 7)


def _read_text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


# Files that drivers of other makers put into /dev, and the variables that choose among their accelerators.
_OTHERS: tuple[tuple[str, str], ...] = (
    ("davinci[0-9]*", "ASCEND_RT_VISIBLE_DEVICES"),
    ("accel/accel[0-9]*", "HABANA_VISIBLE_MODULES"),
    ("cambricon_dev[0-9]*", "MLU_VISIBLE_DEVICES"),
    ("mtgpu*", "MUSA_VISIBLE_DEVICES"),
    ("neuron[0-9]*", "NEURON_RT_VISIBLE_CORES"),
    ("tcaicard[0-9]*", "SDAA_VISIBLE_DEVICES"),
)


def _device_variable(root: str) -> str:
    """Name the variable that chooses among the accelerators of this machine's maker."""
    for pattern, variable in _OTHERS:
        if any(Path(root, "dev").glob(pattern)):
            return variable
    for path in Path(root, "sys/class/drm").glob("renderD*/device/vendor"):
        with contextlib.suppress(OSError):
            if path.read_text().strip() == "0x8086":
                return "ZE_AFFINITY_MASK"
    return "CUDA_VISIBLE_DEVICES"


def _read_number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return -1


def _ask_nvidia_smi() -> int | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines()) or None


def _read_numa(root: str, usable: frozenset[int]) -> tuple[NumaNode, ...]:
    nodes: list[NumaNode] = []
    for path in Path(root, "sys/devices/system/node").glob("node*/cpulist"):
        number = path.parent.name.removeprefix("node")
        try:
            cpus = tuple(cpu for cpu in read_cpu_list(path.read_text()) if cpu in usable)
        except (OSError, ValueError):
            continue
        if number.isdecimal() and cpus:
            nodes.append(NumaNode(int(number), cpus))
    return tuple(sorted(nodes, key=lambda node: node.number))


def read_cpu_list(text: str) -> tuple[int, ...]:
    """Read the system's way to write a list of cores.

    >>> read_cpu_list("0-2,7")
    (0, 1, 2, 7)
    """
    found: list[int] = []
    for part in text.strip().split(","):
        if part:
            first, _, last = part.partition("-")
            found += range(int(first), int(last or first) + 1)
    return tuple(found)


def write_cpu_list(cpus: tuple[int, ...]) -> str:
    """Write a list of cores the system's way.

    >>> write_cpu_list((0, 1, 2, 7))
    '0-2,7'
    """
    parts: list[str] = []
    start = 0
    ordered = sorted(cpus)
    for index, cpu in enumerate(ordered):
        if index + 1 == len(ordered) or ordered[index + 1] != cpu + 1:
            first = ordered[start]
            parts.append(str(cpu) if first == cpu else f"{first}-{cpu}")
            start = index + 1
    return ",".join(parts)


def _is_open_mpi(program: str) -> bool:
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return "Open MPI" in done.stdout or "OpenRTE" in done.stdout or "PRRTE" in done.stdout


def plan_affinity(
    nodes: Sequence[NumaNode], local_size: int, device_nodes: Sequence[int] = ()
) -> tuple[tuple[int, ...], ...]:
    """Share the cores of a machine out. Pure.

    A process goes to the memory node of its accelerator; without that, processes are spread over the nodes in
    blocks. The processes of a node share its cores in equal parts; if it has fewer cores than processes, each
    may use all of them.

    Args:
        nodes: Memory nodes with the cores that may be used.
        local_size: Processes on this machine.
        device_nodes: Memory node of each process's accelerator, -1 where that isn't known.

    Returns:
        The cores of each process, in the order of local ranks; empty without nodes.

    >>> nodes = (NumaNode(0, (0, 1, 2, 3)), NumaNode(1, (4, 5, 6, 7)))
    >>> plan_affinity(nodes, 2), plan_affinity(nodes, 4, (1, 1, 0, 0))
    (((0, 1, 2, 3), (4, 5, 6, 7)), ((4, 5), (6, 7), (0, 1), (2, 3)))
    """
    if not nodes or local_size < 1:
        return ()
    known = {node.number: node for node in nodes}
    homes: list[NumaNode] = []
    for rank in range(local_size):
        number = device_nodes[rank] if rank < len(device_nodes) else -1
        homes.append(known.get(number) or nodes[rank * len(nodes) // local_size])
    plan: list[tuple[int, ...]] = []
    for rank, home in enumerate(homes):
        together = [one for one in range(local_size) if homes[one] is home]
        share = len(home.cpus) // len(together)
        place = together.index(rank)
        plan.append(home.cpus[place * share : (place + 1) * share] if share else home.cpus)
    return tuple(plan)
