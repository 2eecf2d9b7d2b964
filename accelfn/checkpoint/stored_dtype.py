"""How a dtype of torch lies in a safetensors file, and back.

Most dtypes are known to safetensors, and lie there as they are, so that any reader can have them. complex128
lies as F64 with a last dimension of 2. All others (such as float8_e8m0fnu, float4_e2m1fn_x2, complex32, bits8
and uint4) lie as U8, with a last dimension of their size in bytes. What they are is then said by the
manifest, which names every dtype as torch does.
"""

from __future__ import annotations

from types import MappingProxyType

import torch

__all__ = (
    "as_stored",
    "contiguous_copy",
    "copyable",
    "dtype_from_name",
    "dtype_name",
    "from_stored",
    "is_storable",
    "stored_name",
    "stored_shape",
)

_KNOWN = MappingProxyType(
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
    }
)
# An element of a quantized dtype has no value without the scale beside it.
_QUANTIZED = frozenset({torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4})
# Under their full names: torch.half is torch.float16.
_BY_NAME = MappingProxyType(
    {str(value).removeprefix("torch."): value for value in vars(torch).values() if type(value) is torch.dtype}
)
_NAMES = MappingProxyType({value: name for name, value in _BY_NAME.items()})
_SAME_SIZE = MappingProxyType({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64})


def dtype_name(dtype: torch.dtype) -> str:
    """Name a dtype as torch does.

    >>> dtype_name(torch.half)
    'float16'
    """
    return _NAMES[dtype]


def dtype_from_name(name: str) -> torch.dtype:
    """Find a dtype by what :func:`dtype_name` says.

    Raises:
        ValueError: This torch has no such dtype.
    """
    dtype = _BY_NAME.get(name)
    if dtype is None:
        raise ValueError(f"this torch ({torch.__version__}) has no dtype {name!r}")
    return dtype


def is_storable(dtype: torch.dtype) -> bool:
    """Whether tensors of ``dtype`` can be stored: all but the quantized ones."""
    return dtype not in _QUANTIZED


def stored_name(dtype: torch.dtype) -> str:
    """Name the dtype that ``dtype`` has in a safetensors file.

    >>> stored_name(torch.float16), stored_name(torch.complex128), stored_name(torch.float8_e8m0fnu)
    ('F16', 'F64', 'U8')
    """
    return "F64" if dtype == torch.complex128 else _KNOWN.get(dtype, "U8")


def stored_shape(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Give the shape that a tensor has in a safetensors file.

    >>> stored_shape(torch.float16, (3,)), stored_shape(torch.complex128, (3,))
    ((3,), (3, 2))
    """
    if dtype in _KNOWN:
        return tuple(shape)
    return (*shape, 2 if dtype == torch.complex128 else dtype.itemsize)


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as a dtype that torch can copy: sub-byte dtypes have no such kernel."""
    if tensor.dtype in _KNOWN or tensor.dtype == torch.complex128:
        return tensor
    return tensor.view(_SAME_SIZE[tensor.dtype.itemsize])


def contiguous_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor of any dtype into fresh contiguous memory."""
    plain = copyable(tensor)
    return plain.clone(memory_format=torch.contiguous_format).view(tensor.dtype)


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as the safetensors dtype and shape that it is stored with.

    Args:
        tensor: Of any storable dtype. Its memory is copied only where it isn't contiguous, or is marked as
            conjugated or negated.

    Returns:
        A contiguous tensor of :func:`stored_shape`.

    Raises:
        ValueError: The dtype is quantized.
    """
    dtype = tensor.dtype
    if dtype in _QUANTIZED:
        raise ValueError(f"a tensor of {dtype} has no value by itself. Store tensor.dequantize() instead.")
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    if dtype in _KNOWN:
        return plain.contiguous()
    if dtype == torch.complex128:
        return torch.view_as_real(plain.contiguous())
    return copyable(plain).contiguous().unsqueeze(-1).view(torch.uint8)


def from_stored(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View what :func:`as_stored` gave as ``dtype`` again, in the same memory wherever that is possible.

    Args:
        tensor: As it lies in the file.
        dtype: What it was.

    Raises:
        ValueError: No tensor of ``dtype`` is stored with this dtype and shape.
    """
    if not is_storable(dtype) or tensor.dtype != _stored_dtype(dtype):
        raise ValueError(f"{tensor.dtype} isn't how {dtype} is stored")
    if dtype in _KNOWN:
        return tensor
    last = 2 if dtype == torch.complex128 else dtype.itemsize
    if not tensor.dim() or tensor.shape[-1] != last:
        raise ValueError(f"{dtype} is stored with a last dimension of {last}, not {tuple(tensor.shape)}")
    step = dtype.itemsize // tensor.dtype.itemsize
    if not tensor.is_contiguous() or tensor.storage_offset() % step:
        tensor = contiguous_copy(tensor)  # a view of larger elements has to start and step by whole ones
    return tensor.view(dtype).squeeze(-1)


def _stored_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype in _KNOWN:
        return dtype
    return torch.float64 if dtype == torch.complex128 else torch.uint8
