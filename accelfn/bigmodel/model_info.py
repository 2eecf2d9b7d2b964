"""What planning needs to know about a model: modules, tensors, their sizes and ties, but no values."""

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

from accelfn.weights.places import as_names, listed, named_dtype, place_of, suggest_names

LeafKind: TypeAlias = Literal["parameter", "buffer", "non_persistent"]
"""A parameter, a buffer in the state dict, or a buffer outside of it (``persistent=False``)."""

_NUMBER = re.compile(r"\d+")
_PLAIN = frozenset({nn.Parameter, torch.Tensor})


class LeafShape(NamedTuple):
    """A tensor of a model.

    Attributes:
        name: Full name, such as ``"layers.0.weight"``.
        num_bytes: Its current size.
        numel: Number of elements.
        dtype: Of an element; None if torch has no such dtype.
        kind: Parameter or buffer.
        tie: Index of its group of tied names; None if it has one name.
        is_plain: Whether it could be stored in another dtype. False if it consists of other tensors, as in
            quantised layers.
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
        name: Full name; that of the root is ``""``.
        class_name: What ``no_split_module_classes`` matches.
        parameters: Its own parameters, in order.
        children: Its direct children, in order; a child that is registered twice is listed twice.
        buffers: Its own buffers, in order.
    """

    name: str
    class_name: str
    parameters: tuple[LeafShape, ...] = ()
    children: tuple[ModuleShape, ...] = ()
    buffers: tuple[LeafShape, ...] = ()

    def modules(self) -> Iterator[ModuleShape]:
        """Yield the module and all modules below it, parents first."""
        stack: list[ModuleShape] = [self]
        while stack:
            module = stack.pop()
            yield module
            stack.extend(reversed(module.children))

    def leaves(self) -> Iterator[LeafShape]:
        """Yield all tensors in planning order: a module's parameters, its children, its buffers."""
        stack: list[ModuleShape | tuple[LeafShape, ...]] = [self]
        while stack:
            item = stack.pop()
            if isinstance(item, ModuleShape):
                stack += (item.buffers, *reversed(item.children), item.parameters)
            else:
                yield from item


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model without its values.

    Attributes:
        root: The root module.
        ties: Groups of names that share one tensor, each in model order.
        no_split_classes: Classes that the model specifies in ``_no_split_modules``.
    """

    root: ModuleShape
    ties: tuple[tuple[str, ...], ...] = ()
    no_split_classes: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Current size of all tensors, counting tied ones once."""
        return sum(leaf.num_bytes for leaf in self.distinct_leaves())

    def distinct_leaves(self) -> Iterator[LeafShape]:
        """Yield each tensor once, under its first name."""
        seen: set[int] = set()
        for leaf in self.root.leaves():
            if leaf.tie not in seen:
                yield leaf
            if leaf.tie is not None:
                seen.add(leaf.tie)


def read_shape(model: nn.Module, operation: str = "read_shape") -> ModelShape:
    """Read the names, sizes and ties of a model's tensors; the model may be on the meta device.

    Ranks: local. No value is read.

    Args:
        model: Any module.
        operation: The caller's name in errors.

    Raises:
        TypeError: ``model`` isn't a module.
        ValueError: A lazy layer has no shape yet.
    """
    if not isinstance(cast("object", model), nn.Module):
        hint = " plan_device_map takes a shape." if isinstance(model, ModelShape) else ""
        raise TypeError(f"{operation}: model must be a module, got {type(model).__name__}.{hint}")
    names: dict[int, list[str]] = {}
    for name, tensor in _named_tensors(model, ""):
        # By identity: meta tensors have no memory to compare.
        names.setdefault(id(tensor), []).append(name)
    ties = tuple(tuple(group) for group in names.values() if len(group) > 1)
    tie_of = {name: index for index, group in enumerate(ties) for name in group}
    no_split: dict[str, None] = {}

    def read(module: Any, name: str) -> ModuleShape:
        dot = f"{name}." if name else ""
        no_split.update(dict.fromkeys(_no_split_of(module)))
        non_persistent: set[str] = module._non_persistent_buffers_set

        def leaf(key: str, tensor: torch.Tensor, kind: LeafKind) -> LeafShape:
            return _leaf(dot + key, tensor, kind, tie_of.get(dot + key))

        return ModuleShape(
            name,
            type(module).__name__,
            tuple(leaf(key, one, "parameter") for key, one in module._parameters.items() if one is not None),
            tuple(read(child, dot + key) for key, child in module._modules.items() if child is not None),
            tuple(
                leaf(key, one, "non_persistent" if key in non_persistent else "buffer")
                for key, one in module._buffers.items()
                if one is not None
            ),
        )

    root = read(model, "")
    return ModelShape(root=root, ties=ties, no_split_classes=tuple(no_split))


def require_values(operation: str, bare: Iterable[str], todo: str) -> None:
    """Check that there are no tensors on the meta device that would need values.

    Args:
        operation: The caller's name; empty for none.
        bare: Names of such tensors.
        todo: What to do about them.

    Raises:
        ValueError: There are some.
    """
    names = listed(bare)
    if names:
        prefix = f"{operation}: " if operation else ""
        raise ValueError(f"{prefix}{names} are on the meta device and have no values. {todo}")


def _named_tensors(module: Any, prefix: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors in planning order, under each name; torch's own iterators skip repeated modules."""
    yield from ((prefix + key, one) for key, one in module._parameters.items() if one is not None)
    for key, child in module._modules.items():
        if child is not None:
            yield from _named_tensors(child, f"{prefix}{key}.")
    yield from ((prefix + key, one) for key, one in module._buffers.items() if one is not None)


def shape_from_leaves(leaves: Iterable[LeafShape], ties: Iterable[Iterable[str]] = ()) -> ModelShape:
    """Build the shape of a model from the names of its tensors, such as those in a file.

    A file records neither module classes nor their order. Names are therefore sorted naturally, and numbered
    modules get a class named after their list: ``layers.0`` and ``layers.1`` are of class ``"layers.*"``.

    Args:
        leaves: In any order. Their ``tie`` is replaced.
        ties: Groups of names that share one tensor.

    Raises:
        ValueError: A name is repeated, or is a tensor and a module at once.

    >>> sizes = {"layers.10.weight": 8, "layers.9.weight": 8, "bias": 4}
    >>> leaves = [LeafShape(name, size, size // 4, torch.float32) for name, size in sizes.items()]
    >>> [module.name for module in shape_from_leaves(leaves).root.modules()]
    ['', 'layers', 'layers.9', 'layers.10']
    """
    groups = tuple(tuple(names) for names in ties)
    tie_of = {name: index for index, names in enumerate(groups) for name in names}
    tree: dict[str, Any] = {}
    for leaf in leaves:
        *path, last = leaf.name.split(".")
        node: Any = tree
        for part in path:
            node = node.setdefault(part, {})
            if isinstance(node, LeafShape):
                raise ValueError(f"{node.name} can't be a tensor and contain {leaf.name}.")
        if last in node:
            raise ValueError(f"{leaf.name} is repeated, or is also the name of a module.")
        node[last] = leaf._replace(tie=tie_of.get(leaf.name))
    root = _module_from_tree("", "", tree)
    unknown = sorted(tie_of.keys() - {leaf.name for leaf in root.leaves()})
    if unknown:
        raise ValueError(f"ties: there is no tensor {unknown[0]}.")
    return ModelShape(root=root, ties=groups)


def _no_split_of(module: nn.Module) -> Iterable[str]:
    # Not through getattr on the module, which searches three tables before it fails.
    names = vars(module).get("_no_split_modules") or getattr(type(module), "_no_split_modules", None)
    classes = as_names(cast("str | Iterable[str] | None", names))
    return sorted(classes) if isinstance(names, (set, frozenset)) else classes


def _leaf(name: str, tensor: Any, kind: LeafKind, tie: int | None) -> LeafShape:
    if type(tensor) in _PLAIN:  # most are
        return LeafShape(name, tensor.nbytes, tensor.numel(), tensor.dtype, kind, tie)
    if is_lazy(tensor):
        raise ValueError(f"{name} has no shape yet. Run the model on a batch once, or pass the layer's size.")
    is_plain = not is_traceable_wrapper_subclass(tensor)
    return LeafShape(name, _inner_bytes(tensor), tensor.numel(), tensor.dtype, kind, tie, is_plain)


def _inner_bytes(tensor: Any) -> int:
    """Return the size of the plain tensors that a tensor consists of."""
    if not is_traceable_wrapper_subclass(tensor):
        return tensor.numel() * tensor.dtype.itemsize
    names, _ = cast("tuple[list[str], object]", tensor.__tensor_flatten__())
    return sum(_inner_bytes(getattr(tensor, name)) for name in names)


def _module_from_tree(name: str, class_name: str, tree: dict[str, Any]) -> ModuleShape:
    dot = f"{name}." if name else ""
    item_class = f"{name.rpartition('.')[2]}.*" if name else "*"
    leaves: list[LeafShape] = []
    children: list[ModuleShape] = []
    for key in sorted(tree, key=_natural_key):
        node = tree[key]
        if isinstance(node, LeafShape):
            leaves.append(node)
        else:
            child_class = item_class if _NUMBER.fullmatch(key) else key
            children.append(_module_from_tree(dot + key, child_class, node))
    return ModuleShape(name, class_name, tuple(leaves), tuple(children))


def _natural_key(key: str) -> list[tuple[int, int, str]]:
    """Return a key that sorts ``"9"`` before ``"10"``."""
    return [
        (0, int(part), part) if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", key) if part
    ]


class CustomDtype(Enum):
    """Dtypes that torch lacks, or that quantised layers pack; for size calculations only."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


AnyDtype: TypeAlias = "torch.dtype | CustomDtype | str"
"""A dtype, its name such as ``"float16"``, ``"torch.float16"`` or ``"fp16"``, or a :class:`CustomDtype`."""

_CUSTOM_BYTES: Mapping[CustomDtype, float] = MappingProxyType(
    {CustomDtype.FP8: 1, CustomDtype.INT4: 0.5, CustomDtype.INT2: 0.25}
)


def dtype_byte_size(dtype: AnyDtype) -> float:
    """Return the size of one element in bytes.

    Raises:
        ValueError: There is no such dtype.

    >>> dtype_byte_size(torch.float32), dtype_byte_size("bfloat16"), dtype_byte_size(CustomDtype.INT4)
    (4, 2, 0.5)
    """
    known = read_dtype(dtype)
    return _CUSTOM_BYTES[known] if isinstance(known, CustomDtype) else known.itemsize


def read_dtype(dtype: AnyDtype, what: str = "dtype") -> torch.dtype | CustomDtype:
    """Convert a dtype or its name to a dtype.

    Args:
        dtype: See :data:`AnyDtype`; names such as ``"int4"`` are those of :class:`CustomDtype`.
        what: The argument's name in errors.

    Raises:
        ValueError: There is no such dtype.
    """
    value = cast("object", dtype)
    if isinstance(value, (torch.dtype, CustomDtype)):
        return value
    if isinstance(value, str):
        name = value.removeprefix("torch.")
        if name in {custom.value for custom in CustomDtype}:
            return CustomDtype(name)
        named = named_dtype(name)
        if named is not None:
            return named
    raise ValueError(
        f"{what} must be a torch dtype or its name, such as 'float16', or a CustomDtype: got {value!r}."
    )


def check_names(shape: ModelShape, special_dtypes: Mapping[str, object] | None) -> None:
    """Check that a model has the tensors for which dtypes are specified. Pure.

    Raises:
        ValueError: It lacks some.
    """
    if not special_dtypes:
        return
    known = {leaf.name for leaf in shape.root.leaves()}
    unknown = [name for name in special_dtypes if name not in known]
    if unknown:
        raise ValueError(
            f"special_dtypes names tensors that the model doesn't have: {suggest_names(unknown, known)}. "
            "Use names of named_parameters() and named_buffers()."
        )


def read_dtypes(special_dtypes: Mapping[str, AnyDtype] | None) -> dict[str, torch.dtype | CustomDtype]:
    """Convert dtypes by tensor name; errors as in :func:`read_dtype`."""
    return {name: read_dtype(dtype, name) for name, dtype in (special_dtypes or {}).items()}


def counted_bytes(
    leaf: LeafShape,
    dtype: torch.dtype | CustomDtype | None = None,
    special_dtypes: Mapping[str, torch.dtype | CustomDtype] = MappingProxyType({}),
) -> int:
    """Return the size of a tensor if the model were loaded with ``dtype``. Pure.

    ``dtype`` never makes a tensor larger and doesn't apply to non-floating tensors; ``special_dtypes`` always
    apply.
    """
    special = special_dtypes.get(leaf.name)
    if special is not None:
        return math.ceil(leaf.numel * dtype_byte_size(special))
    current = leaf.dtype
    if dtype is None or current is None or not leaf.is_plain or not current.is_floating_point:
        return leaf.num_bytes
    return min(leaf.num_bytes, math.ceil(leaf.numel * dtype_byte_size(dtype)))


def sizes_of(
    shape: ModelShape,
    dtype: AnyDtype | None = None,
    special_dtypes: Mapping[str, AnyDtype] | None = None,
    buffers_only: bool = False,
) -> defaultdict[str, int]:
    """Return what :func:`compute_module_sizes` returns, for a shape. Pure."""
    known = None if dtype is None else read_dtype(dtype)
    special = read_dtypes(special_dtypes)
    sizes: defaultdict[str, int] = defaultdict(int)
    seen: set[int] = set()

    # In torch's order, which determines the first of several tied names.
    modules = list(shape.root.modules())
    leaves = [leaf for module in modules for leaf in module.parameters if not buffers_only]
    leaves += [leaf for module in modules for leaf in module.buffers]
    for leaf in leaves:
        if leaf.tie is not None:
            if leaf.tie in seen:
                continue
            seen.add(leaf.tie)
        size = counted_bytes(leaf, known, special)
        for name in (*_parents(leaf.name), leaf.name):
            sizes[name] += size
    return sizes


def _parents(name: str) -> list[str]:
    """Return the names of all modules that contain a tensor, the root first."""
    return ["", *(name[: match.start()] for match in re.finditer(r"\.", name))]


def compute_module_sizes(
    model: nn.Module,
    dtype: AnyDtype | None = None,
    special_dtypes: Mapping[str, AnyDtype] | None = None,
    buffers_only: bool = False,
) -> defaultdict[str, int]:
    """Return the size in bytes of each tensor and module of a model; ``""`` is the whole model.

    Tied tensors count once, under their first name. Modules without tensors have no entry; looking one up
    returns 0.

    Ranks: local. The model may be on the meta device.

    Args:
        model: Any module.
        dtype: Floating tensors count as if they had it, unless they are smaller already.
        special_dtypes: Dtypes of single tensors, by name; they always apply.
        buffers_only: Don't count parameters.

    Raises:
        ValueError: There is no such dtype, ``special_dtypes`` names an unknown tensor, or a lazy layer has no
            shape yet.
        TypeError: ``model`` isn't a module.

    >>> compute_module_sizes(nn.Sequential(nn.Linear(3, 4)))["0"]
    64
    """
    shape = read_shape(model, "compute_module_sizes")
    check_names(shape, special_dtypes)
    return sizes_of(shape, dtype, special_dtypes, buffers_only)


def compute_module_total_buffer_size(
    model: nn.Module, dtype: AnyDtype | None = None, special_dtypes: Mapping[str, AnyDtype] | None = None
) -> int:
    """Return the size in bytes of all buffers of a model.

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
    """Find the largest layer: a module without children or of an unsplit class, or a bare tensor.

    Args:
        modules: Names and modules or tensors.
        module_sizes: From :func:`compute_module_sizes`.
        no_split_module_classes: Names of classes that aren't split.

    Returns:
        The size in bytes, and the names of all layers of that size; 0 and no names without any layer.
    """
    unsplit = frozenset(as_names(no_split_module_classes))
    stack = list(reversed(modules))
    largest, names = 0, list[str]()
    while stack:
        name, module = stack.pop()
        children = list(module.named_children()) if isinstance(module, nn.Module) else []
        if children and type(module).__name__ not in unsplit:
            stack.extend((f"{name}.{key}", child) for key, child in reversed(children))
            continue
        size = module_sizes.get(name, 0)
        if size > largest:
            largest, names = size, [name]
        elif size == largest:
            names.append(name)
    return largest, names


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Return the size of a model in bytes, and that of its largest layer with the names of all such layers.

    Modules of the classes in ``_no_split_modules`` count as layers.

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
    """Return the names that are no prefix of another name.

    Args:
        module_sizes: From :func:`compute_module_sizes`. The leaves of all names are tensors; without those,
            the leaves are the modules without children.

    >>> get_module_leaves({"": 8, "a": 8, "a.weight": 4, "a.bias": 4})
    ['a.weight', 'a.bias']
    """
    parents = {""}.union(*(_parents(name) for name in module_sizes))
    return [name for name in module_sizes if name not in parents]


def get_non_persistent_buffers(module: nn.Module, recurse: bool = False, fqns: bool = False) -> set[str]:
    """Return the names of buffers that aren't in the state dict.

    Args:
        module: Any module.
        recurse: Include those of modules below it.
        fqns: Return full names instead of their last part.
    """
    names: set[str] = set()
    modules = cast("Iterable[tuple[str, Any]]", module.named_modules())
    for path, inner in modules if recurse else (("", cast("Any", module)),):
        keys: set[str] = inner._non_persistent_buffers_set
        names |= {f"{path}.{key}" for key in keys} if fqns and path else keys
    return names


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Return the groups of names that share one parameter, also on the meta device.

    A module that is registered twice makes one group of each of its parameters. Buffers and views don't
    count.

    Ranks: local.

    Args:
        model: Any module.

    Returns:
        Groups in model order; the names of each are sorted.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> model[1].weight = model[0].weight
    >>> find_tied_parameters(model)
    [['0.weight', '1.weight']]
    """
    groups: dict[int, list[str]] = {}
    for leaf in read_shape(model).root.leaves():
        if leaf.tie is not None and leaf.kind == "parameter":
            groups.setdefault(leaf.tie, []).append(leaf.name)
    return [sorted(names) for names in groups.values() if len(names) > 1]


def retie_parameters(model: nn.Module, tied_params: Iterable[Iterable[str]]) -> None:
    """Make the names of each group share one tensor again, after they were replaced one by one.

    Ranks: local. Effect: on ``model``.

    Args:
        model: The model with these parameters.
        tied_params: Groups of names, as returned by :func:`find_tied_parameters`. The first tensor of a group
            that isn't on the meta device is assigned to all its names; if all are, nothing changes.

    Raises:
        ValueError: The model has no tensor of that name.
    """
    groups = [[_owner_of(model, name) for name in names] for names in tied_params]
    for owners in groups:
        tensors: list[Any] = [getattr(module, key) for module, key in owners]
        real = next((tensor for tensor in tensors if not tensor.is_meta), None)
        if real is None:
            continue
        for (module, key), tensor in zip(owners, tensors, strict=True):
            if tensor is not real:
                setattr(module, key, real)


def _owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that holds a tensor, and the tensor's name in it."""
    path, _, key = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        module = None
    if module is None or not isinstance(getattr(module, key, None), torch.Tensor):
        raise ValueError(f"tied_params: the model has no tensor {name!r}.")
    return module, key


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Check whether a transformers model is configured to tie parameters.

    Args:
        model: Any module; False for models of other libraries.
    """
    if not any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__):
        return False
    pretrained: Any = model
    config: Any = getattr(model, "config", None)
    text_config: Any = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    ties_words = getattr(text_config, "tie_word_embeddings", False) and pretrained.get_output_embeddings()
    ties_halves = getattr(config, "is_encoder_decoder", False) and getattr(
        config, "tie_encoder_decoder", False
    )
    ties_modules = any(hasattr(module, "_tie_weights") for module in model.modules())
    return bool(ties_words or ties_halves or ties_modules)


def check_tied_parameters_on_same_device(
    tied_params: Iterable[Sequence[str]], device_map: Mapping[str, object]
) -> None:
    """Warn about tied parameters that a device map puts on several places, where they become copies.

    Args:
        tied_params: Groups of names.
        device_map: Places by name of a module or tensor; ``""`` is the whole model.

    Raises:
        ValueError: The map has no entry for one of them.
    """
    for names in tied_params:
        places = {name: place_of(name, device_map) for name in names}
        missing = [name for name, place in places.items() if place is None]
        if missing:
            raise ValueError(f"device_map has no entry for {listed(missing)}, or for a module around.")
        if len({str(place) for place in places.values()}) > 1:
            text = ", ".join(f"{name} on {place!r}" for name, place in places.items())
            warnings.warn(
                f"tied parameters are on several places and become independent copies: {text}.",
                stacklevel=2,
            )
