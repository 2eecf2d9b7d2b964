"""Send and reduce packed trees with the context's collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch

from accelfn.comm.agreement import (
    Call,
    agree,
    capacity,
    check,
    has_transforms,
    layout_call,
    padded_size,
    read_groups,
    write_groups,
)
from accelfn.context import Context, ReduceOp
from accelfn.errors import NotAvailableError
from accelfn.tree import PackSpec, flatten, plan_layout, require_tensors

T = TypeVar("T")

# For leaves of this size, a copy into a shared buffer costs more than a separate message.
ALONE_BYTES = 1 << 20


class PackedTree(NamedTuple):
    """A flattened tree of tensors, and the layout of its buffers."""

    leaves: list[torch.Tensor]
    layout: PackSpec


def prepare_tree(operation: str, tree: Any, refused: Callable[[Any], bool] | None = None) -> PackedTree:
    """Flatten a tree of tensors and plan its buffers.

    Args:
        operation: For the message.
        tree: Of tensors.
        refused: Returns whether a container isn't supported. A ``PackedSequence`` isn't where rows are joined
            or split, since its parts aren't rows.

    Raises:
        TypeError: A leaf isn't a dense tensor.
        NotAvailableError: A transform of ``torch.func`` is running, which would get no derivatives.
    """
    if has_transforms():
        raise NotAvailableError(
            f"{operation}: it isn't differentiable, so torch.func can neither differentiate nor map it. Use "
            "all_gather, reduce_scatter, all_to_all or permute, which are differentiable; or value_and_grad; "
            "or call it outside of the transform."
        )
    leaves, structure = flatten(tree, refused)
    return PackedTree(
        require_tensors(operation, leaves, structure), plan_layout(leaves, structure, ALONE_BYTES)
    )


def unwrap(value: Any, error: Exception | None) -> Any:
    """Return the result of :func:`~accelfn.comm.catch`, or raise its exception."""
    if error is not None:
        raise error
    return value


def detached(tree: T, prepared: PackedTree) -> T:
    """Return the tree itself, or where one of its leaves requires a gradient the same tree without them."""
    leaves, layout = prepared
    if not any(leaf.requires_grad for leaf in leaves):
        return tree
    return layout.structure.unflatten([leaf.detach() for leaf in leaves])


def fits(ctx: Context, prepared: PackedTree) -> bool:
    """Return whether the tree fits into the opening exchange: the same on every rank with this layout."""
    layout = prepared.layout
    return all(group.device.type == "cpu" for group in layout.groups) and _payload_bytes(layout) <= capacity(
        ctx
    )


def payload_of(prepared: PackedTree) -> torch.Tensor:
    """Return the bytes of all buffers of a tree."""
    payload = torch.empty(_payload_bytes(prepared.layout), dtype=torch.uint8, device="cpu")
    write_groups(payload, prepared.layout.groups, prepared.leaves)
    return payload


def open_call(
    ctx: Context,
    operation: str,
    options: str,
    prepared: PackedTree | None,
    error: Exception | None,
    *,
    pairs: bool = True,
) -> PackedTree:
    """Open an operation whose tensors follow after the agreement."""
    call = Call(operation)
    if prepared is not None:
        call = layout_call(operation, options, prepared.layout, pairs=pairs)
    check(ctx, call, error)
    return cast("PackedTree", prepared)


def exchange_tree(ctx: Context, call: Call, prepared: PackedTree) -> list[torch.Tensor]:
    """Gather a small tree of every rank with the agreement: per group a block of shape (P, n)."""
    rows = agree(ctx, call, payload_of(prepared))
    by_rank = [read_groups(row, prepared.layout.groups) for row in rows]
    return [torch.stack(buffers) for buffers in zip(*by_rank, strict=True)]


def all_gather_rows(ctx: Context, buffer: torch.Tensor) -> torch.Tensor:
    """Gather a flat buffer of every rank: shape (P, n). Sent as bytes, which works for any dtype."""
    return ctx.collectives.all_gather(buffer.view(torch.uint8)).view(buffer.dtype).view(ctx.world.size, -1)


def _payload_bytes(layout: PackSpec) -> int:
    return sum(padded_size(group.num_bytes) for group in layout.groups)


REDUCTIONS = ("sum", "mean", "max", "min", "none")

# Dtypes that not every backend can sum, so they are gathered and reduced locally.
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
REDUCED_HERE = frozenset((torch.int16, torch.uint16, torch.uint32, torch.uint64, *_FLOAT8))
# Summed in float32 and rounded once.
_NARROW = frozenset((torch.float16, torch.bfloat16, *_FLOAT8))


def check_arithmetic(prepared: PackedTree, reduction: str, scale: float) -> None:
    """Check that the leaves' dtypes can represent the result.

    Raises:
        TypeError: With the path of the leaf.
    """
    for index, dtype in enumerate(prepared.layout.dtypes):
        if dtype.is_floating_point:
            continue
        if dtype.is_complex:
            if reduction in ("max", "min"):
                path = prepared.layout.structure.paths()[index]
                raise TypeError(
                    f"reduce: {path} is complex, and complex numbers have no {reduction}. Use 'sum'."
                )
        elif reduction == "mean" or scale != 1.0:
            path = prepared.layout.structure.paths()[index]
            raise TypeError(
                f"reduce: {path} has dtype {dtype}, which can't represent a mean or a scaled sum "
                f"(reduction={reduction!r}, scale={scale!r}). Convert it with .float(), or use 'sum'."
            )


def combine(stacked: torch.Tensor, op: ReduceOp, divisor: int = 1, factor: float = 1.0) -> torch.Tensor:
    """Reduce the buffers of all ranks, shape (P, n), into a new buffer; the same bits on every rank.

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
