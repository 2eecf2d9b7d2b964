"""Tensors that share memory are stored once, and share it again afterwards.

What counts is memory, not objects: two tensors belong together if the spans of bytes that they reach over
overlap. Of those that belong together, one lies in the checkpoint under its own name if it is contiguous and
covers all the others; they are views of it. Otherwise their whole span lies there as one flat tensor.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

__all__ = ("contiguous_stride", "is_dense", "share")

# A flat span begins at a multiple of the largest element, so that a view of any dtype is possible.
_ALIGNMENT = 16


class _Leaf(NamedTuple):
    """A tensor of a tree, and its node in the document, which says its own name by now."""

    tensor: torch.Tensor
    node: dict[str, Any]


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    stride: list[int] = []
    reach = 1
    for size in reversed(shape):
        stride.append(reach)
        reach *= max(size, 1)
    return tuple(reversed(stride))


def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether elements neither overlap nor have gaps between them."""
    return _gap(shape, stride) == 0


def _gap(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return -1 where elements may overlap, 0 where they fill their span, 1 where there are gaps."""
    reach, gap = 1, 0
    for side, size in sorted((step, size) for step, size in zip(stride, shape, strict=True) if size != 1):
        if side < reach:
            return -1
        gap = max(gap, side > reach)
        reach = side * (size - 1) + reach
    return gap


def share(leaves: list[torch.Tensor], nodes: list[dict[str, Any]], tensors: dict[str, torch.Tensor]) -> None:
    """Complete the nodes of tensors, and take out of ``tensors`` what is stored with another.

    Args:
        leaves: Plain strided tensors, each once, in the order of the tree.
        nodes: Of the leaves, with their own names. Changed in place: they get ``stride`` where a tensor isn't
            contiguous, and ``offset`` (in bytes, from the first of the stored tensor of that name) where it
            is one of several in one memory.
        tensors: What is stored, by name. Changed in place.
    """
    starts: list[int] = []
    ends: list[int] = []
    by_device: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(leaves):
        start = end = 0
        size = tensor.nbytes
        if size:
            start = tensor.data_ptr()
            if tensor.is_contiguous():
                end = start + size
            else:
                end = start + _span(tensor) * tensor.itemsize
                shape, stride = tensor.shape, tensor.stride()
                packed = stride if is_dense(shape, stride) else _packed(shape, stride)
                if _gap(shape, stride) >= 0 and packed != contiguous_stride(shape):
                    nodes[index]["stride"] = list(packed)
            by_device.setdefault(tensor.device, []).append(index)
        starts.append(start)
        ends.append(end)
    groups: list[tuple[list[int], int, int]] = []
    for order in by_device.values():
        order.sort(key=starts.__getitem__)
        place = 0
        while place < len(order):
            begin, reach = place, ends[order[place]]
            place += 1
            while place < len(order) and starts[order[place]] < reach:
                reach = max(reach, ends[order[place]])
                place += 1
            if place > begin + 1 or not leaves[order[begin]].is_contiguous():
                groups.append((sorted(order[begin:place]), starts[order[begin]], reach))
    groups.sort()  # by place in the tree: addresses are others in every process
    for members, begin, reach in groups:
        _settle([_Leaf(leaves[index], nodes[index]) for index in members], begin, reach, tensors)


def _span(tensor: torch.Tensor) -> int:
    return 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _packed(shape: tuple[int, ...], stride: tuple[int, ...]) -> tuple[int, ...]:
    """Squeeze the gaps out of strides, and keep their order, as ``tensor.clone()`` does."""
    packed = [0] * len(shape)
    reach = 1
    for dim in sorted(range(len(shape)), key=lambda dim: (stride[dim], shape[dim], -dim)):
        packed[dim] = reach
        reach *= shape[dim]
    return tuple(packed)


def _settle(members: list[_Leaf], begin: int, end: int, tensors: dict[str, torch.Tensor]) -> None:
    """Decide how the tensors that reach over one span of memory are stored."""
    first, node = members[0]
    overlaps = not first.is_contiguous() and _gap(first.shape, first.stride()) < 0
    if len(members) == 1 and not overlaps:
        return
    if not overlaps and all(_same(first, other.tensor) for other in members[1:]):
        for other in members[1:]:
            del tensors[other.node["name"]]
            other.node["name"] = node["name"]
        return
    for base in members:
        if (
            base.tensor.is_contiguous()
            and base.tensor.data_ptr() == begin
            and base.tensor.nbytes == end - begin
        ):
            break
    else:
        base = None
    if base is None or any((one.tensor.data_ptr() - begin) % one.tensor.itemsize for one in members):
        flat, begin = _flat([one.tensor for one in members], begin, end)
        if flat is None:
            return
        name = f"{node['name']}~memory"  # no path has a "~" before an "m"
        for one in members:
            del tensors[one.node["name"]]
        tensors[name] = flat
    else:
        name = base.node["name"]
        for one in members:
            if one is not base:
                del tensors[one.node["name"]]
    for tensor, node in members:
        node["name"] = name
        node["offset"] = tensor.data_ptr() - begin
        node.pop("stride", None)
        if not tensor.is_contiguous():
            node["stride"] = list(tensor.stride())


def _itemsize(tensor: torch.Tensor) -> int:
    return tensor.itemsize


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


def _flat(tensors: list[torch.Tensor], begin: int, end: int) -> tuple[torch.Tensor | None, int]:
    """View a span of memory as one flat tensor: of the dtype that all have, else of bytes.

    Returns:
        The tensor and where it begins. None where no one storage reaches over the span, as that of arrays of
        numpy may not: those come back with memory of their own.
    """
    for tensor in sorted(tensors, key=_itemsize):  # the end is a multiple of the smallest
        storage = tensor.untyped_storage()
        low = storage.data_ptr()
        if low <= begin and end <= low + storage.nbytes():
            break
    else:
        return None, begin
    whole = tensor.as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
    if len({one.dtype for one in tensors}) > 1 or any(
        (one.data_ptr() - begin) % one.itemsize for one in tensors
    ):
        whole = whole.view(torch.uint8)
        begin = low + (begin - low) // _ALIGNMENT * _ALIGNMENT
    size = whole.itemsize
    return whole[(begin - low) // size : (end - low) // size], begin
