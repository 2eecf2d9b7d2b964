"""Split inputs by rank, scatter the rows of a tree, and pad trees to a common length."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch

from accelfn.comm.agreement import Call, catch, check_rank, tree_call
from accelfn.comm.moves import Pieces, split_blocks
from accelfn.comm.objects import broadcast_bytes, gather_bytes
from accelfn.comm.transfer import PackedTree, detached, prepare_tree, unwrap
from accelfn.context import Context, takes_context
from accelfn.tree import TensorInformation, flatten, flatten_tensor, is_packed_sequence, tree_structure

T = TypeVar("T")


@takes_context
def split_between_processes(ctx: Context, inputs: T, apply_padding: bool = False) -> T:
    """Return this rank's part of ``inputs``: consecutive items, split as evenly as possible.

    Ranks: any; doesn't communicate. Every rank passes the same inputs.

    Args:
        ctx: The world. On a mesh, pass ``ctx.along("dp")``: ranks that share a batch then get the same part.
        inputs: A list or tuple, a tensor or array (split along its first dimension), a ``datasets.Dataset``,
            or a possibly nested mapping of these, all of one length.
        apply_padding: Repeat the last item until all parts are equally long, so that they can be gathered.

    Returns:
        A part of the same type; the first parts are one item longer if they can't be equal. Tensors are views
        unless padded. With one process, the inputs themselves.

    Raises:
        TypeError: ``inputs`` can't be split (a string, a set, a 0-d tensor, ...).
        ValueError: The values of a mapping differ in length.

    >>> split_between_processes(Context(), ["A", "B", "C"])
    ['A', 'B', 'C']
    """
    length = _length(inputs, "inputs")
    size, rank = ctx.world.size, ctx.world.rank
    if size == 1:
        return inputs
    sizes = split_sizes(length, size)
    start = sum(sizes[:rank])
    indices = list(range(start, start + sizes[rank]))
    if apply_padding and length:
        indices += [length - 1] * (sizes[0] - len(indices))
    return _take(inputs, indices)


def split_sizes(length: int, parts: int) -> list[int]:
    """Split ``length`` into ``parts`` as evenly as possible, longer ones first. Pure.

    >>> split_sizes(5, 3)
    [2, 2, 1]
    """
    quotient, remainder = divmod(length, parts)
    return [quotient + (part < remainder) for part in range(parts)]


def _length(inputs: Any, path: str) -> int:
    if isinstance(inputs, Mapping):
        lengths = {
            key: _length(value, f"{path}[{key!r}]")
            for key, value in cast("Mapping[Any, Any]", inputs).items()
        }
        if not lengths:
            raise ValueError(
                f"split_between_processes: {path} is an empty mapping. Pass a mapping with values to split."
            )
        if len(set(lengths.values())) > 1:
            raise ValueError(
                f"split_between_processes: the values of {path} must have the same length, got {lengths}."
            )
        return next(iter(lengths.values()))
    if isinstance(inputs, torch.Tensor) or hasattr(inputs, "__array__"):
        if not inputs.ndim:
            raise TypeError(f"split_between_processes: {path} is 0-dimensional and can't be split.")
        return int(inputs.shape[0])
    if isinstance(inputs, (list, tuple)) or (hasattr(inputs, "select") and hasattr(inputs, "__len__")):
        return len(cast("list[Any]", inputs))
    raise TypeError(
        f"split_between_processes: {path} is a {type(inputs).__name__}, which can't be split. Pass a list, "
        "a tuple, a tensor, an array, a dataset, or a mapping of these."
    )


def _take(inputs: Any, indices: list[int]) -> Any:
    start = indices[0] if indices else 0
    consecutive = indices == list(range(start, start + len(indices)))  # unless padded
    if isinstance(inputs, Mapping):
        mapping = cast("Mapping[Any, Any]", inputs)
        part = {key: _take(value, indices) for key, value in mapping.items()}
        return part if type(mapping) is dict else cast("Any", type(mapping))(part)
    if isinstance(inputs, torch.Tensor) or hasattr(inputs, "__array__"):
        return inputs[start : start + len(indices)] if consecutive else inputs[indices]
    if hasattr(inputs, "select"):
        return inputs.select(indices)
    if isinstance(inputs, list):
        return [inputs[index] for index in indices]
    # A part of a namedtuple has other positions, so it is a plain tuple.
    return tuple(inputs[index] for index in indices)


@takes_context
def scatter(ctx: Context, tree: T | None, from_process: int = 0) -> T:
    """Split each tensor of rank ``from_process`` along its first dimension, one part for each rank.

    Rows are split as evenly as possible: the first ``n % P`` ranks get one row more than the others, as in
    :func:`accelfn.split_between_processes`.

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
        ValueError: ``from_process`` isn't a rank, or a tensor has no first dimension.
        TypeError: A leaf isn't a dense tensor.
        RemoteRankError: The sending rank has failed.

    >>> scatter(Context(), torch.arange(3))
    tensor([0, 1, 2])
    """
    sends = ctx.world.rank == from_process

    def prepare() -> tuple[PackedTree | None, bytes]:
        check_rank(ctx, "scatter", "from_process", from_process)
        if not sends:
            return None, b""
        prepared = prepare_tree("scatter", tree, is_packed_sequence)
        for index, shape in enumerate(prepared.layout.shapes):
            if not shape:
                raise ValueError(
                    f"scatter: {prepared.layout.structure.paths()[index]} has no first dimension to split. "
                    "Add one, or broadcast the tensor."
                )
        on_cpu = [leaf.device.type == "cpu" for leaf in prepared.leaves]
        return prepared, pickle.dumps((tree_structure(tree), on_cpu)) if ctx.world.size > 1 else b""

    result, error = catch(prepare)
    if ctx.world.size == 1:
        return detached(cast("T", tree), unwrap(result, error)[0])
    prepared, blob = result if result is not None else (None, b"")
    stubs, on_cpu = pickle.loads(
        broadcast_bytes(ctx, Call("scatter", f"from {from_process}"), blob, from_process, error)
    )
    info, structure = flatten(stubs, lambda value: isinstance(value, TensorInformation))
    received: list[torch.Tensor] = []
    # One leaf at a time, since parts are contiguous rows, and scatter isn't used in inner loops.
    for index, (shape, dtype) in enumerate(cast("list[TensorInformation]", info)):
        sizes, buffer = split_sizes(shape[0], ctx.world.size), None
        if prepared is not None:  # scatter needs equal parts, so shorter ones are padded
            blocks = split_blocks(prepared.leaves[index], Pieces(0, tuple(sizes)))
            buffer = flatten_tensor(blocks).view(torch.uint8)
        device = torch.device("cpu") if on_cpu[index] else ctx.device
        part = torch.empty(sizes[0], *shape[1:], dtype=dtype, device=device)
        ctx.collectives.scatter(part.view(-1).view(torch.uint8), buffer, from_process)
        received.append(part[: sizes[ctx.world.rank]])
    return structure.unflatten(received)


@takes_context
def pad_across_processes(
    ctx: Context, tree: T, dim: int = 0, pad_index: float = 0, pad_first: bool = False
) -> T:
    """Pad ``dim`` of each tensor to the longest length of all ranks, so that the tensors can be gathered.

    Ranks: every rank of ``ctx``; dtypes and numbers of dimensions must be the same, lengths may differ. If
        other dimensions differ too, pad them with further calls before a gather.

    Args:
        ctx: The world.
        tree: Tensors; those without dimension ``dim`` aren't changed.
        dim: Dimension to pad; negative counts from the last.
        pad_index: Value to pad with, converted to the tensor's dtype.
        pad_first: Pad at the start instead of the end.

    Returns:
        A tree of the same types. A tensor that is already long enough isn't copied.

    Raises:
        TypeError: A leaf isn't a dense tensor, or its dtype can't represent ``pad_index``.
        MismatchError: Structures, dtypes, numbers of dimensions or options differ between ranks.

    >>> pad_across_processes(Context(), torch.tensor([1, 2]))
    tensor([1, 2])
    """

    def prepare() -> PackedTree:
        for name, value in (("dim", dim), ("pad_index", pad_index)):
            if not isinstance(cast("object", value), int if name == "dim" else (int, float)):
                raise TypeError(f"pad_across_processes: {name} must be a number, got {value!r}.")
        prepared = prepare_tree("pad_across_processes", tree, is_packed_sequence)
        for index, dtype in enumerate(prepared.layout.dtypes):
            if not _can_hold(dtype, pad_index):
                raise TypeError(
                    f"pad_across_processes: {prepared.layout.structure.paths()[index]} has dtype {dtype}, "
                    f"which can't represent pad_index={pad_index!r}. Pass a number of that dtype, or convert "
                    "the tensor."
                )
        return prepared

    prepared, error = catch(prepare)
    if ctx.world.size == 1:
        unwrap(prepared, error)
        return tree
    call, blob = Call("pad_across_processes", pairs=True), b""
    if prepared is not None:
        layout = prepared.layout
        kinds = [
            f"{dtype} of {len(shape)} dimensions"
            for dtype, shape in zip(layout.dtypes, layout.shapes, strict=True)
        ]
        options = f"dim={dim} pad_index={pad_index} pad_first={pad_first}"
        call = tree_call("pad_across_processes", options, layout.structure, kinds, pairs=True)
        blob = json.dumps(layout.shapes).encode()
    shapes = [json.loads(row) for row in gather_bytes(ctx, call, blob, error)]
    leaves, layout = unwrap(prepared, error)

    def pad(index: int, leaf: torch.Tensor) -> torch.Tensor:
        if not -leaf.dim() <= dim < leaf.dim():
            return leaf
        longest = max(rank[index][dim] for rank in shapes)
        if leaf.shape[dim] == longest:
            return leaf
        shape = list(leaf.shape)
        shape[dim] = longest
        padded = leaf.new_full(shape, pad_index)
        padded.narrow(dim, longest - leaf.shape[dim] if pad_first else 0, leaf.shape[dim]).copy_(leaf)
        return padded

    return layout.structure.unflatten([pad(index, leaf) for index, leaf in enumerate(leaves)])


def _can_hold(dtype: torch.dtype, value: float) -> bool:
    if dtype.is_floating_point or dtype.is_complex:
        return not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max
    if not math.isfinite(value) or value != int(value):
        return False
    if dtype == torch.bool:
        return value in (0, 1)
    limits = torch.iinfo(dtype)
    return limits.min <= value <= limits.max
