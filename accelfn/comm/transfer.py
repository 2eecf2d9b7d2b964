"""Send and reduce packed trees with the context's collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from accelfn.comm.agreement import (
    Call,
    agree,
    capacity,
    check,
    has_transforms,
    layout_call,
    padded_size,
)
from accelfn.context import Context, ReduceOp
from accelfn.errors import NotAvailableError
from accelfn.tree import Buffer, PackSpec, flatten, flatten_group, plan_layout, require_tensors

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


def open_call(
    ctx: Context,
    operation: str,
    options: str,
    prepared: PackedTree | None,
    error: Exception | None,
    *,
    pairs: bool = True,
    sends: bool = True,
) -> tuple[PackedTree, list[torch.Tensor] | None]:
    """Open an operation on a tree, and send the tree with it if it is small.

    Args:
        ctx: The world.
        operation: Name of the public function.
        options: Everything that must be equal on every rank besides the tree, as text.
        prepared: The tree; None if this rank can't take part.
        error: Why it can't.
        pairs: As for :class:`Call`.
        sends: Whether this rank's tree is needed.

    Returns:
        The tree; and for each rank the bytes of its buffers, None if they follow after the agreement. That
        depends on the layout alone, which is the same on every rank.
    """
    if prepared is None:
        check(ctx, Call(operation), error)
    leaves, layout = unwrap(prepared, error)
    call = layout_call(operation, options, layout, pairs=pairs)
    size = sum(padded_size(group.num_bytes) for group in layout.groups)
    if size > capacity(ctx) or any(group.device.type != "cpu" for group in layout.groups):
        check(ctx, call)
        return PackedTree(leaves, layout), None
    payload = torch.empty(size, dtype=torch.uint8, device="cpu") if sends else None
    if payload is not None:
        for group, buffer in zip(layout.groups, read_groups(payload, layout.groups), strict=True):
            buffer.copy_(flatten_group(group, leaves))
    return PackedTree(leaves, layout), agree(ctx, call, payload)


def read_groups(source: torch.Tensor, groups: tuple[Buffer, ...]) -> list[torch.Tensor]:
    """Return a flat view of ``source``, which is uint8, for each group; they are consecutive and aligned."""
    start = 0
    buffers: list[torch.Tensor] = []
    for group in groups:
        buffers.append(source[start : start + group.num_bytes].view(group.dtype))
        start += padded_size(group.num_bytes)
    return buffers


def stack_buffers(rows: list[torch.Tensor], layout: PackSpec) -> list[torch.Tensor]:
    """Return what :func:`open_call` has received as a block of shape (P, n) for each buffer."""
    by_rank = [read_groups(row, layout.groups) for row in rows]
    return [torch.stack(buffers) for buffers in zip(*by_rank, strict=True)]


def all_gather_rows(ctx: Context, buffer: torch.Tensor) -> torch.Tensor:
    """Gather a flat buffer of every rank: shape (P, n). Sent as bytes, which works for any dtype."""
    return ctx.collectives.all_gather(buffer.view(torch.uint8)).view(buffer.dtype).view(ctx.world.size, -1)


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
        if dtype.is_complex and reduction in ("max", "min"):
            wrong = f"is complex, and complex numbers have no {reduction}. Use 'sum'."
        elif not (dtype.is_floating_point or dtype.is_complex) and (reduction == "mean" or scale != 1.0):
            wrong = (
                f"has dtype {dtype}, which can't represent a mean or a scaled sum (reduction={reduction!r}, "
                f"scale={scale!r}). Convert it with .float(), or use 'sum'."
            )
        else:
            continue
        raise TypeError(f"reduce: {prepared.layout.structure.paths()[index]} {wrong}")


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
    is_longest = dtype == torch.uint64
    signed = stacked.view(torch.int64) if is_longest else stacked.to(torch.int64)
    if op == "sum":  # two's complement: the sum of the signed values has the same bits
        result = signed.sum(0)
    else:
        flip = torch.iinfo(torch.int64).min if is_longest else 0  # keeps the unsigned order
        flipped = signed ^ flip
        result = (flipped.amax(0) if op == "max" else flipped.amin(0)) ^ flip
    return result.view(dtype) if is_longest else result.to(dtype)


def scale_(buffer: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply ``buffer`` in place."""
    # torch has no arithmetic for float8.
    return buffer.mul_(factor) if buffer.dtype.itemsize > 1 else buffer.copy_(buffer.float() * factor)
