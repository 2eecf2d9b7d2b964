"""Trees with Sharded leaves: the whole tensors are stored, each element once, and any ranks take them up."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import accelfn as af
from accelfn import Context
from accelfn.checkpoint import convert_checkpoint
from accelfn.checkpoint.manifest import MANIFEST, parse_manifest
from accelfn.comm.pieces import cut
from accelfn.errors import CheckpointMismatchError, ReplicaDriftError
from accelfn.testing import run_ranks
from accelfn.testing.strategies import parameters, worlds
from accelfn.tree import Sharded

WHOLE = {
    "w": torch.arange(21.0).view(7, 3),
    "half": torch.arange(5, dtype=torch.bfloat16),
    "one": torch.ones(1, 2),
    "empty": torch.zeros(0, 2),
    "count": torch.tensor(2),
}


def same(found: Any, expected: Any) -> bool:
    pairs = zip(af.tree.flatten(found)[0], af.tree.flatten(expected)[0], strict=True)
    return all(one.dtype == other.dtype and torch.equal(one, other) for one, other in pairs)


def save(path: Path, size: int, tree: Any, **options: Any) -> None:
    run_ranks(lambda ctx: af.save_state(ctx, path, {"params": cut(ctx, tree), "n": 3}, **options), size)


@pytest.mark.parametrize("on", ["memory", "processes"])
def test_pieces_of_four_ranks_load_on_others_and_as_the_whole(tmp_path: Path, on: Any) -> None:
    save(tmp_path / "at", 4, WHOLE)
    stored = parse_manifest((tmp_path / "at" / MANIFEST).read_bytes()).tensors
    assert [part.rank for part in stored["params/w"].parts] == [0, 1, 2, 3]
    for name, one in WHOLE.items():
        assert stored[f"params/{name}"].shape == tuple(one.shape)
        assert sum(math.prod(part.shape) for part in stored[f"params/{name}"].parts) == one.numel()
    af.verify_checkpoint(tmp_path / "at")
    assert same(af.load_tree(tmp_path / "at")["params"], WHOLE)

    def load(ctx: Context) -> None:
        empty = af.tree.map(torch.zeros_like, WHOLE)
        like: Any = {"params": cut(ctx, empty), "n": 0}
        found = af.load_state(ctx, tmp_path / "at", like)
        assert found["n"] == 3
        assert same(af.pieces(found["params"]), af.pieces(cut(ctx, WHOLE)))
        assert isinstance(found["params"]["w"], Sharded)
        assert same(af.load_state(ctx, tmp_path / "at", {"params": empty, "n": 0})["params"], WHOLE)

    for size in (1, 2, 3):
        run_ranks(load, size, on)


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parameters(), worlds(4), worlds(4), st.sampled_from([0, -1]), st.booleans())
def test_any_ranks_take_up_what_any_others_have_saved(
    tmp_path: Path, tree: Any, before: int, after: int, dim: int, asynchronous: bool
) -> None:
    def pieces(ctx: Context, whole: Any) -> Any:
        leaves, structure = af.tree.flatten(whole)
        split = [af.shard(ctx, leaf, dim=dim) if leaf.dim() else leaf for leaf in leaves]
        return af.sharded(ctx, structure.unflatten(split), dim=dim)

    def save(ctx: Context) -> None:
        saved = af.save_state(ctx, tmp_path / "at", pieces(ctx, tree), asynchronous=asynchronous)
        if asynchronous:
            saved.result()  # pyright: ignore[reportAttributeAccessIssue]

    def load(ctx: Context) -> None:
        like = cut(ctx, af.tree.map(torch.zeros_like, tree))
        found = af.pieces(af.load_state(ctx, tmp_path / "at", like))
        assert same(found, af.pieces(cut(ctx, tree)))

    run_ranks(save, before)
    run_ranks(load, after)


def test_pieces_along_an_axis_have_copies_which_must_be_equal(tmp_path: Path) -> None:
    mesh = af.ParallelismConfig(dp_replicate_size=2, tp_size=2)

    def run(ctx: Context) -> None:
        piece: Any = af.sharded(ctx, af.shard(ctx, WHOLE["w"], "tp"), "tp")
        af.save_state(ctx, tmp_path / "at", {"w": piece})
        with pytest.raises(ReplicaDriftError):
            af.save_state(ctx, tmp_path / "other", {"w": piece.like(piece.local + (ctx.rank == 3))})

    run_ranks(run, 4, parallelism_config=mesh)
    assert torch.equal(af.load_tree(tmp_path / "at")["w"], WHOLE["w"])
    assert not (tmp_path / "other" / MANIFEST).exists()


def test_an_export_and_a_conversion_have_the_whole(tmp_path: Path) -> None:
    save(tmp_path / "at", 3, WHOLE)
    convert_checkpoint(tmp_path / "at", tmp_path / "dcp", to="dcp")
    convert_checkpoint(tmp_path / "dcp", tmp_path / "back", to="accelfn")
    assert same(af.load_tree(tmp_path / "back")["params"], WHOLE)


def test_a_piece_of_another_whole_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "at", 2, WHOLE)

    def load(ctx: Context) -> None:
        like = cut(ctx, {**WHOLE, "w": torch.zeros(8, 3)})
        with pytest.raises(CheckpointMismatchError, match=r"params/w.*\[7, 3\].*\[8, 3\]"):
            af.load_state(ctx, tmp_path / "at", {"params": like, "n": 0})

    run_ranks(load, 3)


def test_pieces_may_be_views_of_one_buffer_and_empty(tmp_path: Path) -> None:
    def run(ctx: Context) -> None:
        rows, buffer = 1 - ctx.rank, torch.tensor([3.0, 4.0])  # the last rank has empty views at one place
        pieces = {"a": buffer[:rows], "b": buffer[rows : 2 * rows]}
        af.save_state(ctx, tmp_path / "at", af.sharded(ctx, pieces))
        found = af.load_state(ctx, tmp_path / "at", {"a": torch.zeros(1), "b": torch.zeros(1)})
        assert same(found, {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])})

    run_ranks(run, 2)


def test_one_rank_alone_does_not_write_its_piece(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"save_tree: 'w' is split over ranks.*save_state"):
        af.save_tree(tmp_path / "at", {"w": Sharded(torch.ones(2), 0, 0, 4)})
    assert not (tmp_path / "at").exists()


def test_a_state_of_an_optimizer_over_pieces_is_saved_and_goes_on(tmp_path: Path) -> None:
    """Sharded parameters updated by hand, on four ranks and then on two, end as whole ones do."""
    adam = af.functional(torch.optim.AdamW, lr=0.1)
    params = {"w": WHOLE["w"], "b": torch.ones(3), "s": torch.tensor(1.0)}

    def grads(step: int) -> Any:
        return af.tree.map(lambda one: (one + step).sin(), params)

    def update(tree: Any, state: Any, steps: range, ctx: Context) -> Any:
        for step in steps:
            tree, state = adam.update(af.pieces(cut(ctx, grads(step))), state, tree)
        return tree, state

    def begin(ctx: Context) -> None:
        tree = cut(ctx, params)
        tree, state = update(tree, adam.init(tree), range(3), ctx)
        af.save_state(ctx, tmp_path / "at", [tree, state])

    def go_on(ctx: Context) -> None:
        tree = cut(ctx, params)
        tree, state = af.load_state(ctx, tmp_path / "at", [tree, adam.init(tree)])
        af.save_state(ctx, tmp_path / "then", list(update(tree, state, range(3, 6), ctx)))

    run_ranks(begin, 4)
    run_ranks(go_on, 2)
    expected, state = params, adam.init(params)
    for step in range(6):
        expected, state = adam.update(grads(step), state, expected)
    assert same(af.load_tree(tmp_path / "then"), [expected, state])
