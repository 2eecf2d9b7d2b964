"""The nodes of a document: what is in a container and how a path names it, and values without tensors.

A path is a JSON pointer (RFC 6901) without its first slash, such as ``model/0.weight``: the keys and indices
from the root, with ``~`` and ``/`` in a key written as ``~0`` and ``~1``.

None, bool, int, finite float and str stand for themselves. Further kinds are an object with the kind under
``"$"``; only the very classes are taken, as a subclass could mean more than its value. Nothing is imported
for a file.
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

from accelfn.checkpoint.header import dtype_from_name, dtype_name
from accelfn.checkpoint.manifest import Json
from accelfn.errors import AccelfnError, CheckpointError, DamagedCheckpointError, MissingExtraError

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


# --- containers ------------------------------------------------------------------------------------

# Of containers in containers. A document nests up to four times as deep, and json recurses.
MAX_DEPTH = 64

# Kinds whose value is a tensor among the stored ones.
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
    """What is in a container of a tree.

    Attributes:
        kind: As its document has it.
        keys: By which each child is reached.
        children: One for each key.
        metadata: What a class that is registered with optree keeps beside its children.
    """

    kind: str
    keys: Sequence[Any]
    children: Sequence[Any]
    metadata: Any = None


def parts_of(value: Any, namespace: str = "") -> Parts | None:
    """List what is in a container: one of Python, or registered with optree; None for any other value."""
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
    """Return how optree flattens and unflattens a class registered with it; None for another one."""
    return cast("Any", optree).register_pytree_node.get(kind, namespace=namespace)


def is_array(value: Any) -> bool:
    """Return whether ``value`` is an array of numpy, and of no subclass."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def is_leaf(value: Any) -> bool:
    """Return whether a value of a tree is stored as a tensor."""
    return isinstance(value, (torch.Tensor, torch.Generator)) or is_array(value)


def is_object(value: Any, namespace: str = "") -> bool:
    """Return whether a value of a tree is stored by its state: no leaf, plain value or container."""
    return not (is_leaf(value) or is_plain(value) or parts_of(value, namespace) is not None)


def leaves_of(tree: Any, path: str = "", namespace: str = "") -> Iterator[tuple[str, Any]]:
    """List the leaves and objects of a tree with their paths."""
    parts = parts_of(tree, namespace)
    if parts is not None:
        for key, child in zip(parts.keys, parts.children, strict=True):
            yield from leaves_of(child, step(path, key), namespace)
    elif not is_plain(tree):
        yield path[1:], tree


def step(path: str, key: Any) -> str:
    """Append a key to a path that begins with a slash. For None the place is the same."""
    if key is None:
        return path
    text = key if type(key) is str else key_text(key)
    if not text.isascii():
        text = text.encode("utf-8", "backslashreplace").decode()  # a name in a file has no lone surrogates
    if "~" in text or "/" in text:
        text = text.replace("~", "~0").replace("/", "~1")
    return f"{path}/{text}"


def below(path: str, *keys: Any) -> str:
    """Append keys to a path as tensors are named by it: without the first slash; "" for the root.

    >>> below("", "model", "a/b"), below("model", 0)
    ('model/a~1b', 'model/0')
    """
    return functools.reduce(step, keys, f"/{path}" if path else "")[1:]


def shown(path: str) -> str:
    """Return a path as people see it and tensors are named by it: without the first slash."""
    return path[1:] or "tree"


def key_text(key: Any) -> str:
    """Name a key of a dict in paths."""
    return f"{type(key).__name__}.{key.name}" if isinstance(key, enum.Enum) else str(key)


def damaged(path: str, why: str) -> DamagedCheckpointError:
    """Make the error for a node that is malformed."""
    return DamagedCheckpointError(
        f"The tree of the checkpoint is damaged at {shown(path)!r}: {why}. Take an older checkpoint."
    )


def children_of(node: Json, path: str) -> list[tuple[Any, Json]] | None:
    """List what is inside of a node of a document, by key; None where it is a leaf or a plain value.

    What stands at the same place as the node, as the state of an object does, has the key None.

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
    except Exception as error:  # whatever a constructor says to the content of a file
        raise damaged(path, f"a {kind} can't be read ({error!r})") from error
    raise damaged(path, f"there is no kind {kind!r}")


def stored_names(document: Json) -> Iterator[str]:
    """List the names of the stored tensors that a document has need of; several times if it has."""
    if isinstance(document, list):
        for one in document:
            yield from stored_names(one)
    elif isinstance(document, dict):
        name = document.get("name")
        if isinstance(name, str) and document.get("$") in LEAVES:
            yield name
        else:
            for one in document.values():
                yield from stored_names(one)
