"""A document and its tensors as the tree again, see ``accelfn.checkpoint.document.encode``."""

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
    children_of,
    damaged,
    find_class,
    is_object,
    parts_of,
    read_plain,
    registry_entry,
    require_numpy,
    step,
)
from accelfn.checkpoint.header import contiguous_copy, copyable
from accelfn.checkpoint.manifest import Json
from accelfn.errors import AccelfnError, CheckpointMismatchError, Misfit

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
    restore: Restore | None = None,
    adopt: Adopt | None = None,
) -> Any:
    """Build the tree again.

    Args:
        document: As ``encode`` returned it, also after it went through JSON.
        tensors: What it names. Their memory becomes that of the tree.
        like: A tree to load into. Where the document has the state of an object, and an object stands there
            in ``like``, the object is loaded and stands in the new tree; elsewhere ``like`` only lends its
            classes. Without it, states come back as plain trees. Whether it fits is not checked here, see
            ``match``.
        namespace: In which classes are registered with optree, besides the global one.
        restore: Called as ``restore(path, object, state)`` for objects in ``like``; what it returns stands in
            the tree. It should change nothing yet, as the rest of the document may be damaged. Without it,
            ``object.load_state_dict(state)`` is called once everything is read.
        adopt: Called as ``adopt(leaf of like, value)`` for tensors and generators; what it returns stands in
            the tree.

    Raises:
        DamagedCheckpointError: The document is malformed. No object was changed.
        CheckpointMismatchError: An object in ``like`` has no ``load_state_dict``, and there is no
            ``restore``.
        CheckpointError: A class isn't imported or registered.
        MissingExtraError: There are numpy arrays and no numpy.

    >>> decode({"step": 3, "w": {"$": "tensor", "name": "w"}}, {"w": torch.zeros(2)})
    {'step': 3, 'w': tensor([0., 0.])}
    """
    pending: list[tuple[str, Any, Any]] = []

    def remember(path: str, thing: Any, state: Any) -> Any:
        pending.append((path, thing, state))
        return thing

    result = _Decoder(tensors, namespace, restore or remember, adopt).walk(document, like, "", 0)
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
        self, tensors: Mapping[str, torch.Tensor], namespace: str, restore: Restore, adopt: Adopt | None
    ) -> None:
        self._tensors = tensors
        self._namespace = namespace
        self._restore = restore
        self._adopt = adopt
        self._laid: dict[str, torch.Tensor] = {}
        self._made: dict[Any, Any] = {}

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
        if like is None:
            values = [walk(child, None, step(path, key), depth) for key, child in children]
        else:
            parts = parts_of(like, self._namespace)
            kin: Any = {} if parts is None else dict(zip(parts.keys, parts.children, strict=True))
            values = [walk(child, kin.get(key), step(path, key), depth) for key, child in children]
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
        except Exception as error:  # whatever a constructor says to the content of a file
            raise damaged(path, f"it can't be read ({error!r})") from error

    def _leaf(self, node: Json, like: Any) -> tuple[Any, bool]:
        if not isinstance(node, dict) or node["$"] not in LEAVES:
            return read_plain(node, like), False
        marks = node["$"], node["name"], node.get("parameter", False), node.get("requires_grad", False)
        if marks not in self._made:
            self._made[marks] = self._tensor(node, *marks)
        return self._made[marks], True

    def _tensor(self, node: Node, kind: str, name: str, parameter: bool, requires_grad: bool) -> Any:
        tensor = self._laid.get(name)
        if tensor is None:
            tensor = self._laid[name] = _lay(self._tensors[name], node.get("stride"))
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
                raise ValueError("it holds more than it can")
            return deque(values, node.get("maxlen"))
        if kind == "defaultdict":
            return defaultdict(FACTORIES[node["factory"]], zip(keys, values, strict=True))
        if kind == "namedtuple":
            found: Any = find_class(node["of"], like, optree.is_namedtuple_class, "a namedtuple")
            newer = found._fields[len(keys) :]  # since the checkpoint was written
            if list(found._fields) != [*keys, *newer] or not set(newer) <= set(found._field_defaults):
                raise ValueError(f"{found.__qualname__} has the fields {found._fields} now")
            return cast("Any", tuple).__new__(
                found, [*values, *(found._field_defaults[name] for name in newer)]
            )
        found = find_class(node["of"], like, self._is_registered, "an optree node (register it first)")
        return registry_entry(found, self._namespace).unflatten_func(*values)

    def _is_registered(self, kind: type) -> bool:
        return registry_entry(kind, self._namespace) is not None


def _lay(tensor: torch.Tensor, stride: list[int] | None) -> torch.Tensor:
    """Return a stored tensor with the strides that it had."""
    if type(tensor) is not torch.Tensor:  # a DTensor is laid out by who made it
        return tensor
    if stride is None:
        return tensor if tensor.is_contiguous() else contiguous_copy(tensor)
    plain = copyable(tensor)
    wanted = torch.empty_strided(plain.shape, stride, dtype=plain.dtype, device="meta")
    if wanted.untyped_storage().nbytes() != plain.nbytes or min(stride) <= 0:
        raise ValueError(f"{stride} are no strides for {list(tensor.shape)}")
    if tensor.stride() == tuple(stride):
        return tensor
    laid = torch.empty_strided(plain.shape, stride, dtype=plain.dtype, device=plain.device)
    return laid.copy_(plain).view(tensor.dtype)
