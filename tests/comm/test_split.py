from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn.comm import split_between_processes, split_sizes
from accelfn.context import Context
from accelfn.testing import run_ranks
from accelfn.testing.strategies import worlds
from accelfn.tree import listify


@given(st.integers(0, 40), st.integers(1, 12))
def test_sizes_are_as_equal_as_can_be(length: int, parts: int) -> None:
    sizes = split_sizes(length, parts)
    assert (len(sizes), sum(sizes)) == (parts, length)
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1


@given(st.lists(st.integers(), max_size=12), worlds())
def test_the_parts_join_to_the_whole(items: list[int], size: int) -> None:
    inputs: Any = {"list": items, "inner": {"tuple": tuple(items)}, "tensor": torch.arange(len(items))}
    before = repr(inputs)
    parts = run_ranks(lambda ctx: split_between_processes(ctx, inputs), size)
    assert repr(inputs) == before
    assert [item for part in parts for item in part["list"]] == items
    assert tuple(item for part in parts for item in part["inner"]["tuple"]) == tuple(items)
    assert listify(torch.cat([part["tensor"] for part in parts])) == list(range(len(items)))
    assert [len(part["list"]) for part in parts] == split_sizes(len(items), size)
    assert size > 1 or parts[0] is inputs


@given(st.lists(st.integers(-99, 99), max_size=12), worlds())
def test_padding_repeats_the_last_item(items: list[int], size: int) -> None:
    plain = run_ranks(lambda ctx: split_between_processes(ctx, items), size)
    rows = torch.tensor(items, dtype=torch.int64)
    padded = run_ranks(lambda ctx: split_between_processes(ctx, {"l": items, "t": rows}, True), size)
    longest = max(len(part) for part in plain)
    for part, short in zip(padded, plain, strict=True):
        expected = short if size == 1 else short + items[-1:] * (longest - len(short))
        assert part["l"] == expected
        assert listify(part["t"]) == expected


class Named(NamedTuple):
    a: int
    b: int


class Dataset:
    """Has what datasets.Dataset has of this."""

    def __init__(self, items: list[int]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def select(self, indices: list[int]) -> "Dataset":
        return Dataset([self.items[index] for index in indices])


def test_types_are_kept() -> None:
    def parts(inputs: Any, pad: bool = False) -> list[Any]:
        return run_ranks(lambda ctx: split_between_processes(ctx, inputs, pad), 2)

    assert parts((1, 2, 3)) == [(1, 2), (3,)]
    assert parts((1, 2, 3), True) == [(1, 2), (3, 3)]
    assert parts([1], True) == [[1], [1]]
    assert parts([], True) == [[], []]
    assert [type(part) for part in parts(OrderedDict(a=[1, 2]))] == [OrderedDict] * 2
    assert [part.items for part in parts(Dataset([1, 2, 3]), True)] == [[1, 2], [3, 3]]
    assert [type(part) for part in parts(Named(1, 2))] == [tuple, tuple]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("inputs", "kind", "said"),
    [
        ("text", TypeError, "inputs is a str, which can't be split"),
        ({1, 2}, TypeError, "inputs is a set"),
        ({"a": "text"}, TypeError, r"inputs\['a'\] is a str"),
        (torch.tensor(1), TypeError, "inputs is 0-dimensional"),
        ({"a": [1], "b": [1, 2]}, ValueError, "must have the same length, got {'a': 1, 'b': 2}"),
        ({"a": {}}, ValueError, r"inputs\['a'\] is an empty mapping"),
    ],
    ids=str,
)
def test_what_can_not_be_split_is_refused(inputs: Any, kind: type[Exception], said: str, size: int) -> None:
    with pytest.raises(kind, match=said):
        run_ranks(lambda ctx: split_between_processes(ctx, inputs), size)


def test_tensor_parts_are_views() -> None:
    rows = torch.arange(4)
    parts = run_ranks(lambda ctx: split_between_processes(ctx, rows), 2)
    assert [part.untyped_storage().data_ptr() for part in parts] == [rows.untyped_storage().data_ptr()] * 2
    assert split_between_processes(Context(), rows) is rows
