"""Laws of shard, unshard, all_gather, reduce_scatter, all_to_all and permute on trees."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad

from accelfn.comm import (
    all_gather,
    all_to_all,
    permute,
    pmean,
    psum,
    reduce_scatter,
    shard,
    split_sizes,
    unshard,
)
from accelfn.config import ParallelismConfig
from accelfn.context import Context
from accelfn.errors import ConfigurationError, MismatchError, NotAvailableError
from accelfn.testing import run_ranks
from accelfn.testing.strategies import dtypes, rank_trees, shapes, tensors, trees, worlds
from accelfn.tree import flatten, flatten_tensor, listify, map_tensors
from tests.comm.seam import failure

Operation = Callable[[Context, torch.Tensor], torch.Tensor]

# Which torch leaves partly untyped.
func: Any = torch.func
modes: Any = forward_ad

with_rows = trees(tensors(dtypes(float8=True), shapes(min_dims=1), contiguous=True))


def bits(leaf: torch.Tensor) -> list[int]:
    return listify(flatten_tensor(leaf).view(torch.uint8))


def equal(one: Any, other: Any) -> bool:
    left, right = flatten(one), flatten(other)
    assert left[1].paths() == right[1].paths()
    return all(
        (a.dtype, a.shape, bits(a)) == (b.dtype, b.shape, bits(b))
        for a, b in zip(left[0], right[0], strict=True)
    )


def contiguous(tree: Any) -> Any:
    return map_tensors(lambda leaf: leaf.contiguous(), tree)


@settings(max_examples=12)
@given(st.data(), worlds(4))
def test_unshard_undoes_shard(data: st.DataObject, size: int) -> None:
    tree = contiguous(data.draw(with_rows))

    def work(ctx: Context) -> bool:
        pieces = shard(ctx, tree)
        assert type(pieces) is type(tree)
        for whole, piece in zip(flatten(tree)[0], flatten(pieces)[0], strict=True):
            assert piece.shape[0] == split_sizes(whole.shape[0], size)[ctx.rank]
        return equal(unshard(ctx, pieces), tree) and equal(all_gather(ctx, pieces), tree)

    assert all(run_ranks(work, size))


@settings(max_examples=12)
@given(st.data(), worlds(4))
def test_a_gather_joins_and_a_permutation_moves_every_dtype(data: st.DataObject, size: int) -> None:
    ranked = [contiguous(tree) for tree in data.draw(rank_trees(size, float8=True))]
    sources = data.draw(st.permutations(range(size)))

    def work(ctx: Context) -> bool:
        moved = permute(ctx, ranked[ctx.rank], sources)
        gathered = flatten(all_gather(ctx, ranked[ctx.rank]))[0]
        for mine, column in zip(
            gathered, zip(*(flatten(tree)[0] for tree in ranked), strict=True), strict=True
        ):
            assert bits(mine) == [byte for one in column for byte in bits(one)]
        return equal(moved, ranked[sources[ctx.rank]])

    assert all(run_ranks(work, size))


@settings(max_examples=12)
@given(st.data(), worlds(4), st.sampled_from(["sum", "mean"]))
def test_reduce_scatter_is_a_shard_of_the_sum(data: st.DataObject, size: int, reduction: str) -> None:
    kinds = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)
    whole = (torch.int64, torch.int16, torch.uint8, torch.bool) if reduction == "sum" else ()
    form = trees(tensors(st.sampled_from((*kinds, *whole)), shapes(min_dims=1), contiguous=True))
    ranked = data.draw(rank_trees(size, form))

    def total(column: tuple[torch.Tensor, ...]) -> torch.Tensor:
        if column[0].dtype == torch.bool:
            return torch.stack(column).any(0)
        wide = torch.complex128 if column[0].is_complex() else torch.float64
        summed = torch.stack([one.to(wide) for one in column]).sum(0)
        return (summed / size if reduction == "mean" else summed).to(column[0].dtype)

    sums = [total(column) for column in zip(*(flatten(tree)[0] for tree in ranked), strict=True)]

    def work(ctx: Context) -> None:
        pieces = flatten(reduce_scatter(ctx, ranked[ctx.rank], reduction=reduction))[0]
        for piece, wanted in zip(pieces, shard(ctx, sums), strict=True):
            torch.testing.assert_close(piece, wanted, rtol=1e-6, atol=0)

    run_ranks(work, size)


@settings(max_examples=12)
@given(st.data(), worlds(4), st.integers(0, 2), st.integers(0, 2))
def test_all_to_all_shards_along_another_dim(data: st.DataObject, size: int, before: int, after: int) -> None:
    whole = data.draw(tensors(dtypes(), shapes(min_dims=3, max_side=5), contiguous=True))

    def work(ctx: Context) -> bool:
        piece = shard(ctx, whole, dim=before)
        if before == after:
            # Of equally long pieces only: blocks are turned as in a matrix of ranks.
            piece = whole
            turned = all_to_all(ctx, whole, before, before)
            own = torch.split(whole, split_sizes(whole.shape[before], size), before)[ctx.rank]
            return torch.equal(turned, torch.cat([own] * size, before))
        moved = all_to_all(ctx, [piece], after, before)
        (back,) = all_to_all(ctx, moved, before, after)
        return torch.equal(moved[0], shard(ctx, whole, dim=after)) and torch.equal(back, piece)

    assert all(run_ranks(work, size))


LINEAR: dict[str, Operation] = {
    "all_gather": lambda ctx, x: all_gather(ctx, x),
    "all_gather of lengths": lambda ctx, x: all_gather(ctx, x[: 1 + ctx.rank % 3], dim=0),
    "all_gather along 1": lambda ctx, x: all_gather(ctx, x, dim=1),
    "all_gather of a scalar": lambda ctx, x: all_gather(ctx, x[0, 0]),
    "psum": psum,
    "pmean": pmean,
    "reduce_scatter": lambda ctx, x: reduce_scatter(ctx, x),
    "reduce_scatter along -1": lambda ctx, x: reduce_scatter(ctx, x, dim=-1, reduction="mean"),
    "all_to_all": lambda ctx, x: all_to_all(ctx, x, 0, 1),
    "all_to_all back": lambda ctx, x: all_to_all(ctx, x[:, : 1 + ctx.rank % 3], 0, 1),
    "all_to_all in place": lambda ctx, x: all_to_all(ctx, x, 1, 1),
    "permute": lambda ctx, x: permute(
        ctx, x, [(one + 1) % ctx.num_processes for one in range(ctx.num_processes)]
    ),
}


def drawn(seed: int, rank: int, shape: Sequence[int]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randint(-4, 5, tuple(shape), generator=generator).double()


@pytest.mark.parametrize("name", LINEAR)
@settings(max_examples=8)
@given(worlds(4), st.integers(0, 99), st.integers(0, 5), st.integers(3, 5))
def test_backward_is_the_adjoint(name: str, size: int, seed: int, rows: int, columns: int) -> None:
    """<A x, y> = <x, A^T y>, summed over the ranks; and A^T of A^T is A; and A is linear."""
    operation = LINEAR[name]

    def work(ctx: Context) -> tuple[float, float]:
        x = drawn(seed, ctx.rank, (max(rows, 3), columns)).requires_grad_()
        forward = operation(ctx, x)
        y = drawn(seed + 1, ctx.rank, forward.shape).requires_grad_()
        (turned,) = torch.autograd.grad(forward, x, y, create_graph=True)
        z = drawn(seed + 2, ctx.rank, x.shape)
        (again,) = torch.autograd.grad(turned, y, z)
        torch.testing.assert_close(again, operation(ctx, z))
        torch.testing.assert_close(operation(ctx, 2 * x - z), 2 * forward - again)
        return float((forward * y).sum().detach()), float((x * turned).sum().detach())

    sides = run_ranks(work, size)
    assert sum(one for one, _ in sides) == pytest.approx(sum(other for _, other in sides))


def tangents_are_right(ctx: Context, operation: Operation) -> bool:
    """Compare the tangents of squares, of a cube's gradient, and beside a gradient, with those by hand."""
    x, v = drawn(0, ctx.rank, (4, 3)), drawn(1, ctx.rank, (4, 3))
    weight = torch.ones(4, 3, dtype=torch.double, requires_grad=True)

    def move(x: torch.Tensor) -> torch.Tensor:
        return operation(ctx, x)

    def square(x: torch.Tensor) -> torch.Tensor:
        return move(x * x)

    def cube(x: torch.Tensor) -> torch.Tensor:
        return move(x).pow(3).sum()

    _, of_square = func.jvp(square, (x,), (v,))
    _, of_gradient = func.jvp(func.grad(cube), (x,), (v,))
    _, pull = func.vjp(move, x)
    with modes.dual_level():
        moved = move(modes.make_dual(x, v) * weight)
        beside = modes.unpack_dual(moved).tangent
    (back,) = torch.autograd.grad(beside, weight, move(v))
    return (
        torch.equal(of_square, move(2 * x * v))
        and torch.equal(of_gradient, pull(6 * move(x) * move(v))[0])
        and torch.equal(beside, move(v))
        and torch.equal(back, v * pull(move(v))[0])
    )


def test_tangents_are_moved_as_values_are() -> None:
    """On processes: torch has one level of forward-mode differentiation, which threads can't share."""

    def work(ctx: Context) -> list[str]:
        return [name for name, operation in LINEAR.items() if not tangents_are_right(ctx, operation)]

    assert run_ranks(work, 2, "processes") == [[], []]


@pytest.mark.parametrize("transform", ["vmap", "jacrev"])
def test_what_ranks_exchange_is_not_mapped_over(transform: str) -> None:
    def work(ctx: Context) -> str:
        def gathered(x: torch.Tensor) -> torch.Tensor:
            return all_gather(ctx, x)

        with pytest.raises(NotAvailableError) as caught:
            getattr(func, transform)(gathered)(torch.ones(2, 2))
        return str(caught.value)

    assert all(text.startswith("all_gather: torch.func.vmap") for text in run_ranks(work, 2))


def test_sums_over_ranks_are_mapped_over() -> None:
    def work(ctx: Context) -> bool:
        x = drawn(0, ctx.rank, (4, 3))

        def loss(row: torch.Tensor) -> torch.Tensor:
            return psum(ctx, row.pow(2)).sum() + pmean(ctx, row).prod()

        rows = [func.grad(loss)(row) for row in x]
        return torch.equal(func.vmap(func.grad(loss))(x), torch.stack(rows))

    assert run_ranks(work, 2, "processes") == [True, True]


@settings(max_examples=10)
@given(worlds(4), st.integers(0, 99), st.integers(1, 6), st.integers(0, 1))
def test_shard_and_unshard_have_gradients_of_one_process(size: int, seed: int, rows: int, dim: int) -> None:
    """A value that all ranks hold has one gradient, which all of them hold too."""
    start, other = drawn(seed, 0, (rows, 4)), drawn(seed + 1, 0, (rows, 4))
    alone = start.clone().requires_grad_()
    torch.autograd.backward(((alone * other).sin() * alone).sum())

    def work(ctx: Context) -> None:
        whole = start.clone().requires_grad_()
        part, factor = shard(ctx, (whole, other), dim=dim)
        value = unshard(ctx, {"x": (part * factor).sin()}, dim=dim)["x"]
        torch.autograd.backward((value * whole).sum())
        torch.testing.assert_close(whole.grad, alone.grad)

    run_ranks(work, size)


@settings(max_examples=10)
@given(worlds(4), st.integers(0, 99), st.integers(1, 6))
def test_gathered_parameters_have_the_gradient_of_the_sum_of_losses(size: int, seed: int, rows: int) -> None:
    weight = drawn(seed, 0, (rows, 3))
    batches = [drawn(seed + 1, rank, (2, rows)) for rank in range(size)]
    alone = weight.clone().requires_grad_()
    torch.autograd.backward(torch.stack([(batch @ alone).tanh().sum() for batch in batches]).sum())

    def work(ctx: Context) -> None:
        def loss(pieces: dict[str, torch.Tensor]) -> torch.Tensor:
            return (batches[ctx.rank] @ all_gather(ctx, pieces)["w"]).tanh().sum()

        pieces = shard(ctx, {"w": weight})
        by_func = torch.func.grad(loss)(pieces)["w"]
        pieces["w"].requires_grad_()
        torch.autograd.backward(loss(pieces))
        assert pieces["w"].grad is not None
        torch.testing.assert_close(pieces["w"].grad, shard(ctx, alone.grad))
        torch.testing.assert_close(by_func, pieces["w"].grad)

    run_ranks(work, size)


def test_frozen_leaves_and_integers_travel_beside_trained_ones() -> None:
    def work(ctx: Context) -> None:
        trained = torch.full((2,), 1.0 + ctx.rank, dtype=torch.bfloat16, requires_grad=True)
        tree = {"trained": trained, "frozen": torch.ones(2, dtype=torch.bfloat16), "ids": torch.arange(2)}
        whole = all_gather(ctx, tree)
        assert [whole[name].requires_grad for name in tree] == [True, False, False]
        torch.autograd.backward((whole["trained"] * whole["frozen"]).sum())
        assert trained.grad is not None
        assert listify(trained.grad) == [3.0, 3.0]
        assert trained.grad.dtype == torch.bfloat16

    run_ranks(work, 3)


def test_large_leaves_travel_alone_and_empty_trees_not_at_all() -> None:
    large = torch.arange(1 << 18, dtype=torch.float32).view(-1, 2)

    def work(ctx: Context) -> None:
        nothing: Any = {"a": None, "b": []}
        assert shard(ctx, nothing) == nothing
        for operation in (unshard, all_gather, reduce_scatter):
            assert operation(ctx, nothing) == nothing
        tree = [large, torch.ones(3), large + 1]
        pieces = shard(ctx, tree)
        assert pieces[0].untyped_storage().nbytes() < large.untyped_storage().nbytes()
        assert equal(unshard(ctx, pieces), tree)
        assert equal(reduce_scatter(ctx, [one / 2 for one in tree]), pieces)

    run_ranks(work, 2)


@pytest.mark.parametrize("num_nodes", [1, 3])
def test_processes_give_the_same(num_nodes: int) -> None:
    def work(ctx: Context) -> list[Any]:
        x = (torch.arange(15.0).view(5, 3) + ctx.rank).requires_grad_()
        part = reduce_scatter(ctx, {"x": x, "n": torch.arange(5)})
        whole = all_gather(ctx, part)
        turned = all_to_all(ctx, whole["x"], 0, 1)
        moved = permute(ctx, turned.sum(), [2, 0, 1])
        torch.autograd.backward(moved * (1 + ctx.rank))
        assert x.grad is not None
        return [listify(whole["n"]), listify(turned), float(moved.detach()), listify(x.grad)]

    assert run_ranks(work, 3, "processes", num_nodes=num_nodes) == run_ranks(work, 3)


def test_an_axis_of_the_mesh_is_named() -> None:
    def work(ctx: Context) -> list[list[int]]:
        tp, dp = shard(ctx, torch.arange(4), "tp"), shard(ctx, torch.arange(4), ("dp_replicate", "dp_shard"))
        whole = unshard(ctx, tp, "tp")
        assert listify(whole) == [0, 1, 2, 3]
        return [listify(tp), listify(dp)]

    mesh = ParallelismConfig(dp_shard_size=2, tp_size=2)
    halves = [0, 1], [2, 3]
    assert run_ranks(work, 4, parallelism_config=mesh) == [
        [halves[rank % 2], halves[rank // 2]] for rank in range(4)
    ]


REFUSED: tuple[tuple[Callable[[Context], Any], type[Exception], str], ...] = (
    (lambda ctx: shard(ctx, {"a": torch.tensor(1.0)}), ValueError, r"shard: tree\['a'\] has 0 dimensions"),
    (lambda ctx: unshard(ctx, [torch.ones(2)], dim=1), ValueError, r"tree\[0\] has 1 dimension, shape"),
    (lambda ctx: all_gather(ctx, [1]), TypeError, r"all_gather: tree\[0\] must be a tensor"),
    (lambda ctx: reduce_scatter(ctx, torch.ones(2), reduction="max"), ValueError, "mean', got 'max'"),
    (lambda ctx: reduce_scatter(ctx, torch.arange(2), reduction="mean"), TypeError, "can't represent a mean"),
    (lambda ctx: pmean(ctx, torch.arange(2)), TypeError, "can't represent a mean"),
    (lambda ctx: psum(ctx, [1]), TypeError, r"psum: tree\[0\] must be a tensor"),
    (lambda ctx: all_to_all(ctx, torch.ones(2), 0, 1), ValueError, "but no dim 1"),
    (lambda ctx: permute(ctx, torch.ones(2), [0, 0]), ValueError, r"a permutation .* 0 to 1, got \[0, 0\]"),
    (lambda ctx: shard(ctx, torch.ones(2), "rows"), ConfigurationError, "no axis 'rows'"),
)


@pytest.mark.parametrize(("call", "kind", "said"), REFUSED)
def test_a_bad_argument_is_refused_on_every_rank(
    call: Callable[[Context], Any], kind: type[Exception], said: str
) -> None:
    for error in run_ranks(failure(call), 2, timeout_s=10):
        assert type(error) is kind
        assert re.search(said, str(error))


DIFFERENT: tuple[Callable[[Context], Any], ...] = (
    lambda ctx: shard(ctx, torch.ones(2 + ctx.rank)),
    lambda ctx: unshard(ctx, torch.ones(2, 2 + ctx.rank)),
    lambda ctx: all_gather(ctx, torch.ones(2), dim=-ctx.rank),
    lambda ctx: reduce_scatter(ctx, torch.ones(2, requires_grad=ctx.rank == 0)),
    lambda ctx: psum(ctx, torch.ones(2 + ctx.rank)),
    lambda ctx: psum(ctx, torch.ones(2)) if ctx.rank else pmean(ctx, torch.ones(2)),
    lambda ctx: all_to_all(ctx, torch.ones(2 + ctx.rank, 2), 0, 1),
    lambda ctx: permute(ctx, torch.ones(2), [0, 1] if ctx.rank else [1, 0]),
    lambda ctx: shard(ctx, torch.ones(2)) if ctx.rank else unshard(ctx, torch.ones(2)),
)


@pytest.mark.parametrize("call", DIFFERENT)
def test_a_difference_between_ranks_is_an_error_on_all(call: Callable[[Context], Any]) -> None:
    errors = run_ranks(failure(call), 2, timeout_s=10)
    assert [type(error) for error in errors] == [MismatchError] * 2


def test_another_order_of_backward_passes_is_an_error_on_all() -> None:
    def work(ctx: Context) -> None:
        x = torch.ones(2, requires_grad=True)
        losses = [all_gather(ctx, x).sum(), permute(ctx, x, [1, 0]).sum()]
        for loss in reversed(losses) if ctx.rank else losses:
            torch.autograd.backward(loss)

    errors = run_ranks(failure(work), 2, timeout_s=10)
    assert [type(error) for error in errors] == [MismatchError] * 2


def test_a_single_element_with_a_stride_is_gathered() -> None:
    one = torch.arange(4)[1::2][:1]
    assert all(run_ranks(lambda ctx: all_gather(ctx, one).equal(torch.ones(2).long()), 2))
