"""Functions of whole trees: map, choose, the norm, leaves by path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch

from accelfn.tree.local import map_tensors
from accelfn.tree.sharded import Sharded
from accelfn.tree.structure import TreeSpec, flatten, is_dtensor

T = TypeVar("T")


def map(function: Callable[..., Any], tree: T, /, *rest: Any) -> T:  # noqa: A001 -- the field's word, used as tree.map
    """Apply ``function`` to each leaf, and to the leaves at its place in the trees of ``rest``.

    None is no leaf, and stays.

    Raises:
        ValueError: A tree has another structure; with the first path that differs.

    >>> map(torch.add, {"x": torch.ones(2)}, {"x": torch.ones(2)})
    {'x': tensor([2., 2.])}
    """
    leaves, structure = flatten(tree)
    columns = [leaves, *(leaves_like("tree.map", structure, other) for other in rest)]
    return structure.unflatten([function(*row) for row in zip(*columns, strict=True)])


def leaves_with_paths(tree: Any) -> list[tuple[str, Any]]:
    """List the leaves with their paths, such as ``("['layers'][0]['bias']", ...)``.

    >>> leaves_with_paths({"b": [3], "a": 4})
    [("['a']", 4), ("['b'][0]", 3)]
    """
    leaves, structure = flatten(tree)
    return list(zip(structure.paths(""), leaves, strict=True))


def global_norm(tree: Any) -> torch.Tensor:
    """Return the Euclidean norm of all tensors together, as of ``torch.nn.utils.get_total_norm``.

    Ranks: local; of DTensors that are sharded, every rank of their mesh, and the norm is that of the whole.
    Of :class:`accelfn.tree.Sharded` leaves, :func:`accelfn.clip_by_global_norm` returns it, which takes the
    ranks.

    Returns:
        Shape ``()``; zero for a tree without tensors.

    >>> global_norm({"a": torch.tensor([3.0]), "b": [torch.tensor([4.0])]})
    tensor(5.)
    """
    tensors = [leaf for leaf in flatten(tree)[0] if isinstance(leaf, torch.Tensor)]
    norm = torch.nn.utils.get_total_norm(tensors)
    return cast("Any", norm).full_tensor() if is_dtensor(norm) else norm


def where(mask: torch.Tensor | bool, tree: T, other: T) -> T:
    """Choose, for each leaf, from ``tree`` where ``mask`` is true, and else from ``other``.

    Args:
        mask: A bool; or a bool tensor that is broadcast to each leaf, such as of shape ``()``, which isn't
            read on the host.
        tree: A tree of tensors.
        other: A tree of the same structure.

    Raises:
        ValueError: The trees have different structures.

    >>> where(torch.tensor(False), {"x": torch.ones(1)}, {"x": torch.zeros(1)})
    {'x': tensor([0.])}
    """
    leaves, structure = flatten(tree)
    pairs = zip(leaves, leaves_like("tree.where", structure, other), strict=True)
    if isinstance(mask, bool):
        return tree if mask else other
    return structure.unflatten([torch.where(mask.to(one.device), one, two) for one, two in pairs])


def pieces(tree: T) -> T:
    """Return the tree with this rank's piece in place of each :class:`Sharded`; other leaves are kept.

    >>> pieces({"w": Sharded(torch.ones(1), 0, 2, 4), "step": 3})
    {'w': tensor([1.]), 'step': 3}
    """
    return map_tensors(lambda leaf: leaf.local if isinstance(leaf, Sharded) else leaf, tree)


def leaves_like(
    operation: str, structure: TreeSpec, other: Any, is_leaf: Callable[[Any], bool] | None = None
) -> list[Any]:
    """Return the leaves of a tree, which must have a structure."""
    leaves, found = flatten(other, is_leaf)
    if found != structure:
        raise ValueError(f"{operation}: the trees differ: {_difference(structure, found)}.")
    return leaves


def _difference(structure: TreeSpec, found: TreeSpec) -> str:
    ours, theirs = structure.paths(), found.paths()
    differing: Iterator[tuple[str, str]] = (
        (one, two) for one, two in zip(ours, theirs, strict=False) if one != two
    )
    first = next(differing, None)
    if first is not None:
        return f"{first[0]} in the first, {first[1]} in another"
    if len(ours) != len(theirs):
        longer = ours if len(ours) > len(theirs) else theirs
        return f"only one has {longer[min(len(ours), len(theirs))]}"
    return f"{structure.describe()} and {found.describe()}"
