"""The digest against its definition in plain Python, and that no change escapes it."""

import functools
import math
import struct
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from accelfn.testing.strategies import dtypes, shapes, tensors
from accelfn.tree import digest_tensors, flatten, listify, split_flat

MASK = (1 << 64) - 1
MEBI = 1 << 20
GOLDEN = 0x9E3779B97F4A7C15


def raw(tensor: torch.Tensor) -> bytes:
    """Give the bytes of a tensor in logical order, without what is tested."""
    flat = (
        tensor.detach()
        .resolve_conj()
        .resolve_neg()
        .contiguous()
        .reshape(-1)
        .clone(memory_format=torch.contiguous_format)
    )
    return bytes(listify(flat.view(torch.uint8))) if flat.numel() else b""


def mix(word: int) -> int:
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & MASK
    return word ^ (word >> 31)


@functools.cache
def odd(place: int) -> int:
    return mix(((place + 1) * GOLDEN) & MASK) | 1


def signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def defined(data: bytes) -> list[int]:
    """Work the digest out word by word, as the module says it is."""
    padded = data + bytes(-len(data) % 1024)
    first = second = mix(len(data) * GOLDEN & MASK)
    for row, words in enumerate(struct.iter_unpack("<128Q", padded)):
        products = [word * odd(place) & MASK for place, word in enumerate(words)]
        upper = sum((signed(product) >> 48) * odd(128 + place) for place, product in enumerate(products))
        first += mix(sum(products) & MASK) * odd(row)
        second += mix(upper & MASK) * odd(row)
    return [signed(first & MASK), signed(second & MASK)]


def digest(tensor: torch.Tensor) -> list[int]:
    return cast("list[int]", listify(digest_tensors([tensor])[0]))


def flipped(tensor: torch.Tensor, byte: int, bit: int) -> torch.Tensor:
    """Give a copy of a tensor with one other bit."""
    flat = tensor.contiguous().reshape(-1).clone(memory_format=torch.contiguous_format)
    flat.view(torch.uint8)[byte] ^= 1 << bit
    return flat.view(tensor.shape)


def any_tensor() -> st.SearchStrategy[torch.Tensor]:
    return tensors(dtypes(float8=True), shapes(max_side=9))


# --- what it is ----------------------------------------------------------------------------------


def random_bytes(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


# Around a word, a row, a power of two of rows, and the piece that a large tensor is taken in.
@pytest.mark.parametrize(
    "size", [1, 7, 8, 9, 1023, 1024, 1025, 2049, pytest.param(4 * MEBI + 3, marks=pytest.mark.slow)]
)
def test_every_length_is_read_to_its_end(size: int) -> None:
    data = random_bytes(size)
    assert digest(data) == defined(bytes(cast("list[int]", listify(data))))


@given(st.lists(any_tensor(), max_size=9))
def test_only_bytes_count_not_shape_nor_dtype_nor_company(some: list[torch.Tensor]) -> None:
    digests = [defined(raw(tensor)) for tensor in some]
    found = digest_tensors(some)
    assert (found.shape, listify(found)) == ((len(some), 2), digests)
    flat = [tensor.contiguous().reshape(-1).clone(memory_format=torch.contiguous_format) for tensor in some]
    assert listify(digest_tensors([tensor.view(torch.uint8) for tensor in flat])) == digests
    assert listify(digest_tensors(some)) == digests  # and they were left as they are


LARGE = (5, 499, 451)


def laid_out(form: str, dtype: torch.dtype) -> torch.Tensor:
    """Give a tensor of LARGE elements that lies in memory as ``form`` says."""
    data = random_bytes((math.prod(LARGE) + 1) * dtype.itemsize)
    flat = (data & 1 if dtype == torch.bool else data).view(dtype)
    match form:
        case "offset":
            return flat[1:].view(LARGE)
        case "transposed":
            return flat[:-1].view(LARGE[::-1]).permute(2, 1, 0)
        case "strided":
            return torch.stack([flat[1:], flat[:-1]], -1)[:, 0].view(LARGE)
        case _:
            return flat[: LARGE[2]].expand(LARGE)


# Pieces are of four mebibytes.
@pytest.mark.parametrize(
    ("form", "dtype"),
    [
        *((form, torch.bool) for form in ("offset", "transposed", "strided", "expanded")),
        *((form, torch.complex128) for form in ("offset", "transposed")),
    ],
)
def test_large_tensors_may_lie_in_any_way(dtype: torch.dtype, form: str) -> None:
    tensor = laid_out(form, dtype)
    before = tensor.clone()
    straight = tensor.contiguous().view(-1).clone().view(torch.uint8)
    assert digest(tensor) == digest(straight)
    assert torch.equal(tensor.contiguous().view(torch.uint8), before.contiguous().view(torch.uint8))


@pytest.mark.parametrize("count", [3, 128, MEBI])  # 128 and 256 numbers fill one row or two
@pytest.mark.parametrize("negative", [False, True], ids=("conjugate", "negative"))
def test_lazy_views_count_as_what_they_say(negative: bool, count: int) -> None:
    lazy = torch.complex(torch.arange(float(count)), torch.ones(count)).conj()
    lazy = lazy.imag if negative else lazy
    expected = digest(lazy.resolve_conj().resolve_neg().clone())
    assert digest(lazy) == expected
    if count == MEBI:
        turned = lazy.resolve_conj().resolve_neg().view(1024, 1024).T.contiguous()
        assert digest(lazy.view(1024, 1024).T) == digest(turned)


# --- what it finds -------------------------------------------------------------------------------


@given(any_tensor().filter(lambda tensor: tensor.numel() > 0), st.data())
def test_every_flipped_bit_shows_in_the_first_word(tensor: torch.Tensor, data: st.DataObject) -> None:
    byte = data.draw(st.integers(0, tensor.numel() * tensor.dtype.itemsize - 1))
    other = flipped(tensor, byte, data.draw(st.integers(0, 7)))
    assert digest(tensor)[0] != digest(other)[0]


def test_a_dtype_that_can_only_be_stored_has_a_digest() -> None:
    data = random_bytes(MEBI)
    assert digest(data.view(torch.float4_e2m1fn_x2)) == digest(data)


# --- what it takes -------------------------------------------------------------------------------


class Watch(TorchDispatchMode):
    """Note the largest block of memory that any operation gave."""

    largest: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            leaf.untyped_storage().data_ptr() for leaf in flatten(args)[0] if isinstance(leaf, torch.Tensor)
        }
        result = func(*args, **(kwargs or {}))
        for leaf in flatten(result)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, leaf.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("turned", [False, True])
def test_temporary_memory_is_bounded(turned: bool) -> None:
    large = torch.zeros(1024, 2048, dtype=torch.int64)
    small = torch.ones(1000, 5000).unbind()
    with Watch() as watch:
        digest_tensors([large.T if turned else large, *small])
    assert 0 < watch.largest <= 4 * MEBI


@given(any_tensor(), st.integers(1, 20))
def test_pieces_are_the_tensor_in_logical_order(tensor: torch.Tensor, size: int) -> None:
    pieces = list(split_flat(tensor, size))
    assert all(piece.is_contiguous() and piece.stride() == (1,) for piece in pieces)
    assert all(len(piece) == size for piece in pieces[:-1])
    assert len(pieces[-1]) <= size
    assert b"".join(raw(piece) for piece in pieces) == raw(tensor)
    if tensor.is_contiguous() and tensor.numel() > 1:  # a single element may have any stride
        assert {piece.untyped_storage().data_ptr() for piece in pieces} == {
            tensor.untyped_storage().data_ptr()
        }
