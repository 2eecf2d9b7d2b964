"""How much memory a model takes: to hold it, its largest layer, and to train it, for each dtype."""

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
"""Dtypes that are estimated unless others are asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingEstimate:
    """What training with Adam takes, in bytes, where everything is of one dtype. Activations come on top.

    Attributes:
        model: The weights, and the buffers.
        gradients: As much as the parameters.
        optimizer: The two states of Adam, each as much as the parameters.
        step: All of it at once, which is what an optimizer step finds.
    """

    model: int
    gradients: int
    optimizer: int
    step: int

    @property
    def peak(self) -> int:
        """The most of them: what the device must have at least."""
        return max(self.model, self.gradients, self.optimizer, self.step)


@dataclass(frozen=True, slots=True, kw_only=True)
class DtypeEstimate:
    """What a model takes with one dtype, in bytes.

    Attributes:
        dtype: Its name.
        total: All tensors. What isn't floating keeps its own dtype; what has several names counts once.
        largest_layer: The largest part that has to be in one place. Running a model that lies elsewhere takes
            at least this.
        largest_names: Of all layers of that size, in the order of the model; ``""`` is the model itself.
        training: With Adam; None for dtypes that nobody trains in.
    """

    dtype: str
    total: int
    largest_layer: int
    largest_names: tuple[str, ...]
    training: TrainingEstimate | None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """What a model takes.

    Attributes:
        num_parameters: Numbers in its parameters, or in all tensors where a file doesn't tell them apart.
        dtypes: One estimate for each dtype, in the order in which they were asked for.
    """

    num_parameters: int
    dtypes: tuple[DtypeEstimate, ...]


def estimate_memory(
    model: nn.Module | ModelShape, dtypes: Iterable[AnyDtype] = ESTIMATED_DTYPES
) -> MemoryEstimate:
    """Return how much memory a model would take with each of several dtypes. Pure.

    The largest layer is the largest module without modules in it, or of a class that the model doesn't want
    to be split, or a tensor that stands beside modules.

    Ranks: local. No value is read, so the model may be on the meta device.

    Args:
        model: A module, or what is known of one.
        dtypes: Of floating tensors, all of which would be of it; as :data:`AnyDtype`, or ``"float8"``.

    Raises:
        ValueError: There is no such dtype, it isn't one of weights, one is named twice or none is named, or a
            lazy layer has no shape yet.

    >>> row = estimate_memory(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), ["float32"]).dtypes[0]
    >>> row.total, row.largest_layer, row.largest_names, row.training.step
    (84, 64, ('0',), 336)
    """
    shape = model if isinstance(model, ModelShape) else read_shape(model)
    known = _read_dtypes(dtypes)
    parameters = [leaf for leaf in shape.distinct_leaves() if leaf.kind == "parameter"]
    return MemoryEstimate(
        num_parameters=sum(leaf.numel for leaf in parameters),
        dtypes=tuple(_estimate(shape, parameters, name, dtype) for name, dtype in known),
    )


def estimate_json(estimate: MemoryEstimate) -> dict[str, Any]:
    """Return an estimate as JSON has it: sizes in bytes by dtype, None where nobody trains. Pure."""
    rows = {one.dtype: asdict(one) for one in estimate.dtypes}
    for one, row in zip(estimate.dtypes, rows.values(), strict=True):
        row.pop("dtype")
        if one.training is not None:
            row["training"]["peak"] = one.training.peak
    return {"num_parameters": estimate.num_parameters, "dtypes": rows}


def _read_dtypes(dtypes: Iterable[AnyDtype]) -> list[tuple[str, torch.dtype | CustomDtype]]:
    given = [dtypes] if isinstance(dtypes, str) else list(dtypes)
    found: dict[str, torch.dtype | CustomDtype] = {}
    for one in given:
        dtype = CustomDtype.FP8 if one == "float8" else read_dtype(one, "dtypes")
        name = dtype.value if isinstance(dtype, CustomDtype) else str(dtype).removeprefix("torch.")
        name = "float8" if dtype is CustomDtype.FP8 else name
        if isinstance(dtype, torch.dtype) and (dtype.is_complex or dtype == torch.bool):
            raise ValueError(f"dtypes: {one} isn't one of weights. Use float32, bfloat16, int8, int4...")
        if name in found:
            raise ValueError(f"dtypes: {one} is named twice.")
        found[name] = dtype
    if not found:
        raise ValueError("dtypes: none is named. Leave it out for the usual ones.")
    return list(found.items())


def _estimate(
    shape: ModelShape, parameters: Sequence[LeafShape], name: str, dtype: torch.dtype | CustomDtype
) -> DtypeEstimate:
    changed = {leaf.name: dtype for leaf in shape.root.leaves() if _is_weight(leaf)}
    sizes = sizes_of(shape, special_dtypes=changed)
    layers = [(one, sizes.get(one, 0)) for one in _layers(shape.root, frozenset(shape.no_split_classes))]
    largest = max((size for _, size in layers), default=0)
    names = tuple(one for one, size in layers if size == largest and size)
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
    """Whether a tensor would be stored with the dtype of a row."""
    return leaf.is_plain and leaf.dtype is not None and leaf.dtype.is_floating_point


def _layers(module: ModuleShape, whole: frozenset[str]) -> Iterable[str]:
    """Name what isn't split: modules, and tensors beside modules."""
    if not module.children or module.class_name in whole:
        yield module.name
        return
    yield from (leaf.name for leaf in module.parameters)
    for child in module.children:
        yield from _layers(child, whole)
    yield from (leaf.name for leaf in module.buffers)
