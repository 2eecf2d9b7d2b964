"""Flat parts of tensors reach the rows of their ranks, and come back, whatever the partition."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn.parallel.engines.exchange import Range, plan_copies, rows_of

_SHAPES = st.lists(st.integers(1, 5), max_size=3).map(tuple)


class Layout(NamedTuple):
    """Tensors, and the part of each that each rank has."""

    shapes: dict[str, tuple[int, ...]]
    parts: list[dict[str, Range]]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    size = draw(st.integers(1, 4))
    shapes = draw(
        st.dictionaries(
            st.sampled_from("abcd"), st.lists(st.integers(1, 5), max_size=3).map(tuple), min_size=1
        )
    )
    parts: list[dict[str, Range]] = [{} for _ in range(size)]
    for name, shape in shapes.items():
        numel = math.prod(shape)
        cuts = sorted(draw(st.lists(st.integers(0, numel), min_size=size - 1, max_size=size - 1)))
        for rank, (start, stop) in enumerate(zip([0, *cuts], [*cuts, numel], strict=True)):
            if stop > start:
                parts[rank][name] = Range(start, stop - start)
    return Layout(shapes, parts)


def moved(
    values: list[dict[str, torch.Tensor]], before: list[dict[str, Range]], after: list[dict[str, Range]]
) -> list[dict[str, torch.Tensor]]:
    """Carry out the copies between all ranks in this process."""
    found = [{name: torch.full((one.numel,), -1.0) for name, one in parts.items()} for parts in after]
    for sender, sources in enumerate(before):
        for receiver, targets in enumerate(after):
            for copy in plan_copies(sources, targets):
                part = values[sender][copy.name].narrow(0, copy.source, copy.numel)
                found[receiver][copy.name].narrow(0, copy.target, copy.numel).copy_(part)
    return found


@given(layouts())
def test_parts_become_rows_and_come_back(layout: Layout) -> None:
    size = len(layout.parts)
    whole = {name: torch.arange(float(math.prod(shape))) for name, shape in layout.shapes.items()}
    rows = [
        {name: rows_of(shape, rank, size) for name, shape in layout.shapes.items()} for rank in range(size)
    ]
    parts = [{name: whole[name].narrow(0, *one) for name, one in own.items()} for own in layout.parts]
    by_row = moved(parts, layout.parts, rows)
    for rank, own in enumerate(by_row):
        for name, value in own.items():
            assert torch.equal(value, whole[name].narrow(0, *rows[rank][name]))
    back = moved(by_row, rows, layout.parts)
    for own, expected in zip(back, parts, strict=True):
        assert own.keys() == expected.keys()
        assert all(torch.equal(own[name], one) for name, one in expected.items())


@given(st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple), st.integers(1, 5))
def test_rows_are_those_of_torchs_shards(shape: tuple[int, ...], size: int) -> None:
    chunks = list(torch.arange(math.prod(shape)).view(shape).chunk(size)) if math.prod(shape) else []
    for rank in range(size):
        own = rows_of(shape, rank, size)
        expected = list(map(int, chunks[rank].reshape(-1))) if rank < len(chunks) else []
        assert list(range(own.start, own.start + own.numel)) == expected
