"""How many bytes modules take."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from accelfn.bigmodel.dtypes import named_dtype
from accelfn.bigmodel.plan.near import tell_unknown
from accelfn.bigmodel.plan.shape import LeafShape, ModelShape, read_shape

__all__ = (
    "AnyDtype",
    "CustomDtype",
    "calculate_maximum_sizes",
    "check_names",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "counted_bytes",
    "dtype_byte_size",
    "get_max_layer_size",
    "get_module_leaves",
    "get_non_persistent_buffers",
    "read_class_names",
    "read_dtype",
    "read_dtypes",
    "sizes_of",
)


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
        TypeError: They aren't given by name.
    """
    given = cast("object", special_dtypes)
    if given is not None and not isinstance(given, Mapping):
        raise TypeError(
            "special_dtypes takes dtypes by names of tensors, such as {'head.weight': 'float32'}: got "
            f"{given!r}."
        )
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
    kept = frozenset(read_class_names(no_split_module_classes))
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


def read_class_names(given: Collection[str] | str | None) -> tuple[str, ...]:
    """Take one name of a class, or several.

    Raises:
        TypeError: They are no names.
    """
    said = cast("object", given)
    if not isinstance(said, (str, Iterable)) and said is not None:
        raise TypeError(_no_names(said))
    names = (given,) if isinstance(given, str) else tuple(given or ())
    for name in cast("tuple[object, ...]", names):
        if not isinstance(name, str):
            raise TypeError(_no_names(name))
    return names


def _no_names(given: object) -> str:
    name = given.__name__ if isinstance(given, type) else "Block"
    return f"no_split_module_classes takes names of classes, such as [{name!r}]: got {given!r}."
