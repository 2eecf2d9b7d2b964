from typing import Any

import torch
from hypothesis import given

from accelfn.testing.strategies import trees
from accelfn.tree import TensorInformation, flatten, initialize_tensors, tree_structure


@given(trees())
def test_structure_then_initialize_keeps_shapes_and_dtypes(tree: Any) -> None:
    again = initialize_tensors(tree_structure(tree))
    leaves, structure = flatten(tree)
    others, other_structure = flatten(again)
    assert other_structure == structure
    assert [(leaf.shape, leaf.dtype) for leaf in others] == [(leaf.shape, leaf.dtype) for leaf in leaves]


def test_other_leaves_stay() -> None:
    tree = {"x": torch.zeros(2, dtype=torch.int8), "name": "a", "none": None}
    assert tree_structure(tree) == {"x": TensorInformation((2,), torch.int8), "name": "a", "none": None}
    assert initialize_tensors({"name": "a", "n": 1}) == {"name": "a", "n": 1}


def test_the_device_can_be_chosen() -> None:
    info = [TensorInformation((), torch.float32), TensorInformation((0, 2), torch.bool)]
    assert [leaf.is_meta for leaf in initialize_tensors(info, "meta")] == [True, True]
