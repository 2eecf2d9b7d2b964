from __future__ import annotations

import importlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accelfn.bigmodel import (
    compute_module_sizes,
    fallback_allocate,
    find_tied_parameters,
    get_module_size_with_ties,
    read_shape,
)
from tests.bigmodel.plan.trees import Tree, build, trees

PEER: Any = importlib.import_module("accelerate.utils.modeling")


@given(trees(), st.data(), st.sampled_from([[], ["A"], ["B"]]))
def test_the_first_that_fits_is_that_of_accelerate(
    tree: Tree, data: st.DataObject, classes: list[str]
) -> None:
    model = build(tree)
    sizes = compute_module_sizes(model)
    parts = list(model.named_children())
    before = list(parts)
    limit = data.draw(st.integers(0, 5 + read_shape(model).num_bytes))
    ties = find_tied_parameters(model)
    try:
        theirs = PEER.fallback_allocate(list(parts), sizes, limit, classes, ties)
    except IndexError:
        theirs = None  # something is tied to what is no module
    ours = fallback_allocate(parts, sizes, limit, classes, ties)
    assert parts == before
    if theirs is not None and not ties:
        assert ours == theirs
    name, module, rest = ours
    if name is None:
        assert module is None
        assert rest == parts
    else:
        path, _, last = name.rpartition(".")
        assert module is getattr(model.get_submodule(path), last)
        assert name not in [other for other, _ in rest]


def test_a_limit_may_be_a_text() -> None:
    model = nn.Sequential(nn.Linear(10, 4), nn.Linear(4, 4))
    sizes = compute_module_sizes(model)
    parts = list(model.named_children())
    assert fallback_allocate(parts, sizes, "0.1KB") == ("1", model[1], [("0", model[0])])
    assert fallback_allocate(parts, sizes, "1B") == (None, None, parts)
    with pytest.raises(ValueError, match="a size is a number of bytes"):
        fallback_allocate(parts, sizes, "1")


def test_modules_with_what_they_are_tied_to() -> None:
    sizes = {"a.b": 7, "a.b.w": 2, "a": 20, "c": 5, "c.w": 0, "c.v": 1}
    parts = [("a.b", 1), ("a", 2), ("c", 3)]
    assert get_module_size_with_ties(["a.b.w", "c.w"], 10, sizes, parts) == (20, ["a.b", "c"], [1, 3])
    assert PEER.get_module_size_with_ties(["a.b.w", "c.w"], 10, sizes, parts) == (20, ["a.b", "c"], [1, 3])
    # One that shares two tensors counts once; what has a place already adds nothing.
    assert get_module_size_with_ties(["c.w", "c.v", "z.w"], 10, sizes, parts) == (14, ["c"], [3])
    assert get_module_size_with_ties([], 10, {}, []) == (10, [], [])
