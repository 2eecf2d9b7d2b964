"""Packed tensors are unpacked unchanged."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn.bigmodel.transfer import is_dense, is_packed, pack, plan_packing, unpack

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any dtype and shape, with its dimensions in any order, or a part of a larger one."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    order = draw(st.permutations(range(len(shape))))
    values = torch.randint(0, 100, [shape[place] for place in order]).to(draw(st.sampled_from(DTYPES)))
    turned = values.permute([order.index(place) for place in range(len(order))])
    kind = draw(st.sampled_from(["as is", "part", "wide"]))
    if kind == "part" and turned.dim():
        return turned[..., ::2]
    return turned.expand(3, *turned.shape) if kind == "wide" else turned


@given(st.lists(tensors(), max_size=5))
def test_packed_tensors_are_unpacked_unchanged(some: list[torch.Tensor]) -> None:
    packing = plan_packing(some)
    memory = torch.full((packing.num_bytes,), 0xAA, dtype=torch.uint8)
    pack(some, packing, memory)
    found = unpack(memory, packing)
    for tensor, copy in zip(some, found, strict=True):
        assert torch.equal(tensor, copy)
        assert tensor.dtype == copy.dtype
        if is_dense(tensor):
            assert tensor.stride() == copy.stride()
        else:
            assert copy.is_contiguous()
    starts = [piece.start for piece in packing.pieces]
    assert all(start % 256 == 0 for start in starts)
    ends = [start + copy.nbytes for start, copy in zip(starts, found, strict=True)]
    assert all(end <= start for end, start in zip(ends, [*starts, packing.num_bytes][1:], strict=True))
    if any(copy.nbytes for copy in found):
        assert is_packed(found, packing)


def test_each_counts_its_own_changes() -> None:
    packing = plan_packing([torch.zeros(3), torch.zeros(2)])
    with torch.inference_mode():
        first, second = unpack(torch.zeros(packing.num_bytes, dtype=torch.uint8), packing)
    assert not first.is_inference()
    before = (first._version, second._version)
    first.add_(1)
    assert (first._version, second._version) == (before[0] + 1, before[1])


def test_other_layouts_are_not_packed() -> None:
    tensor = torch.zeros(4, 4)
    packing = plan_packing([tensor, torch.zeros(64)])
    memory = torch.zeros(packing.num_bytes, dtype=torch.uint8)
    first, second = unpack(memory, packing)
    assert is_packed((first, second), packing)
    assert not is_packed((first.T, second), packing)
    assert not is_packed((first, torch.zeros(64)), packing)
    assert not is_packed((), plan_packing(()))
    assert not is_packed((tensor,), plan_packing([torch.zeros(100)]))
