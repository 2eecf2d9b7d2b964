"""The nodes of a document: containers and their children, paths, and values without tensors.

A path is a JSON pointer (RFC 6901) without its first slash, such as ``model/0.weight``: the keys and indices
from the root, with ``~`` and ``/`` in a key written as ``~0`` and ``~1``.

None, bool, int, finite float and str are stored as themselves. A value of any other kind is an object with
the kind under ``"$"``. Only exact classes are stored, because a subclass may hold more than its value. A file
never causes an import.
"""

from __future__ import annotations

import base64
import enum
import functools
import importlib
import json
import pathlib
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple, cast

import optree
import torch

from accelfn.checkpoint.manifest import Json
from accelfn.errors import AccelfnError, CheckpointError, DamagedCheckpointError, MissingExtraError
from accelfn.weights.dtypes import dtype_from_name, dtype_name

# Python refuses to format much larger numbers in decimal, because it takes long.
_MAX_INT_BITS = 1024
NUMPY_DTYPES = frozenset(
    (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)


# --- values without tensors ----------------------------------------------------------------------


class Refusal(Exception):  # noqa: N818 - never reaches the user: it becomes a row of an error
    """A value that can't be stored; the text says why."""


class _Codec(NamedTuple):
    """A class of values, and the functions that convert them to JSON and back."""

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
        "float": _Codec(float, repr, float),  # infinity and NaN
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
_KIND_OF = MappingProxyType({codec.kind: kind for kind, codec in _CODECS.items()})
_PLAIN_CLASSES = frozenset({*_LITERALS, *_KIND_OF, set, frozenset})
PLAIN_KINDS = frozenset({*_CODECS, "enum", "numpy", "set", "frozenset"})


def is_plain(value: Any) -> bool:
    """Whether a value is of a kind that :func:`write_plain` writes."""
    return class_of(value) in _PLAIN_CLASSES or isinstance(value, enum.Enum) or _is_numpy_scalar(value)


def write_plain(value: Any) -> Json:
    """Convert a value without tensors to JSON.

    Returns:
        The JSON; NotImplemented for a value of another kind.

    Raises:
        Refusal: The value is of such a kind, but can't be stored.
    """
    kind = class_of(value)
    if kind is str:
        if value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value):
            return value
        raise Refusal("a text with a lone surrogate; store its bytes")
    if kind is bool or value is None:
        return value
    if kind is int:
        if value.bit_length() > _MAX_INT_BITS:
            raise Refusal(f"a number of more than {_MAX_INT_BITS} bits; store it as bytes")
        return value
    if kind is float and value - value == 0:
        return value
    if kind is set or kind is frozenset:
        # Sorted, because the order of a set differs between processes.
        return {"$": kind.__name__, "items": sorted(map(write_key, value), key=json.dumps)}
    name = _KIND_OF.get(kind)
    if name is not None:
        return {"$": name, "value": _CODECS[name].write(value)}
    if isinstance(value, enum.Enum):
        if type(value).__members__.get(value.name) is value:
            return {"$": "enum", "of": class_path(kind), "value": value.name}
        raise Refusal(f"{value!r}, which is not a named member of its enum")
    if _is_numpy_scalar(value):
        if value.dtype.name not in NUMPY_DTYPES:
            # Of other kinds, such as dates and long floats, item() may return what can't be stored either.
            how = "value.item()" if value.dtype.kind in "SUV" else "str(value)"
            raise Refusal(f"a {kind.__module__}.{kind.__qualname__}; store {how}")
        return {"$": "numpy", "dtype": value.dtype.name, "value": _write_bytes(value.tobytes())}
    return cast("Json", NotImplemented)


def write_key(value: Any) -> Json:
    """Convert a key of a dict or a member of a set: a plain value, or a tuple of plain values.

    Raises:
        Refusal: The value is of another kind.
    """
    if type(value) is tuple:
        return {"$": "tuple", "items": [write_key(part) for part in cast("tuple[Any, ...]", value)]}
    written = write_plain(value)
    if written is NotImplemented:
        raise Refusal(
            f"a {class_of(value).__qualname__} as a key or a member of a set; use plain values such as "
            "texts, numbers, enums, and tuples of them"
        )
    return written


def read_plain(node: Json, like: Any = None) -> Any:
    """Convert the result of :func:`write_plain` or :func:`write_key` back.

    Args:
        node: The JSON.
        like: The value at the same path in the tree to load into; its class is used for an enum.

    Raises:
        Exception: Of any class, from the constructors, if the node is malformed.
        CheckpointError: The program doesn't have a class.
        MissingExtraError: A value is of NumPy, which isn't installed.
    """
    if not isinstance(node, dict):
        if type(node) not in _LITERALS or (isinstance(node, float) and node - node != 0):
            raise ValueError(f"{node!r} is not a plain value")
        return node
    kind = node["$"]
    if kind in _COLLECTIONS:
        return _COLLECTIONS[kind](read_plain(part) for part in node["items"])
    if kind == "enum":
        found = find_class(node["of"], like, lambda of: issubclass(of, enum.Enum), "an enum")
        return cast("type[enum.Enum]", found).__members__[node["value"]]
    if kind == "numpy":
        if node["dtype"] not in NUMPY_DTYPES:
            raise ValueError("not a dtype of numbers")
        (value,) = require_numpy().frombuffer(_read_bytes(node["value"]), node["dtype"])
        return value
    return _CODECS[kind].read(node["value"])


# --- NumPy, which writing never imports ----------------------------------------------------------


def _is_numpy_scalar(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def is_array(value: Any) -> bool:
    """Whether a value is a NumPy array, and not of a subclass."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def require_numpy() -> ModuleType:
    """Import NumPy.

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
    """Return the class of a value, typed for values of type Any."""
    return type(value)


def class_path(kind: type) -> str:
    """Return the name by which :func:`find_class` finds a class: module, colon, qualified name.

    >>> class_path(dict)
    'builtins:dict'
    """
    return f"{kind.__module__}:{kind.__qualname__}"


def find_class(path: str, like: Any, accepts: Callable[[type], bool], what: str) -> type:
    """Find a class that a file names: the class of ``like``, or one that the program has imported already.

    The module is only inspected; no code runs, not even a module's ``__getattr__``.

    Args:
        path: From :func:`class_path`.
        like: The value at the same path in the tree to load into; its class is used if it has this name.
        accepts: Whether a class is of the kind in the file.
        what: The kind in words, such as ``"an enum"``, for errors.

    Raises:
        ValueError: The name is malformed, or names something else.
        CheckpointError: The program doesn't have the class.
    """
    own = class_of(like)
    if class_path(own) == path and accepts(own):
        return own
    module, colon, qualname = path.partition(":")
    if not colon or not module or not qualname:
        raise ValueError(f"{path!r} is not the name of a class")
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        attributes: dict[str, Any] = getattr(found, "__dict__", {}) if found is not None else {}
        found = attributes.get(part)
    if found is None:
        raise CheckpointError(
            f"The checkpoint holds {what} {qualname} of the module {module}, which the program doesn't have. "
            "Import the module before loading, or load into a tree with such a value (like=); a file never "
            "causes an import."
        )
    if not isinstance(found, type) or class_path(found) != path or not accepts(found):
        raise ValueError(f"{path} is not {what}")
    return found


# --- containers ----------------------------------------------------------------------------------

# Of nested containers. A document nests up to four times as deep, and json recurses.
MAX_DEPTH = 64

# Kinds whose value is a stored tensor.
LEAVES = frozenset({"tensor", "array", "generator"})
KINDS = MappingProxyType(
    {
        list: "list",
        tuple: "tuple",
        deque: "deque",
        dict: "dict",
        OrderedDict: "ordereddict",
        defaultdict: "defaultdict",
        Counter: "counter",
    }
)
_CONTAINERS = frozenset({*KINDS.values(), "namedtuple", "node"} - {"list"})


class Parts(NamedTuple):
    """The content of a container in a tree.

    Attributes:
        kind: As in its document.
        keys: Key or index of each child.
        children: One for each key.
        metadata: What a class registered with optree keeps besides its children.
    """

    kind: str
    keys: Sequence[Any]
    children: Sequence[Any]
    metadata: Any = None


def parts_of(value: Any, namespace: str = "") -> Parts | None:
    """Open a container of Python, or of a class registered with optree. None for any other value."""
    of = class_of(value)
    kind = KINDS.get(of)
    if kind is not None:
        if isinstance(value, dict):
            items = cast("dict[Any, Any]", value)
            return Parts(kind, list(items), list(items.values()))
        return Parts(kind, range(len(value)), value)
    if value is None or isinstance(value, torch.Tensor):
        return None
    if isinstance(value, tuple):
        named = cast("Any", value) if optree.is_namedtuple_class(of) else None
        return None if named is None else Parts("namedtuple", named._fields, named)
    entry = registry_entry(of, namespace)
    if entry is None:
        return None
    children, metadata, *names = entry.flatten_func(value)
    children = list(children)
    keys = list(names[0]) if names and names[0] is not None else range(len(children))
    return Parts("node", keys, children, metadata)


def registry_entry(kind: type, namespace: str) -> Any:
    """Return how optree flattens and unflattens a class; None for a class that isn't registered."""
    return cast("Any", optree).register_pytree_node.get(kind, namespace=namespace)


def is_leaf(value: Any) -> bool:
    """Whether a value in a tree is stored as a tensor."""
    return isinstance(value, (torch.Tensor, torch.Generator)) or is_array(value)


def is_object(value: Any, namespace: str = "") -> bool:
    """Whether a value in a tree is stored by its state: it is no leaf, plain value or container."""
    return not (is_leaf(value) or is_plain(value) or parts_of(value, namespace) is not None)


def leaves_of(tree: Any, path: str = "", namespace: str = "") -> Iterator[tuple[str, Any]]:
    """List the leaves and objects of a tree with their paths."""
    parts = parts_of(tree, namespace)
    if parts is not None:
        for key, child in zip(parts.keys, parts.children, strict=True):
            yield from leaves_of(child, child_path(path, key), namespace)
    elif not is_plain(tree):
        yield path[1:], tree


# --- paths ---------------------------------------------------------------------------------------


def child_path(path: str, key: Any) -> str:
    """Append a key to a path that begins with a slash. The key None leaves the path unchanged."""
    if key is None:
        return path
    text = key if type(key) is str else key_text(key)
    if not text.isascii():
        text = text.encode("utf-8", "backslashreplace").decode()  # a file's names have no lone surrogates
    if "~" in text or "/" in text:
        text = text.replace("~", "~0").replace("/", "~1")
    return f"{path}/{text}"


def join_path(path: str, *keys: Any) -> str:
    """Append keys to the name of a tensor: a path without its first slash; "" for the root.

    >>> join_path("", "model", "a/b"), join_path("model", 0)
    ('model/a~1b', 'model/0')
    """
    return functools.reduce(child_path, keys, f"/{path}" if path else "")[1:]


def displayed(path: str) -> str:
    """Return a path as in errors and names of tensors: without its first slash."""
    return path[1:] or "tree"


def key_text(key: Any) -> str:
    """Return the text of a key in paths."""
    return f"{type(key).__name__}.{key.name}" if isinstance(key, enum.Enum) else str(key)


# --- documents -----------------------------------------------------------------------------------


def damaged(path: str, why: str) -> DamagedCheckpointError:
    """Make the error for a malformed node."""
    return DamagedCheckpointError(
        f"The tree of the checkpoint is damaged at {displayed(path)!r}: {why}. Use an older checkpoint."
    )


def children_of(node: Json, path: str) -> list[tuple[Any, Json]] | None:
    """List the children of a node in a document, by key. None for a leaf or plain value.

    The state of an object has the key None, because its path is that of the object.

    Raises:
        DamagedCheckpointError: The node is malformed.
    """
    if isinstance(node, list):
        return list(enumerate(node))
    if not isinstance(node, dict):
        return None
    kind = node.get("$")
    if kind is None:
        return list(node.items())
    try:
        if kind in LEAVES or kind in PLAIN_KINDS:
            return None
        if kind == "object":
            return [(None, node["state"])]
        if kind in _CONTAINERS:
            items = node["items"]
            if "keys" not in node:
                return list(enumerate(cast("list[Json]", items)))
            keys = [read_plain(key) for key in node["keys"]]
            if len(set(keys)) != len(items):
                raise ValueError(f"{len(keys)} keys for {len(items)} values")
            return list(zip(keys, items, strict=True))
    except AccelfnError:
        raise
    except Exception as error:  # constructors raise anything on malformed content
        raise damaged(path, f"a {kind} can't be read ({error!r})") from error
    raise damaged(path, f"there is no kind {kind!r}")


def stored_names(document: Json) -> Iterator[str]:
    """List the names of the stored tensors in a document, with repetitions."""
    if isinstance(document, list):
        for node in document:
            yield from stored_names(node)
    elif isinstance(document, dict):
        name = document.get("name")
        if isinstance(name, str) and document.get("$") in LEAVES:
            yield name
        else:
            for node in document.values():
                yield from stored_names(node)
