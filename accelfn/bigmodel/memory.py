"""How much memory the host has to spare."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

__all__ = ("available_memory",)

_MEMINFO = Path("/proc/meminfo")
# What limits this process's group, and what the group uses: version 2 of the kernel's groups, and version 1.
_GROUPS = (
    ("memory.max", "memory.current", Path("/sys/fs/cgroup")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", Path("/sys/fs/cgroup/memory")),
)


def available_memory(meminfo: Path = _MEMINFO) -> int:
    """Give the bytes of the host's memory that are free, or would be if caches gave way.

    Where a container limits the memory, what it leaves counts.

    Args:
        meminfo: What the kernel says of the machine.

    Raises:
        RuntimeError: The system doesn't say, and psutil isn't installed.
    """
    found = [size for size in (_of_machine(meminfo), *map(_of_group, _GROUPS)) if size is not None]
    if not found:
        raise RuntimeError(
            "this system doesn't say how much memory is free. Install psutil, or name the budget of the "
            "host: max_memory={'cpu': '16GB'}."
        )
    return max(0, min(found))


def _of_machine(meminfo: Path) -> int | None:
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    try:
        psutil: Any = importlib.import_module("psutil")
    except ImportError:
        pages, size = (os.sysconf_names.get(name) for name in ("SC_AVPHYS_PAGES", "SC_PAGE_SIZE"))
        return os.sysconf(pages) * os.sysconf(size) if pages and size else None
    return int(psutil.virtual_memory().available)


def _of_group(group: tuple[str, str, Path]) -> int | None:
    limit, used, place = group
    try:
        return int((place / limit).read_text()) - int((place / used).read_text())
    except (OSError, ValueError):  # no such group, or it says "max": no limit
        return None
