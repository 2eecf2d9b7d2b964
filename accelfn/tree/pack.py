"""Many tensors in few buffers: one contiguous buffer per dtype and device, and views back out."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import _utils

from accelfn.tree.structure import TreeSpec, flatten


class Buffer(NamedTuple):
    """The leaves that share one buffer.

    Attributes:
        dtype: Of every leaf in it.
        device: Of every leaf in it.
        leaves: Their numbers, ascending.
        sizes: Elements of each.
    """

    dtype: torch.dtype
    device: torch.device
    leaves: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer."""
        return sum(self.sizes) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PackSpec:
    """Where each leaf of a tree is in its buffers. Holds no tensor.

    Attributes:
        structure: Everything of the tree but its leaves.
        shapes: Of each leaf.
        groups: Of leaves that share a buffer, in order of their first leaf.
    """

    structure: TreeSpec
    shapes: tuple[tuple[int, ...], ...]
    groups: tuple[Buffer, ...]
    dtypes: tuple[torch.dtype, ...] = field(repr=False)

    def describe(self) -> str:
        """Describe structure, shapes and dtypes in text that is equal for equal layouts on every rank."""
        # By group: there are few of them, and naming the dtype of every leaf takes longer than sending it.
        groups = [(group.dtype, group.device.type, group.leaves) for group in self.groups]
        return f"{self.structure.describe()}{self.shapes}{groups}"

    def fingerprint(self) -> bytes:
        """Return 16 bytes that differ where structure, a shape or a dtype does. The same in every process."""
        return hashlib.blake2b(self.describe().encode(), digest_size=16).digest()


class Packed(NamedTuple):
    """A tree of tensors as few flat buffers.

    Attributes:
        buffers: 1-D and contiguous, one for each of ``layout.groups``.
        layout: How to get the tree back.
    """

    buffers: tuple[torch.Tensor, ...]
    layout: PackSpec


def plan_layout(leaves: list[torch.Tensor], structure: TreeSpec, alone_bytes: int | None = None) -> PackSpec:
    """Decide which leaves share a buffer: those of one dtype and device. Pure.

    Args:
        leaves: Tensors, as :func:`accelfn.tree.flatten` gives them.
        structure: Of the tree that they come from.
        alone_bytes: A leaf of at least this size gets a buffer of its own; None: never.
    """
    together: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    alone: list[int] = []
    for index, leaf in enumerate(leaves):
        if alone_bytes is not None and leaf.numel() * leaf.dtype.itemsize >= alone_bytes:
            alone.append(index)
        else:
            together.setdefault((leaf.dtype, leaf.device), []).append(index)
    members = [*together.values(), *([index] for index in alone)]
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
    """Put the tensors of ``tree`` into one contiguous buffer per dtype and device.

    Args:
        tree: A tree whose leaves are all dense tensors of any dtype and shape, 0-d, empty and
            non-contiguous ones too.
        alone_bytes: A leaf of at least this size gets a buffer of its own, which spares its copy when it is
            contiguous. None: leaves of one dtype and device always share.

    Returns:
        Buffers and their layout. A buffer of a single contiguous leaf shares the leaf's memory; all others
        are new. Detached from autograd.

    Raises:
        TypeError: A leaf is no dense tensor; the message names its path.

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
    """Put the leaves of ``group`` end to end into one flat buffer.

    Args:
        group: Which.
        leaves: All leaves of the tree.
        copy: Give new memory also for a single contiguous leaf.
    """
    with torch.no_grad():
        if len(group.sizes) > 1:
            # In one call: a reshape per leaf from Python costs more than the copy of a small tree.
            together = cast("Any", _utils)._flatten_dense_tensors([leaves[one] for one in group.leaves])
            return flatten_tensor(together)
        leaf = leaves[group.leaves[0]]
        flat = flatten_tensor(leaf)
        return flat.clone() if copy and flat.data_ptr() == leaf.data_ptr() else flat


def flatten_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor`` as one row that can be viewed as bytes; copied only where it can't be otherwise."""
    # A lazy conjugate or negative is not what its bytes say.
    flat = tensor.detach().reshape(-1).resolve_conj().resolve_neg()
    # One element counts as contiguous whatever its stride is.
    return flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)


def unpack(packed: Packed) -> Any:
    """Return the tree: its leaves are views of the buffers.

    Raises:
        ValueError: A buffer doesn't have the length or dtype that the layout says.
    """
    leaves: list[Any] = [None] * len(packed.layout.shapes)
    for group, buffer in zip(packed.layout.groups, packed.buffers, strict=True):
        if buffer.dtype != group.dtype or buffer.numel() != sum(group.sizes):
            raise ValueError(
                f"unpack: a buffer doesn't fit the layout: got {buffer.numel()} elements of "
                f"{buffer.dtype}, expected {sum(group.sizes)} of {group.dtype}. "
                "Pass the buffers that pack gave, or ones of the same form."
            )
        for index, part in zip(group.leaves, torch.split(buffer, list(group.sizes)), strict=True):
            leaves[index] = part.view(packed.layout.shapes[index])
    return packed.layout.structure.unflatten(leaves)


def require_tensors(
    operation: str, leaves: list[Any], structure: TreeSpec, root: str = "tree"
) -> list[torch.Tensor]:
    """Return ``leaves`` as they are when each is a dense tensor.

    Args:
        operation: For the message.
        leaves: Those of a tree.
        structure: Of that tree.
        root: What the message calls the tree.

    Raises:
        TypeError: One isn't; the message names ``operation`` and the leaf's path.
    """
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(
                f"{operation}: {structure.paths(root)[index]} must be a tensor, got {type(leaf).__name__}. "
                "Convert it with torch.as_tensor, leave it out, or use gather_object or "
                "broadcast_object_list."
            )
        if leaf.layout != torch.strided or leaf.is_meta:
            kind = "on the meta device" if leaf.is_meta else f"of layout {leaf.layout}"
            raise TypeError(
                f"{operation}: {structure.paths(root)[index]} must be a dense tensor with data, "
                f"got one {kind}. Make it dense (to_dense, materialise) first."
            )
    return leaves
