"""Convert a tree to a document of JSON and the tensors that it names. No pickle, no code, no import.

JSON values represent themselves: None, bool, int, finite float, str, list, and a dict whose keys are all
texts that don't begin with ``"$"``. Everything else is an object with its kind under ``"$"``:

- ``tensor``, ``array`` (NumPy) and ``generator`` (torch): the name of a stored tensor.
- Containers: ``tuple``, ``deque``, ``dict`` with other keys, ``ordereddict``, ``defaultdict``, ``counter``,
  ``namedtuple``, and ``node`` for a class registered with optree. Their children are ``items``.
- ``object``: the state of an object such as a model or an optimizer.
- Plain values, see ``nodes``.

Tensors are named by their path, a JSON pointer without its first slash (``model/0.weight``). A tensor that
occurs several times is stored once and becomes one tensor again; other views of the same memory are stored by
their values. A decoded tensor has the strides of the tensor's ``clone()``; lazy conjugation and negation are
resolved. A container that occurs several times becomes several.

Classes of namedtuples, enums and nodes are stored by name, and resolved among those that the program has.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch

from accelfn.checkpoint.document.nodes import (
    MAX_DEPTH,
    NUMPY_DTYPES,
    Parts,
    Refusal,
    child_path,
    class_of,
    class_path,
    displayed,
    is_array,
    parts_of,
    write_key,
    write_plain,
)
from accelfn.checkpoint.manifest import Json
from accelfn.tree import local_of
from accelfn.weights.dtypes import is_storable

Node = dict[str, Any]
Convert = Callable[[str, Any], Any]

FACTORIES: MappingProxyType[str, Any] = MappingProxyType(
    {
        **{kind.__name__: kind for kind in (list, dict, set, tuple, int, float, bool, str)},
        **dict[str, Any](OrderedDict=OrderedDict, deque=deque, none=None),
    }
)
_MAX_ROWS = 50


class Encoded(NamedTuple):
    """Result of :func:`encode`.

    Attributes:
        document: JSON.
        tensors: By the names in the document. They are the caller's memory, of any strides, and don't require
            grad.
    """

    document: Json
    tensors: dict[str, torch.Tensor]


def encode(tree: Any, *, convert: Convert | None = None, namespace: str = "") -> Encoded:
    """Split a tree into a document and tensors. Pure: only arrays that torch can't share are copied.

    Args:
        tree: Tensors, NumPy arrays, plain values, and objects with ``state_dict`` and ``load_state_dict``, in
            any containers of Python or registered with optree.
        convert: Called as ``convert(path, value)`` for every value that is no tensor, array, plain value or
            container. Its result is stored as the state of the object, unless it is ``NotImplemented``.
        namespace: Of classes registered with optree, besides the global one.

    Raises:
        TypeError: A value can't be stored: it is of an unknown class, code, a tensor without data, or a
            container that contains itself. All such values are listed by path.

    >>> encode({"step": 3, "w": torch.zeros(2)}).document
    {'step': 3, 'w': {'$': 'tensor', 'name': 'w'}}
    """
    encoder = _Encoder(convert, namespace)
    document = encoder.walk(tree, "", 0)
    if encoder.refused:
        num = len(encoder.refused)
        values = "One value" if num == 1 else f"{num} values"
        rows = [f"  {displayed(path)}: {why}" for path, why in encoder.refused[:_MAX_ROWS]]
        if num > _MAX_ROWS:
            rows.append(f"  ... and {num - _MAX_ROWS} more")
        raise TypeError(
            f"{values} of the tree can't be stored in a checkpoint:\n"
            + "\n".join(rows)
            + "\nStore such a value as a text, a number or a tensor; add state_dict() and load_state_dict() "
            "to its class, or register the class with optree (optree.register_pytree_node) and pass its "
            "namespace; or leave the value out of the tree."
        )
    return Encoded(document, encoder.tensors)


def _refusal(tensor: torch.Tensor, local: torch.Tensor) -> str | None:
    """Return why a tensor with a local part can't be stored; None if it can."""
    kind = type(local)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter:
        return (
            f"a {kind.__module__}.{kind.__qualname__}, a tensor that is more than its elements; store the "
            "tensors that it consists of, or its plain value, such as tensor.as_subclass(torch.Tensor)"
        )
    if tensor.is_nested:
        return "a nested tensor; store tensor.unbind()"
    if not is_storable(tensor.dtype):
        return "a quantized tensor; store tensor.dequantize(), or tensor.int_repr() and its scales"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}; store tensor.to_dense()"
    if tensor.is_meta:
        return "a tensor on the meta device, which has no data; allocate it with to_empty, or load it first"
    return None


class _Encoder:
    """One walk over one tree."""

    def __init__(self, convert: Convert | None, namespace: str) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.refused: list[tuple[str, str]] = []
        self._convert = convert
        self._namespace = namespace
        self._names: dict[Any, str] = {}  # by identity of the tensor
        self._kept: list[Any] = []  # alive, so that no other object gets the same id
        self._open: set[int] = set()  # ids of the containers around the current value

    def walk(self, value: Any, path: str, depth: int) -> Json:
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        try:
            written = write_plain(value)
        except Refusal as refused:
            return self._refuse(path, str(refused))
        if written is not NotImplemented:
            return written
        if isinstance(value, torch.Generator):
            name = self._name(("generator", id(value)), value.get_state, path)
            self._kept.append(value)
            return {"$": "generator", "name": name, "device": str(value.device)}
        if is_array(value):
            return self._array(value, path)
        if depth == MAX_DEPTH:
            return self._refuse(path, f"a container in more than {MAX_DEPTH} others")
        if id(value) in self._open:
            return self._refuse(path, f"a {type(value).__qualname__} that contains itself")
        self._open.add(id(value))
        parts = parts_of(value, self._namespace)
        if parts is None:
            result = self._object(value, path, depth + 1)
        else:
            result = self._container(value, parts, path, depth + 1)
        self._open.discard(id(value))
        return result

    def _refuse(self, path: str, why: str) -> Json:
        self.refused.append((path, why))
        return None

    def _container(self, value: Any, parts: Parts, path: str, depth: int) -> Json:
        kind, keys, walk = parts.kind, parts.keys, self.walk
        node: Node = {"$": kind}
        if kind == "node":
            node["metadata"] = walk(parts.metadata, f"{path}/~metadata", depth)
            if not isinstance(keys, range):
                keys = [key if type(key) in (str, int) else child_path("", key)[1:] for key in keys]
        items = [
            walk(child, child_path(path, key), depth) for key, child in zip(keys, parts.children, strict=True)
        ]
        if kind == "list":
            return items
        if not isinstance(keys, range):
            try:
                node["keys"] = [write_key(key) for key in keys]
            except Refusal as refused:
                return self._refuse(path, str(refused))
        if kind == "dict" and all(type(key) is str and key[:1] != "$" for key in keys):
            return dict(zip(keys, items, strict=True))
        if kind in ("namedtuple", "node"):
            node["of"] = class_path(class_of(value))
        elif kind == "deque" and value.maxlen is not None:
            node["maxlen"] = value.maxlen
        elif kind == "defaultdict":
            factory = value.default_factory
            node["factory"] = next((name for name, known in FACTORIES.items() if known is factory), None)
            if node["factory"] is None:
                known = ", ".join(FACTORIES)
                return self._refuse(path, f"a defaultdict of {factory!r}; its factory can be one of {known}")
        node["items"] = items
        return node

    def _object(self, value: Any, path: str, depth: int) -> Json:
        state: Any = NotImplemented if self._convert is None else self._convert(path[1:], value)
        of = class_of(value)
        if state is NotImplemented:
            methods = ("state_dict", "load_state_dict")
            has_state = all(callable(getattr(value, name, None)) for name in methods)
            if not has_state or isinstance(value, type):
                return self._refuse(path, f"a {of.__module__}.{of.__qualname__}, which isn't known")
            state = value.state_dict()
        return {"$": "object", "of": class_path(of), "state": self.walk(state, path, depth)}

    def _name(self, key: Any, make: Callable[[], torch.Tensor], path: str) -> str:
        """Return the name of a tensor; store the tensor under its path when it first occurs."""
        known = self._names.get(key)
        if known is not None:
            return known
        name = displayed(path)
        if name in self.tensors or name == "__metadata__":
            number = 2  # "~0" and "~1" are escapes
            while f"{name}~{number}" in self.tensors:
                number += 1
            name = f"{name}~{number}"
        self.tensors[name] = make()
        self._names[key] = name
        return name

    def _tensor(self, value: torch.Tensor, path: str, kind: str = "tensor") -> Json:
        local = local_of(value)
        why = _refusal(value, local)
        if why is not None:
            return self._refuse(path, why)
        # Also a DTensor that is a parameter. The test of this class is slow: it is written in Python.
        is_parameter = type(value) is not torch.Tensor and isinstance(value, torch.nn.Parameter)
        tensor = value.detach() if value.requires_grad or is_parameter else value
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        stride = None
        if type(tensor) is not torch.Tensor:
            layout = cast("Any", tensor)
            # An empty shard has a storage too; all ranks have to identify the same tensors.
            storage = cast("Any", local.untyped_storage())
            key: Any = (storage._cdata, local.storage_offset(), local.stride(), layout._spec)
        elif tensor.numel():
            key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            if not tensor.is_contiguous():
                clone = torch.empty_like(tensor, device="meta")
                stride = None if clone.is_contiguous() else list(clone.stride())
        else:
            key = id(value)
            self._kept.append(value)
        node: Node = {"$": kind, "name": self._name(key, lambda: tensor, path)}
        if stride is not None:
            node["stride"] = stride
        if value.requires_grad:
            node["requires_grad"] = True
        if is_parameter:
            node["parameter"] = True
        return node

    def _array(self, value: Any, path: str) -> Json:
        if value.dtype.name not in NUMPY_DTYPES or not value.dtype.isnative:
            why = f"an array of {value.dtype}, which torch lacks; store it as numbers or texts"
            return self._refuse(path, why)
        size = value.dtype.itemsize
        fits = all(stride >= 0 and stride % size == 0 for stride in value.strides)
        if not (fits and value.flags.writeable and value.flags.aligned):
            value = value.copy(order="K" if fits else "C")
        return self._tensor(torch.from_numpy(value), path, "array")  # pyright: ignore[reportUnknownMemberType]
