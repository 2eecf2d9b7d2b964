"""A tree without its data: shapes and dtypes, from which empty tensors can be made again."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from accelfn.tree.structure import flatten, is_packed_sequence

__all__ = ("TensorInformation", "initialize_tensors", "tree_structure")


class TensorInformation(NamedTuple):
    """What is known of a tensor without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def tree_structure(tree: Any) -> Any:
    """Replace each tensor by its :class:`TensorInformation`; other leaves and a ``PackedSequence`` stay.

    >>> tree_structure({"x": torch.zeros(2)})
    {'x': TensorInformation(shape=(2,), dtype=torch.float32)}
    """
    leaves, structure = flatten(tree, is_packed_sequence)
    return structure.unflatten(
        [
            TensorInformation(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        ]
    )


def initialize_tensors(tree: Any, device: torch.device | str = "cpu") -> Any:
    """Replace each :class:`TensorInformation` by an uninitialised tensor of its shape and dtype.

    >>> initialize_tensors(tree_structure(torch.zeros(2, 3))).shape
    torch.Size([2, 3])
    """
    leaves, structure = flatten(tree, _stays_whole)
    return structure.unflatten(
        [
            torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
            if isinstance(leaf, TensorInformation)
            else leaf
            for leaf in leaves
        ]
    )


def _stays_whole(value: Any) -> bool:
    return isinstance(value, TensorInformation) or is_packed_sequence(value)
