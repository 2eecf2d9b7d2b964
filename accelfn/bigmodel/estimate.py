"""Memory estimates per dtype: for all weights, for the largest layer, and for training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from accelfn.bigmodel.model_info import (
    AnyDtype,
    CustomDtype,
    LeafShape,
    ModelShape,
    ModuleShape,
    dtype_byte_size,
    read_dtype,
    read_shape,
    sizes_of,
)

ESTIMATED_DTYPES = ("float32", "float16", "bfloat16", "float8", "int8", "int4")
"""The default dtypes of :func:`estimate_memory`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEstimate:
    """Memory for training with Adam in one dtype, in bytes, without activations.

    Attributes:
        model: Weights and buffers.
        gradients: As large as the parameters.
        optimizer: Both moments of Adam, each as large as the parameters.
        step: The sum, which an optimizer step needs.
    """

    model: int
    gradients: int
    optimizer: int
    step: int

    @property
    def peak(self) -> int:
        """The maximum: what the device must have at least."""
        return max(self.model, self.gradients, self.optimizer, self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeEstimate:
    """Memory of a model in one dtype, in bytes.

    Attributes:
        dtype: The name of the dtype.
        total: All tensors. Non-floating ones keep their dtype; tied ones count once.
        largest_layer: The largest part that can't be split: the minimum for running an offloaded model.
        largest_names: The names of all layers of that size, in model order; ``""`` is the model itself.
        training: Memory for training with Adam; None for inference-only dtypes.
    """

    dtype: str
    total: int
    largest_layer: int
    largest_names: tuple[str, ...]
    training: TrainingEstimate | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Memory of a model in several dtypes.

    Attributes:
        num_parameters: Number of elements of its parameters; of all tensors for a file, which doesn't
            distinguish buffers.
        dtypes: The estimates, in the order of the requested dtypes.
    """

    num_parameters: int
    dtypes: tuple[DtypeEstimate, ...]


def estimate_memory(
    model: nn.Module | ModelShape, dtypes: Iterable[AnyDtype] = ESTIMATED_DTYPES
) -> MemoryEstimate:
    """Estimate the memory of a model in several dtypes. Pure.

    A layer is a module without children, a module of a class in ``_no_split_modules``, or a bare tensor.

    Ranks: local. No value is read, so the model may be on the meta device.

    Args:
        model: A module, or its shape.
        dtypes: Dtypes of all floating tensors: :data:`AnyDtype`, or ``"float8"``.

    Raises:
        ValueError: A dtype is unknown, unsuitable for weights or repeated, ``dtypes`` is empty, or a lazy
            layer has no shape yet.

    >>> row = estimate_memory(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), ["float32"]).dtypes[0]
    >>> row.total, row.largest_layer, row.largest_names, row.training.step
    (84, 64, ('0',), 336)
    """
    shape = model if isinstance(model, ModelShape) else read_shape(model)
    parameters = [leaf for leaf in shape.distinct_leaves() if leaf.kind == "parameter"]
    return MemoryEstimate(
        num_parameters=sum(leaf.numel for leaf in parameters),
        dtypes=tuple(
            _estimate(shape, parameters, name, dtype) for name, dtype in _read_dtypes(dtypes).items()
        ),
    )


def estimate_json(estimate: MemoryEstimate) -> dict[str, Any]:
    """Return an estimate as JSON data: sizes in bytes by dtype. Pure."""
    rows: dict[str, Any] = {}
    for row in estimate.dtypes:
        data = asdict(row)
        rows[data.pop("dtype")] = data
        if row.training is not None:
            data["training"]["peak"] = row.training.peak
    return {"num_parameters": estimate.num_parameters, "dtypes": rows}


def _read_dtypes(dtypes: Iterable[AnyDtype]) -> dict[str, torch.dtype | CustomDtype]:
    by_name: dict[str, torch.dtype | CustomDtype] = {}
    for item in [dtypes] if isinstance(dtypes, str) else list(dtypes):
        dtype = CustomDtype.FP8 if item == "float8" else read_dtype(item, "dtypes")
        name = dtype.value if isinstance(dtype, CustomDtype) else str(dtype).removeprefix("torch.")
        name = "float8" if dtype is CustomDtype.FP8 else name
        if isinstance(dtype, torch.dtype) and (dtype.is_complex or dtype == torch.bool):
            raise ValueError(f"dtypes: weights can't be {item}. Use float32, bfloat16, int8 or int4.")
        if name in by_name:
            raise ValueError(f"dtypes: {item} is repeated. Remove one.")
        by_name[name] = dtype
    if not by_name:
        raise ValueError("dtypes is empty. Omit it for the defaults.")
    return by_name


def _estimate(
    shape: ModelShape, parameters: Sequence[LeafShape], name: str, dtype: torch.dtype | CustomDtype
) -> DtypeEstimate:
    cast_dtypes = {leaf.name: dtype for leaf in shape.root.leaves() if _is_weight(leaf)}
    sizes = sizes_of(shape, special_dtypes=cast_dtypes)
    layers = list(_layers(shape.root, frozenset(shape.no_split_classes)))
    largest = max((sizes.get(name, 0) for name in layers), default=0)
    names = tuple(name for name in layers if sizes.get(name, 0) == largest and largest)
    return DtypeEstimate(
        dtype=name,
        total=sizes.get("", 0),
        largest_layer=largest,
        largest_names=names,
        training=_training(sizes.get("", 0), parameters, dtype),
    )


def _training(
    total: int, parameters: Sequence[LeafShape], dtype: torch.dtype | CustomDtype
) -> TrainingEstimate | None:
    if isinstance(dtype, CustomDtype) or not dtype.is_floating_point or dtype.itemsize < 2:
        return None
    size = sum(math.ceil(leaf.numel * dtype_byte_size(dtype)) for leaf in parameters if _is_weight(leaf))
    return TrainingEstimate(model=total, gradients=size, optimizer=2 * size, step=total + 3 * size)


def _is_weight(leaf: LeafShape) -> bool:
    """Check whether a tensor would be stored in the estimated dtype."""
    return leaf.is_plain and leaf.dtype is not None and leaf.dtype.is_floating_point


def _layers(module: ModuleShape, unsplit: frozenset[str]) -> Iterable[str]:
    """Yield the names of unsplit modules and bare tensors."""
    if not module.children or module.class_name in unsplit:
        yield module.name
        return
    yield from (leaf.name for leaf in module.parameters)
    for child in module.children:
        yield from _layers(child, unsplit)
    yield from (leaf.name for leaf in module.buffers)
