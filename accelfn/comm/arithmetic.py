"""Reducing buffers of all dtypes, also where a backend or torch itself can't."""

from __future__ import annotations

import torch

from accelfn.comm.transfer import PackedTree
from accelfn.context import ReduceOp

__all__ = ("REDUCED_HERE", "REDUCTIONS", "check_arithmetic", "combine", "scale_")

REDUCTIONS = ("sum", "mean", "max", "min", "none")

# Dtypes that not every backend can add, so they are gathered and added here.
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
REDUCED_HERE = frozenset((torch.int16, torch.uint16, torch.uint32, torch.uint64, *_FLOAT8))
# Added in float32 and rounded once.
_NARROW = frozenset((torch.float16, torch.bfloat16, *_FLOAT8))


def check_arithmetic(prepared: PackedTree, reduction: str, scale: float) -> None:
    """Refuse what a dtype can't hold.

    Raises:
        TypeError: With the path of the leaf.
    """
    for index, dtype in enumerate(prepared.layout.dtypes):
        if dtype.is_floating_point:
            continue
        if dtype.is_complex:
            if reduction in ("max", "min"):
                path = prepared.layout.structure.paths()[index]
                raise TypeError(f"reduce: {path} is complex, and complex numbers have no {reduction}.")
        elif reduction == "mean" or scale != 1.0:
            path = prepared.layout.structure.paths()[index]
            raise TypeError(
                f"reduce: {path} is of dtype {dtype}, which can't hold a mean or a scaled "
                f"sum (reduction={reduction!r}, scale={scale!r}). "
                "Convert it with .float(), or reduce it with 'sum'."
            )


def combine(stacked: torch.Tensor, op: ReduceOp, divisor: int = 1, factor: float = 1.0) -> torch.Tensor:
    """Reduce the buffers of all ranks, shape (P, n), into a new one; the same bits on every rank.

    Narrow floats are summed, divided and scaled in float32, and rounded once.
    """
    dtype = stacked.dtype
    if dtype == torch.bool:
        return stacked.all(0) if op == "min" else stacked.any(0)
    if dtype in _NARROW:
        stacked = stacked.float()
    elif dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch has hardly any arithmetic for these
        return _combine_unsigned(stacked, op)
    if op == "sum":
        result = stacked.sum(0, dtype=stacked.dtype)
    else:
        result = stacked.amax(0) if op == "max" else stacked.amin(0)
    if divisor != 1:
        result.div_(divisor)
    if factor != 1.0:
        result.mul_(factor)
    return result.to(dtype)


def _combine_unsigned(stacked: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    dtype = stacked.dtype
    if dtype != torch.uint64:
        wide = stacked.to(torch.int64)
        result = wide.sum(0) if op == "sum" else wide.amax(0) if op == "max" else wide.amin(0)
        return result.to(dtype)
    signed = stacked.view(torch.int64)
    if op == "sum":  # two's complement: the sum of the signed values has the same bits
        return signed.sum(0).view(dtype)
    flipped = signed ^ torch.iinfo(torch.int64).min  # keeps the unsigned order
    result = flipped.amax(0) if op == "max" else flipped.amin(0)
    return (result ^ torch.iinfo(torch.int64).min).view(dtype)


def scale_(buffer: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply ``buffer`` in place."""
    # torch has no arithmetic for float8.
    return buffer.mul_(factor) if buffer.dtype.itemsize > 1 else buffer.copy_(buffer.float() * factor)
