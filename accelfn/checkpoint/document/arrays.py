"""numpy's scalars and arrays, where numpy is installed.

Arrays of numbers lie in a checkpoint as tensors. What torch has no dtype for (dates, texts, records, other
byte orders) lies as its bytes, and numpy's name of its dtype stands beside. numpy is never imported to write.
"""

from __future__ import annotations

import base64
import importlib
import math
import sys
from types import MappingProxyType, ModuleType
from typing import Any, cast

import torch

from accelfn.checkpoint.document.classes import class_of
from accelfn.checkpoint.document.plain import Refusal, count, read_plain, write_plain
from accelfn.comm.wire import as_bytes, as_tensor
from accelfn.errors import MissingExtraError

__all__ = (
    "array_as_tensor",
    "is_array",
    "is_scalar",
    "raw_array",
    "raw_bytes",
    "read_raw",
    "read_scalar",
    "tensor_as_array",
    "write_scalar",
)

Node = dict[str, Any]

_NATIVE = frozenset(
    (
        *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)
_TEXTS = MappingProxyType({"str_": str, "bytes_": bytes})


def is_array(value: Any) -> bool:
    """Whether ``value`` is an array of numpy, and of no subclass."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(value) is numpy.ndarray


def is_scalar(value: Any) -> bool:
    """Whether ``value`` is a scalar of numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def array_as_tensor(array: Any) -> torch.Tensor | None:
    """View an array as a tensor, in the same memory where torch can.

    Returns:
        The tensor; None where torch has no dtype for it.
    """
    if array.dtype.name not in _NATIVE or not array.dtype.isnative or array.dtype.names is not None:
        return None
    size = array.dtype.itemsize
    fits = all(stride >= 0 and stride % size == 0 for stride in array.strides)
    if not (fits and array.flags.writeable and array.flags.aligned):
        array = array.copy(order="K" if fits else "C")
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]


def tensor_as_array(tensor: torch.Tensor, *, writeable: bool) -> Any:
    """View a tensor on the CPU as an array."""
    _numpy()
    array: Any = tensor.numpy()
    if not writeable:
        array.flags.writeable = False
    return array


def raw_array(array: Any) -> Node:
    """Return what the bytes of an array don't say: dtype, shape, order.

    Raises:
        Refusal: Its bytes aren't all of it.
    """
    node: Node = {"numpy": _describe(array.dtype), "sides": list(array.shape)}
    if array.flags.f_contiguous and not array.flags.c_contiguous:
        node["order"] = "F"
    return node


def raw_bytes(array: Any) -> torch.Tensor:
    """Copy the bytes of an array into a tensor, in the order that :func:`raw_array` says."""
    turned = array.flags.f_contiguous and not array.flags.c_contiguous
    return as_tensor(array.tobytes(order="F" if turned else "C"))


def read_raw(node: Node, content: torch.Tensor) -> Any:
    """Make an array of its bytes, a flat uint8 tensor.

    Raises:
        Exception: Of any kind, where the node is malformed or the bytes aren't as many as it says.
        MissingExtraError: numpy isn't installed.
    """
    numpy = _numpy()
    dtype = _dtype(node["numpy"])
    shape = tuple(map(count, node["sides"]))
    data = bytearray(as_bytes(content.cpu().contiguous()))
    if len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for an array of {shape} and {dtype}")
    order = node.get("order", "C")
    array = numpy.ndarray(shape, dtype, data, order=order) if data else numpy.empty(shape, dtype, order=order)
    if not node.get("writeable", True):
        array.flags.writeable = False
    return array


def write_scalar(value: Any) -> Node:
    """Write a scalar of numpy as JSON.

    Raises:
        Refusal: Its bytes aren't all of it.
    """
    kind = class_of(value)
    if kind.__name__ in _TEXTS and kind.__module__ == "numpy":  # their dtype says nothing of what is in them
        text = _TEXTS[kind.__name__](value)
        return {"$": "numpy", "text": write_plain(text)}
    content = base64.b64encode(value.tobytes()).decode()
    node = {"$": "numpy", "dtype": _describe(value.dtype), "base64": content}
    try:
        back = read_scalar(node)
        same = type(back) is kind and back.tobytes() == value.tobytes()
    except (TypeError, ValueError):
        same = False
    if not same:
        raise Refusal(f"a {kind.__module__}.{kind.__qualname__} that is more than its bytes")
    return node


def read_scalar(node: Node) -> Any:
    """Read what :func:`write_scalar` wrote.

    Raises:
        Exception: Of any kind, where the node is malformed.
        MissingExtraError: numpy isn't installed.
    """
    numpy = _numpy()
    if "text" in node:
        text = read_plain(node["text"])
        if type(text) is str:
            return numpy.str_(text)
        if type(text) is bytes:
            return numpy.bytes_(text)
        raise ValueError("no text of numpy's")
    dtype = _dtype(node["dtype"])
    content = bytearray(base64.b64decode(node["base64"], validate=True))
    if len(content) != dtype.itemsize:
        raise ValueError(f"{len(content)} bytes for {dtype}")
    array = numpy.ndarray((), dtype, content) if content else numpy.empty((), dtype)
    return array[()]


def _numpy() -> ModuleType:
    try:
        return importlib.import_module("numpy")
    except ImportError as error:
        raise MissingExtraError(
            "The checkpoint holds arrays of numpy, which is not installed. Install it: pip install numpy"
        ) from error


def _describe(dtype: Any) -> Any:
    """Describe a dtype by texts, lists and numbers, as numpy's own files do."""
    if dtype.hasobject:
        raise Refusal("an array of Python objects, of which numpy holds only the addresses")
    described = _listed(_numpy().lib.format.dtype_to_descr(dtype))
    try:
        same = _dtype(described) == dtype
    except (TypeError, ValueError):
        same = False
    if not same:
        raise Refusal(f"an array of {dtype}, a dtype that numpy can't describe in a file")
    return described


def _listed(described: Any) -> Any:
    if isinstance(described, (list, tuple)):
        return [_listed(part) for part in cast("list[Any]", described)]
    return described


def _dtype(described: Any) -> Any:
    dtype = _numpy().lib.format.descr_to_dtype(_tupled(described, is_fields=True))
    if dtype.hasobject:
        raise ValueError("an array of Python objects")
    return dtype


def _tupled(described: Any, *, is_fields: bool) -> Any:
    """Undo JSON's making a list of every tuple: fields are a list of tuples, all else is tuples."""
    if not isinstance(described, list):
        return read_plain(described)
    parts = cast("list[Any]", described)
    if is_fields and parts and all(isinstance(part, list) for part in parts):
        return [_field(part) for part in parts]
    return tuple(_tupled(part, is_fields=index == 0 and is_fields) for index, part in enumerate(parts))


def _field(parts: list[Any]) -> Any:
    name, described, *shape = parts
    if isinstance(name, list):  # with a title
        name = tuple(cast("list[str]", name))
    return (name, _tupled(described, is_fields=True), *(tuple(sides) for sides in shape))
