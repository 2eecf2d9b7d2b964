"""Comparison of a stored tree with the tree to load into."""

import json
from collections import OrderedDict
from typing import Any, cast

import numpy
import pytest
import torch

from accelfn.checkpoint.document.compare import choose_part, match
from accelfn.checkpoint.document.encode import encode
from accelfn.errors import DamagedCheckpointError, Misfit
from tests.checkpoint.document.test_document import Stateful
from tests.checkpoint.trees import NAMESPACE, Pair, Point

np = cast("Any", numpy)


def misfits(stored: Any, like: Any) -> list[Misfit]:
    document, tensors = encode(stored, namespace=NAMESPACE)
    return match(json.loads(json.dumps(document)), tensors, like, namespace=NAMESPACE).rows


def test_tensors_match_by_shape_and_dtype() -> None:
    stored = {"w": torch.nn.Parameter(torch.zeros(2, 3)), "n": np.zeros(2), "tied": [torch.zeros(1)] * 2}
    like = {"w": torch.ones(3, 2, device="meta").t(), "n": np.ones(2), "tied": [torch.ones(1), torch.ones(1)]}
    assert misfits(stored, like) == []


def test_plain_subtrees_may_differ() -> None:
    stored = {"w": torch.zeros(1), "log": {"a": [1, 2], "b": "x"}, "step": 3}
    assert misfits(stored, {"w": torch.zeros(1), "log": (), "step": None}) == []


def test_all_misfits_are_listed_by_path() -> None:
    stored = {
        "same": torch.zeros(1),
        "shape": torch.zeros(2),
        "dtype": torch.zeros(3),
        "extra": [torch.zeros(4)],
        "none": None,
        "kind": [torch.zeros(5)],
        "short": (torch.zeros(1),),
        "a/b": np.zeros(1),
        "step": 1,
        "random": torch.Generator(),
    }
    like = {
        "same": torch.zeros(1),
        "shape": torch.zeros(2, 2),
        "dtype": torch.zeros(3).int(),
        "none": torch.zeros(1),
        "kind": (torch.zeros(5),),
        "short": (torch.zeros(1), {"x": torch.zeros(2), "y": 1}),
        "a/b": torch.zeros(1),
        "missing": Stateful(1),
        "random": 3,
    }
    assert misfits(stored, like) == [
        Misfit("shape", "float32 [2]", "float32 [2, 2]"),
        Misfit("dtype", "float32 [3]", "int32 [3]"),
        Misfit("extra/0", "float32 [4]", "nothing"),
        Misfit("none", "None", "float32 [1]"),
        Misfit("kind", "a list of 1", "a tuple"),
        Misfit("short/1/x", "nothing", "float32 [2]"),
        Misfit("short/1/y", "nothing", "int"),
        Misfit("a~1b", "array float64 [1]", "float32 [1]"),
        Misfit("step", "int", "nothing"),
        Misfit("random", "a generator", "int"),
        Misfit("missing", "nothing", "an object Stateful"),
    ]
    assert misfits(torch.zeros(1), torch.zeros(2)) == [Misfit("tree", "float32 [1]", "float32 [2]")]


def test_containers_must_have_the_same_class() -> None:
    leaf = torch.zeros(1)
    pairs: list[tuple[Any, Any]] = [
        ({"a": leaf}, OrderedDict(a=leaf)),
        ((leaf, 0), Point(leaf)),
        ([leaf], leaf),
        (Pair(leaf, 1), (leaf, 1)),
        ({"a": leaf}, Stateful({"a": leaf})),
    ]
    for stored, like in pairs:
        assert [row.path for row in misfits(stored, like)] == ["tree"]
        assert [row.path for row in misfits([stored], [like])] == ["0"]


def test_objects_match_by_path_and_a_state_matches_a_tree_of_its_form() -> None:
    stored, like = {"o": Stateful(torch.zeros(1))}, {"o": Stateful(None)}
    document, tensors = encode(stored)
    (stored_object,) = match(document, tensors, like).objects
    assert (stored_object.path, stored_object.thing, stored_object.kind) == ("o", like["o"], "Stateful")
    assert stored_object.node == {"value": {"$": "tensor", "name": "o/value"}}
    assert misfits({"o": 1}, like) == [Misfit("o", "int", "an object Stateful")]
    assert misfits(stored, {"o": 1}) == [Misfit("o", "an object Stateful", "int")]
    assert misfits(stored, {"o": {"value": torch.zeros(1)}}) == []
    assert [row.path for row in misfits(stored, {"o": {"value": torch.zeros(2)}})] == ["o/value"]


def test_leaves_are_listed_by_the_name_of_the_stored_tensor() -> None:
    base, generator = torch.zeros(4), torch.Generator()
    document, tensors = encode({"a": base, "b": [base], "g": generator, "n": np.zeros(2)})
    like = {"a": torch.ones(4), "b": [torch.ones(4)], "g": generator, "n": np.ones(2)}
    assert match(document, tensors, like).leaves == {name: like[name] for name in "agn"}


def test_optional_entries_that_are_not_wanted_are_removed() -> None:
    document: Any = {"model": {"w": 1, "b": 2}, "ema": {"$": "tuple", "items": []}, "step": 3}
    assert choose_part(document, {"model": {"w": 0}}, lambda path: path != "step") == {
        "model": {"w": 1},
        "step": 3,
    }
    assert choose_part(document, [1], lambda path: True) == document


def test_malformed_documents_are_damaged() -> None:
    documents: list[Any] = [[{"$": "tensor"}], [{"$": "what"}], {"$": "dict", "keys": 3, "items": []}]
    for document in documents:
        with pytest.raises(DamagedCheckpointError):
            match(document, {}, [torch.zeros(1)])
