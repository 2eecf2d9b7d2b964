"""Packing of many tensors into one contiguous buffer per dtype and device."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import _utils

from accelfn.tree.sharded import Sharded
from accelfn.tree.structure import TreeSpec, flatten


class Buffer(NamedTuple):
    """The leaves that share one buffer.

    Attributes:
        dtype: Of every leaf.
        device: Of every leaf.
        leaves: Indices of the leaves, ascending.
        sizes: Elements of each leaf.
    """

    dtype: torch.dtype
    device: torch.device
    leaves: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the buffer in bytes."""
        return sum(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PackSpec:
    """The position of each leaf of a tree in its buffers. Holds no tensors.

    Attributes:
        structure: Structure of the tree.
        shapes: Shape of each leaf.
        groups: The buffers, in order of their first leaf.
    """

    structure: TreeSpec
    shapes: tuple[tuple[int, ...], ...]
    groups: tuple[Buffer, ...]
    dtypes: tuple[torch.dtype, ...] = field(repr=False)

    def describe(self) -> str:
        """Describe structure, shapes and dtypes in text that is equal for equal layouts on every rank."""
        # By group: formatting the dtype of every leaf would take longer than sending the description.
        groups = [(group.dtype, group.device.type, group.leaves) for group in self.groups]
        return f"{self.structure.describe()}{self.shapes}{groups}"

    def fingerprint(self) -> bytes:
        """Return a 16-byte hash of structure, shapes and dtypes. The same in every process."""
        return hashlib.blake2b(self.describe().encode(), digest_size=16).digest()


class Packed(NamedTuple):
    """A tree of tensors as flat buffers.

    Attributes:
        buffers: 1-D and contiguous, one for each of ``layout.groups``.
        layout: Position of each leaf.
    """

    buffers: tuple[torch.Tensor, ...]
    layout: PackSpec


def plan_layout(leaves: list[torch.Tensor], structure: TreeSpec, alone_bytes: int | None = None) -> PackSpec:
    """Assign leaves to buffers by dtype and device. Pure.

    Args:
        leaves: Tensors, as returned by :func:`accelfn.tree.flatten`.
        structure: Structure of their tree.
        alone_bytes: Leaves of at least this size get their own buffer; None: never.
    """
    shared: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    alone: list[int] = []
    for index, leaf in enumerate(leaves):
        if alone_bytes is not None and leaf.numel() * leaf.dtype.itemsize >= alone_bytes:
            alone.append(index)
        else:
            shared.setdefault((leaf.dtype, leaf.device), []).append(index)
    members = [*shared.values(), *([index] for index in alone)]
    members.sort(key=lambda indices: indices[0])
    return PackSpec(
        structure,
        tuple([tuple(leaf.shape) for leaf in leaves]),
        tuple(
            Buffer(
                leaves[indices[0]].dtype,
                leaves[indices[0]].device,
                tuple(indices),
                tuple([leaves[index].numel() for index in indices]),
            )
            for indices in members
        ),
        tuple([leaf.dtype for leaf in leaves]),
    )


def pack(tree: Any, alone_bytes: int | None = None) -> Packed:
    """Pack the tensors of ``tree`` into one contiguous buffer per dtype and device.

    Args:
        tree: A tree of dense tensors of any dtype and shape, including 0-d, empty and non-contiguous ones.
        alone_bytes: Leaves of at least this size get their own buffer, which avoids a copy if the leaf is
            contiguous. None: leaves of one dtype and device always share.

    Returns:
        Buffers and their layout, detached from autograd. The buffer of a single contiguous leaf shares the
        leaf's memory; all others are new.

    Raises:
        TypeError: A leaf is not a dense tensor; the message has its path.

    >>> packed = pack({"a": torch.ones(2), "b": torch.zeros(())})
    >>> packed.buffers
    (tensor([1., 1., 0.]),)
    >>> unpack(packed)
    {'a': tensor([1., 1.]), 'b': tensor(0.)}
    """
    leaves, structure = flatten(tree)
    layout = plan_layout(require_tensors("pack", leaves, structure), structure, alone_bytes)
    return Packed(tuple([flatten_group(group, leaves) for group in layout.groups]), layout)


def flatten_group(group: Buffer, leaves: list[torch.Tensor], *, copy: bool = False) -> torch.Tensor:
    """Concatenate the leaves of ``group`` into one flat buffer.

    Args:
        group: The buffer's leaves.
        leaves: All leaves of the tree.
        copy: Return new memory even for a single contiguous leaf.
    """
    with torch.no_grad():
        if len(group.sizes) > 1:
            # One call: a reshape per leaf from Python costs more than the copy of a small tree.
            together = cast("Any", _utils)._flatten_dense_tensors([leaves[one] for one in group.leaves])
            return flatten_tensor(together)
        leaf = leaves[group.leaves[0]]
        flat = flatten_tensor(leaf)
        return flat.clone() if copy and flat.data_ptr() == leaf.data_ptr() else flat


def flatten_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` flat and contiguous, so that it can be viewed as bytes; copied only if necessary."""
    # The bytes of a lazy conjugate or negative are those of its base.
    flat = tensor.detach().reshape(-1).resolve_conj().resolve_neg()
    # A tensor of one element counts as contiguous with any stride.
    return flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)


def unpack(packed: Packed) -> Any:
    """Return the tree, with views of the buffers as leaves.

    Raises:
        ValueError: The length or dtype of a buffer doesn't fit the layout.
    """
    leaves: list[Any] = [None] * len(packed.layout.shapes)
    for group, buffer in zip(packed.layout.groups, packed.buffers, strict=True):
        if buffer.dtype != group.dtype or buffer.numel() != sum(group.sizes):
            raise ValueError(
                f"unpack: a buffer doesn't fit the layout: got {buffer.numel()} elements of "
                f"{buffer.dtype}, expected {sum(group.sizes)} of {group.dtype}. "
                "Pass the buffers from pack, or buffers of the same lengths and dtypes."
            )
        for index, part in zip(group.leaves, torch.split(buffer, list(group.sizes)), strict=True):
            leaves[index] = part.view(packed.layout.shapes[index])
    return packed.layout.structure.unflatten(leaves)


def require_tensors(
    operation: str, leaves: list[Any], structure: TreeSpec, root: str = "tree"
) -> list[torch.Tensor]:
    """Check that all leaves are dense tensors, and return them.

    Args:
        operation: Name of the operation, for the message.
        leaves: Leaves of a tree.
        structure: Structure of the tree.
        root: Name of the tree, for the message.

    Raises:
        TypeError: A leaf isn't a dense tensor; the message has ``operation`` and the leaf's path.
    """
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(
                f"{operation}: {structure.paths(root)[index]} must be a tensor, got {type(leaf).__name__}. "
                "Convert it with torch.as_tensor, leave it out, or use gather_object or "
                "broadcast_object_list."
            )
        if isinstance(leaf, Sharded):
            raise TypeError(
                f"{operation}: {structure.paths(root)[index]} is a Sharded: this rank's piece. Pass the "
                "pieces of the tree, accelfn.pieces(tree)."
            )
        if leaf.layout != torch.strided or leaf.is_meta:
            kind = "on the meta device" if leaf.is_meta else f"of layout {leaf.layout}"
            raise TypeError(
                f"{operation}: {structure.paths(root)[index]} must be a dense tensor with data, "
                f"got one {kind}. Convert it with to_dense() or materialise it first."
            )
    return leaves
