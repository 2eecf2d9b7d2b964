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

from accelfn.errors import MissingExtraError

_MOST_NAMES = 5
T = TypeVar("T")


def tell_unknown(unknown: Sequence[str], known: Collection[str]) -> str:
    """List names for an error, each with at most three known ones that look like it. Pure.

    >>> tell_unknown(["linaer", "x"], ["linear", "bias"])
    "'linaer' (near it: 'linear'), 'x'"
    """
    told: list[str] = []
    for name in unknown[:_MOST_NAMES]:
        near = difflib.get_close_matches(name, known, n=3)
        told.append(f"{name!r}" + (f" (near it: {', '.join(map(repr, near))})" if near else ""))
    return listed([*told, *unknown[_MOST_NAMES:]])


def listed(names: Iterable[str], most: int = _MOST_NAMES) -> str:
    """List names for an error, the first of them by name. Pure.

    >>> listed(["a", "b", "c"], most=2)
    'a, b and 1 more'
    """
    told = list(names)
    more = f" and {len(told) - most} more" if len(told) > most else ""
    return f"{', '.join(told[:most])}{more}"


def names_in(given: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return one name, several, or none as a tuple. Pure."""
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)


def place_of(name: str, places: Mapping[str, T]) -> T | None:
    """Find what a map has for a tensor or module: of its keys the longest that the name begins with. Pure.

    >>> place_of("a.b.weight", {"": 0, "a": 1, "a.c": 2})
    1
    """
    while name not in places:
        if not name:
            return None
        name = name.rpartition(".")[0]
    return places[name]


# As precision is written elsewhere.
_SHORT: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
)


def named_dtype(name: str) -> torch.dtype | None:
    """Find a dtype by its name in torch, with or without ``torch.``, or by ``"bf16"`` and the like.

    >>> named_dtype("torch.float16"), named_dtype("bf16"), named_dtype("float15")
    (torch.float16, torch.bfloat16, None)
    """
    plain = name.removeprefix("torch.")
    found: object = _SHORT.get(plain) or getattr(torch, plain, None)
    return found if isinstance(found, torch.dtype) else None


Place: TypeAlias = int | str
"""An accelerator by its number, ``"mps"``, ``"cpu"`` (the host's memory), ``"disk"``, or a simulated device.

``"cpu:0"``, ``"cpu:1"`` and so on are simulated devices: they lie in the host's memory, and everything else
treats them as accelerators. So what a model does on several devices can be run without any.
"""

PlaceLike: TypeAlias = int | str | torch.device
"""What callers may write for a place: also devices of torch, ``"cuda:1"`` and ``"cuda"``, the current one."""

_SIMULATED = re.compile(r"cpu:(\d+)")
_NUMBERED = re.compile(r"([a-z]+)(?::(\d+))?")


def read_place(place: object, what: str = "device") -> Place:
    """Turn what a caller writes for a place into the one form that plans use.

    Whether this machine has the device isn't asked: plans are made for other machines too. ``"cuda"`` is the
    current device at the time of the call, and 0 where there is none.

    Args:
        place: A number, a name, or a device of torch.
        what: Where it stands, for errors.

    Raises:
        ValueError: No such place can exist.

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
        if match is not None and match[1] in _accelerator_types():
            if match[1] == "mps":
                return "mps"
            here = current_place()
            return int(match[2]) if match[2] else here if isinstance(here, int) else 0
    raise ValueError(
        f"{what}: there is no place {place!r}. Places are numbers of accelerators (0, 1, ...), names such as "
        "'cuda:0', 'mps', 'cpu', 'disk', and 'cpu:0', 'cpu:1' and so on for simulated devices."
    )


def _accelerator_types() -> frozenset[str]:
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    # Without any, "cuda:0" is what somebody writes who plans for another machine.
    return frozenset({"cuda"} if here is None else {here.type})


def current_place() -> Place:
    """Return the place where models run if nobody says otherwise: the current accelerator, or the CPU."""
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if here is None:
        return "cpu"
    return "mps" if here.type == "mps" else torch.accelerator.current_device_index()


def is_on(tensor: torch.Tensor, device: torch.device) -> bool:
    """Whether ``tensor`` is on ``device``; on mps, torch numbers the devices of tensors alone."""
    return tensor.device.type == device.type and (tensor.device.index or 0) == (device.index or 0)


def is_simulated(place: Place) -> bool:
    """Whether it is a device that is simulated in the host's memory."""
    return isinstance(place, str) and _SIMULATED.fullmatch(place) is not None


def is_accelerator(place: Place) -> bool:
    """Whether it is no place of the host: an accelerator, or a simulated one."""
    return place not in ("cpu", "disk")


def order_of(place: Place) -> tuple[int, int]:
    """Where a place stands among others, the fastest first: accelerators, simulated ones, mps, cpu, disk."""
    if isinstance(place, int):
        return (0, place)
    match = _SIMULATED.fullmatch(place)
    if match is not None:
        return (1, int(match[1]))
    return (("mps", "cpu", "disk").index(place) + 2, 0)


def check_device(place: Place, what: str = "device") -> torch.device:
    """Return torch's device for a place.

    Args:
        place: Any but ``"disk"``, which holds no tensors of torch.
        what: Where it stands, for errors.

    Raises:
        ValueError: This machine has no such device, or it is the disk.
    """
    if place == "disk":
        raise ValueError(f"{what}: nothing is computed on the disk. Name a device, such as 'cpu'.")
    if place == "cpu" or is_simulated(place):
        return torch.device("cpu")
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    count = torch.accelerator.device_count() if here is not None else 0
    if place == "mps":
        if here is not None and here.type == "mps":
            return torch.device("mps")
    elif here is not None and here.type != "mps" and isinstance(place, int) and place < count:
        return torch.device(here.type, place)
    have = f"{count} of type {here.type}" if here is not None else "none"
    raise ValueError(
        f"{what}: this machine has no accelerator {place!r} (it has {have}). Use 'cpu', or 'cpu:0' and so on "
        "for devices that are simulated in the host's memory."
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
        TypeError: A size is neither a text nor a number.
    """
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
        TypeError: A size is neither a text nor a number.

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
