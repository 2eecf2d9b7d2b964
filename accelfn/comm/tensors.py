"""Trees of tensors across ranks: gather, reduce, broadcast, scatter, pad.

Small trees on the CPU travel whole in the exchange that opens the operation; larger ones as one buffer per
dtype, and a leaf of a mebibyte or more by itself, without being copied. With one process each operation gives
back what it got. None of them is differentiable, and none writes into its input.
"""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch

from accelfn.comm.agreement import Call, agree, attempt, capacity, layout_call
from accelfn.comm.objects import broadcast_bytes, gather_bytes
from accelfn.comm.wire import padded_size, read_groups, write_groups
from accelfn.context import Context, ReduceOp
from accelfn.tree import (
    Layout,
    Packed,
    TensorInformation,
    fill,
    flatten,
    flatten_tensor,
    is_packed_sequence,
    plan_layout,
    require_tensors,
    tree_structure,
    unpack,
)

__all__ = ("broadcast", "gather", "pad_across_processes", "reduce", "scatter", "split_sizes")

T = TypeVar("T")

# From here on a copy into a shared buffer costs more than a message of one's own.
ALONE_BYTES = 1 << 20

REDUCTIONS = ("sum", "mean", "max", "min", "none")

# Dtypes that not every backend can add, so they are gathered and added here.
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_REDUCED_HERE = frozenset((torch.int16, torch.uint16, torch.uint32, torch.uint64, *_FLOAT8))
# Added in float32 and rounded once.
_NARROW = frozenset((torch.float16, torch.bfloat16, *_FLOAT8))


class _Prepared(NamedTuple):
    """A tree of tensors, ready to travel."""

    leaves: list[torch.Tensor]
    layout: Layout


def gather(ctx: Context, tree: T) -> T:
    """Join each tensor of ``tree`` over all ranks along its first dimension, in rank order.

    Ranks: every rank of ``ctx``, with trees of the same structure, shapes and dtypes.

    Args:
        ctx: The world.
        tree: Tensors of any dtype, shape ``(n, ...)`` or ``()``; ``None`` stays ``None``.

    Returns:
        On every rank a tree of the same types, leaves of shape ``(P * n, ...)``; a 0-d tensor counts as one
        row and gives ``(P,)``. New memory when ``P > 1``; with one process the tree itself, not copied.

    Raises:
        TypeError: A leaf is no dense tensor (``RemoteRankError`` on the ranks where all is well).
        MismatchError: The trees differ; the same error on every rank, with rank and path. For tensors that
            differ in length, see :func:`pad_across_processes`.

    >>> gather(Context(), {"x": torch.ones(2), "loss": torch.tensor(0.5)})
    {'x': tensor([1., 1.]), 'loss': tensor([0.5000])}
    """
    size = ctx.world.size
    prepared, error = attempt(lambda: _prepare("gather", tree, is_packed_sequence))
    if size == 1:
        leaves, layout = _given(prepared, error)
        if all(leaf.dim() and not leaf.requires_grad for leaf in leaves):
            return tree
        return layout.structure.unflatten([_rows(leaf.detach()) for leaf in leaves])

    if prepared is not None and _fits(ctx, prepared):
        by_group = _exchange(ctx, layout_call("gather", "", prepared.layout), prepared)
    else:
        prepared = _open(ctx, "gather", "", prepared, error)
        by_group = [_all_gather(ctx, fill(group, prepared.leaves)) for group in prepared.layout.groups]
    layout = prepared.layout
    gathered: list[Any] = [None] * len(layout.shapes)
    for group, block in zip(layout.groups, by_group, strict=True):
        for index, part in zip(group.leaves, torch.split(block, list(group.sizes), dim=1), strict=True):
            shape = layout.shapes[index]
            # Copies, unless the leaf has the block to itself: then the rows already lie end to end.
            gathered[index] = part.reshape((size * shape[0], *shape[1:]) if shape else (size,))
    return layout.structure.unflatten(gathered)


def reduce(ctx: Context, tree: T, reduction: str = "sum", scale: float = 1.0) -> T:
    """Combine each tensor of ``tree`` with those of the other ranks, element by element.

    float16, bfloat16 and float8 sums of small trees are formed in float32 and rounded once.

    Ranks: every rank of ``ctx``, with trees of the same structure, shapes and dtypes.

    Args:
        ctx: The world.
        tree: Tensors of any dtype and shape; ``None`` stays ``None``.
        reduction: ``"sum"``, ``"mean"``, ``"max"``, ``"min"``, or ``"none"`` to leave all as it is. The sum
            and the maximum of booleans is their "or", the minimum their "and".
        scale: Factor applied after the reduction.

    Returns:
        On every rank the same tree; shapes and dtypes kept. With one process and ``scale=1`` the tree itself.

    Raises:
        ValueError: Unknown ``reduction``.
        TypeError: A leaf is no dense tensor; a mean or a scale for integers or booleans, whose dtype can't
            hold it; a maximum or minimum of complex numbers.
        MismatchError: The trees or options differ between ranks.

    >>> reduce(Context(), torch.tensor([1.0, 2.0]), "mean")
    tensor([1., 2.])
    """
    size = ctx.world.size

    def prepare() -> _Prepared:
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduce: reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}.")
        prepared = _prepare("reduce", tree)
        _check_arithmetic(prepared, reduction, scale)
        return prepared

    prepared, error = attempt(prepare)
    if size == 1 or (error is None and reduction == "none"):
        leaves, layout = _given(prepared, error)
        if scale == 1.0 and not any(leaf.requires_grad for leaf in leaves):
            return tree
        return layout.structure.unflatten(
            [_scale_(leaf.detach().clone(), scale) if scale != 1.0 else leaf.detach() for leaf in leaves]
        )

    op: ReduceOp = "max" if reduction == "max" else "min" if reduction == "min" else "sum"
    options = f"{reduction} {scale!r}"
    if prepared is not None and _fits(ctx, prepared):
        by_group = _exchange(ctx, layout_call("reduce", options, prepared.layout), prepared)
        buffers = [_combine(block, op) for block in by_group]
    else:
        prepared = _open(ctx, "reduce", options, prepared, error)
        buffers = [
            _all_reduce(ctx, fill(group, prepared.leaves, copy=True), op) for group in prepared.layout.groups
        ]
    layout = prepared.layout
    for buffer in buffers:
        if reduction == "mean":
            buffer.div_(size) if buffer.dtype.itemsize > 1 else buffer.copy_(buffer.float() / size)
        if scale != 1.0:
            _scale_(buffer, scale)
    return unpack(Packed(tuple(buffers), layout))


def broadcast(ctx: Context, tree: T, from_process: int = 0) -> T:
    """Give every rank the tensors of rank ``from_process``.

    Ranks: every rank of ``ctx``, with trees of the same structure, shapes and dtypes.

    Args:
        ctx: The world.
        tree: On ``from_process`` what is sent; elsewhere a tree of the same form, which is left as it is.
        from_process: The rank that sends.

    Returns:
        On ``from_process`` the tree itself; elsewhere a new tree, on the devices of this rank's leaves.

    Raises:
        ValueError: ``from_process`` is no rank.
        TypeError: A leaf is no dense tensor.
        MismatchError: The trees or ``from_process`` differ between ranks.

    >>> broadcast(Context(), [torch.tensor(1)])
    [tensor(1)]
    """

    def prepare() -> _Prepared:
        _check_rank(ctx, "broadcast", "from_process", from_process)
        return _prepare("broadcast", tree)

    prepared, error = attempt(prepare)
    if ctx.world.size == 1:
        _given(prepared, error)
        return tree
    options = f"from {from_process}"
    sends = ctx.world.rank == from_process
    if prepared is not None and _fits(ctx, prepared):
        leaves, layout = prepared
        payload = _payload(prepared) if sends else None
        rows = agree(ctx, layout_call("broadcast", options, layout), payload)
        if sends:
            return tree
        received = [buffer.clone() for buffer in read_groups(rows[from_process], layout.groups)]
        return unpack(Packed(tuple(received), layout))
    leaves, layout = _open(ctx, "broadcast", options, prepared, error)
    buffers: list[torch.Tensor] = []
    for group in layout.groups:
        buffer = (
            fill(group, leaves)
            if sends
            else torch.empty(sum(group.sizes), dtype=group.dtype, device=group.device)
        )
        ctx.collectives.broadcast(buffer.view(torch.uint8), from_process)
        buffers.append(buffer)
    return tree if sends else unpack(Packed(tuple(buffers), layout))


def scatter(ctx: Context, tree: T | None, from_process: int = 0) -> T:
    """Split each tensor of rank ``from_process`` along its first dimension, one part for each rank.

    The parts are as equal as can be: of ``n`` rows the first ``n % P`` ranks get one more than the others, as
    in :func:`accelfn.split_between_processes`.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        tree: On ``from_process`` a tree of tensors of shape ``(n, ...)``; ignored elsewhere, where it may be
            None.
        from_process: The rank that has the data.

    Returns:
        This rank's part, as the same types. Tensors that were on the CPU are on the CPU, others on
        ``ctx.device``.

    Raises:
        ValueError: ``from_process`` is no rank, or a tensor has no first dimension.
        TypeError: A leaf is no dense tensor.
        RemoteRankError: The sending rank can't send.

    >>> scatter(Context(), torch.arange(3))
    tensor([0, 1, 2])
    """
    sends = ctx.world.rank == from_process

    def prepare() -> tuple[_Prepared | None, bytes]:
        _check_rank(ctx, "scatter", "from_process", from_process)
        if not sends:
            return None, b""
        prepared = _prepare("scatter", tree, is_packed_sequence)
        for index, shape in enumerate(prepared.layout.shapes):
            if not shape:
                raise ValueError(
                    f"scatter: {prepared.layout.structure.paths()[index]} has no first dimension to split. "
                    "Give it one, or broadcast it."
                )
        kinds = [leaf.device.type == "cpu" for leaf in prepared.leaves]
        return prepared, pickle.dumps((tree_structure(tree), kinds)) if ctx.world.size > 1 else b""

    made, error = attempt(prepare)
    if ctx.world.size == 1:
        _given(made, error)
        return cast("T", tree)
    prepared, blob = made if made is not None else (None, b"")
    stubs, on_cpu = pickle.loads(
        broadcast_bytes(ctx, Call("scatter", f"from {from_process}"), blob, from_process, error)
    )
    info, structure = flatten(stubs, lambda value: isinstance(value, TensorInformation))
    # Leaf by leaf: parts are cut from contiguous rows, and scatter is no operation of an inner loop.
    received = [
        _scatter_leaf(
            ctx, leaf, None if prepared is None else prepared.leaves[index], on_cpu[index], from_process
        )
        for index, leaf in enumerate(cast("list[TensorInformation]", info))
    ]
    return structure.unflatten(received)


def pad_across_processes(
    ctx: Context, tree: T, dim: int = 0, pad_index: float = 0, pad_first: bool = False
) -> T:
    """Lengthen ``dim`` of each tensor to the longest over all ranks, so that a gather is possible.

    Ranks: every rank of ``ctx``; dtypes and numbers of dimensions must be the same, lengths may differ.

    Args:
        ctx: The world.
        tree: Tensors; one without dimension ``dim`` stays as it is.
        dim: Dimension to lengthen; negative counts from the last.
        pad_index: Value to fill with. Its dtype is the tensor's, on every rank.
        pad_first: Fill before what is there, not after it.

    Returns:
        A tree of the same types. A tensor that is already long enough isn't copied.

    Raises:
        TypeError: A leaf is no dense tensor, or its dtype can't hold ``pad_index``.
        MismatchError: Structures, dtypes, numbers of dimensions or options differ between ranks.

    >>> pad_across_processes(Context(), torch.tensor([1, 2]))
    tensor([1, 2])
    """

    def prepare() -> _Prepared:
        prepared = _prepare("pad_across_processes", tree, is_packed_sequence)
        for index, dtype in enumerate(prepared.layout.dtypes):
            if not _can_hold(dtype, pad_index):
                raise TypeError(
                    f"pad_across_processes: {prepared.layout.structure.paths()[index]} is of dtype "
                    f"{dtype}, which can't hold pad_index={pad_index!r}. "
                    "Pass a number of that dtype, or convert the tensor."
                )
        return prepared

    prepared, error = attempt(prepare)
    if ctx.world.size == 1:
        _given(prepared, error)
        return tree
    call, blob = Call("pad_across_processes"), b""
    if prepared is not None:
        layout = prepared.layout
        kinds = [
            f"{dtype} of {len(shape)} dimensions"
            for dtype, shape in zip(layout.dtypes, layout.shapes, strict=True)
        ]
        call = Call(
            "pad_across_processes",
            f"dim={dim} pad_index={pad_index} pad_first={pad_first}\0{layout.structure.describe()}{kinds}",
            lambda: dict(zip(layout.structure.paths(), kinds, strict=True)),
        )
        blob = json.dumps(layout.shapes).encode()
    shapes = [json.loads(row) for row in gather_bytes(ctx, call, blob, error)]
    leaves, layout = _given(prepared, error)

    def pad(index: int, leaf: torch.Tensor) -> torch.Tensor:
        if not -leaf.dim() <= dim < leaf.dim():
            return leaf
        longest = max(rank[index][dim] for rank in shapes)
        if leaf.shape[dim] == longest:
            return leaf
        shape = list(leaf.shape)
        shape[dim] = longest
        padded = leaf.new_full(shape, pad_index)
        padded.narrow(dim, longest - leaf.shape[dim] if pad_first else 0, leaf.shape[dim]).copy_(
            leaf.detach()
        )
        return padded

    return layout.structure.unflatten([pad(index, leaf) for index, leaf in enumerate(leaves)])


def split_sizes(length: int, parts: int) -> list[int]:
    """Cut ``length`` into ``parts`` as equal as can be, longer ones first. Pure.

    >>> split_sizes(5, 3)
    [2, 2, 1]
    """
    quotient, rest = divmod(length, parts)
    return [quotient + (part < rest) for part in range(parts)]


def _check_rank(ctx: Context, operation: str, name: str, rank: int) -> None:
    """Refuse a rank that isn't in the world."""
    if not 0 <= rank < ctx.world.size:
        raise ValueError(f"{operation}: {name} must be a rank in 0..{ctx.world.size - 1}, got {rank}.")


def _prepare(operation: str, tree: Any, refused: Callable[[Any], bool] | None = None) -> _Prepared:
    # A PackedSequence stays a leaf, and so is refused, where rows are joined or cut: its parts are no rows.
    leaves, structure = flatten(tree, refused)
    return _Prepared(
        require_tensors(operation, leaves, structure), plan_layout(leaves, structure, ALONE_BYTES)
    )


def _given(value: Any, error: Exception | None) -> Any:
    if error is not None:
        raise error
    return value


def _payload_bytes(layout: Layout) -> int:
    return sum(padded_size(group.num_bytes) for group in layout.groups)


def _fits(ctx: Context, prepared: _Prepared) -> bool:
    """Whether the whole tree fits into the opening exchange: the same on every rank of one layout."""
    layout = prepared.layout
    return all(group.device.type == "cpu" for group in layout.groups) and _payload_bytes(layout) <= capacity(
        ctx
    )


def _payload(prepared: _Prepared) -> torch.Tensor:
    payload = torch.empty(_payload_bytes(prepared.layout), dtype=torch.uint8)
    write_groups(payload, prepared.layout.groups, prepared.leaves)
    return payload


def _open(
    ctx: Context, operation: str, options: str, prepared: _Prepared | None, error: Exception | None
) -> _Prepared:
    """Open an operation whose tensors follow after the agreement."""
    call = Call(operation) if prepared is None else layout_call(operation, options, prepared.layout)
    agree(ctx, call, None, error)
    return cast("_Prepared", prepared)


def _exchange(ctx: Context, call: Call, prepared: _Prepared) -> list[torch.Tensor]:
    """Bring a small tree of every rank together within the agreement: per group a block of shape (P, n)."""
    rows = agree(ctx, call, _payload(prepared))
    by_rank = [read_groups(row, prepared.layout.groups) for row in rows]
    return [torch.stack(buffers) for buffers in zip(*by_rank, strict=True)]


def _all_gather(ctx: Context, buffer: torch.Tensor) -> torch.Tensor:
    """Bring a flat buffer of every rank together: shape (P, n). As bytes, so that any dtype can travel."""
    return ctx.collectives.all_gather(buffer.view(torch.uint8)).view(buffer.dtype).view(ctx.world.size, -1)


def _rows(leaf: torch.Tensor) -> torch.Tensor:
    return leaf if leaf.dim() else leaf.reshape(1)


def _can_hold(dtype: torch.dtype, value: float) -> bool:
    if dtype.is_floating_point or dtype.is_complex:
        return True
    if not math.isfinite(value) or value != int(value):
        return False
    if dtype == torch.bool:
        return value in (0, 1)
    limits = torch.iinfo(dtype)
    return limits.min <= value <= limits.max


def _check_arithmetic(prepared: _Prepared, reduction: str, scale: float) -> None:
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


def _combine(stacked: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Reduce the buffers of all ranks, shape (P, n), into a new one; the same bits on every rank."""
    dtype = stacked.dtype
    if dtype == torch.bool:
        return stacked.all(0) if op == "min" else stacked.any(0)
    if dtype in _NARROW:
        stacked = stacked.float()
    elif dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch has hardly any arithmetic for these
        return _combine_unsigned(stacked, op)
    if op == "sum":
        return stacked.sum(0, dtype=stacked.dtype).to(dtype)
    return (stacked.amax(0) if op == "max" else stacked.amin(0)).to(dtype)


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


def _scale_(buffer: torch.Tensor, factor: float) -> torch.Tensor:
    # torch has no arithmetic for float8.
    return buffer.mul_(factor) if buffer.dtype.itemsize > 1 else buffer.copy_(buffer.float() * factor)


def _all_reduce(ctx: Context, buffer: torch.Tensor, op: ReduceOp) -> torch.Tensor:
    """Reduce a buffer of our own over all ranks."""
    if buffer.dtype in _REDUCED_HERE:
        return _combine(_all_gather(ctx, buffer), op)
    if buffer.dtype == torch.bool:
        ctx.collectives.all_reduce(buffer.view(torch.uint8), "min" if op == "min" else "max")
    else:
        ctx.collectives.all_reduce(buffer, op)
    return buffer


def _scatter_leaf(
    ctx: Context, info: TensorInformation, leaf: torch.Tensor | None, on_cpu: bool, from_process: int
) -> torch.Tensor:
    device = torch.device("cpu") if on_cpu else ctx.device
    sizes = split_sizes(info.shape[0], ctx.world.size)
    row = math.prod(info.shape[1:])
    longest = sizes[0] * row
    buffer = None
    if leaf is not None:
        flat = flatten_tensor(leaf)
        if longest * ctx.world.size == flat.numel():
            buffer = flat
        else:  # scatter takes equal parts: the shorter ones are filled up
            parts = [
                torch.nn.functional.pad(
                    part.view(torch.uint8), (0, (longest - part.numel()) * info.dtype.itemsize)
                )
                for part in torch.split(flat, [rows * row for rows in sizes])
            ]
            buffer = torch.cat(parts).view(info.dtype)
        buffer = buffer.view(torch.uint8)
    output = torch.empty(longest, dtype=info.dtype, device=device)
    ctx.collectives.scatter(output.view(torch.uint8), buffer, from_process)
    own = sizes[ctx.world.rank]
    return output[: own * row].view(own, *info.shape[1:])
