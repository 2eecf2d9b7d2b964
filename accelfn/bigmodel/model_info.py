"""What a planner has to know of a model: modules, tensors, their sizes and ties. No values."""

from __future__ import annotations

import math
import re
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelfn.bigmodel.devices import listed, named_dtype, names_in, place_of, tell_unknown

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
        return sum(leaf.num_bytes for leaf in self.distinct_leaves())

    def distinct_leaves(self) -> Iterator[LeafShape]:
        """Return each tensor once, under the first of its names."""
        seen: set[int] = set()
        for leaf in self.root.leaves():
            if leaf.tie not in seen:
                yield leaf
            if leaf.tie is not None:
                seen.add(leaf.tie)


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
    names: dict[int, list[str]] = {}
    for name, tensor in _named_tensors(model, ""):
        # By the object: tensors of the meta device have no memory that could be compared.
        names.setdefault(id(tensor), []).append(name)
    ties = tuple(tuple(group) for group in names.values() if len(group) > 1)
    tie_of = {name: number for number, group in enumerate(ties) for name in group}
    no_split: dict[str, None] = {}

    def read(module: Any, name: str) -> ModuleShape:
        prefix = f"{name}." if name else ""
        no_split.update(dict.fromkeys(_no_split_of(module)))
        temporary: set[str] = module._non_persistent_buffers_set
        return ModuleShape(
            name,
            type(module).__name__,
            tuple(
                _leaf(prefix + key, tensor, "parameter", tie_of.get(prefix + key))
                for key, tensor in module._parameters.items()
                if tensor is not None
            ),
            tuple(read(child, prefix + key) for key, child in module._modules.items() if child is not None),
            tuple(
                _leaf(
                    prefix + key,
                    tensor,
                    "temporary" if key in temporary else "buffer",
                    tie_of.get(prefix + key),
                )
                for key, tensor in module._buffers.items()
                if tensor is not None
            ),
        )

    root = read(model, "")
    return ModelShape(root=root, ties=ties, no_split_classes=tuple(no_split))


def _named_tensors(module: Any, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Return all tensors in the order of a plan. torch's own iterators leave out what is registered twice."""
    yield from ((prefix + key, one) for key, one in module._parameters.items() if one is not None)
    for key, child in module._modules.items():
        if child is not None:
            yield from _named_tensors(child, f"{prefix}{key}.")
    yield from ((prefix + key, one) for key, one in module._buffers.items() if one is not None)


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
    root = _build("", "", tree)
    lost = sorted(tie_of.keys() - {leaf.name for leaf in root.leaves()})
    if lost:
        raise ValueError(f"{lost[0]} is said to be tied, and there is no such tensor.")
    return ModelShape(root=root, ties=groups)


def _no_split_of(module: nn.Module) -> Iterable[str]:
    """Return what a model, or one inside of another, says of its blocks."""
    # Not by getattr alone: a module looks for what isn't there in three places first.
    said = vars(module).get("_no_split_modules") or getattr(type(module), "_no_split_modules", None)
    if isinstance(said, str):
        return (said,)
    names = cast("Iterable[str]", said or ())
    return sorted(names) if isinstance(names, (set, frozenset)) else names


def _leaf(name: str, tensor: Any, kind: LeafKind, tie: int | None) -> LeafShape:
    if type(tensor) in _PLAIN:  # most are
        return LeafShape(name, tensor.nbytes, tensor.numel(), tensor.dtype, kind, tie)
    if is_lazy(tensor):
        raise ValueError(
            f"{name} has no shape yet: run the model on a batch once, or give the layer its size."
        )
    is_plain = not is_traceable_wrapper_subclass(tensor)
    return LeafShape(name, _bytes_inside(tensor), tensor.numel(), tensor.dtype, kind, tie, is_plain)


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


class CustomDtype(Enum):
    """Numbers that torch has no dtype for, or that a quantised layer packs: for sizes alone."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


AnyDtype: TypeAlias = "torch.dtype | CustomDtype | str"
"""A dtype, its name such as ``"float16"``, ``"torch.float16"`` or ``"fp16"``, or a :class:`CustomDtype`."""

_CUSTOM_BYTES: Mapping[CustomDtype, float] = MappingProxyType(
    {CustomDtype.FP8: 1, CustomDtype.INT4: 0.5, CustomDtype.INT2: 0.25}
)


def dtype_byte_size(dtype: AnyDtype) -> float:
    """Return the bytes of one element.

    Raises:
        ValueError: There is no such dtype.

    >>> dtype_byte_size(torch.float32), dtype_byte_size("bfloat16"), dtype_byte_size(CustomDtype.INT4)
    (4, 2, 0.5)
    """
    known = read_dtype(dtype)
    return _CUSTOM_BYTES[known] if isinstance(known, CustomDtype) else known.itemsize


def read_dtype(dtype: AnyDtype, what: str = "dtype") -> torch.dtype | CustomDtype:
    """Turn what a caller writes for a dtype into one.

    Args:
        dtype: See :data:`AnyDtype`; ``"int4"`` and the like are those of :class:`CustomDtype`.
        what: Where it stands, for errors.

    Raises:
        ValueError: There is no such dtype.
    """
    given = cast("object", dtype)
    if isinstance(given, (torch.dtype, CustomDtype)):
        return given
    if isinstance(given, str):
        name = given.removeprefix("torch.")
        if name in {one.value for one in CustomDtype}:
            return CustomDtype(name)
        found = named_dtype(name)
        if found is not None:
            return found
    raise ValueError(
        f"{what} must be a dtype of torch or its name, such as 'float16', or one of CustomDtype: got "
        f"{given!r}."
    )


def check_names(shape: ModelShape, special_dtypes: Mapping[str, object] | None) -> None:
    """Check that a model has the tensors that dtypes are given for. Pure.

    Raises:
        ValueError: It lacks some, so that a size would be counted that isn't meant.
    """
    if not special_dtypes:
        return
    known = {leaf.name for leaf in shape.root.leaves()}
    unknown = [name for name in special_dtypes if name not in known]
    if unknown:
        raise ValueError(
            f"special_dtypes names tensors that the model doesn't have: {tell_unknown(unknown, known)}. "
            "Names are those of named_parameters() and named_buffers()."
        )


def read_dtypes(special_dtypes: Mapping[str, AnyDtype] | None) -> dict[str, torch.dtype | CustomDtype]:
    """Read dtypes that are given by names of tensors.

    Raises:
        ValueError: There is no such dtype.
    """
    return {name: read_dtype(one, name) for name, one in (special_dtypes or {}).items()}


def counted_bytes(
    leaf: LeafShape,
    dtype: torch.dtype | CustomDtype | None = None,
    special_dtypes: Mapping[str, torch.dtype | CustomDtype] = MappingProxyType({}),
) -> int:
    """Count what a tensor would take if the model were loaded with ``dtype``.

    A dtype never makes a tensor larger, and what isn't floating keeps its own. Pure.
    """
    special = special_dtypes.get(leaf.name)
    if special is not None:
        return math.ceil(leaf.numel * dtype_byte_size(special))
    own = leaf.dtype
    if dtype is None or own is None or not leaf.is_plain or not own.is_floating_point:
        return leaf.num_bytes
    return min(leaf.num_bytes, math.ceil(leaf.numel * dtype_byte_size(dtype)))


def sizes_of(
    shape: ModelShape,
    dtype: AnyDtype | None = None,
    special_dtypes: Mapping[str, AnyDtype] | None = None,
    buffers_only: bool = False,
) -> defaultdict[str, int]:
    """Do what :func:`compute_module_sizes` does for a shape. Pure."""
    known = None if dtype is None else read_dtype(dtype)
    special = read_dtypes(special_dtypes)
    sizes: defaultdict[str, int] = defaultdict(int)
    seen: set[int] = set()

    # In the order of torch, by which one of several names is the first.
    modules = list(shape.root.modules())
    leaves = [leaf for module in modules for leaf in module.parameters if not buffers_only]
    leaves += [leaf for module in modules for leaf in module.buffers]
    for leaf in leaves:
        if leaf.tie is not None:
            if leaf.tie in seen:
                continue
            seen.add(leaf.tie)
        size = counted_bytes(leaf, known, special)
        sizes[""] += size
        end = leaf.name.find(".")
        while end >= 0:
            sizes[leaf.name[:end]] += size
            end = leaf.name.find(".", end + 1)
        sizes[leaf.name] += size
    return sizes


def compute_module_sizes(
    model: nn.Module,
    dtype: AnyDtype | None = None,
    special_dtypes: Mapping[str, AnyDtype] | None = None,
    buffers_only: bool = False,
) -> defaultdict[str, int]:
    """Count the bytes below each name of a model: tensors, modules, and ``""`` for all.

    What has several names counts once, under the first. Modules without tensors have no entry, and 0 when
    they are asked for.

    Ranks: local. The model may be on the meta device.

    Args:
        model: Any module.
        dtype: Floating tensors count as if they were of it, unless they are smaller already.
        special_dtypes: Dtypes of single tensors, by name; they count in any case.
        buffers_only: Parameters don't count.

    Raises:
        ValueError: There is no such dtype, ``special_dtypes`` names what the model lacks, or a lazy layer has
            no shape yet.
        TypeError: ``model`` is no module.

    >>> compute_module_sizes(nn.Sequential(nn.Linear(3, 4)))["0"]
    64
    """
    shape = read_shape(model, "compute_module_sizes")
    check_names(shape, special_dtypes)
    return sizes_of(shape, dtype, special_dtypes, buffers_only)


def compute_module_total_buffer_size(
    model: nn.Module, dtype: AnyDtype | None = None, special_dtypes: Mapping[str, AnyDtype] | None = None
) -> int:
    """Count the bytes of all buffers of a model.

    Args:
        model: Any module.
        dtype: See :func:`compute_module_sizes`.
        special_dtypes: See :func:`compute_module_sizes`.

    >>> compute_module_total_buffer_size(nn.BatchNorm1d(4))
    40
    """
    return compute_module_sizes(model, dtype, special_dtypes, buffers_only=True)[""]


def get_max_layer_size(
    modules: Sequence[tuple[str, Any]],
    module_sizes: Mapping[str, int],
    no_split_module_classes: Collection[str] | str | None,
) -> tuple[int, list[str]]:
    """Find the largest layer: a module without children, one that isn't split, or a bare tensor.

    Args:
        modules: Names, with modules or tensors.
        module_sizes: Of :func:`compute_module_sizes`.
        no_split_module_classes: Names of classes that count as one layer.

    Returns:
        Its bytes, and the names of all layers that have so many; 0 and no name without any layer.
    """
    kept = frozenset(names_in(no_split_module_classes))
    left = list(reversed(modules))
    largest, names = 0, list[str]()
    while left:
        name, module = left.pop()
        children = list(module.named_children()) if isinstance(module, nn.Module) else []
        if children and type(module).__name__ not in kept:
            left.extend((f"{name}.{key}", child) for key, child in reversed(children))
            continue
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Count a model's bytes, and those of its largest layer with the names of all that are so large.

    What the model says in ``_no_split_modules`` is a layer.

    Args:
        model: Any module, also on the meta device.
    """
    shape = read_shape(model, "calculate_maximum_sizes")
    sizes = sizes_of(shape)
    parts = [
        *model.named_parameters(recurse=False),
        *model.named_children(),
        *model.named_buffers(recurse=False),
    ]
    return sizes[""], get_max_layer_size(parts, sizes, shape.no_split_classes)


def get_module_leaves(module_sizes: Mapping[str, int]) -> list[str]:
    """Find the names that no other name is below of.

    Args:
        module_sizes: Of :func:`compute_module_sizes`. Of a model these are its tensors; without them, the
            modules that have no modules below them.

    >>> get_module_leaves({"": 8, "a": 8, "a.weight": 4, "a.bias": 4})
    ['a.weight', 'a.bias']
    """
    above = {""}.union(*(_above(name) for name in module_sizes))
    return [name for name in module_sizes if name not in above]


def _above(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Name the buffers that a state dict leaves out.

    Args:
        module: Any.
        recurse: Those of modules below it too.
        fqns: By full names; otherwise by the last part of them.
    """
    found: set[str] = set()
    inside = cast("Iterable[tuple[str, Any]]", module.named_modules())
    for name, one in inside if recurse else (("", cast("Any", module)),):
        own: set[str] = one._non_persistent_buffers_set
        found |= {f"{name}.{key}" for key in own} if fqns and name else own
    return found


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Find the parameters that a model has under several names, also on the meta device.

    A module that is registered twice makes one group of each of its parameters. Buffers don't count, and
    neither do views.

    Ranks: local.

    Args:
        model: Any module.

    Returns:
        Groups in the order of the model; names in the order of letters.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> model[1].weight = model[0].weight
    >>> find_tied_parameters(model)
    [['0.weight', '1.weight']]
    """
    return _tied_parameters_of(read_shape(model))


def _tied_parameters_of(shape: ModelShape) -> list[list[str]]:
    """Do what :func:`find_tied_parameters` does for a shape. Pure."""
    groups: dict[int, list[str]] = {}
    for leaf in shape.root.leaves():
        if leaf.tie is not None and leaf.kind == "parameter":
            groups.setdefault(leaf.tie, []).append(leaf.name)
    return [sorted(names) for names in groups.values() if len(names) > 1]


def retie_parameters(model: nn.Module, tied_params: Iterable[Iterable[str]]) -> None:
    """Make the names of each group one tensor again, after they were replaced one by one.

    Ranks: local. Effect: changes the model.

    Args:
        model: Whose parameters they are.
        tied_params: Groups of names, as :func:`find_tied_parameters` gives them. The first of a group that
            isn't on the meta device becomes the value of all; if all are, nothing is changed.

    Raises:
        ValueError: The model has no tensor of that name.
    """
    groups = [[_holder(model, name) for name in names] for names in tied_params]
    for holders in groups:
        values: list[Any] = [getattr(module, key) for module, key in holders]
        kept = next((value for value in values if not value.is_meta), None)
        if kept is None:
            continue
        for (module, key), value in zip(holders, values, strict=True):
            if value is not kept:
                setattr(module, key, kept)


def _holder(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that has a tensor, and what it calls it."""
    path, _, key = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        module = None
    if module is None or not isinstance(getattr(module, key, None), torch.Tensor):
        raise ValueError(f"the model has no tensor {name!r}, which is said to be tied.")
    return module, key


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return whether a model of transformers is configured to tie parameters.

    Args:
        model: Any module; False for those of other libraries.
    """
    if not any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__):
        return False
    config: Any = getattr(model, "config", None)
    text: Any = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    found: Any = model
    ties_words = bool(getattr(text, "tie_word_embeddings", False)) and bool(found.get_output_embeddings())
    ties_halves = bool(getattr(config, "is_encoder_decoder", False)) and bool(
        getattr(config, "tie_encoder_decoder", False)
    )
    return ties_words or ties_halves or any(hasattr(module, "_tie_weights") for module in model.modules())


def check_tied_parameters_on_same_device(
    tied_params: Iterable[Sequence[str]], device_map: Mapping[str, object]
) -> None:
    """Warn of parameters that are tied and that a map puts on several places: they become copies.

    Args:
        tied_params: Groups of names.
        device_map: From names of modules or tensors to places; ``""`` is the whole model.

    Raises:
        ValueError: The map has no place for one of them.
    """
    for names in tied_params:
        places = {name: place_of(name, device_map) for name in names}
        lost = [name for name, place in places.items() if place is None]
        if lost:
            raise ValueError(f"device_map has no entry for {listed(lost)}, or for a module around.")
        if len({str(place) for place in places.values()}) > 1:
            said = ", ".join(f"{name} on {place!r}" for name, place in places.items())
            warnings.warn(
                "tied parameters are on several places, and become copies that no longer change together: "
                f"{said}.",
                stacklevel=2,
            )
