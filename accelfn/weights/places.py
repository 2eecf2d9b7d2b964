"""Devices, dtypes and sizes as callers write them, and how much memory each device may hold."""

from __future__ import annotations

import difflib
import importlib
import logging
import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar, cast

import torch

from accelfn.context import device_module
from accelfn.devices import device_type
from accelfn.errors import MissingExtraError

_MAX_NAMES = 5
T = TypeVar("T")


def suggest_names(unknown: Sequence[str], known: Collection[str]) -> str:
    """List unknown names for an error message, each with the known names that resemble it. Pure.

    >>> suggest_names(["linaer", "x"], ["linear", "bias"])
    "'linaer' (did you mean 'linear'?), 'x'"
    """
    texts: list[str] = []
    for name in unknown[:_MAX_NAMES]:
        similar = difflib.get_close_matches(name, known, n=3)
        texts.append(f"{name!r}" + (f" (did you mean {' or '.join(map(repr, similar))}?)" if similar else ""))
    return listed([*texts, *unknown[_MAX_NAMES:]])


def listed(names: Iterable[str], most: int = _MAX_NAMES) -> str:
    """Join names for an error message, and count those beyond the first few. Pure.

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    texts = list(names)
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return f"{', '.join(texts[:most])}{more}"


def as_names(names: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return one name, several names, or None as a tuple. Pure."""
    return () if names is None else (names,) if isinstance(names, str) else tuple(names)


def place_of(name: str, places: Mapping[str, T]) -> T | None:
    """Look up a tensor or module in a device map: the longest key that is the name or a parent of it. Pure.

    >>> place_of("a.b.weight", {"": 0, "a": 1, "a.c": 2})
    1
    """
    while name not in places:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return places[name]


_SHORT_DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
)


def named_dtype(name: str) -> torch.dtype | None:
    """Find a dtype by its torch name, with or without ``torch.``, or by a short one such as ``"bf16"``.

    >>> named_dtype("torch.float16"), named_dtype("bf16"), named_dtype("float15")
    (torch.float16, torch.bfloat16, None)
    """
    plain = name.removeprefix("torch.")
    dtype: object = _SHORT_DTYPES.get(plain) or getattr(torch, plain, None)
    return dtype if isinstance(dtype, torch.dtype) else None


Place: TypeAlias = int | str
"""An accelerator by index, ``"mps"``, ``"cpu"`` (host memory), ``"disk"``, or a simulated device.

``"cpu:0"``, ``"cpu:1"`` and so on are simulated devices: they use host memory but are treated as accelerators
everywhere else, so that multi-device behaviour can be tested without any hardware.
"""

PlaceLike: TypeAlias = int | str | torch.device
"""What callers may pass as a place: also ``torch.device``, ``"cuda:1"``, and ``"cuda"`` (the current one)."""

_SIMULATED = re.compile(r"cpu:(\d+)")
_NUMBERED = re.compile(r"([a-z]+)(?::(\d+))?")


def read_place(place: object, what: str = "device") -> Place:
    """Normalise what a caller passes as a place.

    The device needn't exist on this machine, since plans are also made for other machines. ``"cuda"`` is the
    current device at the time of the call, or 0 without a GPU.

    Args:
        place: An index, a name, or a ``torch.device``.
        what: The argument's name in errors.

    Raises:
        ValueError: ``place`` isn't a place.

    >>> read_place(0), read_place("cuda:1"), read_place("cpu"), read_place("cpu:1"), read_place("disk")
    (0, 1, 'cpu', 'cpu:1', 'disk')
    """
    if isinstance(place, int) and not isinstance(place, bool):
        if place >= 0:
            return place
    elif isinstance(place, (str, torch.device)):
        text = str(place)
        if text in ("cpu", "disk", "mps") or _SIMULATED.fullmatch(text):
            return text
        match = _NUMBERED.fullmatch(text)
        accelerator = _accelerator()
        # Without an accelerator, "cuda:0" plans for another machine.
        if match is not None and match[1] == ("cuda" if accelerator is None else accelerator.type):
            if device_type(match[1]).numbering == "none":
                return match[1]
            current = current_place()
            return int(match[2]) if match[2] else current if isinstance(current, int) else 0
    raise ValueError(
        f"{what}: unknown place {place!r}. Use an accelerator's index (0, 1, ...), 'cuda:0', 'mps', 'cpu', "
        "'disk', or 'cpu:0', 'cpu:1' and so on for simulated devices."
    )


def _accelerator() -> torch.device | None:
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def current_place() -> Place:
    """Return the default device: the current accelerator, or the CPU."""
    accelerator = _accelerator()
    if accelerator is None:
        return "cpu"
    is_alone = device_type(accelerator.type).numbering == "none"
    return accelerator.type if is_alone else torch.accelerator.current_device_index()


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Check whether ``tensor`` is on ``device``; only tensors on mps have an index that the device lacks."""
    return tensor.device.type == device.type and (tensor.device.index or 0) == (device.index or 0)


def is_simulated(place: Place) -> bool:
    """Check whether ``place`` is a device simulated in host memory."""
    return isinstance(place, str) and _SIMULATED.fullmatch(place) is not None


def is_accelerator(place: Place) -> bool:
    """Check whether ``place`` is an accelerator, real or simulated."""
    return place not in ("cpu", "disk")


def order_of(place: Place) -> tuple[int, int]:
    """Return a sort key, fastest first: accelerators, simulated devices, mps, cpu, disk."""
    if isinstance(place, int):
        return (0, place)
    match = _SIMULATED.fullmatch(place)
    if match is not None:
        return (1, int(match[1]))
    return (("mps", "cpu", "disk").index(place) + 2, 0)


def check_device(place: Place, what: str = "device") -> torch.device:
    """Return the ``torch.device`` of a place.

    Args:
        place: Any place but ``"disk"``.
        what: The argument's name in errors.

    Raises:
        ValueError: This machine has no such device, or ``place`` is the disk.
    """
    if place == "disk":
        raise ValueError(f"{what}: the disk can't compute. Pass a device, such as 'cpu'.")
    if place == "cpu" or is_simulated(place):
        return torch.device("cpu")
    accelerator = _accelerator()
    count = torch.accelerator.device_count() if accelerator is not None else 0
    if accelerator is not None:
        is_alone = device_type(accelerator.type).numbering == "none"
        if is_alone and place == accelerator.type:
            return torch.device(accelerator.type)
        if not is_alone and isinstance(place, int) and place < count:
            return torch.device(accelerator.type, place)
    available = f"{count} of type {accelerator.type}" if accelerator is not None else "none"
    raise ValueError(
        f"{what}: this machine has no accelerator {place!r} (it has {available}). Use 'cpu', or 'cpu:0' and "
        "so on for devices simulated in host memory."
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
# Without a limit, cgroups v1 report the largest multiple of a page.
_NO_LIMIT = 1 << 60


def convert_file_size_to_int(size: float | str) -> int:
    """Convert a size such as ``"10GB"``, or a number of bytes, to bytes. Pure.

    Decimal units are powers of 1000, units with an i powers of 1024. Case doesn't matter: ``"10gb"`` is 10
    gigabytes.

    Raises:
        ValueError: The text has another form, or the number isn't finite and at least 0.
        TypeError: ``size`` is neither a string nor a number.

    >>> convert_file_size_to_int("1.5 GB"), convert_file_size_to_int("10gb"), convert_file_size_to_int("2KiB")
    (1500000000, 10000000000, 2048)
    """
    value = cast("object", size)
    if isinstance(value, str):
        match = _SIZE.fullmatch(value)
        if match is not None:
            return int(Decimal(match[1]) * _UNITS[match[2].upper()])
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        if math.isfinite(value) and value >= 0:
            return int(value)
    else:
        raise TypeError(f"a size must be a number of bytes or a string such as '10GB', got {value!r}.")
    raise ValueError(
        "a size must be a number of bytes of at least 0, or a number with B, KB, MB, GB, TB (powers of "
        f"1000), KiB, MiB, GiB or TiB (powers of 1024), such as '10GB': got {value!r}."
    )


def read_budgets(max_memory: MaxMemory, what: str = "max_memory") -> dict[Place, int]:
    """Convert memory limits by place to bytes. Pure.

    Args:
        max_memory: Sizes by place.
        what: The argument's name in errors.

    Returns:
        Bytes by place, fastest place first: accelerators, simulated devices, mps, cpu, disk.

    Raises:
        ValueError: A place is unknown or specified twice, or a size has another form.
        TypeError: A size is neither a string nor a number.
    """
    budgets: dict[Place, int] = {}
    for key, size in max_memory.items():
        place = read_place(key, what)
        if place in budgets:
            raise ValueError(f"{what} specifies the place {place!r} twice, once as {key!r}. Remove one.")
        try:
            budgets[place] = convert_file_size_to_int(size)
        except (TypeError, ValueError) as error:
            raise type(error)(f"{what}[{key!r}]: {error}") from error
    return dict(sorted(budgets.items(), key=lambda pair: order_of(pair[0])))


def get_max_memory(max_memory: MaxMemory | None = None) -> dict[Place, int]:
    """Return how much memory each place may hold: as specified, or what is free on this machine.

    Ranks: local. Without ``max_memory`` it queries this machine's accelerators, which starts their driver.

    Args:
        max_memory: Sizes by place, in bytes or such as ``"10GB"``. Places that it leaves out aren't used,
            except the disk, which holds the remainder: without ``"cpu"``, host memory holds no weights. None
            for the free memory of all accelerators and of the host.

    Returns:
        Bytes by place, fastest first. ``max_memory`` isn't modified.

    Raises:
        ValueError: A place is unknown or specified twice, or a size has another form.
        TypeError: A size is neither a string nor a number.

    >>> get_max_memory({"cpu": "20GB", "cuda:1": 10_000, 0: "1KiB"})
    {0: 1024, 1: 10000, 'cpu': 20000000000}
    """
    if max_memory is not None:
        return read_budgets(max_memory)
    budgets: dict[Place, int] = {}
    accelerator = _accelerator()
    if accelerator is not None and device_type(accelerator.type).numbering == "none":
        return {accelerator.type: available_memory()}  # it shares the host's memory
    if accelerator is not None:
        module = device_module(accelerator.type)
        for index in range(torch.accelerator.device_count()):
            try:
                budgets[index] = int(module.mem_get_info(index)[0])
            except Exception as error:  # noqa: BLE001, PERF203 -- drivers raise exceptions of any class
                logging.getLogger(__name__).info("accelerator %d isn't used: %s", index, error)
    budgets["cpu"] = available_memory()
    return budgets


def available_memory(root: Path = Path("/")) -> int:
    """Return how much memory this process can still allocate without swapping or being killed.

    Ranks: local. Linux reports it in ``/proc/meminfo``; the limits of the process's control groups apply too,
    as in a container. Other systems are queried through psutil.

    Args:
        root: Parent directory of ``proc`` and ``sys``.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        try:
            psutil: Any = importlib.import_module("psutil")
        except ImportError as error:
            raise MissingExtraError(
                "reading the free memory of this system needs psutil: pip install 'accelfn[bigmodel]'. Or "
                "pass max_memory with a size for 'cpu'."
            ) from error
        return int(psutil.virtual_memory().available)
    return max(0, min([free, *_free_in_cgroups(root)]))


def _free_in_cgroups(root: Path) -> list[int]:
    """Return the free memory below each cgroup limit of this process."""
    free: list[int] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:  # cgroups v2
            base, limit_file, usage_file = root / "sys/fs/cgroup", "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            base, limit_file = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            usage_file = "memory.usage_in_bytes"
        else:
            continue
        # A limit applies to all groups below. In a container the root of what it sees may be its own group.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            group = base.joinpath(*parts[:depth])
            limit = _read(group / limit_file).strip()
            if limit.isdecimal() and int(limit) < _NO_LIMIT:
                # The page cache counts as used, and is reclaimed under memory pressure.
                stat = dict(line.split() for line in _read(group / "memory.stat").splitlines())
                cached = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
                free.append(int(limit) - int(_read(group / usage_file).strip() or 0) + cached)
    return free


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
