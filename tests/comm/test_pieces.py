"""Pieces that know their place, from pieces that don't; cut from the whole, and joined to it."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from typing import Any, cast

import pytest
import torch
from hypothesis import given

import accelfn as af
from accelfn import Context
from accelfn.comm.pieces import cut, join
from accelfn.errors import MismatchError, RemoteRankError
from accelfn.testing import run_ranks
from accelfn.testing.strategies import parameters, worlds
from accelfn.tree import Sharded


@given(parameters(), worlds())
def test_pieces_cover_the_whole_each_element_once(tree: Any, size: int) -> None:
    def run(ctx: Context) -> Any:
        pieces = cut(ctx, tree)
        again = af.sharded(ctx, af.pieces(pieces))  # the same places, from lengths alone
        leaves, structure = af.tree.flatten(join(ctx, "test", pieces))
        assert structure == af.tree.flatten(tree)[1]
        for one, other, whole, found in zip(
            *(af.tree.flatten(each)[0] for each in (pieces, again, tree)), leaves, strict=True
        ):
            assert torch.equal(found, whole)
            assert isinstance(one, Sharded) == isinstance(other, Sharded) == (whole.dim() > 0)
            if isinstance(one, Sharded):
                assert one.place == other.place
                assert one.shape == whole.shape
        return [leaf.local.shape[0] for leaf in af.tree.flatten(pieces)[0] if isinstance(leaf, Sharded)]

    rows = [sum(each) for each in zip(*run_ranks(run, size), strict=True)]
    assert rows == [leaf.shape[0] for leaf in af.tree.flatten(tree)[0] if leaf.dim()]


def test_lengths_may_differ_and_what_has_no_such_dimension_stays() -> None:
    def run(ctx: Context) -> Any:
        kept = Sharded(torch.ones(1), 0, 0, 9)
        rows = torch.ones(2, 3 * ctx.rank)
        found: dict[str, Any] = af.sharded(
            ctx, {"w": rows, "count": torch.tensor(1), "row": torch.ones(4), "k": kept}, dim=1
        )
        assert found["k"] is kept
        assert found["w"].local.data_ptr() == rows.data_ptr() or not rows.numel()
        assert not isinstance(found["count"], Sharded)
        assert not isinstance(found["row"], Sharded)
        last = cast("Any", af.sharded(ctx, torch.ones(2, ctx.rank + 1), dim=-1))
        assert (last.split_dim, last.start, last.shape) == (1, [0, 1, 3][ctx.rank], (2, 6))
        return found["w"].start, found["w"].shape

    assert run_ranks(run, 3) == [(0, (2, 9)), (0, (2, 9)), (3, (2, 9))]


def test_pieces_along_an_axis() -> None:
    mesh = af.ParallelismConfig(dp_shard_size=2, tp_size=2)

    def run(ctx: Context) -> Any:
        piece: Any = af.sharded(ctx, af.shard(ctx, torch.arange(5), "tp"), "tp")
        return piece.start, piece.local.tolist(), piece.shape[0]

    expected = [(0, [0, 1, 2], 5), (3, [3, 4], 5)]
    assert run_ranks(run, 4, parallelism_config=mesh) == expected * 2


def test_what_differs_between_ranks_is_refused_on_all() -> None:
    def run(ctx: Context) -> None:
        odd = ctx.rank == 1
        with pytest.raises(MismatchError):
            af.sharded(ctx, torch.ones(2, 3 + odd))
        with pytest.raises(MismatchError):
            af.sharded(ctx, torch.ones(2, 3), dim=int(odd))
        with pytest.raises(TypeError if odd else RemoteRankError, match="must be a dense tensor"):
            af.sharded(ctx, torch.ones(2).to_sparse() if odd else torch.ones(2))

    run_ranks(run, 2)
