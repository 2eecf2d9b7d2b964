"""Values without structure as JSON and back, exactly: numbers, texts, dates, paths, dtypes and the like.

What JSON has stays as it is: None, bool, int, finite float, str. All else becomes an object whose ``"$"``
says what it is. Only the very classes are taken: a subclass of int that is no enum could mean more than its
number.
"""

from __future__ import annotations

import base64
import datetime
import enum
import math
import pathlib
import re
import struct
import uuid
import zoneinfo
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from types import MappingProxyType
from typing import Any, cast

import torch

from accelfn.checkpoint.document.classes import class_of, find_class, spell_class_of
from accelfn.checkpoint.files.manifest import Json
from accelfn.checkpoint.files.stored_dtype import dtype_from_name, dtype_name

__all__ = ("LITERALS", "PLAIN_KINDS", "Refusal", "count", "is_json_text", "read_plain", "write_plain")

Node = dict[str, Any]

LITERALS = frozenset({type(None), bool, int, float, str})
_DOUBLE = struct.Struct(">d")
# Beyond it Python may refuse to write an int in decimal, as it takes long.
_MAX_INT_BITS = 1024
_DEVICE = re.compile(r"[a-z][a-z0-9_]*(:[0-9]{1,5})?")
_ZONE = re.compile(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*")
_NATIVE_PATH = type(pathlib.Path())
_LAYOUTS = MappingProxyType({str(x): x for x in vars(torch).values() if isinstance(x, torch.layout)})
_FORMATS = MappingProxyType({str(x): x for x in vars(torch).values() if isinstance(x, torch.memory_format)})


class Refusal(Exception):  # noqa: N818 - no error of its own: it becomes a row of one
    """A value that can't be stored, and why."""


def is_json_text(text: str) -> bool:
    """Whether JSON keeps a text: surrogates could be joined to one character on the way."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def count(value: object) -> int:
    """Return ``value`` if it is a number of things.

    Raises:
        ValueError: It isn't.
    """
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def write_plain(value: Any) -> Json:
    """Write a value without structure.

    Returns:
        It as JSON; NotImplemented where it is of another kind.

    Raises:
        Refusal: It is of such a kind, but can't be written.
    """
    writer = _WRITERS.get(class_of(value))
    if writer is not None:
        return writer(value)
    if isinstance(value, enum.Enum):
        return _write_enum(value)
    return cast("Json", NotImplemented)


def read_plain(node: Json, like: Any = None) -> Any:
    """Read what :func:`write_plain` wrote.

    Args:
        node: The JSON; a ``"$"`` in it is one of ``PLAIN_KINDS``.
        like: A value at the same place in the tree to load into, for its class.

    Raises:
        Exception: Of any kind, as it comes from the constructors, where the node is malformed.
        CheckpointError: It is of a class that the program doesn't have.
    """
    if not isinstance(node, dict):
        if type(node) not in LITERALS:
            raise ValueError(f"a {type(node).__name__} is no plain value")
        if isinstance(node, float) and not math.isfinite(node):
            raise ValueError("a number is infinite, or none")
        return node
    kind = node["$"]
    return _read_enum(node, like) if kind == "enum" else _READERS[kind](node)


# --- numbers and texts ---------------------------------------------------------------------------


def _write_literal(value: Any) -> Json:
    return value


def _write_int(value: int) -> Json:
    return value if value.bit_length() <= _MAX_INT_BITS else {"$": "int", "hex": hex(value)}


def _write_float(value: float) -> Json:
    return value if math.isfinite(value) else {"$": "float", "bits": _DOUBLE.pack(value).hex()}


def _read_float(node: Node) -> float:
    return _DOUBLE.unpack(bytes.fromhex(node["bits"]))[0]


def _write_str(value: str) -> Json:
    if is_json_text(value):
        return value
    return {"$": "str", "base64": _write_base64(value.encode("utf-8", "surrogatepass"))}


def _write_base64(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode()


def _read_base64(node: Node) -> bytes:
    return base64.b64decode(node["base64"], validate=True)


def _write_complex(value: complex) -> Json:
    return {"$": "complex", "parts": [_write_float(value.real), _write_float(value.imag)]}


def _read_complex(node: Node) -> complex:
    real, imag = map(read_plain, node["parts"])
    if type(real) is not float or type(imag) is not float:
        raise ValueError("a complex number is made of two floats")
    return complex(real, imag)


def _write_fraction(value: Fraction) -> Json:
    return {"$": "fraction", "parts": [_write_int(value.numerator), _write_int(value.denominator)]}


def _write_range(value: range) -> Json:
    return {"$": "range", "parts": [_write_int(part) for part in (value.start, value.stop, value.step)]}


def _write_slice(value: slice) -> Json:
    parts = [
        NotImplemented if isinstance(part, slice) else write_plain(part)
        for part in (value.start, value.stop, value.step)
    ]
    if NotImplemented in parts:
        raise Refusal("a slice whose ends aren't plain values")
    return {"$": "slice", "parts": parts}


def _read_ints(node: Node) -> list[int]:
    return [_int(read_plain(part)) for part in node["parts"]]


def _int(value: object) -> int:
    if type(value) is not int:
        raise ValueError(f"{value!r} is no int")
    return value


def _text(value: object) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r} is no text")
    return value


def _read_slice(node: Node) -> slice:
    parts = node["parts"]
    if any(isinstance(part, dict) and cast("Node", part)["$"] == "slice" for part in parts):
        raise ValueError("a slice of slices")
    start, stop, step = map(read_plain, parts)
    return slice(start, stop, step)


# --- dates ---------------------------------------------------------------------------------------


def _write_timedelta(value: datetime.timedelta) -> Json:
    return {"$": "timedelta", "parts": [value.days, value.seconds, value.microseconds]}


def _write_moment(value: datetime.datetime | datetime.time) -> Json:
    node: Node = {"$": type(value).__name__, "text": value.replace(tzinfo=None, fold=0).isoformat()}
    if value.fold:
        node["fold"] = 1
    if value.tzinfo is not None:
        node["zone"] = _write_zone(value.tzinfo)
    return node


def _write_zone(zone: Any) -> Json:
    if type(zone) is datetime.timezone:
        offset, *name = cast("Any", zone).__getinitargs__()
        return {"$": "timezone", "parts": [offset.days, offset.seconds, offset.microseconds], "name": name}
    if type(zone) is zoneinfo.ZoneInfo and zone.key and _ZONE.fullmatch(zone.key):
        return {"$": "zoneinfo", "key": zone.key}
    raise Refusal(f"a time in a {type(zone).__name__}; datetime.timezone and zoneinfo.ZoneInfo can be stored")


def _read_zone(node: Node) -> datetime.tzinfo:
    if node["$"] == "timezone":
        return datetime.timezone(datetime.timedelta(*_read_ints(node)), *map(_text, node["name"]))
    if node["$"] != "zoneinfo" or not _ZONE.fullmatch(node["key"]):
        raise ValueError("no time zone")
    return zoneinfo.ZoneInfo(node["key"])


def _read_moment(node: Node) -> Any:
    kind = datetime.datetime if node["$"] == "datetime" else datetime.time
    value = kind.fromisoformat(_text(node["text"]))
    zone = _read_zone(node["zone"]) if "zone" in node else None
    if value.tzinfo is not None:
        raise ValueError("the zone stands beside the time")
    return value.replace(tzinfo=zone, fold=count(node.get("fold", 0)))


# --- paths, torch's values and enums -------------------------------------------------------------


def _write_path(value: pathlib.PurePath) -> Json:
    # The native one comes back as the native one of the machine that reads it.
    name = "Path" if type(value) is _NATIVE_PATH else type(value).__name__
    return {"$": "path", "of": name, "text": _write_str(str(value))}


def _read_path(node: Node) -> pathlib.PurePath:
    kinds = {"Path": pathlib.Path, "PurePosixPath": pathlib.PurePosixPath}
    kind = {**kinds, "PureWindowsPath": pathlib.PureWindowsPath}[node["of"]]
    return kind(_text(read_plain(node["text"])))


def _write_device(value: torch.device) -> Json:
    return {"$": "device", "text": str(value)}


def _read_device(node: Node) -> torch.device:
    if not _DEVICE.fullmatch(node["text"]):
        raise ValueError("no device")
    return torch.device(node["text"])


def _write_enum(value: enum.Enum) -> Json:
    spelled = spell_class_of(value)
    if type(value).__members__.get(value.name) is value:
        return {"$": "enum", "of": spelled, "name": value.name}
    if isinstance(value, enum.Flag):  # several flags together, which have no name of their own
        return {"$": "enum", "of": spelled, "value": _write_int(_int(value.value))}
    raise Refusal(f"{value!r}, which is no named member of its enum")


def _read_enum(node: Node, like: Any) -> enum.Enum:
    kind = find_class(_text(node["of"]), like, _is_enum, "an enum")
    if "name" in node:
        return cast("type[enum.Enum]", kind).__members__[_text(node["name"])]
    if not issubclass(kind, enum.Flag):
        raise ValueError(f"{kind.__qualname__} has no flags")
    return kind(_int(read_plain(node["value"])))


def _is_enum(kind: type) -> bool:
    return issubclass(kind, enum.Enum)


def _named(kind: str) -> Callable[[Any], Json]:
    return lambda value: {"$": kind, "text": str(value)}


_WRITERS: MappingProxyType[type, Callable[[Any], Json]] = MappingProxyType(
    {
        type(None): _write_literal,
        bool: _write_literal,
        int: _write_int,
        float: _write_float,
        str: _write_str,
        complex: _write_complex,
        bytes: lambda value: {"$": "bytes", "base64": _write_base64(value)},
        bytearray: lambda value: {"$": "bytearray", "base64": _write_base64(value)},
        Decimal: _named("decimal"),
        Fraction: _write_fraction,
        uuid.UUID: _named("uuid"),
        pathlib.PurePosixPath: _write_path,
        pathlib.PureWindowsPath: _write_path,
        _NATIVE_PATH: _write_path,
        datetime.date: lambda value: {"$": "date", "text": value.isoformat()},
        datetime.time: _write_moment,
        datetime.datetime: _write_moment,
        datetime.timedelta: _write_timedelta,
        datetime.timezone: _write_zone,
        zoneinfo.ZoneInfo: _write_zone,
        range: _write_range,
        slice: _write_slice,
        torch.dtype: lambda value: {"$": "dtype", "text": dtype_name(value)},
        torch.device: _write_device,
        torch.Size: lambda value: {"$": "size", "parts": list(value)},
        torch.layout: _named("layout"),
        torch.memory_format: _named("memory_format"),
    }
)
_READERS: MappingProxyType[str, Callable[[Node], Any]] = MappingProxyType(
    {
        "int": lambda node: int(_text(node["hex"]), 16),
        "float": _read_float,
        "str": lambda node: _read_base64(node).decode("utf-8", "surrogatepass"),
        "complex": _read_complex,
        "bytes": _read_base64,
        "bytearray": lambda node: bytearray(_read_base64(node)),
        "decimal": lambda node: Decimal(_text(node["text"])),
        "fraction": lambda node: Fraction(*_read_ints(node)),
        "uuid": lambda node: uuid.UUID(_text(node["text"])),
        "path": _read_path,
        "date": lambda node: datetime.date.fromisoformat(_text(node["text"])),
        "time": _read_moment,
        "datetime": _read_moment,
        "timedelta": lambda node: datetime.timedelta(*_read_ints(node)),
        "timezone": _read_zone,
        "zoneinfo": _read_zone,
        "range": lambda node: range(*_read_ints(node)),
        "slice": _read_slice,
        "dtype": lambda node: dtype_from_name(_text(node["text"])),
        "device": _read_device,
        "size": lambda node: torch.Size(map(count, node["parts"])),
        "layout": lambda node: _LAYOUTS[node["text"]],
        "memory_format": lambda node: _FORMATS[node["text"]],
    }
)
PLAIN_KINDS = frozenset({*_READERS, "enum"})
