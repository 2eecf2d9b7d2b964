"""The dtypes of torch and of safetensors: their names, and what is stored of those that a file lacks."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType

import torch

SAFETENSORS_NAMES = MappingProxyType(
    {
        torch.float64: "F64",
        torch.float32: "F32",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.int64: "I64",
        torch.int32: "I32",
        torch.int16: "I16",
        torch.int8: "I8",
        torch.uint64: "U64",
        torch.uint32: "U32",
        torch.uint16: "U16",
        torch.uint8: "U8",
        torch.bool: "BOOL",
        torch.complex64: "C64",
        torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
        torch.float8_e5m2: "F8_E5M2",
        torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
        torch.float8_e8m0fnu: "F8_E8M0",
    }
)
STORED_DTYPES = MappingProxyType({name: dtype for dtype, name in SAFETENSORS_NAMES.items()})
"""torch dtypes by their name in safetensors files."""

# An element of a quantized dtype has no value without a scale.
_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})
# Under their full names: torch.half is torch.float16.
_BY_NAME = MappingProxyType(
    {str(value).removeprefix("torch."): value for value in vars(torch).values() if type(value) is torch.dtype}
)
_NAMES = MappingProxyType({value: name for name, value in _BY_NAME.items()})
# Dtypes that torch can copy, by the size of an element.
SAME_SIZE = MappingProxyType(
    {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
)


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype as torch does.

    >>> dtype_name(torch.half)
    'float16'
    """
    return _NAMES[dtype]


def dtype_from_name(name: str) -> torch.dtype:
    """Return the dtype of a name that :func:`dtype_name` returns.

    Raises:
        ValueError: This torch has no such dtype.
    """
    dtype = _BY_NAME.get(name)
    if dtype is None:
        raise ValueError(f"this torch ({torch.__version__}) has no dtype {name!r}")
    return dtype


def is_storable(dtype: torch.dtype) -> bool:
    """Return whether tensors of ``dtype`` can be stored: all but the quantized ones."""
    return dtype not in _QUANTIZED


def stored_form(dtype: torch.dtype, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Return the safetensors dtype and shape under which a tensor's bytes are stored.

    Args:
        dtype: Of the tensor.
        shape: Of the tensor.

    >>> stored_form(torch.complex128, (3,)), stored_form(torch.float32, ())
    (('F64', (3, 2)), ('F32', ()))
    """
    if dtype in SAFETENSORS_NAMES:
        return SAFETENSORS_NAMES[dtype], tuple(shape)
    if dtype == torch.complex128:
        return "F64", (*shape, 2)
    return ("F4", (*shape, 2)) if dtype == torch.float4_e2m1fn_x2 else ("U8", (*shape, dtype.itemsize))


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as a dtype that torch can copy, since torch has no copy kernels for some dtypes."""
    if tensor.dtype in SAFETENSORS_NAMES or tensor.dtype == torch.complex128:
        return tensor
    return tensor.view(SAME_SIZE[tensor.dtype.itemsize])


def contiguous_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor of any dtype into fresh contiguous memory."""
    plain = copyable(tensor)
    return plain.clone(memory_format=torch.contiguous_format).view(tensor.dtype)
