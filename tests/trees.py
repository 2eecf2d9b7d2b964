"""Trees of tensors in a form that tests compare."""

from __future__ import annotations

from typing import Any

import torch

from accelfn.tree import flatten, listify

__all__ = ("values",)


def values(tree: Any) -> list[Any]:
    """Give each leaf with its path: dicts may be filled in any order. Of tensors dtype, shape and numbers."""
    leaves, structure = flatten(tree)
    forms = [
        (leaf.dtype, tuple(leaf.shape), listify(leaf.to(torch.complex128).reshape(-1)))
        if isinstance(leaf, torch.Tensor)
        else leaf
        for leaf in leaves
    ]
    return sorted(zip(structure.paths(), forms, strict=True), key=lambda item: item[0])
