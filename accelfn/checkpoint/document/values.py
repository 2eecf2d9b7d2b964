"""Values without tensors as JSON and back, and classes by name. Nothing is imported for a file.

None, bool, int, finite float and str stand for themselves. Further kinds are an object with the kind under
``"$"``; only the very classes are taken, as a subclass could mean more than its value.
"""

from __future__ import annotations

import base64
import enum
import importlib
import json
import pathlib
import sys
from collections.abc import Callable
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple, cast

import torch

from accelfn.checkpoint.header import dtype_from_name, dtype_name
from accelfn.checkpoint.manifest import Json
from accelfn.errors import CheckpointError, MissingExtraError

# Beyond it Python may refuse to write an int in decimal, as it takes long.
_MAX_INT_BITS = 1024
NUMPY_DTYPES = frozenset(
    (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)


class Refusal(Exception):  # noqa: N818 - no error of its own: it becomes a row of one
    """A value that can't be stored, and why."""


class _Codec(NamedTuple):
    """A kind of values: its class, and how they become JSON and come back."""

    kind: type
    write: Callable[[Any], Json]
    read: Callable[[Any], Any]


def _write_bytes(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _read_bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _read_bytearray(text: str) -> bytearray:
    return bytearray(_read_bytes(text))


def _write_complex(value: complex) -> Json:
    return [repr(value.real), repr(value.imag)]


def _read_complex(parts: list[str]) -> complex:
    real, imag = map(float, parts)
    return complex(real, imag)


_CODECS = MappingProxyType(
    {
        "float": _Codec(float, repr, float),  # the infinite ones, and nan
        "complex": _Codec(complex, _write_complex, _read_complex),
        "bytes": _Codec(bytes, _write_bytes, _read_bytes),
        "bytearray": _Codec(bytearray, _write_bytes, _read_bytearray),
        "dtype": _Codec(torch.dtype, dtype_name, dtype_from_name),
        "device": _Codec(torch.device, str, torch.device),
        "size": _Codec(torch.Size, list, torch.Size),
        "path": _Codec(type(pathlib.Path()), str, pathlib.Path),
    }
)
_COLLECTIONS = MappingProxyType({"tuple": tuple, "set": set, "frozenset": frozenset})
_LITERALS = frozenset({type(None), bool, int, float, str})
_KIND_OF = MappingProxyType({one.kind: kind for kind, one in _CODECS.items()} | {set: "set"})
PLAIN_KINDS = frozenset({*_CODECS, "enum", "numpy", "set", "frozenset"})


def is_plain(value: Any) -> bool:
    """Return whether a value is of a kind that :func:`write_plain` writes."""
    kind = class_of(value)
    return (
        kind in _LITERALS
        or kind in _KIND_OF
        or kind is frozenset
        or isinstance(value, enum.Enum)
        or _is_scalar(value)
    )


def write_plain(value: Any) -> Json:
    """Write a value that has no tensors.

    Returns:
        It as JSON; NotImplemented where it is of another kind.

    Raises:
        Refusal: It is of such a kind, but can't be written.
    """
    kind = class_of(value)
    if kind is str:
        if value.isascii() or not any("\ud800" <= one <= "\udfff" for one in value):
            return value
        raise Refusal("a text with half a character (a lone surrogate); store its bytes")
    if kind is bool or value is None:
        return value
    if kind is int:
        if value.bit_length() > _MAX_INT_BITS:
            raise Refusal(f"a number of more than {_MAX_INT_BITS} bits; store it as bytes")
        return value
    if kind is float and value - value == 0:
        return value
    name = _KIND_OF.get(kind)
    if kind is set or kind is frozenset:
        # In an order that is the same in every process.
        return {"$": kind.__name__, "items": sorted(map(write_key, value), key=json.dumps)}
    if name is not None:
        return {"$": name, "value": _CODECS[name].write(value)}
    if isinstance(value, enum.Enum):
        if type(value).__members__.get(value.name) is value:
            return {"$": "enum", "of": spell_class(kind), "value": value.name}
        raise Refusal(f"{value!r}, which is no named member of its enum")
    if _is_scalar(value):
        if value.dtype.name not in NUMPY_DTYPES:
            raise Refusal(f"a {kind.__module__}.{kind.__qualname__}; store value.item()")
        return {"$": "numpy", "dtype": value.dtype.name, "value": _write_bytes(value.tobytes())}
    return cast("Json", NotImplemented)


def write_key(value: Any) -> Json:
    """Write a key of a dict or a member of a set: a plain value, or a tuple of such.

    Raises:
        Refusal: It is of another kind.
    """
    if type(value) is tuple:
        return {"$": "tuple", "items": [write_key(part) for part in cast("tuple[Any, ...]", value)]}
    written = write_plain(value)
    if written is NotImplemented:
        raise Refusal(
            f"a {class_of(value).__qualname__} as a key or a member of a set; those can be plain values such "
            "as texts, numbers, enums, and tuples of them"
        )
    return written


def read_plain(node: Json, like: Any = None) -> Any:
    """Read what :func:`write_plain` or :func:`write_key` wrote.

    Args:
        node: The JSON.
        like: A value at the same place in the tree to load into, for its class.

    Raises:
        Exception: Of any kind, as it comes from the constructors, where the node is malformed.
        CheckpointError: It is of a class that the program doesn't have.
        MissingExtraError: It is of numpy, which isn't installed.
    """
    if not isinstance(node, dict):
        if type(node) not in _LITERALS or (isinstance(node, float) and node - node != 0):
            raise ValueError(f"{node!r} is no plain value")
        return node
    kind = node["$"]
    if kind in _COLLECTIONS:
        return _COLLECTIONS[kind](read_plain(part) for part in node["items"])
    if kind == "enum":
        found = find_class(node["of"], like, lambda one: issubclass(one, enum.Enum), "an enum")
        return cast("type[enum.Enum]", found).__members__[node["value"]]
    if kind == "numpy":
        if node["dtype"] not in NUMPY_DTYPES:
            raise ValueError("no dtype of numbers")
        (value,) = require_numpy().frombuffer(_read_bytes(node["value"]), node["dtype"])
        return value
    return _CODECS[kind].read(node["value"])


# --- numpy, which is never imported to write -----------------------------------------------------


def _is_scalar(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def require_numpy() -> ModuleType:
    """Import numpy.

    Raises:
        MissingExtraError: It isn't installed.
    """
    try:
        return importlib.import_module("numpy")
    except ImportError as error:
        raise MissingExtraError(
            "The checkpoint holds arrays of numpy, which is not installed. Install it: pip install numpy"
        ) from error


# --- classes -------------------------------------------------------------------------------------


def class_of(value: object) -> type[Any]:
    """Return the class of a value, for type checkers that would wonder of what."""
    return type(value)


def spell_class(kind: type) -> str:
    """Name a class so that :func:`find_class` finds it: its module, a colon and its qualified name.

    >>> spell_class(dict)
    'builtins:dict'
    """
    return f"{kind.__module__}:{kind.__qualname__}"


def find_class(spelled: str, like: Any, accepts: Callable[[type], bool], what: str) -> type:
    """Find a class that a file names: the one of ``like``, else one that the program has imported already.

    A module is only looked into: nothing of it runs, not even its ``__getattr__``.

    Args:
        spelled: As :func:`spell_class` gives it.
        like: A value at the same place in the tree to load into; its own class is taken if it has this name.
        accepts: Whether a class is of the kind that the file says.
        what: That kind in words, such as ``"an enum"``, for errors.

    Raises:
        ValueError: The name is none, or that of something else.
        CheckpointError: The program has no such class now.
    """
    own = class_of(like)
    if spell_class(own) == spelled and accepts(own):
        return own
    module, colon, qualname = spelled.partition(":")
    if not colon or not module or not qualname:
        raise ValueError(f"{spelled!r} is no name of a class")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        inside: dict[str, Any] = getattr(found, "__dict__", {}) if found is not None else {}
        found = inside.get(part)
    if found is None:
        raise CheckpointError(
            f"The checkpoint holds {what} {qualname} of the module {module}, which the program doesn't have: "
            "nothing is imported for a file. Import the module before loading, or load into a tree that has "
            "one (like=)."
        )
    if not isinstance(found, type) or spell_class(found) != spelled or not accepts(found):
        raise ValueError(f"{spelled} is not {what}")
    return found
