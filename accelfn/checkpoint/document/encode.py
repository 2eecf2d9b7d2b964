"""A tree as a document of JSON and the tensors that it names. No pickle, no code, no import.

What JSON has stands for itself: None, bool, int, finite float, str, list, and dict with keys that are all
texts, none of which begins with ``"$"``. Everything else is an object with its kind under ``"$"``:

- ``tensor``, ``array`` (of numpy) and ``generator`` (of torch): the name of a stored tensor.
- Containers: ``tuple``, ``deque``, ``dict`` with other keys, ``ordereddict``, ``defaultdict``, ``counter``,
  ``namedtuple``, and ``node`` for what is registered with optree. Their children are ``items``.
- ``object``: what was asked for its state, a model or an optimizer, with that state inside.
- Plain values, see ``nodes``.

Tensors are named by their path, a JSON pointer without its first slash (``model/0.weight``). The same tensor
at several places is stored once and comes back as one; other views of one memory are stored by their values.
A tensor comes back with the strides that its ``clone()`` has; marks of conjugation and negation are resolved.
Containers that stand at two places come back as two.

Classes of namedtuples, enums and nodes are stored by name, and are looked up where the program already has
them.
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
    class_of,
    is_array,
    parts_of,
    shown,
    spell_class,
    step,
    write_key,
    write_plain,
)
from accelfn.checkpoint.header import is_storable
from accelfn.checkpoint.manifest import Json
from accelfn.tree import is_dtensor

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
        document: Of JSON.
        tensors: What it names. They are in the caller's memory, of any strides, and ask for no gradient.
    """

    document: Json
    tensors: dict[str, torch.Tensor]


def encode(tree: Any, *, convert: Convert | None = None, namespace: str = "") -> Encoded:
    """Take a tree apart into a document and tensors. Pure: nothing is copied but what numpy can't lend.

    Args:
        tree: Of tensors, numpy arrays, plain values and objects with ``state_dict`` and ``load_state_dict``,
            in any containers of Python, or registered with optree.
        convert: Called as ``convert(path, value)`` with every value that is no tensor, array, plain value or
            container. What it returns is stored as the state of the object; ``NotImplemented``: go on
            without it.
        namespace: In which classes are registered with optree, besides the global one.

    Raises:
        TypeError: Something can't be stored: of an unknown class, code, a tensor without data, a container
            that contains itself. All such values are listed by path.

    >>> encode({"step": 3, "w": torch.zeros(2)}).document
    {'step': 3, 'w': {'$': 'tensor', 'name': 'w'}}
    """
    encoder = _Encoder(convert, namespace)
    document = encoder.walk(tree, "", 0)
    if encoder.refused:
        rows = [f"  {shown(path)}: {why}" for path, why in encoder.refused[:_MAX_ROWS]]
        if len(encoder.refused) > _MAX_ROWS:
            rows.append(f"  ... and {len(encoder.refused) - _MAX_ROWS} more")
        one = "One value" if len(encoder.refused) == 1 else f"{len(encoder.refused)} values"
        raise TypeError(
            "\n".join((f"{one} of the tree can't be stored in a checkpoint:", *rows))
            + "\nStore such a value as a text, a number or a tensor; give a class of your own state_dict() "
            "and load_state_dict(), or register it with optree (optree.register_pytree_node) and pass its "
            "namespace; or leave it out of the tree."
        )
    return Encoded(document, encoder.tensors)


def _refusal(tensor: torch.Tensor) -> str | None:
    """Return why a tensor can't be stored; None where it can."""
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter and not is_dtensor(tensor):
        return (
            f"a {kind.__module__}.{kind.__qualname__}, a tensor that is more than its elements; store what "
            "it is made of, or its plain value, such as tensor.as_subclass(torch.Tensor)"
        )
    if tensor.is_nested:
        return "a nested tensor; store tensor.unbind()"
    if not is_storable(tensor.dtype):
        return "a quantized tensor; store tensor.dequantize(), or tensor.int_repr() and its scales"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}; store tensor.to_dense()"
    if tensor.is_meta:
        return "a tensor on the meta device, which has no data; give it some with to_empty, or load it first"
    return None


class _Encoder:
    """One walk over one tree."""

    def __init__(self, convert: Convert | None, namespace: str) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.refused: list[tuple[str, str]] = []
        self._convert = convert
        self._namespace = namespace
        self._names: dict[Any, str] = {}  # by what tells one tensor from another
        self._kept: list[Any] = []  # so that no identity is given twice: states are often made for the moment
        self._open: set[int] = set()

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
                keys = [key if type(key) in (str, int) else step("", key)[1:] for key in keys]
        items = [walk(child, step(path, key), depth) for key, child in zip(keys, parts.children, strict=True)]
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
            node["of"] = spell_class(class_of(value))
        elif kind == "deque" and value.maxlen is not None:
            node["maxlen"] = value.maxlen
        elif kind == "defaultdict":
            factory = value.default_factory
            known = ", ".join(FACTORIES)
            node["factory"] = next((name for name, one in FACTORIES.items() if one is factory), None)
            if node["factory"] is None:
                return self._refuse(path, f"a defaultdict of {factory!r}; its factory can be one of {known}")
        node["items"] = items
        return node

    def _object(self, value: Any, path: str, depth: int) -> Json:
        state: Any = NotImplemented if self._convert is None else self._convert(path[1:], value)
        if state is NotImplemented:
            speaks = all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))
            if not speaks or isinstance(value, type):
                of = class_of(value)
                return self._refuse(path, f"a {of.__module__}.{of.__qualname__}, which isn't known")
            state = value.state_dict()
        return {"$": "object", "of": spell_class(class_of(value)), "state": self.walk(state, path, depth)}

    def _name(self, key: Any, make: Callable[[], torch.Tensor], path: str) -> str:
        """Name a tensor by its path, and store it if it is met for the first time."""
        known = self._names.get(key)
        if known is not None:
            return known
        name = path[1:] or "tree"
        if name in self.tensors or name == "__metadata__":
            number = 2  # "~0" and "~1" stand for characters
            while f"{name}~{number}" in self.tensors:
                number += 1
            name = f"{name}~{number}"
        self.tensors[name] = make()
        self._names[key] = name
        return name

    def _tensor(self, value: torch.Tensor, path: str, kind: str = "tensor") -> Json:
        why = _refusal(value)
        if why is not None:
            return self._refuse(path, why)
        tensor = value.detach() if value.requires_grad or type(value) is not torch.Tensor else value
        if tensor.is_conj() or tensor.is_neg():  # views that only say so
            tensor = tensor.resolve_conj().resolve_neg()
        stride = None
        if type(tensor) is not torch.Tensor:
            layout = cast("Any", tensor)
            local = layout.to_local()
            # By the storage, which an empty shard has too: all ranks have to find the same.
            memory = local.untyped_storage()._cdata, local.storage_offset(), local.stride()
            key: Any = (memory, str(layout._spec))
        elif tensor.numel():
            key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
            if not tensor.is_contiguous():
                kept = torch.empty_like(tensor, device="meta")  # has the strides of a clone
                stride = None if kept.is_contiguous() else list(kept.stride())
        else:
            key = id(value)
            self._kept.append(value)
        node: Node = {"$": kind, "name": self._name(key, lambda: tensor, path)}
        if stride is not None:
            node["stride"] = stride
        if value.requires_grad:
            node["requires_grad"] = True
        if isinstance(value, torch.nn.Parameter):  # also a DTensor that is one
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
