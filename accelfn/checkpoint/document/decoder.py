"""The walk from a document back to a tree, see ``accelfn.checkpoint.document.document``."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, cast

import optree
import torch

from accelfn.checkpoint.document.arrays import read_raw, read_scalar, tensor_as_array
from accelfn.checkpoint.document.classes import class_of, find_class, registry_entry
from accelfn.checkpoint.document.encoder import FACTORIES
from accelfn.checkpoint.document.keys import read_key
from accelfn.checkpoint.document.leaves import TensorReader, join_sparse
from accelfn.checkpoint.document.nodes import LEAVES, MAX_DEPTH, children_of, damaged, shown, step
from accelfn.checkpoint.document.plain import LITERALS, PLAIN_KINDS, read_plain
from accelfn.checkpoint.files.manifest import Json
from accelfn.errors import AccelfnError, CheckpointMismatchError, Misfit

__all__ = ("Decoder", "Restore", "is_object")

Node = dict[str, Any]
Restore = Callable[[str, Any, Any], Any]

_CONTAINERS = (list, tuple, dict, deque)


def is_object(value: Any) -> bool:
    """Whether ``value`` in a tree to load into takes up a state, rather than being a container of others."""
    return value is not None and not isinstance(value, (*_CONTAINERS, torch.Tensor, str, bytes, int, float))


class Decoder:
    """Reads one document. First everything is read, only then are objects given their state."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], namespace: str, restore: Restore | None) -> None:
        self._tensors = TensorReader(tensors)
        self._namespace = namespace
        self._restore = restore
        self._shared: dict[int, Any] = {}
        # Objects to give a state, by the identity of their nodes; the second walk finds them restored.
        self._pending: dict[int, tuple[str, Any, Any]] = {}
        self._restored: dict[int, Any] = {}

    def tree(self, document: Json, like: Any) -> Any:
        """Read the document.

        Raises:
            DamagedCheckpointError: It is malformed.
            CheckpointError: It is of a class that the program doesn't have.
        """
        result = self._walk(document, like, "", 0)
        if not self._pending:
            return result
        if self._restore is None:
            rows = [
                Misfit(shown(path), "the state of an object", f"a {type(target).__qualname__}")
                for path, target, _ in self._pending.values()
                if not callable(getattr(target, "load_state_dict", None))
            ]
            if rows:
                raise CheckpointMismatchError(
                    "The checkpoint has the states of objects that have no load_state_dict:", rows
                )
        for key, (path, target, state) in self._pending.items():
            if self._restore is not None:
                self._restored[key] = self._restore(path[1:], target, state)
            else:
                target.load_state_dict(state)
                self._restored[key] = target
        return self._walk(document, like, "", 0)

    def _walk(self, node: Json, like: Any, path: str, depth: int) -> Any:
        kind = type(node)
        if kind in LITERALS:
            if kind is float and node - node != 0:  # pyright: ignore[reportOperatorIssue]
                raise damaged(path, "a number is infinite, or none")
            return node
        if depth > 2 * MAX_DEPTH + 2:
            raise damaged(path, "it nests too deep")
        if kind is not list and kind is not dict:
            raise damaged(path, f"a {kind.__name__} in it")
        if id(node) in self._restored:
            return self._restored[id(node)]
        children = children_of(node, path)
        if children is None:
            return self._leaf(cast("Node", node), like, path)
        keys, nodes = children
        form = cast("Node", node).get("$") if kind is dict else None
        walk = self._walk
        if form == "object":
            return self._object(cast("Node", node), like, path, depth)
        if like is None:
            values = [
                walk(child, None, step(path, key), depth + 1) for key, child in zip(keys, nodes, strict=True)
            ]
        else:
            likes = self._likes(form, keys, like)
            values = [
                walk(child, kin, step(path, key), depth + 1)
                for key, child, kin in zip(keys, nodes, likes, strict=True)
            ]
        if kind is list:
            return values
        if form is None or form == "dict":
            return dict(zip(keys, values, strict=True))
        try:
            return self._build(form, cast("Node", node), values, keys, like, path, depth)
        except AccelfnError:
            raise
        except Exception as error:  # whatever a constructor says to the content of a file
            raise damaged(path, f"a {form} can't be made ({error!r})") from error

    def _likes(self, form: Any, keys: list[Any], like: Any) -> list[Any]:
        """Find what stands in the tree to load into where a node's children do; None where nothing."""
        if keys == [None]:
            return [like]
        if isinstance(like, dict):
            items = cast("dict[Any, Any]", like)
            return [items.get(key) for key in keys]
        if form == "node":
            entry: Any = registry_entry(class_of(like), self._namespace)
            like = [] if entry is None else list(entry.flatten_func(like)[0])
        if not isinstance(like, (list, tuple, deque)):
            return [None] * len(keys)
        children = list(cast("list[Any]", like))[: len(keys)]
        return children + [None] * (len(keys) - len(children))

    def _object(self, node: Node, like: Any, path: str, depth: int) -> Any:
        if "state" not in node:
            raise damaged(path, "an object has no state")
        if not is_object(like):
            return self._walk(node["state"], like, path, depth + 1)
        state = self._walk(node["state"], None, path, depth + 1)
        self._pending[id(node)] = path, like, state
        return state

    def _leaf(self, node: Node, like: Any, path: str) -> Any:
        kind: str = node["$"]
        if kind == "again":
            if type(node.get("id")) is not int or node["id"] not in self._shared:
                raise damaged(path, "it refers to nothing before it")
            return self._shared[node["id"]]
        known = node.get("id")
        if known is not None and kind in LEAVES:
            if type(known) is not int:
                raise damaged(path, "an id is no number")
            if known in self._shared:
                return self._shared[known]
        try:
            value = self._value(kind, node, like, path)
        except AccelfnError:
            raise
        except Exception as error:  # whatever a constructor says to the content of a file
            raise damaged(path, f"a {kind} can't be read ({error!r})") from error
        if known is not None:
            self._shared[known] = value
        return value

    def _value(self, kind: str, node: Node, like: Any, path: str) -> Any:
        if kind in PLAIN_KINDS:
            return read_plain(node, like)
        if kind == "numpy":
            return read_scalar(node)
        if kind in ("set", "frozenset"):
            return read_key(node)
        tensor = self._tensors.read(node, path)
        if kind == "tensor":
            return tensor
        if kind == "array":
            return tensor_as_array(tensor.detach().cpu(), writeable=node.get("writeable", True) is True)
        if kind == "raw":
            return read_raw(node, tensor)
        generator = torch.Generator(device=read_plain({"$": "device", "text": node["device"]}))
        generator.set_state(tensor.cpu())
        return generator

    def _build(
        self, form: Any, node: Node, values: list[Any], keys: list[Any], like: Any, path: str, depth: int
    ) -> Any:
        """Make a container of its children."""
        if form == "tuple":
            return tuple(values)
        if form == "ordereddict":
            return OrderedDict(cast("dict[Any, Any]", _of(dict, values)))
        if form == "defaultdict":
            return defaultdict(FACTORIES[node["factory"]], cast("dict[Any, Any]", _of(dict, values)))
        if form == "deque":
            maxlen = node.get("maxlen")
            if maxlen is not None and (type(maxlen) is not int or maxlen < len(values)):
                raise ValueError("it holds more than it can")
            return deque(values, maxlen)
        if form == "sparse":
            return self._sparse(node, dict(zip(keys, values, strict=True)), path)
        if form == "namedtuple":
            kind = find_class(node["of"], like, optree.is_namedtuple_class, "a namedtuple")
            fields, defaults = cast("Any", kind)._fields, cast("Any", kind)._field_defaults
            newer = fields[len(keys) :]  # since the checkpoint was written
            if list(fields) != [*keys, *newer] or not set(newer) <= set(defaults):
                raise ValueError(f"{kind.__qualname__} has the fields {fields} now")
            return cast("Any", tuple).__new__(kind, [*values, *(defaults[name] for name in newer)])
        if form == "structseq":
            kind = find_class(node["of"], like, optree.is_structseq_class, "a struct sequence")
            hidden = {name: read_plain(child) for name, child in node.get("hidden", {}).items()}
            return cast("Any", kind)(values, hidden) if hidden else cast("Any", kind)(values)
        kind = find_class(node["of"], like, self._is_registered, "an optree node (register it first)")
        entry: Any = registry_entry(kind, self._namespace)
        metadata = self._walk(node["metadata"], None, f"{path}/~metadata", depth + 1)
        return entry.unflatten_func(metadata, values)

    def _is_registered(self, kind: type) -> bool:
        return registry_entry(kind, self._namespace) is not None

    def _sparse(self, node: Node, parts: dict[str, Any], path: str) -> torch.Tensor:
        known = node.get("id")
        if known in self._shared:
            return self._shared[known]
        tensor = join_sparse(node, parts)
        if node.get("parameter") is True:
            tensor = torch.nn.Parameter(tensor, requires_grad=node.get("requires_grad") is True)
        elif node.get("requires_grad") is True:
            tensor.requires_grad_()
        if known is not None:
            self._shared[known] = tensor
        return tensor


def _of(kind: type, values: list[Any]) -> Any:
    if len(values) != 1 or type(values[0]) is not kind:
        raise ValueError(f"there is no {kind.__name__} in it")
    return values[0]
