"""Tensors as nodes of a document, and the other way.

A node says dtype, shape and the name of the stored tensor; further ``stride`` where memory isn't contiguous,
``offset`` where the tensor is a view into the stored one, ``parameter`` and ``requires_grad`` where they are
true.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, cast

import torch

from accelfn.checkpoint.document.nodes import damaged
from accelfn.checkpoint.document.plain import count
from accelfn.checkpoint.document.sharing import contiguous_stride, is_dense
from accelfn.checkpoint.files.stored_dtype import (
    contiguous_copy,
    copyable,
    dtype_from_name,
    dtype_name,
    is_storable,
)
from accelfn.tree import is_dtensor

__all__ = ("SPARSE", "TensorReader", "join_sparse", "refusal", "sparse_parts")

Node = dict[str, Any]

# Names of the parts, in the order in which torch's constructors take them.
_ROWS = ("crow_indices", "col_indices", "values")
_COLUMNS = ("ccol_indices", "row_indices", "values")
SPARSE = MappingProxyType(
    {
        torch.sparse_coo: ("indices", "values"),
        torch.sparse_csr: _ROWS,
        torch.sparse_bsr: _ROWS,
        torch.sparse_csc: _COLUMNS,
        torch.sparse_bsc: _COLUMNS,
    }
)
_SPARSE_BY_NAME = MappingProxyType({str(layout): layout for layout in SPARSE})
_ALIGNMENT = 16


def refusal(tensor: torch.Tensor) -> str | None:
    """Return why a tensor can't be stored; None where it can."""
    kind = type(tensor)
    if kind is not torch.Tensor and kind is not torch.nn.Parameter and not is_dtensor(tensor):
        return (
            f"a {kind.__module__}.{kind.__qualname__}, a tensor that is more than its elements; store what "
            "it is made of, or its plain value, such as tensor.as_subclass(torch.Tensor)"
        )
    if tensor.is_nested:
        return "a nested tensor; store tensor.unbind()"
    if tensor.is_quantized or not is_storable(tensor.dtype):
        return "a quantized tensor; store tensor.dequantize(), or tensor.int_repr() and its scales"
    if tensor.device.type == "meta":
        return "a tensor on the meta device, which has no data; give it some with to_empty, or load it first"
    if tensor.layout is not torch.strided and tensor.layout not in SPARSE:
        return f"a tensor of layout {tensor.layout}; store tensor.to_dense()"
    return None


def sparse_parts(tensor: torch.Tensor) -> tuple[Node, dict[str, torch.Tensor]]:
    """Take a sparse tensor apart: what is to be said of it, and its parts by name."""
    node: Node = {"$": "sparse", "layout": str(tensor.layout), "shape": list(tensor.shape)}
    if tensor.layout is torch.sparse_coo:
        if tensor.is_coalesced():
            node["coalesced"] = True
        plain = tensor.detach()
        return node, {"indices": plain._indices(), "values": plain._values()}
    plain = tensor.detach()
    return node, {name: getattr(plain, name)() for name in SPARSE[tensor.layout]}


def join_sparse(node: Node, parts: Mapping[str, Any]) -> torch.Tensor:
    """Make a sparse tensor of its parts.

    Raises:
        Exception: Of any kind, where node or parts are malformed.
    """
    layout = _SPARSE_BY_NAME[node["layout"]]
    shape = tuple(map(count, node["shape"]))
    tensors = [parts[name] for name in SPARSE[layout]]
    if len(parts) != len(tensors) or not all(isinstance(part, torch.Tensor) for part in tensors):
        raise ValueError(f"a {layout} tensor has other parts than {sorted(parts)}")
    make = cast("Any", torch)  # its constructors aren't fully typed
    if layout is not torch.sparse_coo:
        return make.sparse_compressed_tensor(*tensors, shape, layout=layout, check_invariants=True)
    coalesced = node.get("coalesced") is True
    return make.sparse_coo_tensor(*tensors, shape, check_invariants=True, is_coalesced=coalesced)


class TensorReader:
    """Makes the tensors of a document of the stored ones. Those in one memory are made to share it again."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._laid: dict[str, tuple[tuple[int, ...] | None, torch.Tensor]] = {}

    def read(self, node: Node, path: str) -> torch.Tensor:
        """Make the tensor of a node.

        Raises:
            DamagedCheckpointError: Node and stored tensor don't fit.
        """
        try:
            name = node["name"]
            dtype = dtype_from_name(node["dtype"])
            shape = tuple(map(count, node["shape"]))
            stride = tuple(map(count, node["stride"])) if "stride" in node else None
            stored = self._tensors[name]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise damaged(path, f"a tensor is malformed or isn't there ({error!r})") from error
        if "offset" in node:
            tensor = self._view(name, stored, node, (dtype, shape, stride), path)
        else:
            if stored.dtype is not dtype or stored.shape != shape:
                found = f"{dtype_name(stored.dtype)} {list(stored.shape)}"
                raise damaged(path, f"{found} is stored for {node['dtype']} {list(shape)}")
            if stride is None and name not in self._laid and stored.is_contiguous():
                tensor = stored
            else:
                tensor = self._lay(name, stored, stride, path)
        return _finish(tensor, node, path)

    def _lay(
        self, name: str, stored: torch.Tensor, stride: tuple[int, ...] | None, path: str
    ) -> torch.Tensor:
        """Return a stored tensor with the strides that it had. All of one name get the same memory."""
        known = self._laid.get(name)
        if known is not None:
            if known[0] != stride:
                raise damaged(path, f"the tensor {name!r} has several layouts")
            return known[1]
        tensor = stored.detach()
        if type(tensor) is torch.Tensor:  # a DTensor is laid out by who made it
            if stride is None:
                if not tensor.is_contiguous():
                    tensor = contiguous_copy(tensor)
            elif len(stride) != tensor.dim() or not is_dense(tuple(tensor.shape), stride):
                raise damaged(path, f"{list(stride)} are no strides for {list(tensor.shape)}")
            elif tensor.stride() != stride:
                plain = copyable(tensor)
                turned = torch.empty_strided(
                    tuple(plain.shape), stride, dtype=plain.dtype, device=plain.device
                )
                tensor = turned.copy_(plain).view(tensor.dtype)
        self._laid[name] = stride, tensor
        return tensor

    def _view(
        self,
        name: str,
        stored: torch.Tensor,
        node: Node,
        form: tuple[torch.dtype, tuple[int, ...], tuple[int, ...] | None],
        path: str,
    ) -> torch.Tensor:
        """View the bytes of a stored tensor, from an offset on, as dtype, shape and strides."""
        dtype, shape, stride = form
        if name not in self._laid and type(stored) is torch.Tensor and stored.is_contiguous():
            misplaced = stored.storage_offset() * stored.itemsize % _ALIGNMENT
            if misplaced:  # larger elements have to begin at a multiple of their size
                self._laid[name] = None, contiguous_copy(stored.detach())
        base = self._lay(name, stored, None, path)
        try:
            offset, size = count(node["offset"]), dtype.itemsize
            if type(base) is not torch.Tensor or offset % size:
                raise ValueError("no view of it begins there")
            if stride is None:
                stride = contiguous_stride(shape)
            if len(stride) != len(shape) or 0 in shape:
                raise ValueError("the strides are of another shape")
            reach = 1 + sum((side - 1) * step for side, step in zip(shape, stride, strict=True))
            if offset + reach * size > base.nbytes:
                raise ValueError("it reaches beyond the end")
            if dtype is base.dtype:
                return base.as_strided(shape, stride, base.storage_offset() + offset // size).detach()
            flat = base.reshape(-1).view(torch.uint8)
            flat = flat[: flat.numel() // size * size].view(dtype)
            return flat.as_strided(shape, stride, flat.storage_offset() + offset // size).detach()
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise damaged(path, f"it isn't a view of the tensor {name!r} ({error})") from error


def _finish(tensor: torch.Tensor, node: Node, path: str) -> torch.Tensor:
    requires_grad, parameter = node.get("requires_grad", False), node.get("parameter", False)
    if requires_grad is False and parameter is False:
        return tensor.detach()
    if type(requires_grad) is not bool or type(parameter) is not bool:
        raise damaged(path, "a mark of a tensor is neither true nor false")
    try:
        if parameter:
            return torch.nn.Parameter(tensor, requires_grad=requires_grad)
        return tensor.detach().requires_grad_()
    except RuntimeError as error:
        raise damaged(path, f"a {node['dtype']} can't be trained") from error
