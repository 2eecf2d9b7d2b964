"""Sums over microbatches have the bits of a sum that one rank forms one by one."""

# pyright: reportUnknownMemberType=false

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn import Context
from accelfn.comm import Call
from accelfn.errors import RemoteRankError
from accelfn.parallel.exact import OrderedSum
from accelfn.testing import run_ranks

SHAPES = ((3, 5), (7,), (), (0,), (2, 2))
Row = list[torch.Tensor | None]


def rows_of(used: list[int], seed: int) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float32, torch.float32)
    return [
        [
            torch.randn(shape, generator=generator).to(dtype) if mask >> index & 1 else None
            for index, (shape, dtype) in enumerate(zip(SHAPES, dtypes, strict=True))
        ]
        for mask in used
    ]


def bits(rows: Row) -> list[Any]:
    return [None if one is None else one.reshape(-1).view(torch.uint8).tolist() for one in rows]


@given(
    st.sampled_from([1, 2, 3, 4]),
    st.lists(
        st.one_of(st.just([31] * 12), st.lists(st.integers(0, 31), min_size=12, max_size=12)),
        min_size=1,
        max_size=2,
    ),
    st.integers(0, 2**31),
)
def test_sums_are_those_of_one_rank(world: int, steps: list[list[int]], seed: int) -> None:
    like = [one for one in rows_of([31], 0)[0] if one is not None]
    added = [rows_of(used, seed + number) for number, used in enumerate(steps)]
    expected: Row = [None] * len(like)
    for rows in added:
        for row in rows:
            for index, one in enumerate(row):
                before = expected[index]
                expected[index] = before if one is None else one if before is None else before + one

    def run(ctx: Context) -> list[Any]:
        total = OrderedSum(ctx, like)
        own = slice(ctx.rank * 12 // world, (ctx.rank + 1) * 12 // world)
        for rows in added:
            total.add(Call("add"), rows[own])
        found = bits(total.close())
        assert not total.is_open
        assert bits(total.close()) == [None] * len(like)  # begun anew
        return found

    assert run_ranks(run, world) == [bits(expected)] * world


@pytest.mark.parametrize("world", [1, 2])
def test_what_one_rank_cannot_add_changes_nothing_on_any(world: int) -> None:
    def run(ctx: Context) -> list[Any]:
        total = OrderedSum(ctx, [torch.ones(3)])
        total.add(Call("add"), [[torch.ones(3)]])
        last = ctx.rank == world - 1
        with pytest.raises(ValueError if last else RemoteRankError, match="no more"):
            total.add(Call("add"), [[torch.ones(3)]], error=ValueError("no more") if last else None)
        with pytest.raises(RuntimeError if last else RemoteRankError, match="size"):
            total.add(Call("add"), [[torch.ones(4 if last else 3)]])
        return bits(total.close())

    assert run_ranks(run, world) == [bits([torch.full((3,), float(world))])] * world
