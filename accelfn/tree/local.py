"""Local operations on the tensors of a tree: move, slice, concatenate, convert.

Inputs are not modified, and container types are kept.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, cast

import torch

from accelfn.tree.structure import flatten, is_packed_sequence

T = TypeVar("T")


def map_tensors(function: Callable[[torch.Tensor], Any], tree: T) -> T:
    """Apply ``function`` to each tensor of ``tree``; other leaves are kept.

    >>> map_tensors(torch.numel, {"x": torch.zeros(2, 3), "name": "a"})
    {'x': 6, 'name': 'a'}
    """
    if isinstance(tree, torch.Tensor):
        return function(tree)
    leaves, structure = flatten(tree)
    return structure.unflatten(
        [function(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    )


def send_to_device(
    tree: T,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | Iterable[str] | None = None,
) -> T:
    """Move each tensor of ``tree`` to ``device``.

    Args:
        tree: Any tree. Other leaves with a ``.to`` method, such as a ``PackedSequence``, are moved by it; all
            others are kept.
        device: Target device.
        non_blocking: Don't wait for copies from pinned memory.
        skip_keys: Keys of mappings, at any depth, whose values are not moved.

    Returns:
        A tree of the same structure. Tensors already on ``device`` are not copied.

    >>> send_to_device({"x": torch.zeros(2), "n": 1}, "cpu")
    {'x': tensor([0., 0.]), 'n': 1}
    """
    if isinstance(tree, torch.Tensor):
        return cast("T", tree.to(device, non_blocking=non_blocking))
    # A PackedSequence must keep its batch sizes on the CPU, which its own method does.
    leaves, structure = flatten(tree, is_packed_sequence)
    skipped = _indices_below(structure.paths(), skip_keys) if skip_keys else frozenset[int]()
    target = torch.device(device)
    # Usually the tensors are on the device already, and comparing is faster than calling to().
    return structure.unflatten(
        [
            leaf
            if index in skipped or (isinstance(leaf, torch.Tensor) and leaf.device == target)
            else _move(leaf, device, non_blocking)
            for index, leaf in enumerate(leaves)
        ]
    )


def slice_tensors(tree: T, s: slice) -> T:
    """Slice the first dimension of each tensor.

    Args:
        tree: Any tree. 0-d tensors and other leaves are kept.
        s: Slice of rows.

    Returns:
        A tree of the same structure; its tensors are views.

    >>> slice_tensors({"x": torch.arange(4), "loss": torch.tensor(0.5)}, slice(1, 3))
    {'x': tensor([1, 2]), 'loss': tensor(0.5000)}
    """
    return map_tensors(lambda tensor: tensor[s] if tensor.dim() else tensor, tree)


def count_rows(
    tree: Any, name: str, reason: str, *, with_others: bool = False, may_be_empty: bool = False
) -> int:
    """Return the number of rows (size of the first dimension) that the tensors of a batch share.

    Args:
        tree: The batch. 0-d tensors are ignored.
        name: Root of paths in errors.
        reason: Start of errors: why the batch is split.
        with_others: Ignore leaves that are no tensors, and tensors with another number of rows than the
            first.
        may_be_empty: Allow tensors of no rows.

    Raises:
        ValueError: A leaf is no tensor, the tensors have different numbers of rows, or there are no rows.

    >>> count_rows([torch.zeros(3, 2), torch.zeros(3), torch.tensor(1.0)], "batch", "cut")
    3
    """
    leaves, structure = flatten(tree, is_packed_sequence)
    rows: int | None = None
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            if with_others and not is_packed_sequence(leaf):
                continue
            raise ValueError(
                f"{reason}, and {structure.paths(name)[index]} is of type {type(leaf).__name__}, which can't "
                "be split. Make it a tensor, or let loss_fn close over it."
            )
        if leaf.dim() == 0:
            continue
        if rows is None:
            rows = leaf.shape[0]
        elif leaf.shape[0] != rows and not with_others:
            raise ValueError(
                f"{reason} along the first dimension of its tensors, and {structure.paths(name)[index]} has "
                f"{leaf.shape[0]} rows, where an earlier tensor has {rows}. Every tensor needs one row per "
                "sample."
            )
    if rows is None or not (rows or may_be_empty):
        missing = "no such dimension" if rows is None else "no rows"
        raise ValueError(
            f"{reason} along the first dimension of its tensors, and this one has {missing}. Pass a batch "
            "with rows."
        )
    return rows


def concatenate(trees: Sequence[T], dim: int = 0) -> T:
    """Concatenate trees of the same structure along ``dim``, leaf by leaf.

    Args:
        trees: At least one. 0-d tensors count as tensors of one row.
        dim: Dimension of every leaf.

    Raises:
        ValueError: No tree, or trees of different structure.
        TypeError: Leaves that are not tensors differ between the trees.

    >>> concatenate([{"x": torch.tensor([1])}, {"x": torch.tensor([2, 3])}])
    {'x': tensor([1, 2, 3])}
    """
    if not trees:
        raise ValueError("concatenate: got no tree. Pass at least one.")
    leaves, structure = flatten(trees[0])
    columns: list[list[Any]] = [[leaf] for leaf in leaves]
    for number, tree in enumerate(trees[1:], start=1):
        more, other = flatten(tree)
        if other != structure:
            raise ValueError(
                f"concatenate: tree {number} has another structure than tree 0:\n"
                f"  tree 0: {structure.describe()}\n  tree {number}: {other.describe()}"
            )
        for column, leaf in zip(columns, more, strict=True):
            column.append(leaf)

    def join(index: int, column: list[Any]) -> Any:
        if all(isinstance(leaf, torch.Tensor) for leaf in column):
            return torch.cat([leaf.reshape(1) if leaf.dim() == 0 else leaf for leaf in column], dim=dim)
        if all(_equal(leaf, column[0]) for leaf in column):
            return column[0]
        raise TypeError(
            f"concatenate: {structure.paths()[index]} has values that are not tensors and differ between "
            f"the trees: {column[0]!r} and others. Remove them, or make them tensors."
        )

    return structure.unflatten([join(index, column) for index, column in enumerate(columns)])


def find_batch_size(tree: Any) -> int:
    """Return the size of the first dimension of the first tensor that has one.

    Raises:
        ValueError: There is no such tensor.

    >>> find_batch_size({"loss": torch.tensor(1.0), "x": torch.zeros(3, 2)})
    3
    """
    size = _first_size(tree)
    if size is not None:
        return size
    raise ValueError(
        "find_batch_size: the tree holds no tensor with a first dimension. Pass a batch with one."
    )


def convert_to_fp32(tree: T) -> T:
    """Convert float16 and bfloat16 tensors to float32; all other leaves are kept.

    Differentiable.
    """

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor

    return map_tensors(convert, tree)


def pad_input_tensors(tree: T, batch_size: int, num_processes: int, dim: int = 0) -> T:
    """Pad ``dim`` of each tensor to a multiple of ``num_processes`` by repeating its last row.

    Args:
        tree: Any tree. Tensors whose ``dim`` has another size than ``batch_size`` are kept.
        batch_size: Current size of ``dim``, at least 1.
        num_processes: Divisor of the new size.
        dim: Dimension to pad.

    >>> pad_input_tensors(torch.tensor([1, 2, 3]), batch_size=3, num_processes=2)
    tensor([1, 2, 3, 3])
    """
    if batch_size < 1 or num_processes < 1:
        raise ValueError(
            f"pad_input_tensors: batch_size and num_processes must be positive, "
            f"got {batch_size} and {num_processes}."
        )
    missing = -batch_size % num_processes

    def pad(tensor: torch.Tensor) -> torch.Tensor:
        if missing == 0 or not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] != batch_size:
            return tensor
        last = tensor.narrow(dim, batch_size - 1, 1)
        shape = list(tensor.shape)
        shape[dim] = missing
        return torch.cat([tensor, last.expand(shape)], dim=dim)

    return map_tensors(pad, tree)


def listify(tree: Any) -> Any:
    """Convert tensors to (nested) lists, or numbers if 0-d; a ``PackedSequence`` is kept.

    >>> listify({"x": torch.tensor([1, 2], dtype=torch.bfloat16)})
    {'x': [1.0, 2.0]}
    """
    leaves, structure = flatten(tree, is_packed_sequence)
    # The return type of tolist() is partly unknown.
    return structure.unflatten(
        [cast("Any", leaf).tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    )


def find_device(tree: Any) -> torch.device | None:
    """Return the device of the first tensor, or None when there is none."""
    return next((leaf.device for leaf in flatten(tree)[0] if isinstance(leaf, torch.Tensor)), None)


def _first_size(tree: Any) -> int | None:
    """Search the usual containers one value at a time, as the first leaf is nearly always the answer."""
    if isinstance(tree, torch.Tensor):
        return tree.size(0) if tree.dim() else None
    if isinstance(tree, Mapping):
        values: Iterable[Any] = cast("Mapping[Any, Any]", tree).values()
    elif isinstance(tree, (list, tuple, deque)):
        values = cast("Sequence[Any]", tree)
    elif is_dataclass(tree) and not isinstance(tree, (type, torch.nn.Module)):
        values = [getattr(tree, item.name) for item in fields(tree)]
    else:
        values, _ = flatten(tree)
        if len(values) == 1 and values[0] is tree:  # a leaf
            return None
    for value in values:
        size = _first_size(value)
        if size is not None:
            return size
    return None


def _equal(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return False
    try:
        return bool(one == other)
    except ValueError:  # an array compares element by element
        return False


def _move(leaf: Any, device: torch.device | str | int, non_blocking: bool) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.to(device, non_blocking=non_blocking)
    move = getattr(leaf, "to", None)
    if not callable(move) or isinstance(leaf, type):
        return leaf
    try:
        return move(device, non_blocking=non_blocking)
    except TypeError:  # without non_blocking
        return move(device)


def _indices_below(paths: list[str], keys: str | Iterable[str]) -> frozenset[int]:
    names = (keys,) if isinstance(keys, str) else tuple(keys)
    marks = tuple(f"[{name!r}]" for name in names)
    return frozenset(index for index, path in enumerate(paths) if any(mark in path for mark in marks))
