"""Convert a document and its tensors back to the tree; see ``accelfn.checkpoint.document.encode``."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

import optree
import torch

from accelfn.checkpoint.document.encode import FACTORIES
from accelfn.checkpoint.document.nodes import (
    LEAVES,
    MAX_DEPTH,
    child_path,
    children_of,
    damaged,
    find_class,
    is_object,
    parts_of,
    read_plain,
    registry_entry,
    require_numpy,
)
from accelfn.checkpoint.manifest import Json
from accelfn.errors import AccelfnError, CheckpointMismatchError, Misfit
from accelfn.weights.dtypes import contiguous_copy, copyable

Node = dict[str, Any]
Restore = Callable[[str, Any, Any], Any]
Adopt = Callable[[Any, Any], Any]

_MAPPINGS = MappingProxyType({"dict": dict, "ordereddict": OrderedDict, "counter": Counter})


def decode(
    document: Json,
    tensors: Mapping[str, torch.Tensor],
    *,
    like: Any = None,
    namespace: str = "",
    in_place: Mapping[str, torch.Tensor] = MappingProxyType({}),
    restore: Restore | None = None,
    adopt: Adopt | None = None,
) -> Any:
    """Build a tree from its document.

    Args:
        document: From ``encode``, possibly written to JSON and read again.
        tensors: By the names in the document. The tree uses their memory.
        like: A tree to load into. If it has an object where the document has an object's state, the object
            loads the state and becomes part of the new tree; otherwise only the classes of ``like`` are used.
            Without it, states are returned as trees. Whether the trees match isn't checked; see ``match``.
        namespace: Of classes registered with optree, besides the global one.
        in_place: More tensors by name, whose strides are kept.
        restore: Called as ``restore(path, object, state)`` for objects in ``like``; returns the value for the
            new tree. It shouldn't change the object yet, because the rest of the document may be damaged.
            Without it, ``object.load_state_dict(state)`` is called at the end.
        adopt: Called as ``adopt(leaf of like, value)`` for tensors and generators; returns the value for the
            new tree.

    Raises:
        DamagedCheckpointError: The document is malformed. No object was changed.
        CheckpointMismatchError: An object in ``like`` has no ``load_state_dict``, and there is no
            ``restore``.
        CheckpointError: A class isn't imported or registered.
        MissingExtraError: The document has NumPy arrays, and NumPy isn't installed.

    >>> decode({"step": 3, "w": {"$": "tensor", "name": "w"}}, {"w": torch.zeros(2)})
    {'step': 3, 'w': tensor([0., 0.])}
    """
    pending: list[tuple[str, Any, Any]] = []

    def postpone(path: str, thing: Any, state: Any) -> Any:
        pending.append((path, thing, state))
        return thing

    result = _Decoder(tensors, in_place, namespace, restore or postpone, adopt).walk(document, like, "", 0)
    rows = [
        Misfit(path or "tree", "the state of an object", f"a {type(thing).__qualname__}")
        for path, thing, _ in pending
        if not callable(getattr(thing, "load_state_dict", None))
    ]
    if rows:
        raise CheckpointMismatchError(
            "The checkpoint has the states of objects that have no load_state_dict:", rows
        )
    for _, thing, state in pending:
        thing.load_state_dict(state)
    return result


class _Decoder:
    """One walk over one document."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        in_place: Mapping[str, torch.Tensor],
        namespace: str,
        restore: Restore,
        adopt: Adopt | None,
    ) -> None:
        self._tensors = tensors
        self._namespace = namespace
        self._restore = restore
        self._adopt = adopt
        self._strided = dict(in_place)
        self._leaves: dict[Any, Any] = {}

    def walk(self, node: Json, like: Any, path: str, depth: int) -> Any:
        if depth > MAX_DEPTH + 2:
            raise damaged(path, "it nests too deep")
        children = children_of(node, path)
        if children is None:
            value, is_tensor = self._checked(path, self._leaf, node, like)
            adopts = is_tensor and like is not None and self._adopt is not None
            return cast("Adopt", self._adopt)(like, value) if adopts else value
        kind = node.get("$", "dict") if isinstance(node, dict) else "list"
        walk, depth = self.walk, depth + 1
        if kind == "object":
            if not is_object(like, self._namespace):
                return walk(children[0][1], like, path, depth)
            return self._restore(path[1:], like, walk(children[0][1], None, path, depth))
        parts = None if like is None else parts_of(like, self._namespace)
        like_of: Any = {} if parts is None else dict(zip(parts.keys, parts.children, strict=True))
        values = [walk(child, like_of.get(key), child_path(path, key), depth) for key, child in children]
        if kind == "list":
            return values
        if kind == "node":
            metadata = walk(cast("Node", node).get("metadata"), None, f"{path}/~metadata", depth)
            values = [metadata, values]
        return self._checked(path, self._container, kind, node, [key for key, _ in children], values, like)

    def _checked(self, path: str, make: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return make(*arguments)
        except AccelfnError:
            raise
        except Exception as error:  # constructors raise anything on malformed content
            raise damaged(path, f"it can't be read ({error!r})") from error

    def _leaf(self, node: Json, like: Any) -> tuple[Any, bool]:
        if not isinstance(node, dict) or node["$"] not in LEAVES:
            return read_plain(node, like), False
        # The same tensor may be a parameter at one path and plain at another.
        key = node["$"], node["name"], node.get("parameter", False), node.get("requires_grad", False)
        if key not in self._leaves:
            self._leaves[key] = self._tensor(node, *key)
        return self._leaves[key], True

    def _tensor(self, node: Node, kind: str, name: str, parameter: bool, requires_grad: bool) -> Any:
        tensor = self._strided.get(name)
        if tensor is None:
            tensor = self._strided[name] = _with_stride(self._tensors[name], node.get("stride"))
        if kind == "generator":
            generator = torch.Generator(device=node["device"])
            generator.set_state(tensor.cpu())
            return generator
        if kind == "array":
            require_numpy()
            return tensor.cpu().numpy()
        if parameter:
            return torch.nn.Parameter(tensor, requires_grad=requires_grad)
        return tensor.detach().requires_grad_() if requires_grad else tensor.detach()

    def _container(self, kind: str, node: Node, keys: list[Any], values: list[Any], like: Any) -> Any:
        if kind in _MAPPINGS:
            return _MAPPINGS[kind](dict(zip(keys, values, strict=True)))
        if kind == "tuple":
            return tuple(values)
        if kind == "deque":
            if node.get("maxlen", len(values)) < len(values):
                raise ValueError("it has more items than its maxlen")
            return deque(values, node.get("maxlen"))
        if kind == "defaultdict":
            return defaultdict(FACTORIES[node["factory"]], zip(keys, values, strict=True))
        if kind == "namedtuple":
            found: Any = find_class(node["of"], like, optree.is_namedtuple_class, "a namedtuple")
            newer = found._fields[len(keys) :]  # fields added since the checkpoint was written
            if list(found._fields) != [*keys, *newer] or not set(newer) <= set(found._field_defaults):
                raise ValueError(f"{found.__qualname__} has the fields {found._fields} now")
            values = [*values, *(found._field_defaults[name] for name in newer)]
            return cast("Any", tuple).__new__(found, values)
        found = find_class(node["of"], like, self._is_registered, "an optree node (register it first)")
        return registry_entry(found, self._namespace).unflatten_func(*values)

    def _is_registered(self, kind: type) -> bool:
        return registry_entry(kind, self._namespace) is not None


def _with_stride(tensor: torch.Tensor, stride: list[int] | None) -> torch.Tensor:
    """Return a stored tensor with its original strides; None: contiguous."""
    if type(tensor) is not torch.Tensor:  # a DTensor has its final layout already
        return tensor
    if stride is None:
        return tensor if tensor.is_contiguous() else contiguous_copy(tensor)
    plain = copyable(tensor)
    wanted = torch.empty_strided(plain.shape, stride, dtype=plain.dtype, device="meta")
    if wanted.untyped_storage().nbytes() != plain.nbytes or min(stride) <= 0:
        raise ValueError(f"{stride} are not strides of a tensor of shape {list(tensor.shape)}")
    if tensor.stride() == tuple(stride):
        return tensor
    result = torch.empty_strided(plain.shape, stride, dtype=plain.dtype, device=plain.device)
    return result.copy_(plain).view(tensor.dtype)
