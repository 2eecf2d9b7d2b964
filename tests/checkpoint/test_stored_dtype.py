"""Every dtype goes into a safetensors file and comes back, bit for bit."""

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn.checkpoint.stored_dtype import (
    as_stored,
    contiguous_copy,
    copyable,
    dtype_from_name,
    dtype_name,
    from_stored,
    is_storable,
    stored_name,
    stored_shape,
)
from accelfn.comm.wire import as_bytes

ALL = tuple(dict.fromkeys(value for value in vars(torch).values() if type(value) is torch.dtype))
STORABLE = tuple(dtype for dtype in ALL if is_storable(dtype))


def raw(tensor: torch.Tensor) -> bytes:
    plain = contiguous_copy(tensor).reshape(-1)
    return as_bytes(plain.view(torch.uint8)) if plain.numel() else b""


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
@given(data=st.data())
def test_through_a_file_and_back(dtype: torch.dtype, data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(0, 3), max_size=3)))
    count = torch.Size(shape).numel() * dtype.itemsize
    content = data.draw(st.binary(min_size=count, max_size=count))
    if dtype == torch.bool:
        content = bytes(byte & 1 for byte in content)
    tensor = torch.tensor(list(content), dtype=torch.uint8)
    tensor = tensor.view(dtype).view(shape) if count else tensor.view(dtype).reshape(shape)
    if data.draw(st.booleans()) and tensor.dim() > 1:
        tensor = tensor.transpose(0, 1)

    stored = as_stored(tensor)
    assert tuple(stored.shape) == stored_shape(dtype, tuple(tensor.shape))
    assert stored.is_contiguous()
    file = safetensors.torch.save({"it": stored})
    assert f'"dtype":"{stored_name(dtype)}"'.encode() in file
    back = from_stored(safetensors.torch.load(file)["it"], dtype)
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert raw(back) == raw(tensor)


@pytest.mark.parametrize("dtype", STORABLE, ids=str)
def test_nothing_is_copied_where_memory_is_contiguous(dtype: torch.dtype) -> None:
    tensor = torch.zeros(4 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    stored = as_stored(tensor)
    assert stored.data_ptr() == tensor.data_ptr()
    assert from_stored(stored, dtype).data_ptr() == tensor.data_ptr()
    assert copyable(tensor).data_ptr() == tensor.data_ptr()


def test_a_view_that_starts_between_elements_is_copied() -> None:
    shifted = torch.arange(1, 10, dtype=torch.uint8)[1:].view(2, 4)
    back = from_stored(shifted, torch.complex32)
    assert raw(back) == bytes(range(2, 10))


def test_conjugated_and_negated_marks_are_resolved() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128)
    assert from_stored(as_stored(tensor.conj()), tensor.dtype).equal(tensor.conj().resolve_conj())
    assert as_stored(tensor.conj().imag).equal(torch.tensor([-2.0, 4.0], dtype=torch.float64))


def test_what_is_stored_otherwise_is_refused() -> None:
    with pytest.raises(ValueError, match=r"isn't how torch\.float32 is stored"):
        from_stored(torch.zeros(2, dtype=torch.int32), torch.float32)
    with pytest.raises(ValueError, match="last dimension of 2"):
        from_stored(torch.zeros(3, 3, dtype=torch.float64), torch.complex128)
    with pytest.raises(ValueError, match="last dimension of 1"):
        from_stored(torch.zeros((), dtype=torch.uint8), dtype_from_name("uint4"))
    with pytest.raises(ValueError, match="isn't how"):
        from_stored(torch.zeros(1, dtype=torch.uint8), torch.quint8)


@pytest.mark.filterwarnings("ignore")
def test_quantized_tensors_are_refused() -> None:
    tensor = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(ValueError, match="dequantize"):
        as_stored(tensor)
