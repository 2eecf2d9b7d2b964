from __future__ import annotations

import importlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelfn.bigmodel import clean_device_map

PEER: Any = importlib.import_module("accelerate.utils.modeling")


@st.composite
def maps(draw: st.DrawFn) -> dict[str, int]:
    """Draw a map of whose names none is a part of another."""
    names = draw(
        st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=4).map(".".join), unique=True)
    )
    apart = [name for name in names if not any(other.startswith(f"{name}.") for other in names)]
    return {name: draw(st.integers(0, 1)) for name in apart}


@given(maps(), st.sampled_from(["", "a", "a.b"]))
def test_cleaned_maps_are_those_of_accelerate(value: dict[str, int], name: str) -> None:
    before = dict(value)
    assert clean_device_map(value, name) == PEER.clean_device_map(dict(value), name)
    assert value == before


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({}, {}),
        ({"a": 0}, {"a": 0}),
        ({"a.b.c": 0}, {"a.b.c": 0}),
        ({"a.b.c": 0, "a.b.d": 0}, {"": 0}),
        ({"b.c": 1, "b.d": 1}, {"": 1}),  # whatever else there is
        ({"": 5}, {"": 5}),
        ({"a.x": "cpu", "a.y": "cpu", "b": 0}, {"a": "cpu", "b": 0}),
        ({"a": 0, "a.x": 1}, {"a": 0, "a.x": 1}),
    ],
)
def test_examples(value: dict[str, Any], expected: dict[str, Any]) -> None:
    assert clean_device_map(value) == expected
