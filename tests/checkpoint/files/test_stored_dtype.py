"""Every dtype has a name, a form in safetensors files, and a way to be copied."""

import re

import pytest
import torch

from accelfn.checkpoint.header import (
    SAFETENSORS_NAMES,
    contiguous_copy,
    copyable,
    dtype_from_name,
    dtype_name,
    is_storable,
    stored_form,
)
from accelfn.comm.agreement import as_bytes

ALL = tuple(dict.fromkeys(value for value in vars(torch).values() if type(value) is torch.dtype))
STORABLE = tuple(dtype for dtype in ALL if is_storable(dtype))


def test_all_but_the_five_quantized_dtypes_are_storable() -> None:
    assert {dtype_name(dtype) for dtype in ALL if not is_storable(dtype)} == {
        *("qint8", "quint8", "qint32", "quint4x2", "quint2x4")
    }
    assert len(STORABLE) > 30


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_a_dtype_is_found_by_its_name(dtype: torch.dtype) -> None:
    assert dtype_from_name(dtype_name(dtype)) is dtype


def test_an_unknown_name_is_refused() -> None:
    for name in ("", "Tensor", "float33", "__name__", "float"):  # the last is an alias of float32
        with pytest.raises(ValueError, match="no dtype"):
            dtype_from_name(name)


@pytest.mark.parametrize("dtype", STORABLE, ids=str)
def test_the_stored_form_has_the_same_bytes(dtype: torch.dtype) -> None:
    name, shape = stored_form(dtype, (2, 3))
    assert shape[:2] == (2, 3)
    assert len(shape) == (2 if dtype in SAFETENSORS_NAMES else 3)
    bits = 4 if name == "F4" else 8 if name in ("BOOL",) else int(re.findall(r"\d+", name)[0])
    assert torch.Size(shape).numel() * bits == 6 * dtype.itemsize * 8


@pytest.mark.parametrize("dtype", STORABLE, ids=str)
def test_copies_have_the_same_bits(dtype: torch.dtype) -> None:
    content = torch.arange(6 * dtype.itemsize, dtype=torch.uint8) % (2 if dtype == torch.bool else 251)
    tensor = content.view(dtype).view(2, 3)
    assert copyable(tensor).data_ptr() == tensor.data_ptr()
    assert as_bytes(contiguous_copy(tensor).view(-1).view(torch.uint8)) == as_bytes(content)
    turned = contiguous_copy(tensor.T)
    assert turned.is_contiguous()
    assert as_bytes(contiguous_copy(turned.T).view(-1).view(torch.uint8)) == as_bytes(content)
