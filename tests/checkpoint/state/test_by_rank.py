"""One document for several ranks."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.checkpoint.by_rank import document_of, join_documents, renamed
from accelfn.errors import DamagedCheckpointError

DOCUMENTS = st.recursive(
    st.none() | st.booleans() | st.integers(0, 2) | st.sampled_from([0.0, 1.0, -0.0]) | st.sampled_from("ab"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(DOCUMENTS, min_size=1, max_size=4))
def test_each_rank_gets_its_own_again(documents: list[Any]) -> None:
    joined = join_documents(documents)
    for rank, document in enumerate(documents):
        assert repr(document_of(joined, rank)) == repr(document)  # by repr: 1, 1.0 and True aren't the same


@given(DOCUMENTS, st.integers(1, 4))
def test_what_all_have_alike_is_there_once(document: Any, size: int) -> None:
    assert repr(join_documents([document] * size)) == repr(document)


def test_only_the_part_that_differs_is_kept_by_rank() -> None:
    joined = join_documents([{"a": [1, rank // 2], "b": "same"} for rank in range(4)])
    assert joined == {"a": [1, {"$": "by_rank", "values": [0, 1], "of": [0, 0, 1, 1]}], "b": "same"}
    assert [document_of(joined, rank) for rank in (1, 2, 5)] == [
        {"a": [1, 0], "b": "same"},
        {"a": [1, 1], "b": "same"},
        {"a": [1, 0], "b": "same"},
    ]


@pytest.mark.parametrize(
    "part",
    [
        {"values": [1]},
        {"values": [1], "of": []},
        {"values": [1], "of": [1]},
        {"values": [1], "of": [-1]},
        {"values": [1], "of": ["0"]},
        {"values": 3, "of": [0]},
    ],
)
def test_what_nobody_writes_is_damage(part: dict[str, Any]) -> None:
    with pytest.raises(DamagedCheckpointError, match="by rank"):
        document_of({"a": {"$": "by_rank", **part}}, 0)


def test_tensors_are_called_by_other_names_and_nothing_else_is() -> None:
    document = {"name": "w", "x": [{"$": "tensor", "name": "w"}, {"$": "array", "name": "v"}]}
    assert renamed(document, {"w": "w@1"}) == {
        "name": "w",
        "x": [{"$": "tensor", "name": "w@1"}, {"$": "array", "name": "v"}],
    }
    assert renamed(document, {}) is document
