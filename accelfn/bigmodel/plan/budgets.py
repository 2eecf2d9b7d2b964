"""How many bytes of a model each place may hold."""

from __future__ import annotations

import importlib
import logging
import math
import re
from collections.abc import Collection, Mapping
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from accelfn.bigmodel.places import Place, is_accelerator, order_of, read_place
from accelfn.bigmodel.plan.shape import ModelShape, read_shape
from accelfn.bigmodel.plan.sizes import AnyDtype, check_names, get_module_leaves, read_class_names, sizes_of
from accelfn.errors import MissingExtraError

__all__ = (
    "MaxMemory",
    "available_memory",
    "balance_budgets",
    "convert_file_size_to_int",
    "get_balanced_memory",
    "get_max_memory",
    "read_budgets",
)

MaxMemory: TypeAlias = "Mapping[Any, int | float | str]"
"""Sizes by place, in bytes or such as ``"10GB"``; places as in :data:`PlaceLike`."""

_UNITS = MappingProxyType(
    {
        "B": 1,
        "KB": 10**3,
        "MB": 10**6,
        "GB": 10**9,
        "TB": 10**12,
        "KIB": 2**10,
        "MIB": 2**20,
        "GIB": 2**30,
        "TIB": 2**40,
    }
)
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]?i?B)\s*", re.IGNORECASE)
# What a limit of the first version of cgroups is where there is none: the largest multiple of a page.
_NO_LIMIT = 1 << 60


def convert_file_size_to_int(size: float | str) -> int:
    """Read a size such as ``"10GB"``, or a number of bytes. Pure.

    Decimal units are powers of 1000 and those with an i are powers of 1024, in small letters too: ``"10gb"``
    are 10 gigabytes.

    Raises:
        ValueError: It has another form, or isn't finite and at least 0.
        TypeError: It is neither a text nor a number.

    >>> convert_file_size_to_int("1.5 GB"), convert_file_size_to_int("10gb"), convert_file_size_to_int("2KiB")
    (1500000000, 10000000000, 2048)
    """
    given = cast("object", size)
    if isinstance(given, str):
        match = _SIZE.fullmatch(given)
        if match is not None:
            return int(Decimal(match[1]) * _UNITS[match[2].upper()])
    elif isinstance(given, (int, float)) and not isinstance(given, bool):
        if math.isfinite(given) and given >= 0:
            return int(given)
    else:
        raise TypeError(f"a size is a number of bytes, or a text such as '10GB': got {given!r}.")
    raise ValueError(
        "a size is a number of bytes from 0 on, or a number with B, KB, MB, GB, TB (powers of 1000), KiB, "
        f"MiB, GiB or TiB (powers of 1024), such as '10GB': got {given!r}."
    )


def read_budgets(max_memory: MaxMemory, what: str = "max_memory") -> dict[Place, int]:
    """Read how much each place may hold. Pure: what is given isn't changed.

    Args:
        max_memory: Sizes by place.
        what: How errors call it.

    Returns:
        Bytes by place, the fastest place first: accelerators, simulated ones, mps, cpu, disk.

    Raises:
        ValueError: There is no such place, one is given twice, or a size has another form.
        TypeError: It is no mapping, or a size is neither a text nor a number.
    """
    if not isinstance(cast("object", max_memory), Mapping):
        raise TypeError(
            f"{what} takes sizes by place, such as {{0: '10GB', 'cpu': '30GB'}}: got {max_memory!r}."
        )
    found: dict[Place, int] = {}
    for given, size in max_memory.items():
        place = read_place(given, what)
        if place in found:
            raise ValueError(f"{what} gives the place {place!r} twice, once as {given!r}. Give it once.")
        try:
            found[place] = convert_file_size_to_int(size)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{what}[{given!r}]: {error}") from error
    return dict(sorted(found.items(), key=lambda pair: order_of(pair[0])))


def get_max_memory(max_memory: MaxMemory | None = None) -> dict[Place, int]:
    """Return how much each place may hold: what is given, or else what this machine has free.

    Ranks: local. Without ``max_memory`` it asks the accelerators of this machine, which starts their driver.

    Args:
        max_memory: Sizes by place, in bytes or such as ``"10GB"``. What isn't in it isn't used, but for the
            disk, which holds whatever is left: without ``"cpu"`` nothing lies in the host's memory. None for
            the free memory of all accelerators and of the host.

    Returns:
        Bytes by place, the fastest first. ``max_memory`` is left as it is.

    Raises:
        ValueError: There is no such place, one is given twice, or a size has another form.
        TypeError: It is no mapping, or a size is neither a text nor a number.

    >>> get_max_memory({"cpu": "20GB", "cuda:1": 10_000, 0: "1KiB"})
    {0: 1024, 1: 10000, 'cpu': 20000000000}
    """
    if max_memory is not None:
        return read_budgets(max_memory)
    found: dict[Place, int] = {}
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if here is not None and here.type == "mps":
        return {"mps": available_memory()}  # it has the memory of the host
    if here is not None:
        device_module: Any = torch.get_device_module(here.type)
        for number in range(torch.accelerator.device_count()):
            free = _free_of(device_module, number)
            if free is not None:
                found[number] = free
    found["cpu"] = available_memory()
    return found


def _free_of(device_module: Any, number: int) -> int | None:
    try:
        return int(device_module.mem_get_info(number)[0])
    except Exception as error:  # noqa: BLE001 -- drivers raise what they like
        logging.getLogger(__name__).info("accelerator %d isn't used: %s", number, error)
        return None


def available_memory(root: Path = Path("/")) -> int:
    """Return how much memory this process can still take without others being swapped out or killed.

    Ranks: local. It is what Linux says in ``/proc/meminfo``, or what is left of the limits of the control
    groups that the process is in, as in a container. On other systems psutil says it.

    Args:
        root: Where ``proc`` and ``sys`` are.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        try:
            psutil: Any = importlib.import_module("psutil")
        except ImportError as error:
            raise MissingExtraError(
                "the free memory of this system can't be read without psutil: pip install "
                "'accelfn[bigmodel]'. Or say in max_memory how much 'cpu' may hold."
            ) from error
        return int(psutil.virtual_memory().available)
    return max(0, min([free, *_left_in_groups(root)]))


def _left_in_groups(root: Path) -> list[int]:
    """Return how much is left of each limit for memory that holds for this process."""
    found: list[int] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, kinds, path = line.split(":", 2)
        if not kinds:
            base, limit, usage = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in kinds.split(","):
            base, limit = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            usage = "memory.usage_in_bytes"
        else:
            continue
        # A limit holds for all groups below. In a container its own group may be the root of what it sees.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            group = base.joinpath(*parts[:depth])
            said = _read(group / limit).strip()
            if said.isdecimal() and int(said) < _NO_LIMIT:
                # What was read from files counts as used, and is given back when memory is short.
                stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
                cached = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
                found.append(int(said) - int(_read(group / usage).strip() or 0) + cached)
    return found


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def get_balanced_memory(
    model: nn.Module,
    max_memory: MaxMemory | None = None,
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: AnyDtype | None = None,
    special_dtypes: Mapping[str, AnyDtype] | None = None,
    low_zero: bool = False,
) -> dict[Place, int]:
    """Lower the budgets of accelerators, so that a model that would fit on few is spread evenly over all.

    Ranks: local. See :func:`get_max_memory` for what it asks the machine.

    Args:
        model: Any module, also on the meta device.
        max_memory: As :func:`get_max_memory` takes it. With a single accelerator and without this, a tenth of
            its memory is left for what the model computes.
        no_split_module_classes: Names of classes whose modules stay whole.
        dtype: With which the model will be loaded; see :func:`compute_module_sizes`.
        special_dtypes: Dtypes of single tensors, by name.
        low_zero: Leave as much as possible of the first accelerator free.

    Returns:
        Bytes by place, the fastest first. ``max_memory`` is left as it is.

    Raises:
        ValueError: As :func:`get_max_memory` and :func:`compute_module_sizes` do.
        TypeError: As :func:`get_max_memory` does.
    """
    shape = read_shape(model, "get_balanced_memory")
    check_names(shape, special_dtypes)
    budgets = get_max_memory(max_memory)
    own = max_memory is None
    return balance_budgets(
        shape, budgets, no_split_module_classes, dtype, special_dtypes, low_zero, leave_tenth=own
    )


def balance_budgets(
    shape: ModelShape,
    budgets: Mapping[Place, int],
    no_split_module_classes: Collection[str] | str | None = None,
    dtype: AnyDtype | None = None,
    special_dtypes: Mapping[str, AnyDtype] | None = None,
    low_zero: bool = False,
    leave_tenth: bool = False,
) -> dict[Place, int]:
    """Do what :func:`get_balanced_memory` does for a shape. Pure.

    Each accelerator but the last gets an equal share, and on top of it a quarter more than the largest block
    or, if that is larger, than layers have on average.

    Args:
        shape: Of the model.
        budgets: Bytes by place, the fastest first.
        no_split_module_classes: Names of classes whose modules stay whole.
        dtype: With which the model will be loaded.
        special_dtypes: Dtypes of single tensors, by name.
        low_zero: Leave as much as possible of the first accelerator free.
        leave_tenth: If there is one accelerator, leave a tenth of it free.
    """
    found = dict(budgets)
    accelerators = [place for place in budgets if is_accelerator(place)]
    used = [place for place in accelerators if budgets[place] > 0]
    if len(used) <= 1:
        if used and leave_tenth:
            found[used[0]] = found[used[0]] * 9 // 10
        return found
    sizes = sizes_of(shape, dtype, special_dtypes)
    total = sizes[""]
    share = total // (len(used) - low_zero)
    kept = frozenset(read_class_names(no_split_module_classes))
    class_of = {module.name: module.class_name for module in shape.root.modules()}
    blocks: dict[str, int] = {}  # the first of each class stands for all
    for name, size in sizes.items():
        if name and class_of.get(name) in kept:
            blocks.setdefault(class_of[name], size)
    tensors = frozenset(get_module_leaves(sizes))
    layers = get_module_leaves({name: size for name, size in sizes.items() if name not in tensors})
    mean = sum(sizes[name] for name in layers) // max(len(layers), 1)
    share += int(1.25 * max([mean, *blocks.values()]))
    first, last = accelerators[0], used[-1]
    for place in used:
        if place != last and not (low_zero and place == first):
            found[place] = min(share, found[place])
    if low_zero:
        others = sum(found[place] for place in accelerators if place != first)
        found[first] = min(found[first], max(0, total - others))
    return found
