"""The states of torchao's low-bit optimizers, as the plain tensors that they consist of.

Such a state has codes of 8 or 4 bits, and a scale for each block of consecutive elements. It is stored as
``{"low_bit": class, "shape": [...], "attributes": [...], "tensors": {"codes": ..., "scale": ...}}``. A shard
of it has blocks of its own. Where all shards have equally many rows, and complete blocks, these are the
blocks of the complete tensor: its codes and scales are stored as sharded tensors, and load in any such
layout. Elsewhere each rank stores its shard, under ``"shards"`` and the part of the tensor that it is, for
the same layout only.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

import torch
from torch.optim import Optimizer

from accelfn.checkpoint.document.compare import Shaped
from accelfn.checkpoint.manifest import Json
from accelfn.checkpoint.plan import boxes_of
from accelfn.errors import Misfit
from accelfn.tree import from_local, is_dtensor, local_of

# Modules of torchao's classes.
_MODULES = MappingProxyType(
    {
        "OptimState8bit": "torchao.optim.subclass_8bit",
        "OptimState4bit": "torchao.optim.subclass_4bit",
        "OptimStateFp8": "torchao.optim.subclass_fp8",
    }
)

# Elements of the smallest shard that torchao keeps in low bits.
_SMALLEST = 4096

# The table of values by code, the same for all blocks.
_TABLE = "qmap"


def may_have_low_bits(optimizer: Optimizer) -> bool:
    """Return whether an optimizer is one of torchao."""
    return any(base.__module__.startswith("torchao.") for base in type(optimizer).__mro__)


def plain_states(values: Any) -> Any:
    """Return the state of a parameter with plain tensors instead of low-bit ones.

    Ranks: local.
    """
    if not isinstance(values, dict):
        return values
    return {name: _plain(value) for name, value in cast("dict[str, Any]", values).items()}


def with_low_bits(values: Any, parameter: torch.Tensor) -> Any:
    """Return what :func:`plain_states` has made plain, in the layout of its parameter.

    Ranks: local.
    """
    if not isinstance(values, dict):
        return values
    return {
        name: _low_bit(value, parameter) if is_low_bit(value) else value
        for name, value in cast("dict[str, Any]", values).items()
    }


def _plain(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    local: Any = local_of(value)
    kind = type(local).__name__ if type(local).__name__ in _MODULES else None
    is_irregular = is_dtensor(value) and num_shards(value) is None
    # Other shards of the same tensor may have low bits.
    if kind is None and not (is_irregular and value.numel() >= _SMALLEST):
        return value
    tensors: dict[str, torch.Tensor] = {"values": local}
    attributes: list[Any] = []
    if kind is not None:
        names, attributes = local.__tensor_flatten__()
        tensors = {name: getattr(local, name) for name in names}
    plain = [None if isinstance(one, tuple) else one for one in attributes]  # the shape of a shard
    node: dict[str, Any] = {"low_bit": kind, "shape": list(value.shape), "attributes": plain}
    if is_irregular:
        return {**node, "shards": {_part_of(value): tensors}}
    if is_dtensor(value):
        tensors = {name: one if name == _TABLE else _sharded(one, value) for name, one in tensors.items()}
    return {**node, "tensors": tensors}


def num_shards(layout: Any) -> int | None:
    """Return the number of shards that a ``DTensor`` has, if these are equally many rows; else None."""
    number = 1
    for size, placement in zip(layout.device_mesh.shape, layout.placements, strict=True):
        if placement.is_replicate():
            continue
        if number > 1 or type(placement).__name__ != "Shard" or placement.dim != 0 or layout.shape[0] % size:
            return None
        number = size
    return number


def _sharded(local: torch.Tensor, layout: Any) -> Any:
    """Return the tensor of which ``local`` is this rank's shard, in the layout of a regular ``DTensor``."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(local, layout.device_mesh, layout.placements, run_check=False)


def _part_of(tensor: torch.Tensor) -> str:
    """Return which part of a tensor this rank has: offsets and sizes."""
    boxes = boxes_of(tensor)
    return "all" if boxes is None else " ".join(f"{[*box.offset]}+{[*box.shape]}" for box in boxes)


def is_low_bit(node: object) -> bool:
    """Return whether a value, or its node in a document, is one of :func:`plain_states`."""
    return isinstance(node, dict) and "low_bit" in node


def fit_low_bit(
    path: str, node: Json, parameter: torch.Tensor, tensors: Mapping[str, Shaped]
) -> tuple[list[Misfit], dict[str, torch.Tensor]]:
    """Compare a stored low-bit state with the parameter that it is for.

    Returns:
        The differences; and the tensors whose sharding stored tensors get, by their names.
    """
    state = cast("dict[str, Any]", node)
    shape, part = list(parameter.shape), _part_of(parameter)
    if state["shape"] != shape:
        return [Misfit(path, f"low bits of shape {state['shape']}", f"shape {shape}")], {}
    if "shards" in state:
        stored = next(iter(state["shards"]))
        return ([] if stored == part else [Misfit(path, f"low bits of the part {stored}", part)]), {}
    if not is_dtensor(parameter):
        return [], {}
    number, targets = num_shards(parameter), dict[str, torch.Tensor]()
    for name, one in state["tensors"].items():
        if name == _TABLE:
            continue
        rows, *rest = tensors[one["name"]].shape
        if number is None or rows % number:
            blocks = "low bits in blocks, which can't be divided over the shards"
            return [Misfit(path, blocks, f"the part {part}; load it on the same number of ranks")], {}
        device = local_of(parameter).device
        targets[one["name"]] = _sharded(torch.empty([rows // number, *rest], device=device), parameter)
    return [], targets


def _low_bit(node: Mapping[str, Any], parameter: torch.Tensor) -> torch.Tensor:
    tensors = node["tensors"] if "tensors" in node else next(iter(node["shards"].values()))
    kind, local = node["low_bit"], local_of(parameter)
    if kind is None:
        state = tensors["values"]
    else:
        attributes = list(node["attributes"])
        if kind == "OptimState4bit":
            attributes[1] = local.shape
        plain = {name: local_of(one) for name, one in tensors.items()}
        state = getattr(sys.modules[_MODULES[kind]], kind).__tensor_unflatten__(plain, attributes)
    return from_local(state, like=parameter)
