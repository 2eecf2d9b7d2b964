"""Operations on the tensors of one rank's tree: move, slice, join, convert.

None of them writes into its input, and each returns the types that it was given.
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
    """Apply ``function`` to each tensor of ``tree``; other leaves stay as they are.

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
        tree: Any tree. Leaves that are no tensors but have a ``.to`` method are moved by it, a
            ``PackedSequence`` among them; all others stay as they are.
        device: Where to.
        non_blocking: Don't wait for copies from pinned memory.
        skip_keys: Keys of mappings, at any depth, below which nothing is moved.

    Returns:
        A tree of the same types. A tensor that is already there is not copied.

    >>> send_to_device({"x": torch.zeros(2), "n": 1}, "cpu")
    {'x': tensor([0., 0.]), 'n': 1}
    """
    if isinstance(tree, torch.Tensor):
        return cast("T", tree.to(device, non_blocking=non_blocking))
    # A PackedSequence keeps its batch sizes on the CPU: only its own method knows.
    leaves, structure = flatten(tree, is_packed_sequence)
    skipped = _below(structure.paths(), skip_keys) if skip_keys else frozenset[int]()
    target = torch.device(device)
    # Most often all is there already, and comparing is cheaper than asking each tensor to move.
    return structure.unflatten(
        [
            leaf
            if index in skipped or (isinstance(leaf, torch.Tensor) and leaf.device == target)
            else _move(leaf, device, non_blocking)
            for index, leaf in enumerate(leaves)
        ]
    )


def slice_tensors(tree: T, s: slice) -> T:
    """Take ``s`` of the first dimension of each tensor.

    Args:
        tree: Any tree. 0-d tensors and leaves that are no tensors stay as they are.
        s: Which rows.

    Returns:
        A tree of the same types; its tensors are views.

    >>> slice_tensors({"x": torch.arange(4), "loss": torch.tensor(0.5)}, slice(1, 3))
    {'x': tensor([1, 2]), 'loss': tensor(0.5000)}
    """

    def cut(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[s] if tensor.dim() else tensor

    return map_tensors(cut, tree)


def count_rows(tree: Any, name: str, reason: str, *, with_others: bool = False) -> int:
    """Return the rows that all tensors of a tree have, which is to be cut along them.

    Args:
        tree: 0-d tensors in it have none, and belong to each part.
        name: What paths in errors begin with.
        reason: Why it is cut; errors begin with it.
        with_others: Leaves that are no tensors belong to each part too, and so do tensors with another
            number of rows than the first has.

    Raises:
        ValueError: A leaf is no tensor, the tensors have different numbers of rows, or there is no row.

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
                "be. Make it a tensor, or let loss_fn close over it."
            )
        if leaf.dim() == 0:
            continue
        if rows is None:
            rows = leaf.shape[0]
        elif leaf.shape[0] != rows and not with_others:
            raise ValueError(
                f"{reason} along the first dimension of its tensors, and {structure.paths(name)[index]} has "
                f"{leaf.shape[0]} rows, where an earlier tensor has {rows}. Give all of them one row for "
                "each sample."
            )
    if not rows:
        missing = "no such dimension" if rows is None else "no rows"
        raise ValueError(
            f"{reason} along the first dimension of its tensors, and this one has {missing}. Pass a batch "
            "that has some."
        )
    return rows


def concatenate(trees: Sequence[T], dim: int = 0) -> T:
    """Join trees of one structure along ``dim``, leaf by leaf.

    Args:
        trees: At least one. 0-d tensors count as tensors of one row.
        dim: Dimension of every leaf.

    Raises:
        ValueError: No tree, or trees of different structure.
        TypeError: Leaves that are no tensors and differ between the trees.

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
        if all(_same(leaf, column[0]) for leaf in column):
            return column[0]
        raise TypeError(
            f"concatenate: {structure.paths()[index]} holds values that are no tensors and differ between "
            f"the trees: {column[0]!r} and others. Join them yourself, or leave them out."
        )

    return structure.unflatten([join(index, column) for index, column in enumerate(columns)])


def find_batch_size(tree: Any) -> int:
    """Return the number of rows of the first tensor that has any dimension, as the tree reads.

    Raises:
        ValueError: There is no such tensor.

    >>> find_batch_size({"loss": torch.tensor(1.0), "x": torch.zeros(3, 2)})
    3
    """
    size = _first_size(tree)
    if size is not None:
        return size
    raise ValueError(
        "find_batch_size: the tree holds no tensor with a first dimension. Pass the batch that has one."
    )


def convert_to_fp32(tree: T) -> T:
    """Turn each float16 and bfloat16 tensor into float32; all else stays, float64 and integers too.

    Differentiable.
    """

    def convert(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor

    return map_tensors(convert, tree)


def pad_input_tensors(tree: T, batch_size: int, num_processes: int, dim: int = 0) -> T:
    """Lengthen ``dim`` of each tensor to the next multiple of ``num_processes`` by repeating its last row.

    Args:
        tree: Any tree. Tensors whose ``dim`` isn't ``batch_size`` long stay as they are.
        batch_size: Length of ``dim`` now, at least 1.
        num_processes: What the new length is to be divisible by.
        dim: Dimension to lengthen.

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
    """Turn each tensor into (nested) Python lists, a 0-d tensor into a number; a ``PackedSequence`` stays.

    >>> listify({"x": torch.tensor([1, 2], dtype=torch.bfloat16)})
    {'x': [1.0, 2.0]}
    """
    leaves, structure = flatten(tree, is_packed_sequence)
    # torch types a tensor's list as one of unknowns
    return structure.unflatten(
        [cast("Any", leaf).tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    )


def find_device(tree: Any) -> torch.device | None:
    """Return the device of the first tensor, or None when there is none."""
    return next((leaf.device for leaf in flatten(tree)[0] if isinstance(leaf, torch.Tensor)), None)


def _first_size(tree: Any) -> int | None:
    """Look into the usual containers one value at a time: the first leaf is nearly always the answer."""
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


def _same(one: Any, other: Any) -> bool:
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
    except TypeError:  # a .to of somebody's own, without the option
        return move(device)


def _below(paths: list[str], keys: str | Iterable[str]) -> frozenset[int]:
    names = (keys,) if isinstance(keys, str) else tuple(keys)
    marks = tuple(f"[{name!r}]" for name in names)
    return frozenset(index for index, path in enumerate(paths) if any(mark in path for mark in marks))
