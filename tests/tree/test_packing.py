from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn.testing.strategies import dtypes, tensors, trees
from accelfn.tree import Packed, flatten, listify, pack, unpack
from tests.trees import values


def any_tree() -> st.SearchStrategy[Any]:
    return trees(tensors(dtypes(float8=True)))


@given(any_tree(), st.none() | st.integers(0, 32))
def test_pack_then_unpack_gives_the_tree_back(tree: Any, alone_bytes: int | None) -> None:
    before = values(tree)
    again = unpack(pack(tree, alone_bytes))
    assert flatten(again)[1] == flatten(tree)[1]
    assert values(again) == values(tree) == before


def test_a_single_contiguous_leaf_is_not_copied_and_others_are() -> None:
    single, first, second = torch.ones(3, dtype=torch.int32), torch.ones(2), torch.ones(2)
    ints, floats = pack([single, first, second]).buffers
    assert ints.data_ptr() == single.data_ptr()
    floats.zero_()
    assert listify([first, second]) == [[1, 1], [1, 1]]


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
