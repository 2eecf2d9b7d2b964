"""Flattening of trees into leaves and a structure.

optree handles dict, list, tuple, namedtuple, OrderedDict, defaultdict, deque, None and types that users
registered. This module also expands other containers, without registering them: dataclass instances, mapping
types such as transformers' ``BatchEncoding`` and ``ModelOutput``, and subclasses of list, tuple and deque.
They are rebuilt as their own type. Keys of mappings are sorted, so the insertion order of a dict doesn't
matter across ranks; in an OrderedDict it does. ``None`` is part of the structure, not a leaf; a
``torch.Size`` is a leaf.
"""

from __future__ import annotations

import copy
import dataclasses
import re
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import optree
import torch
from torch.nn.utils.rnn import PackedSequence

from accelfn.tree.sharded import Sharded

# The most common leaves, for a fast check.
_PLAIN = (
    torch.Tensor,
    str,
    bytes,
    int,
    float,
    complex,
    torch.Size,
    torch.dtype,
    torch.device,
    torch.nn.Module,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Container:
    """A container that optree treats as a leaf.

    Attributes:
        position: Index among the leaves of the outer structure.
        label: Type and keys, the same on every rank for equal containers.
        entries: Path entry of each child, such as ``"['x']"`` or ``".loss"``.
        children: Structure of the list of children.
        rebuild: Makes a container of the same type from new children.
    """

    position: int
    label: str
    entries: tuple[str, ...]
    children: TreeSpec
    rebuild: Callable[[Sequence[Any]], Any] = field(compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class TreeSpec:
    """The structure of a tree without its leaves. Comparable.

    Attributes:
        spec: optree's structure.
        opened: Containers that optree doesn't know, by position.
    """

    spec: optree.PyTreeSpec
    containers: tuple[_Container, ...] = ()

    @property
    def num_leaves(self) -> int:
        """Number of leaves."""
        return self.spec.num_leaves + sum(item.children.num_leaves - 1 for item in self.containers)

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Build a tree of this structure from ``leaves``, in the order of :func:`flatten`."""
        if not self.containers:
            return optree.tree_unflatten(self.spec, leaves)
        outer: list[Any] = []
        start = 0
        for item in self.containers:
            gap = item.position - len(outer)
            outer += leaves[start : start + gap]
            start += gap
            count = item.children.num_leaves
            outer.append(item.rebuild(item.children.unflatten(leaves[start : start + count])))
            start += count
        outer += leaves[start:]
        return optree.tree_unflatten(self.spec, outer)

    def paths(self, root: str = "tree") -> list[str]:
        """Return the path of each leaf, such as ``tree['x'][0]``, in the order of the leaves."""
        outer = [accessor.codify(root) for accessor in optree.treespec_accessors(self.spec)]
        paths: list[str] = []
        start = 0
        for item in self.containers:
            paths += outer[start : item.position]
            inner = item.children.paths("")  # "[0]", "[1]['a']"
            own = outer[item.position]
            paths += [own + _join_path(item.entries, path) for path in inner]
            start = item.position + 1
        return paths + outer[start:]

    def describe(self) -> str:
        """Describe the structure in text that is equal for equal structures on every rank."""
        text = repr(self.spec)
        if "0x" in text:  # the default repr of a default factory contains its address
            text = re.sub(r"(?<= at 0x)[0-9a-fA-F]+(?=>)", "", text)
        if not self.containers:
            return text
        inner = ", ".join(
            f"{item.position}: {item.label} {item.children.describe()}" for item in self.containers
        )
        return f"{text} with {{{inner}}}"


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], TreeSpec]:
    """Flatten a tree into its leaves and its :class:`TreeSpec`.

    Args:
        tree: Any tree.
        is_leaf: Whether to treat a container as a leaf.

    >>> leaves, structure = flatten({"b": 1, "a": (2, None)})
    >>> leaves, structure.paths(), structure.unflatten([20, 10])
    ([2, 1], ["tree['a'][0]", "tree['b']"], {'b': 10, 'a': (20, None)})
    """
    leaves, spec = optree.tree_flatten(tree, is_leaf)
    for leaf in leaves:
        if not isinstance(leaf, _PLAIN):
            break
    else:
        return leaves, TreeSpec(spec)

    flat: list[Any] = []
    containers: list[_Container] = []
    for position, leaf in enumerate(leaves):
        parts = None if isinstance(leaf, _PLAIN) or (is_leaf is not None and is_leaf(leaf)) else _expand(leaf)
        if parts is None:
            flat.append(leaf)
            continue
        label, entries, children, rebuild = parts
        inner, structure = flatten(children, is_leaf)
        flat += inner
        containers.append(
            _Container(position=position, label=label, entries=entries, children=structure, rebuild=rebuild)
        )
    return flat, TreeSpec(spec, tuple(containers))


def is_packed_sequence(value: Any) -> bool:
    """Return whether ``value`` is a ``PackedSequence``, which must not be taken apart."""
    return isinstance(value, PackedSequence)


def leaf_paths(tree: Any) -> list[str]:
    """Return the path of each leaf of ``tree``.

    >>> leaf_paths({"x": [1, 2]})
    ["tree['x'][0]", "tree['x'][1]"]
    """
    return flatten(tree)[1].paths()


Expansion = tuple[str, tuple[str, ...], list[Any], Callable[[Sequence[Any]], Any]]


def _expand(value: Any) -> Expansion | None:
    """Expand a container that optree doesn't know; None for a leaf."""
    # Mappings first: transformers' ModelOutput is also a dataclass, with unset fields that aren't keys.
    if isinstance(value, Mapping):
        return _expand_mapping(cast("Mapping[Any, Any]", value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _expand_dataclass(value)
    if isinstance(value, (list, tuple, deque)):
        return _expand_sequence(cast("Sequence[Any]", value))
    return None


def _expand_mapping(value: Mapping[Any, Any]) -> Expansion:
    try:
        keys = sorted(value)
    except TypeError:  # keys of several types
        keys = sorted(value, key=lambda key: (type(key).__qualname__, repr(key)))
    children = [value[key] for key in keys]

    def rebuild(new: Sequence[Any]) -> Any:
        items = dict(zip(keys, new, strict=True))
        ordered = {key: items[key] for key in value}
        make = cast("Callable[[dict[Any, Any]], Any]", type(value))
        # A copy keeps other attributes. But the default copy of a mapping with its items in an attribute
        # would share them.
        if not isinstance(value, dict) and not hasattr(value, "__copy__"):
            return make(ordered)
        try:
            result = copy.copy(value)
            for key, child in ordered.items():
                cast("dict[Any, Any]", result)[key] = child
        except (TypeError, NotImplementedError):  # a read-only mapping
            result = make(ordered)
        return result

    return f"{_name(value)}{keys!r}", tuple(f"[{key!r}]" for key in keys), children, rebuild


def _expand_dataclass(value: Any) -> Expansion:
    names = tuple(item.name for item in dataclasses.fields(value))
    children = [getattr(value, name) for name in names]

    def rebuild(new: Sequence[Any]) -> Any:
        # Not the constructor, since __post_init__ may convert its arguments.
        result = copy.copy(value)
        for name, child in zip(names, new, strict=True):
            object.__setattr__(result, name, child)  # frozen ones too
        return result

    return f"{_name(value)}{names!r}", tuple(f".{name}" for name in names), children, rebuild


def _expand_sequence(value: Sequence[Any]) -> Expansion:
    kind = cast("Callable[[Sequence[Any]], Any]", type(value))

    def rebuild(new: Sequence[Any]) -> Any:
        if not isinstance(value, deque) or value.maxlen is None:
            return kind(new)
        result = copy.copy(value)  # keeps maxlen
        result.clear()
        result.extend(new)
        return result

    return _name(value), tuple(f"[{index}]" for index in range(len(value))), list(value), rebuild


def _name(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _join_path(entries: tuple[str, ...], path: str) -> str:
    """Replace the leading list index of ``path`` by its entry."""
    index, _, rest = path[1:].partition("]")
    return entries[int(index)] + rest


class TensorInformation(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def tree_structure(tree: Any) -> Any:
    """Replace each tensor by its :class:`TensorInformation`; other leaves and a ``PackedSequence`` stay.

    >>> tree_structure({"x": torch.zeros(2)})
    {'x': TensorInformation(shape=(2,), dtype=torch.float32)}
    """
    leaves, structure = flatten(tree, is_packed_sequence)
    return structure.unflatten(
        [
            TensorInformation(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
    )


def initialize_tensors(tree: Any, device: torch.device | str = "cpu") -> Any:
    """Replace each :class:`TensorInformation` by an uninitialised tensor of its shape and dtype.

    >>> initialize_tensors(tree_structure(torch.zeros(2, 3))).shape
    torch.Size([2, 3])
    """
    leaves, structure = flatten(tree, _is_opaque)
    return structure.unflatten(
        [
            torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
            if isinstance(leaf, TensorInformation)
            else leaf
            for leaf in leaves
        ]
    )


def _is_opaque(value: Any) -> bool:
    return isinstance(value, TensorInformation) or is_packed_sequence(value)


def is_dtensor(value: object) -> bool:
    """Return whether ``value`` is a ``DTensor``.

    Ranks: local.
    """
    # Importing the module takes half a second; if it isn't loaded, no DTensor exists.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the local part of a ``DTensor`` or :class:`Sharded`, without gradient, or the tensor itself.

    The local part shares memory and version counter with the DTensor. It is a plain tensor, also of a weight
    that FSDP gathers in 8 bits, for which torchao wraps it.

    Ranks: local.
    """
    if isinstance(tensor, Sharded):
        return tensor.local.detach()
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        local = cast("Any", tensor).to_local()
        return local._tensor if hasattr(local, "fsdp_pre_all_gather") else local


def from_local(local: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the tensor of which ``local`` is this rank's part, in the shape and layout of ``like``.

    Ranks: local.

    Args:
        local: Of any dtype and memory.
        like: A ``DTensor`` or :class:`Sharded`; of any other tensor, all of it is this rank's part.
    """
    if isinstance(like, Sharded):
        return like.like(local)
    if not is_dtensor(like):
        return local
    from torch.distributed.tensor import DTensor

    layout = cast("Any", like)
    return DTensor.from_local(
        local,
        layout.device_mesh,
        layout.placements,
        run_check=False,
        shape=layout.shape,
        stride=layout.stride(),
    )


_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def size_text(num_bytes: int) -> str:
    """Format a size in powers of 1000.

    >>> size_text(999), size_text(1234), size_text(56_700_000), size_text(999_960)
    ('999 B', '1.2 kB', '56.7 MB', '1.0 MB')
    """
    size, unit = float(num_bytes), 0
    while unit + 1 < len(_UNITS) and round(size, 1) >= 1000:
        size, unit = size / 1000, unit + 1
    return f"{size:.1f} {_UNITS[unit]}" if unit else f"{num_bytes} B"
