"""The walk from a tree to a document, see ``accelfn.checkpoint.document.document``."""

from __future__ import annotations

import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar, cast

import optree
import torch

from accelfn.checkpoint.document.arrays import (
    array_as_tensor,
    is_array,
    is_scalar,
    raw_array,
    raw_bytes,
    write_scalar,
)
from accelfn.checkpoint.document.classes import class_of, registry_entry, spell_class_of
from accelfn.checkpoint.document.keys import write_key, write_members
from accelfn.checkpoint.document.leaves import SPARSE, refusal, sparse_parts
from accelfn.checkpoint.document.nodes import MAX_DEPTH, shown, step
from accelfn.checkpoint.document.plain import Refusal, is_json_text, write_plain
from accelfn.checkpoint.document.sharing import share
from accelfn.checkpoint.files.manifest import Json
from accelfn.checkpoint.files.stored_dtype import dtype_name
from accelfn.tree import is_dtensor

__all__ = ("FACTORIES", "Convert", "Encoder")

Node = dict[str, Any]
Convert = Callable[[str, Any], Any]

FACTORIES = MappingProxyType(
    {
        **{
            kind.__name__: kind
            for kind in (list, dict, set, tuple, frozenset, int, float, complex, bool, str)
        },
        **dict[str, Any](bytes=bytes, OrderedDict=OrderedDict, deque=deque),
        "None": None,
    }
)
_FACTORY_NAMES = MappingProxyType({factory: name for name, factory in FACTORIES.items()})
_MAX_ROWS = 50
_CODE = (
    *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, type),
    *(types.GeneratorType, types.CoroutineType),
)


class Encoder:
    """One walk over one tree.

    Attributes:
        tensors: What is to be stored, by name; complete after :meth:`document`.
        leaves: The tensors and arrays of the tree, by path.
        refused: Path and reason of what can't be stored.
    """

    def __init__(
        self, convert: Convert | None, namespace: str, inside: Callable[[str, Any], bool] | None = None
    ) -> None:
        """Prepare a walk.

        Args:
            convert: As for ``encode``.
            namespace: Of optree's registry.
            inside: Given where only the form of the tree is of interest, and not what is in its tensors: then
                tensors without data pass too, and it is asked of every object whether its state is.
        """
        self.tensors: dict[str, torch.Tensor] = {}
        self.leaves: dict[str, Any] = {}
        self.refused: list[tuple[str, str]] = []
        self._convert = convert
        self._namespace = namespace
        self._inside = inside
        # Nodes of values that are one object wherever they stand, by identity. Such values are kept alive, so
        # that no id is given twice: tensors of a state_dict are often made for the moment.
        self._seen: dict[int, Node] = {}
        self._kept: list[Any] = []
        self._num_shared = 0
        self._strided_tensors: list[torch.Tensor] = []
        self._strided_nodes: list[Node] = []
        self._distributed: dict[Any, str] = {}
        self._open: set[int] = set()

    def document(self, tree: Any) -> Json:
        """Walk the tree.

        Raises:
            TypeError: Something in it can't be stored; all of that is listed.
        """
        document = self._walk(tree, "", 0)
        if self.refused:
            rows = [f"  {shown(path)}: {why}" for path, why in self.refused[:_MAX_ROWS]]
            if len(self.refused) > _MAX_ROWS:
                rows.append(f"  ... and {len(self.refused) - _MAX_ROWS} more")
            one = "One value" if len(self.refused) == 1 else f"{len(self.refused)} values"
            raise TypeError(
                "\n".join((f"{one} of the tree can't be stored in a checkpoint:", *rows))
                + "\nGive such a class state_dict() and load_state_dict(), or register it with optree "
                "(optree.register_pytree_node) and pass its namespace; or leave it out of the tree."
            )
        if self._inside is None:
            share(self._strided_tensors, self._strided_nodes, self.tensors)
        return document

    def _walk(self, value: Any, path: str, depth: int) -> Json:
        kind = class_of(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            return self._tensor(value, path)
        writer = self._WRITERS.get(kind)
        if writer is None:
            try:
                written = write_plain(value)
                if written is not NotImplemented:
                    return written
                writer = self._other(value)
            except Refusal as refused:
                return self._refuse(path, str(refused))
        if depth == MAX_DEPTH:
            return self._refuse(path, f"a container in more than {MAX_DEPTH} others")
        if id(value) in self._open:
            return self._refuse(path, f"a {kind.__qualname__} that contains itself")
        self._open.add(id(value))
        result = writer(self, value, path, depth + 1)
        self._open.discard(id(value))
        return result

    def _refuse(self, path: str, why: str) -> Json:
        self.refused.append((path, why))
        return None

    def _other(self, value: Any) -> Writer:
        """Choose how to write a value whose class isn't one of the usual ones."""
        if isinstance(value, torch.Tensor):
            return Encoder._special_tensor
        if isinstance(value, torch.Generator):
            return Encoder._generator
        if is_array(value):
            return Encoder._array
        if is_scalar(value):
            return Encoder._scalar
        if isinstance(value, tuple):
            if optree.is_structseq_class(type(cast("tuple[Any, ...]", value))):
                return Encoder._structseq
            if optree.is_namedtuple_class(type(cast("tuple[Any, ...]", value))):
                return Encoder._namedtuple
        return Encoder._object

    # --- containers ------------------------------------------------------------------------------

    def _list(self, value: Iterable[Any], path: str, depth: int) -> list[Json]:
        walk = self._walk
        return [walk(child, f"{path}/{index}", depth) for index, child in enumerate(value)]

    def _tuple(self, value: Any, path: str, depth: int) -> Json:
        return {"$": "tuple", "items": self._list(value, path, depth)}

    def _deque(self, value: deque[Any], path: str, depth: int) -> Json:
        node: Node = {"$": "deque", "items": self._list(value, path, depth)}
        if value.maxlen is not None:
            node["maxlen"] = value.maxlen
        return node

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Json:
        result: Node = {}
        for key, child in value.items():
            if type(key) is not str or key[:1] == "$" or not is_json_text(key):
                break
            result[key] = self._walk(child, step(path, key), depth)
        else:
            return result
        keys: list[Json] = []
        values: list[Json] = []
        written = len(result)
        for index, (key, child) in enumerate(value.items()):
            try:
                keys.append(write_key(key))
            except Refusal as refused:
                self._refuse(path, str(refused))
                continue
            values.append(result[key] if index < written else self._walk(child, step(path, key), depth))
        return {"$": "dict", "keys": keys, "values": values}

    def _ordered(self, value: OrderedDict[Any, Any], path: str, depth: int) -> Json:
        return {"$": "ordereddict", "items": self._dict(value, path, depth)}

    def _default(self, value: defaultdict[Any, Any], path: str, depth: int) -> Json:
        factory: Any = value.default_factory
        name = _FACTORY_NAMES.get(factory) if isinstance(factory, type) or factory is None else None
        if name is None:
            known = ", ".join(FACTORIES)
            return self._refuse(path, f"a defaultdict of {factory!r}; its factory can be one of {known}")
        return {"$": "defaultdict", "factory": name, "items": self._dict(value, path, depth)}

    def _set(self, value: Any, path: str, depth: int) -> Json:
        try:
            return {"$": type(value).__name__, "items": write_members(value)}
        except Refusal as refused:
            return self._refuse(path, str(refused))

    def _namedtuple(self, value: Any, path: str, depth: int) -> Json:
        fields = {
            name: self._walk(child, step(path, name), depth)
            for name, child in zip(value._fields, value, strict=True)
        }
        return {"$": "namedtuple", "of": spell_class_of(value), "fields": fields}

    def _structseq(self, value: Any, path: str, depth: int) -> Json:
        node: Node = {
            "$": "structseq",
            "of": spell_class_of(value),
            "items": self._list(value, path, depth),
        }
        hidden = cast("dict[str, Any]", value.__reduce__()[1][1])  # fields that stand outside of the sequence
        if hidden:
            node["hidden"] = {name: write_plain(child) for name, child in hidden.items()}
            if NotImplemented in node["hidden"].values():
                return self._refuse(path, f"a {type(value).__qualname__} with a field that is no plain value")
        return node

    def _object(self, value: Any, path: str, depth: int) -> Json:
        spelled = spell_class_of(value)
        if self._inside is not None and self._registered(value) is None and not self._inside(path[1:], value):
            return {"$": "object", "of": spelled}
        if self._convert is not None:
            state = self._convert(path[1:], value)
            if state is not NotImplemented:
                return {"$": "object", "of": spelled, "state": self._walk(state, path, depth)}
        if isinstance(value, _CODE):
            what = class_of(cast("object", value)).__name__
            return self._refuse(path, f"a {what} is code: it has no state to store")
        entry = self._registered(value)
        if entry is not None:
            return self._registered_node(value, entry, path, depth)
        if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            return {"$": "object", "of": spelled, "state": self._walk(value.state_dict(), path, depth)}
        return self._refuse(path, f"a {type(value).__module__}.{type(value).__qualname__}, which isn't known")

    def _registered(self, value: Any) -> Any:
        return registry_entry(class_of(value), self._namespace)

    def _registered_node(self, value: Any, entry: Any, path: str, depth: int) -> Json:
        children, metadata, *names = entry.flatten_func(value)
        children = list(children)
        keys = list(names[0]) if names and names[0] is not None else list(range(len(children)))
        before = len(self.leaves)
        node: Node = {
            "$": "node",
            "of": spell_class_of(value),
            "metadata": self._walk(metadata, f"{path}/~metadata", depth),
        }
        if len(self.leaves) > before:
            self._refuse(
                path, f"a {type(value).__qualname__} with tensors in its metadata; make them children"
            )
        if keys != list(range(len(children))):
            node["names"] = keys = [key if type(key) in (str, int) else step("", key)[1:] for key in keys]
        node["children"] = [
            self._walk(child, step(path, key), depth) for key, child in zip(keys, children, strict=True)
        ]
        return node

    # --- leaves ----------------------------------------------------------------------------------

    def _again(self, value: Any) -> Node | None:
        """Refer to a value that was met before."""
        node = self._seen.get(id(value))
        if node is None:
            return None
        if "id" not in node:
            node["id"] = self._num_shared
            self._num_shared += 1
        return {"$": "again", "id": node["id"]}

    def _keep(self, tensor: torch.Tensor, node: Node, path: str) -> None:
        """Store a tensor under its path."""
        name = path[1:] or "tree"
        if name in self.tensors or name == "__metadata__":
            number = 2  # "~0" and "~1" stand for characters
            while f"{name}~{number}" in self.tensors:
                number += 1
            name = f"{name}~{number}"
        node["name"] = name
        self.tensors[name] = tensor

    def _tensor(self, value: torch.Tensor, path: str) -> Json:
        again = self._again(value)
        if again is not None:
            return again
        if self._inside is None:
            why = refusal(value)
            if why is not None:
                return self._refuse(path, why)
        if value.layout in SPARSE:
            node = self._sparse(value, path)
        else:
            node = self._strided(value, path)
        if value.requires_grad:
            node["requires_grad"] = True
        kind = type(value)
        if kind is not torch.Tensor and isinstance(value, torch.nn.Parameter):  # also a DTensor that is one
            node["parameter"] = True
        return self._remember(value, node)

    def _remember(self, value: Any, node: Node) -> Node:
        self._seen[id(value)] = node
        self._kept.append(value)
        return node

    def _strided(self, value: torch.Tensor, path: str, kind: str = "tensor") -> Node:
        node: Node = {"$": kind, "name": "", "dtype": dtype_name(value.dtype), "shape": list(value.shape)}
        self.leaves[path[1:]] = value
        if self._inside is not None:
            return node
        tensor = value.detach() if value.requires_grad or type(value) is not torch.Tensor else value
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        if is_dtensor(value):
            local: torch.Tensor = cast("Any", tensor).to_local()
            # By the storage, which an empty shard has too: all ranks have to find the same.
            memory = cast("Any", local.untyped_storage())._cdata, local.storage_offset(), local.stride()
            place = (memory, str(cast("Any", tensor)._spec))
            if place in self._distributed:
                node["name"] = self._distributed[place]
                return node
            self._keep(tensor, node, path)
            self._distributed[place] = node["name"]
            return node
        self._keep(tensor, node, path)
        self._strided_tensors.append(tensor)
        self._strided_nodes.append(node)
        return node

    def _sparse(self, value: torch.Tensor, path: str) -> Node:
        self.leaves[path[1:]] = value
        node, parts = sparse_parts(value)
        fields = {name: self._strided(part, f"{path}/{name}") for name, part in parts.items()}
        return {**node, "fields": fields}

    def _special_tensor(self, value: Any, path: str, depth: int) -> Json:
        if self._convert is not None and not is_dtensor(value):
            state = self._convert(path[1:], value)
            if state is not NotImplemented:
                return {
                    "$": "object",
                    "of": spell_class_of(value),
                    "state": self._walk(state, path, depth),
                }
        return self._tensor(value, path)

    def _generator(self, value: torch.Generator, path: str, depth: int) -> Json:
        again = self._again(value)
        if again is not None:
            return again
        node = self._strided(value.get_state(), path, "generator")
        node["device"] = str(value.device)
        self.leaves[path[1:]] = value
        return self._remember(value, node)

    def _array(self, value: Any, path: str, depth: int) -> Json:
        again = self._again(value)
        if again is not None:
            return again
        tensor = array_as_tensor(value)
        if tensor is not None:
            node = self._strided(tensor, path, "array")
        else:
            try:
                described = raw_array(value)
            except Refusal as refused:
                return self._refuse(path, str(refused))
            node = {**self._strided(raw_bytes(value), path, "raw"), **described}
        self.leaves[path[1:]] = value
        if not value.flags.writeable:
            node["writeable"] = False
        return self._remember(value, node)

    def _scalar(self, value: Any, path: str, depth: int) -> Json:
        try:
            return write_scalar(value)
        except Refusal as refused:
            return self._refuse(path, str(refused))

    _WRITERS: ClassVar[Mapping[type, Writer]] = MappingProxyType(
        {
            list: _list,
            tuple: _tuple,
            dict: _dict,
            OrderedDict: _ordered,
            defaultdict: _default,
            deque: _deque,
            set: _set,
            frozenset: _set,
        }
    )


Writer = Callable[[Encoder, Any, str, int], Json]
