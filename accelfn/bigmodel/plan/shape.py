"""What a planner has to know of a model: its modules, and name, size and kind of each tensor. No values."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = (
    "LeafKind",
    "LeafShape",
    "ModelShape",
    "ModuleShape",
    "read_shape",
    "require_shape",
    "shape_from_leaves",
)

LeafKind: TypeAlias = Literal["parameter", "buffer", "temporary"]
"""A parameter, a buffer that a state dict holds, or one that it doesn't (``persistent=False``)."""

# Of what a file has only the names, numbered modules of one list are of one class, as far as can be told.
_NUMBER = re.compile(r"\d+")
_PLAIN = frozenset({nn.Parameter, torch.Tensor})


class LeafShape(NamedTuple):
    """A tensor of a model.

    Attributes:
        name: From the root, such as ``"layers.0.weight"``.
        num_bytes: That it takes as it is.
        numel: Elements.
        dtype: Of an element; None where torch has none of that kind.
        kind: What it is to its module.
        tie: Number of the group of names that are this one tensor; None if it has one name.
        is_plain: Whether it could be stored with another dtype: not, if it is made of other tensors, as those
            of quantised layers are.
    """

    name: str
    num_bytes: int
    numel: int
    dtype: torch.dtype | None
    kind: LeafKind = "parameter"
    tie: int | None = None
    is_plain: bool = True


class ModuleShape(NamedTuple):
    """A module of a model.

    Attributes:
        name: From the root, which is ``""``.
        class_name: By which ``no_split_module_classes`` finds it.
        parameters: Its own, in order.
        children: Modules right below it, in order; one that is registered twice stands here twice.
        buffers: Its own, in order.
    """

    name: str
    class_name: str
    parameters: tuple[LeafShape, ...] = ()
    children: tuple[ModuleShape, ...] = ()
    buffers: tuple[LeafShape, ...] = ()

    def modules(self) -> Iterator[ModuleShape]:
        """Return the module and all below it, each before its children."""
        left: list[ModuleShape] = [self]
        while left:
            module = left.pop()
            yield module
            left.extend(reversed(module.children))

    def leaves(self) -> Iterator[LeafShape]:
        """Return all tensors in the order of a plan: parameters of a module, its children, its buffers."""
        left: list[ModuleShape | tuple[LeafShape, ...]] = [self]
        while left:
            one = left.pop()
            if isinstance(one, ModuleShape):
                left += (one.buffers, *reversed(one.children), one.parameters)
            else:
                yield from one


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model without its values.

    Attributes:
        root: The whole model.
        ties: Groups of names that are one tensor each, every group in the order of the model.
        no_split_classes: Classes that the model itself doesn't want to be spread over places.
    """

    root: ModuleShape
    ties: tuple[tuple[str, ...], ...] = ()
    no_split_classes: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Of all tensors as they are; what has several names counts once."""
        seen: set[int] = set()
        total = 0
        for leaf in self.root.leaves():
            if leaf.tie is None or leaf.tie not in seen:
                total += leaf.num_bytes
            if leaf.tie is not None:
                seen.add(leaf.tie)
        return total


def require_shape(operation: str, shape: object) -> None:
    """Check that something is the shape of a model.

    Raises:
        TypeError: It isn't.
    """
    if not isinstance(shape, ModelShape):
        more = " read_shape(model) gives it." if isinstance(shape, nn.Module) else ""
        raise TypeError(
            f"{operation}: takes the shape of a model (ModelShape), got {type(shape).__name__}.{more}"
        )


def read_shape(model: nn.Module, operation: str = "read_shape") -> ModelShape:
    """Read what a planner has to know of a model, which may lie on the meta device.

    Ranks: local. No value is read.

    Args:
        model: Any module. What stands in it under several names is one tensor.
        operation: What errors call it.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: A lazy layer doesn't know its shape yet.
    """
    if not isinstance(cast("object", model), nn.Module):
        more = " plan_device_map takes a shape." if isinstance(model, ModelShape) else ""
        raise TypeError(f"{operation}: takes a module, got {type(model).__name__}.{more}")
    reader = _Reader()
    root = reader.read(model, "")
    ties = reader.ties()
    number_of = {name: number for number, names in enumerate(ties) for name in names}
    inside = {""} if ties else set[str]()
    for name in number_of:
        while name := name.rpartition(".")[0]:
            inside.add(name)
    classes = tuple(reader.no_split_classes)
    return ModelShape(root=_tie(root, inside, number_of), ties=ties, no_split_classes=classes)


def shape_from_leaves(leaves: Iterable[LeafShape], ties: Iterable[Iterable[str]] = ()) -> ModelShape:
    """Make the shape of a model from the names of its tensors, such as those of a file.

    A file says neither the classes of modules nor in which order they run. So names are ordered, by numbers
    where there are some, and a numbered module is of a class that is called after its list: ``layers.0`` and
    ``layers.1`` are of ``"layers.*"``.

    Args:
        leaves: In any order. What they say of ties is replaced.
        ties: Groups of names that are one tensor each.

    Raises:
        ValueError: A name is given twice, or is that of a module too.

    >>> sizes = {"layers.10.weight": 8, "layers.9.weight": 8, "bias": 4}
    >>> leaves = [LeafShape(name, size, size // 4, torch.float32) for name, size in sizes.items()]
    >>> [module.name for module in shape_from_leaves(leaves).root.modules()]
    ['', 'layers', 'layers.9', 'layers.10']
    """
    groups = tuple(tuple(names) for names in ties)
    tie_of = {name: number for number, names in enumerate(groups) for name in names}
    tree: dict[str, Any] = {}
    for leaf in leaves:
        *path, last = leaf.name.split(".")
        node: Any = tree
        for part in path:
            node = node.setdefault(part, {})
            if isinstance(node, LeafShape):
                raise ValueError(f"{node.name} can't be a tensor and hold {leaf.name}.")
        if last in node:
            raise ValueError(f"{leaf.name} is given twice, or is a module's name too.")
        node[last] = leaf._replace(tie=tie_of.get(leaf.name))
    lost = sorted(tie_of.keys() - {leaf.name for leaf in _build("", "", tree).leaves()})
    if lost:
        raise ValueError(f"{lost[0]} is said to be tied, and there is no such tensor.")
    return ModelShape(root=_build("", "", tree), ties=groups)


class _Reader:
    """Walks a model once, and remembers what it has seen.

    torch's own iterators leave out what is registered twice.
    """

    def __init__(self) -> None:
        self._first: dict[int, str] = {}
        self._ties: dict[int, list[str]] = {}
        self.no_split_classes: dict[str, None] = {}

    def ties(self) -> tuple[tuple[str, ...], ...]:
        """Return the groups of names that are one tensor each, in the order of the model."""
        return tuple(tuple(self._ties[tensor]) for tensor in self._first if tensor in self._ties)

    def read(self, module: Any, name: str) -> ModuleShape:
        """Read a module and all below it."""
        prefix = f"{name}." if name else ""
        self.no_split_classes.update(dict.fromkeys(_no_split_of(module)))
        parameters: list[LeafShape] = []
        for key, tensor in module._parameters.items():
            if tensor is not None:
                leaf = _leaf(prefix + key, tensor, "parameter")
                self._see(tensor, leaf.name)
                parameters.append(leaf)
        children = [
            self.read(child, prefix + key) for key, child in module._modules.items() if child is not None
        ]
        buffers: list[LeafShape] = []
        if module._buffers:
            temporary: set[str] = module._non_persistent_buffers_set
            for key, tensor in module._buffers.items():
                if tensor is not None:
                    leaf = _leaf(prefix + key, tensor, "temporary" if key in temporary else "buffer")
                    self._see(tensor, leaf.name)
                    buffers.append(leaf)
        return ModuleShape(name, type(module).__name__, tuple(parameters), tuple(children), tuple(buffers))

    def _see(self, tensor: torch.Tensor, name: str) -> None:
        # By the object: tensors of the meta device have no memory that could be compared.
        first = self._first.setdefault(id(tensor), name)
        if first is not name:
            self._ties.setdefault(id(tensor), [first]).append(name)


def _no_split_of(module: nn.Module) -> Iterable[str]:
    """Return what a model, or one inside of another, says of its blocks."""
    # Not by getattr alone: a module looks for what isn't there in three places first.
    said = vars(module).get("_no_split_modules") or getattr(type(module), "_no_split_modules", None)
    if isinstance(said, str):
        return (said,)
    names = cast("Iterable[str]", said or ())
    return sorted(names) if isinstance(names, (set, frozenset)) else names


def _tie(module: ModuleShape, inside: Collection[str], tie_of: Mapping[str, int]) -> ModuleShape:
    """Number the ties of all tensors in a module; ``inside`` are the modules that have some."""
    if module.name not in inside:
        return module
    parameters, buffers = (
        tuple(leaf._replace(tie=tie_of.get(leaf.name)) for leaf in leaves)
        for leaves in (module.parameters, module.buffers)
    )
    children = tuple(_tie(child, inside, tie_of) for child in module.children)
    return module._replace(parameters=parameters, children=children, buffers=buffers)


def _leaf(name: str, tensor: Any, kind: LeafKind) -> LeafShape:
    if type(tensor) in _PLAIN:  # most are
        return LeafShape(name, tensor.nbytes, tensor.numel(), tensor.dtype, kind)
    if is_lazy(tensor):
        raise ValueError(
            f"{name} has no shape yet: run the model on a batch once, or give the layer its size."
        )
    is_plain = not is_traceable_wrapper_subclass(tensor)
    return LeafShape(name, _bytes_inside(tensor), tensor.numel(), tensor.dtype, kind, None, is_plain)


def _bytes_inside(tensor: Any) -> int:
    """Count the bytes of the tensors that a tensor is made of."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.numel() * tensor.dtype.itemsize
    names, _ = cast("tuple[list[str], object]", tensor.__tensor_flatten__())
    return sum(_bytes_inside(getattr(tensor, name)) for name in names)


def _build(name: str, class_name: str, tree: dict[str, Any]) -> ModuleShape:
    prefix = f"{name}." if name else ""
    listed = f"{name.rpartition('.')[2]}.*" if name else "*"
    leaves: list[LeafShape] = []
    children: list[ModuleShape] = []
    for key in sorted(tree, key=_natural):
        one = tree[key]
        if isinstance(one, LeafShape):
            leaves.append(one)
        else:
            kind = listed if _NUMBER.fullmatch(key) else key
            children.append(_build(prefix + key, kind, one))
    return ModuleShape(name, class_name, tuple(leaves), tuple(children))


def _natural(key: str) -> list[tuple[int, int, str]]:
    """Order ``"9"`` before ``"10"``, and names by letters."""
    return [
        (0, int(part), part) if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", key) if part
    ]
