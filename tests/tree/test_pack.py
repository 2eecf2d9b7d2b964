from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn.testing.strategies import dtypes, tensors, trees
from accelfn.tree import Packed, flatten, listify, pack, plan_layout, unpack
from tests.trees import values


def any_tree() -> st.SearchStrategy[Any]:
    return trees(tensors(dtypes(float8=True)))


@given(any_tree(), st.none() | st.integers(0, 32))
def test_pack_then_unpack_gives_the_tree_back(tree: Any, alone_bytes: int | None) -> None:
    before = values(tree)
    again = unpack(pack(tree, alone_bytes))
    assert flatten(again)[1] == flatten(tree)[1]
    assert values(again) == values(tree) == before


@given(any_tree())
def test_there_is_one_flat_buffer_per_dtype(tree: Any) -> None:
    packed = pack(tree)
    kinds = dict.fromkeys(leaf.dtype for leaf in flatten(tree)[0])
    assert [buffer.dtype for buffer in packed.buffers] == list(kinds)
    assert all(buffer.dim() == 1 and buffer.is_contiguous() for buffer in packed.buffers)


@given(any_tree(), st.integers(0, 32))
def test_a_large_leaf_travels_alone(tree: Any, alone_bytes: int) -> None:
    leaves, structure = flatten(tree)
    layout = plan_layout(leaves, structure, alone_bytes)
    large = {index for index, leaf in enumerate(leaves) if leaf.numel() * leaf.dtype.itemsize >= alone_bytes}
    assert sorted(index for group in layout.groups for index in group.leaves) == list(range(len(leaves)))
    for group in layout.groups:
        assert len(group.leaves) == 1 or not large.intersection(group.leaves)
        assert group.num_bytes == sum(leaves[index].numel() for index in group.leaves) * group.dtype.itemsize


@given(any_tree())
def test_the_layout_depends_on_form_alone(tree: Any) -> None:
    leaves, structure = flatten(tree)
    zeros = [torch.zeros_like(leaf) for leaf in leaves]
    layout, other = plan_layout(leaves, structure), plan_layout(zeros, structure)
    assert layout == other
    assert layout.fingerprint() == other.fingerprint()
    wrapped = pack([tree]).layout
    assert wrapped.fingerprint() != layout.fingerprint()


@pytest.mark.parametrize(
    ("tree", "other"),
    [
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        ({"a": torch.zeros(2)}, {"b": torch.zeros(2)}),
    ],
)
def test_a_fingerprint_tells_forms_apart(tree: Any, other: Any) -> None:
    assert pack(tree).layout.fingerprint() != pack(other).layout.fingerprint()


def test_a_single_contiguous_leaf_is_not_copied_and_others_are() -> None:
    single, first, second = torch.ones(3, dtype=torch.int32), torch.ones(2), torch.ones(2)
    ints, floats = pack([single, first, second]).buffers
    assert ints.data_ptr() == single.data_ptr()
    floats.zero_()
    assert listify([first, second]) == [[1, 1], [1, 1]]


def test_packed_tensors_are_detached() -> None:
    weight = torch.ones(2, requires_grad=True)
    assert not pack([weight]).buffers[0].requires_grad
    assert not pack([weight, weight * 2]).buffers[0].requires_grad


def test_lazy_conjugates_and_negatives_are_resolved() -> None:
    values = torch.tensor([1 + 2j, 3 - 4j])
    assert pack(values.conj()).buffers[0].view(torch.uint8).numel() == 16
    assert unpack(pack(values.conj())).tolist() == [1 - 2j, 3 + 4j]
    assert unpack(pack([values.conj().imag, values.real]))[0].tolist() == [-2, 4]


@pytest.mark.parametrize(
    ("leaf", "said"),
    [
        (3.0, "a tensor, got float"),
        ({1}, "a tensor, got set"),
        (torch.zeros(2, device="meta"), "a dense tensor with data, got one on the meta device"),
        (torch.eye(2).to_sparse(), "a dense tensor with data, got one of layout torch.sparse_coo"),
    ],
    ids=("float", "set", "meta", "sparse"),
)
def test_what_can_not_be_packed_is_named(leaf: Any, said: str) -> None:
    with pytest.raises(TypeError) as caught:
        pack({"x": [leaf], "y": torch.zeros(1)})
    assert str(caught.value).startswith(f"pack: tree['x'][0] must be {said}")


def test_foreign_buffers_are_refused() -> None:
    layout = pack(torch.zeros(2)).layout
    with pytest.raises(ValueError, match=r"got 3 elements of torch.float32, expected 2 of torch.float32"):
        unpack(Packed((torch.zeros(3),), layout))
    with pytest.raises(ValueError, match=r"expected 2 of torch.float32"):
        unpack(Packed((torch.zeros(2, dtype=torch.int32),), layout))
