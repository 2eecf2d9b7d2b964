"""Sequences that ranks share: the pieces of a batch, and the whole again."""

# torch leaves tolist and backward partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import accelfn as af
from accelfn.testing import run_ranks


class Pair(NamedTuple):
    ids: torch.Tensor
    labels: torch.Tensor


def mesh(axis: str, size: int, **more: int) -> af.ParallelismConfig:
    sizes: dict[str, Any] = {f"{axis}_size": size, **more}
    return af.ParallelismConfig(**sizes)


@settings(max_examples=15)
@given(
    axis=st.sampled_from(["cp", "sp"]),
    size=st.integers(1, 4),
    copies=st.integers(1, 2),
    times=st.integers(0, 3),
    before=st.lists(st.integers(1, 3), max_size=2),
    after=st.lists(st.integers(1, 3), max_size=2),
    from_end=st.booleans(),
)
def test_gathered_pieces_are_the_whole(
    axis: str, size: int, copies: int, times: int, before: list[int], after: list[int], from_end: bool
) -> None:
    shape = [*before, 2 * size * times, *after]
    dim = len(before) - (len(shape) if from_end else 0)
    whole = torch.arange(torch.Size(shape).numel()).view(shape)

    def work(ctx: af.Context) -> tuple[torch.Tensor, dict[str, Any], torch.Tensor]:
        batch: dict[str, Any] = {"x": whole, "y": "text"}
        piece = af.shard_sequence(ctx, batch, {"x": dim})
        return (
            piece["x"],
            af.data.gather_sequence(ctx, piece, {"x": dim}),
            af.data.gather_sequence(ctx, piece["x"], dim),
        )

    ranks = run_ranks(work, size * copies, parallelism_config=mesh(axis, size, dp_replicate_size=copies))
    for rank, (piece, gathered, alone) in enumerate(ranks):
        assert piece.shape[dim] == 2 * times
        assert gathered["y"] == "text"
        assert torch.equal(gathered["x"], whole)
        assert torch.equal(alone, whole)
        assert torch.equal(piece, ranks[rank % size][0])  # copies have the same pieces
    pieces = torch.cat([piece for piece, _, _ in ranks[:size]], dim)
    assert torch.equal(pieces.flatten().sort().values, whole.flatten().sort().values)


def test_a_ring_has_heads_and_tails_and_heads_are_exchanged_of_neighbours() -> None:
    tokens = torch.arange(8)
    for axis, expected in (("cp", [[0, 1, 6, 7], [2, 3, 4, 5]]), ("sp", [[0, 1, 2, 3], [4, 5, 6, 7]])):
        ranks = run_ranks(lambda ctx: af.shard_sequence(ctx, tokens, 0), 2, parallelism_config=mesh(axis, 2))
        assert [one.tolist() for one in ranks] == expected


@pytest.mark.parametrize("kind", [list, tuple, Pair, dict])
def test_a_batch_keeps_its_type_and_is_left_as_it_was(kind: Any) -> None:
    ctx = af.plan_context(2, parallelism_config=mesh("sp", 2))
    pair = [torch.arange(4), torch.arange(4)]
    batch = Pair(*pair) if kind is Pair else kind(enumerate(pair) if kind is dict else pair)
    cut = af.shard_sequence(ctx, batch, {1: 0})
    assert type(cut) is kind
    assert [len(cut[0]), len(cut[1])] == [4, 2]
    assert [len(batch[0]), len(batch[1])] == [4, 4]


def test_gradients_come_back_through_gathered_pieces() -> None:
    def work(ctx: af.Context) -> torch.Tensor:
        piece = af.shard_sequence(ctx, torch.arange(8.0), 0).requires_grad_()
        (af.data.gather_sequence(ctx, piece, 0) * torch.arange(8.0)).sum().backward()
        assert piece.grad is not None
        return piece.grad

    ranks = run_ranks(work, 2, parallelism_config=mesh("cp", 2))
    assert [one.tolist() for one in ranks] == [[0, 1, 6, 7], [2, 3, 4, 5]]


@pytest.mark.parametrize("axis", ["cp", "sp"])
def test_a_length_that_does_not_divide_is_an_error_that_says_which_would(axis: str) -> None:
    ctx = af.plan_context(2, parallelism_config=mesh(axis, 2))
    number, fitting = (4, "4 or 8") if axis == "cp" else (2, "6 or 8")
    with pytest.raises(
        ValueError, match=rf"'ids' have 7 tokens.*{number} equal chunks. Use a length of {fitting}"
    ):
        af.shard_sequence(ctx, {"ids": torch.zeros(2, 7)}, {"ids": 1})
    padded = af.shard_sequence(ctx, {"ids": torch.ones(2, 7)}, {"ids": 1}, {"ids": -100})
    assert padded["ids"].tolist() == ([[1.0, 1.0, 1.0, -100.0]] * 2 if axis == "cp" else [[1.0] * 4] * 2)


@pytest.mark.parametrize(
    ("batch", "dims", "error", "message"),
    [
        ({"x": torch.zeros(2)}, {"ids": 1}, ValueError, "no 'ids'; it has 'x'"),
        ({"x": torch.zeros(2)}, {"x": 1}, ValueError, r"shape \(2,\) and no dimension 1"),
        ({"x": 3}, {"x": 0}, TypeError, "'x' is a int, which has no dimension 0"),
        (torch.zeros(2), {"x": 0}, TypeError, "Tensor has no keys"),
    ],
)
def test_what_can_not_be_cut_is_named(batch: Any, dims: Any, error: type[Exception], message: str) -> None:
    ctx = af.plan_context(2, parallelism_config=mesh("cp", 2))
    with pytest.raises(error, match=message):
        af.shard_sequence(ctx, batch, dims)


def test_loaders_and_microbatches_give_each_rank_its_pieces_and_count_whole_rows() -> None:
    rows = [{"ids": torch.arange(6) + 10 * row, "labels": torch.arange(6), "row": row} for row in range(4)]
    loading = af.DataLoaderConfiguration(
        sequence={"ids": 1, "labels": 1}, sequence_padding={"ids": 0, "labels": -100}
    )

    def work(ctx: af.Context) -> list[Any]:
        loader: Any = af.prepare_data_loader(ctx, DataLoader[Any](rows, batch_size=2))  # pyright: ignore[reportArgumentType]
        found = list(af.microbatches(ctx, loader))
        for batch, (expected, _) in zip(loader, found, strict=True):
            assert batch["ids"].tolist() == expected["ids"].tolist()
        return [(one["ids"].tolist(), one["labels"].tolist(), micro.num_valid) for one, micro in found]

    first, second = run_ranks(work, 2, parallelism_config=mesh("cp", 2), dataloader_config=loading)
    head, tail = ([0, 1, 0, 0], [0, 1, -100, -100]), ([2, 3, 4, 5], [2, 3, 4, 5])
    assert first[0] == ([head[0], [10, 11, 0, 0]], [head[1]] * 2, 2)
    assert second[1] == ([[one + 20 for one in tail[0]], [one + 30 for one in tail[0]]], [tail[1]] * 2, 2)


def test_dimensions_are_checked_where_they_are_said() -> None:
    for wrong in ({"sequence": {"ids": "1"}}, {"sequence": [1]}, {"sequence_padding": {"ids": None}}):
        given_: Any = wrong
        with pytest.raises(TypeError, match=r"DataLoaderConfiguration\.sequence"):
            af.DataLoaderConfiguration(**given_)
