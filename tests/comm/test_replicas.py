"""Replicas that are equal pass; of others every rank names the same leaves, ranks and amounts."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from accelfn.comm import check_replicas, gather
from accelfn.context import Context
from accelfn.context.config import ParallelismConfig
from accelfn.errors import Drift, MismatchError, RemoteRankError, ReplicaDriftError
from accelfn.testing import Where, run_ranks
from accelfn.testing.strategies import Mismatched, dtypes, mismatched_trees, shapes, tensors, trees
from accelfn.tree import flatten, listify, map_tensors
from tests.comm.seam import counted, failure, split_up

KINDS: tuple[Where, ...] = ("memory", "gloo", "processes")
Work = Callable[[Context], Any]


def drift(work: Work, size: int, on: Where = "memory") -> ReplicaDriftError:
    """Give the one error that every rank raises."""
    errors = run_ranks(failure(work), size, on, timeout_s=20)
    assert [type(error) for error in errors] == [ReplicaDriftError] * size, errors
    assert len({str(error) for error in errors}) == 1
    assert len({repr(error.rows) for error in errors}) == 1  # as text, since no NaN equals another
    return errors[0]


def copies(tree: Any, size: int) -> list[Any]:
    """Give each rank a tree of its own, of equal bits in contiguous tensors."""
    return [map_tensors(lambda leaf: leaf.contiguous().clone(), tree) for _ in range(size)]


def flip(tree: Any, index: int, byte: int, bit: int) -> Any:
    """Give a tree with one other bit in leaf ``index``."""
    leaves, structure = flatten(tree)
    flat = leaves[index].contiguous().reshape(-1).clone()
    flat.view(torch.uint8)[byte] ^= 1 << bit
    return structure.unflatten([*leaves[:index], flat.view(leaves[index].shape), *leaves[index + 1 :]])


def any_tree() -> st.SearchStrategy[Any]:
    return trees(tensors(dtypes(float8=True), shapes(max_side=5)))


# --- equal and not equal -------------------------------------------------------------------------


@given(any_tree(), st.integers(1, 4), st.booleans())
def test_equal_replicas_pass_and_stay_as_they_are(tree: Any, size: int, split: bool) -> None:
    # On rank 0 some leaves are views with gaps or turned dimensions: only their values count.
    ranked = [tree, *copies(tree, size - 1)]
    before = [[listify(leaf.to(torch.complex128)) for leaf in flatten(one)[0]] for one in ranked]
    held = [flatten(one)[0] for one in ranked]

    def work(ctx: Context) -> Any:
        return check_replicas(split_up(ctx) if split else ctx, ranked[ctx.rank])

    assert run_ranks(work, size) == [None] * size
    assert [[listify(leaf.to(torch.complex128)) for leaf in leaves] for leaves in held] == before


@given(any_tree(), st.integers(2, 4), st.booleans(), st.data())
def test_one_flipped_bit_is_found_on_every_rank(
    tree: Any, size: int, split: bool, data: st.DataObject
) -> None:
    tree = [tree, torch.zeros(2)]  # so that there is an element
    leaves, structure = flatten(tree)
    full = [index for index, leaf in enumerate(leaves) if leaf.numel()]
    index = data.draw(st.sampled_from(full))
    leaf = leaves[index]
    byte = data.draw(st.integers(0, leaf.numel() * leaf.dtype.itemsize - 1))
    odd = data.draw(st.integers(0, size - 1))
    ranked = [tree, *copies(tree, size - 1)]
    ranked[odd] = flip(ranked[odd], index, byte, data.draw(st.integers(0, 7)))

    def work(ctx: Context) -> Any:
        check_replicas(split_up(ctx) if split else ctx, ranked[ctx.rank], name="state")

    (row,) = drift(work, size).rows
    # Of two ranks the lower is right.
    assert (row.rank, row.reference) == (odd, 1 if odd == 0 else 0) if size > 2 else (1, 0)
    assert row.path == structure.paths("state")[index]
    assert (row.num_elements, row.num_differing) == (leaf.numel(), 1)
    assert row.position is not None
    place = sum(step * math.prod(leaf.shape[dim + 1 :]) for dim, step in enumerate(row.position))
    assert place == byte // leaf.dtype.itemsize
    mine, theirs = (flatten(ranked[rank])[0][index][row.position] for rank in (row.rank, row.reference))
    exact = torch.complex128 if leaf.is_complex() else torch.float64
    amount = float((mine.to(exact) - theirs.to(exact)).abs())
    assert row.largest == amount or (math.isnan(amount) and math.isnan(row.largest or 0.0))


@given(st.sampled_from((torch.float32, torch.float64)), st.floats(-4, 4, width=16))
def test_a_drift_of_the_last_place_is_measured(dtype: torch.dtype, value: float) -> None:
    def work(ctx: Context) -> Any:
        weight = torch.full((16, 32), value, dtype=dtype)
        if ctx.rank == 1:
            weight[3, 17] = torch.nextafter(weight[3, 17], torch.tensor(math.inf, dtype=dtype))
        check_replicas(ctx, {"weight": weight})

    step = torch.nextafter(torch.tensor(value, dtype=dtype), torch.tensor(math.inf, dtype=dtype)) - value
    assert drift(work, 2).rows == (Drift(1, "tree['weight']", 0, 512, 1, float(step), (3, 17)),)


def filled(ctx: Context, *values: float) -> None:
    check_replicas(ctx, {"x": torch.full((2, 3), values[ctx.rank])})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1, 2, 2), [(0, 1, 1.0)]),
        ((2, 1, 2), [(1, 0, 1.0)]),
        ((1, 2, 4), [(1, 0, 1.0), (2, 0, 3.0)]),
        ((1, 2, 2, 1), [(1, 0, 1.0), (2, 0, 1.0)]),
        ((9, 5, 1, 5), [(0, 1, 4.0), (2, 1, 4.0)]),
    ],
)
def test_most_ranks_are_the_reference_and_of_equally_many_the_lowest(
    values: tuple[float, ...], expected: list[tuple[int, int, float]]
) -> None:
    rows = drift(lambda ctx: filled(ctx, *values), len(values)).rows
    assert [(row.rank, row.reference, row.largest) for row in rows] == expected
    assert {(row.num_differing, row.num_elements, row.position) for row in rows} == {(6, 6, (0, 0))}


NAN = math.nan
AMOUNTS: tuple[tuple[Any, Any, torch.dtype, tuple[int, float, tuple[int, ...]]], ...] = (
    ([0.0, 1.0], [-0.0, 1.0], torch.float32, (1, 0.0, (0,))),
    ([1.0, NAN, 2.0], [9.0, NAN, 2.5], torch.float32, (2, 8.0, (0,))),
    ([1.0, 3.0], [9.0, NAN], torch.float16, (2, NAN, (1,))),
    ([math.inf, math.inf], [math.inf, -math.inf], torch.bfloat16, (1, math.inf, (1,))),
    ([2**60, 5], [2**60 + 1, 5], torch.int64, (1, 1.0, (0,))),
    ([-(2**63), 0], [2**63 - 1, 0], torch.int64, (1, 2.0**64, (0,))),
    ([0, 255], [1, 0], torch.uint8, (2, 255.0, (1,))),
    ([True, False], [True, True], torch.bool, (1, 1.0, (1,))),
    ([1 + 1j, 0], [1 + 1j, 3 - 4j], torch.complex64, (1, 5.0, (1,))),
    ([1 + 1j, 0], [1 + 1j, 3 - 4j], torch.complex128, (1, 5.0, (1,))),
    (1.0, 1.5, torch.float8_e4m3fn, (1, 0.5, ())),
)


@pytest.mark.parametrize(("right", "wrong", "dtype", "expected"), AMOUNTS)
def test_amounts_are_exact(
    right: Any, wrong: Any, dtype: torch.dtype, expected: tuple[int, float, tuple[int, ...]]
) -> None:
    def work(ctx: Context) -> Any:
        check_replicas(ctx, torch.tensor(wrong if ctx.rank == 1 else right, dtype=dtype))

    (row,) = drift(work, 3).rows
    assert repr((row.num_differing, row.largest, row.position)) == repr(expected)


@pytest.mark.parametrize("turned", [False, True])
def test_large_leaves_are_compared_piece_by_piece(turned: bool) -> None:
    def work(ctx: Context) -> Any:
        large = torch.zeros(1100, 2000)
        large = large.T if turned else large
        if ctx.rank == 1:
            large[2, 3] = large[-1, -1] = 2.0
            large[-1, -2] = -3.0
        check_replicas(ctx, large)

    (row,) = drift(work, 2).rows
    last = (1999, 1098) if turned else (1099, 1998)
    assert row == Drift(1, "tree", 0, 2_200_000, 3, 3.0, last)


# --- modules, optimizers, DTensors ---------------------------------------------------------------


def trained(steps: int = 2) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Give a module with buffers and an optimizer with state, the same each time."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view(parameter.shape))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.linspace(-2, 2, 15).view(5, 3)).square().sum().backward()
        optimizer.step()  # pyright: ignore[reportUnknownMemberType] -- torch types it loosely
    return model, optimizer


def spoil_parameter(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    del optimizer
    model.get_parameter("0.weight").data[1, 2] += 1


def spoil_buffer(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    del optimizer
    model.get_buffer("1.running_mean")[3] += 1


def spoil_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.get_parameter("0.bias")]["exp_avg"][2] += 1


def test_equal_modules_and_optimizers_pass() -> None:
    def work(ctx: Context) -> Any:
        model, optimizer = trained()
        check_replicas(ctx, model)
        check_replicas(ctx, optimizer)
        check_replicas(ctx, {"model": model, "rest": (optimizer, None, torch.ones(1))})

    assert run_ranks(work, 3) == [None] * 3


@pytest.mark.parametrize(
    ("spoil", "path", "whole"),
    [
        (spoil_parameter, "['0.weight']", "model"),
        (spoil_buffer, "['1.running_mean']", "model"),
        (spoil_state, "['state'][1]['exp_avg']", "optimizer"),
    ],
)
def test_of_a_module_or_an_optimizer_the_tensor_is_named(
    spoil: Callable[[torch.nn.Module, torch.optim.Optimizer], None], path: str, whole: str
) -> None:
    def work(ctx: Context, nested: bool) -> Any:
        both = trained()
        if ctx.rank == 2:
            spoil(*both)
        parts: dict[str, Any] = {"model": both[0], "optimizer": both[1]}
        check_replicas(ctx, parts if nested else parts[whole], name="state" if nested else whole)

    for nested, expected in ((True, f"state['{whole}']{path}"), (False, f"{whole}{path}")):
        (row,) = drift(functools.partial(work, nested=nested), 3).rows
        assert (row.rank, row.path) == (2, expected)
        assert row.largest == pytest.approx(1)


def dtensor(ctx: Context, *, sharded: bool) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (ctx.num_processes,))
    local = torch.full((4,), 7 if ctx.rank == 1 else 5)
    return DTensor.from_local(local, mesh, [Shard(0) if sharded else Replicate()], run_check=False)


def test_of_a_replicated_dtensor_the_local_tensors_are_compared() -> None:
    error = drift(lambda ctx: check_replicas(ctx, [dtensor(ctx, sharded=False)]), 2, "processes")
    assert error.rows == (Drift(1, "tree[0]", 0, 4, 4, 2.0, (0,)),)


def test_a_sharded_dtensor_is_refused() -> None:
    errors = run_ranks(
        failure(lambda ctx: check_replicas(ctx, [dtensor(ctx, sharded=True)], name="p")), 2, "processes"
    )
    assert [type(error) for error in errors] == [TypeError] * 2
    assert str(errors[0]).startswith(
        "check_replicas: p[0] is a DTensor that is sharded on another mesh than the context's, "
        "with placements (Shard(dim=0),)"
    )


# --- what it says --------------------------------------------------------------------------------


def test_the_table_of_one_leaf() -> None:
    def work(ctx: Context) -> Any:
        weight = torch.zeros(64, 64)
        if ctx.rank == 1:
            weight[3, 17] = 2**-23
        check_replicas(ctx, {"layer.weight": weight})

    assert str(drift(work, 2)) == (
        "check_replicas: 1 leaf differs between ranks.\n"
        "  rank 1  tree['layer.weight']  1 of 4096 elements differ from rank 0, "
        "by at most 1.19e-07, at [3, 17]"
    )


def test_the_table_has_twenty_rows_of_which_eight_leaves_are_compared() -> None:
    def work(ctx: Context) -> Any:
        check_replicas(ctx, [torch.tensor(float(ctx.rank)) for _ in range(13)])

    error = drift(work, 3)
    lines = str(error).splitlines()
    assert len(error.rows) == 26
    assert lines[0] == "check_replicas: 13 leaves differ between ranks."
    assert lines[16] == "  rank 2  tree[7]  1 of 1 elements differ from rank 0, by at most 2"
    assert lines[17] == "  rank 1  tree[8]  differs from rank 0"
    assert lines[20:] == ["  rank 2  tree[9]  differs from rank 0", "  ... and 6 more"]
    assert error.rows[16] == Drift(1, "tree[8]", 0, 1, None, None, None)


# --- how much it speaks --------------------------------------------------------------------------


def test_equal_replicas_take_one_exchange_whatever_their_size() -> None:
    def work(ctx: Context) -> Any:
        watched, calls = counted(ctx)
        check_replicas(watched, [torch.ones(5) for _ in range(10_000)])
        return dict(calls)

    assert run_ranks(work, 2) == [{"all_gather_bytes": 1}] * 2


def test_no_more_than_eight_leaves_travel() -> None:
    def work(ctx: Context) -> Any:
        watched, calls = counted(ctx)
        with pytest.raises(ReplicaDriftError):
            check_replicas(watched, [torch.tensor(ctx.rank) for _ in range(100)])
        return dict(calls)

    assert run_ranks(work, 2) == [{"all_gather_bytes": 3, "broadcast": 8}] * 2


def test_after_a_drift_the_ranks_go_on_together() -> None:
    def work(ctx: Context) -> Any:
        with pytest.raises(ReplicaDriftError):
            filled(ctx, 1, 2, 2)
        return listify(gather(ctx, torch.tensor([ctx.rank])))

    assert run_ranks(work, 3) == [[0, 1, 2]] * 3


class Without(TorchDispatchMode):
    """Let an operation of torch fail, on the thread of one rank."""

    def __init__(self, operation: Any) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType] -- torch leaves it untyped
        self.operation = operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self.operation:
            raise MemoryError("no room")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("operation", [torch.ops.aten.mul.Tensor, torch.ops.aten.argmax.default])
def test_a_failure_on_one_rank_is_told_to_all_and_nobody_waits(operation: Any) -> None:
    def work(ctx: Context) -> Any:
        with Without(operation if ctx.rank == 1 else None):
            check_replicas(ctx, [torch.tensor(ctx.rank), torch.tensor(-ctx.rank)])

    here, there, third = run_ranks(failure(work), 3, timeout_s=10)
    assert type(there) is MemoryError
    for error in (here, third):
        assert isinstance(error, RemoteRankError)
        assert (error.rank, error.cause, error.message) == (1, "MemoryError", "no room")


# --- the same on every kind of world -------------------------------------------------------------


@pytest.mark.parametrize("split", [False, True], ids=("whole", "split"))
@pytest.mark.parametrize("on", KINDS)
def test_all_worlds_conform(on: Where, split: bool) -> None:
    def tree(ctx: Context, odd: int) -> Any:
        model, optimizer = trained()
        if ctx.rank == odd:
            spoil_parameter(model, optimizer)
            spoil_state(model, optimizer)
        return {"m": model, "o": optimizer, "x": torch.arange(600_000).view(2, -1).T.contiguous().T}

    def work(ctx: Context, odd: int) -> Any:
        check_replicas(split_up(ctx) if split else ctx, tree(ctx, odd))

    assert run_ranks(functools.partial(work, odd=-1), 3, on) == [None] * 3
    for odd in (0, 2):
        rows = drift(functools.partial(work, odd=odd), 3, on).rows
        assert [(row.rank, row.path, row.num_differing, row.position) for row in rows] == [
            (odd, "tree['m']['0.weight']", 1, (1, 2)),
            (odd, "tree['o']['state'][1]['exp_avg']", 1, (2,)),
        ]


# --- what is refused -----------------------------------------------------------------------------


@given(st.integers(2, 5).flatmap(mismatched_trees), st.booleans(), st.booleans())
def test_trees_of_another_form_give_every_rank_one_error(drawn: Mismatched, split: bool, debug: bool) -> None:
    def work(ctx: Context) -> Any:
        check_replicas(split_up(ctx) if split else ctx, drawn.trees[ctx.rank], name="tree")

    errors = run_ranks(failure(work), len(drawn.trees), debug=debug)
    assert {type(error) for error in errors} == {MismatchError}
    assert len({str(error) for error in errors}) == 1
    assert errors[0].operation == "check_replicas"
    assert {row.rank for row in errors[0].rows} == {drawn.rank}
    assert {row.path for row in errors[0].rows} == set(drawn.paths)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: "text", "state['x'] must be a tensor, got str"),
        (lambda: 1.5, "state['x'] must be a tensor, got float"),
        (lambda: torch.eye(2).to_sparse(), "state['x'] must be a dense tensor with data"),
        (lambda: torch.nn.Linear(2, 2, device="meta"), "state['x']['bias'] must be a dense tensor with data"),
    ],
    ids=("str", "float", "sparse", "meta"),
)
def test_a_leaf_that_is_no_dense_tensor_is_named_on_every_rank(make: Callable[[], Any], said: str) -> None:
    def work(ctx: Context) -> Any:
        check_replicas(ctx, {"x": make() if ctx.rank == 1 else torch.zeros(2)}, name="state")

    here, there = run_ranks(failure(work), 2, timeout_s=10)
    assert type(there) is TypeError
    assert str(there).startswith(f"check_replicas: {said}")
    assert isinstance(here, RemoteRankError)
    assert (here.rank, here.cause, here.message) == (1, "TypeError", str(there))


def test_the_name_is_a_string_and_the_same_on_all_ranks() -> None:
    def work(ctx: Context, name: Any) -> Any:
        check_replicas(ctx, (), name=name if ctx.rank else "model")

    for error in run_ranks(failure(functools.partial(work, name="optimizer")), 2):
        assert isinstance(error, MismatchError)
        assert [row[2:] for row in error.rows] == [("name='model'", "name='optimizer'")]
    _, there = run_ranks(failure(functools.partial(work, name=5)), 2)
    assert isinstance(there, TypeError)
    assert str(there) == "check_replicas: name must be a string, got 5."


def test_shards_are_compared_along_the_axes_that_replicate_them() -> None:
    def work(ctx: Context) -> str:
        from torch.distributed.tensor import DTensor, Replicate, Shard

        assert ctx.mesh is not None
        mesh = ctx.mesh.device_mesh("dp_replicate", "shard")

        def tree(odd: float) -> Any:
            shard = torch.full((2,), float(ctx.coordinate("dp_shard")))
            shard[1] += odd
            return {
                "shard": DTensor.from_local(shard, mesh, [Replicate(), Shard(0)], run_check=False),
                "whole": torch.ones(2),
            }

        check_replicas(ctx, tree(0.0), name="model")
        try:
            check_replicas(ctx, tree(1.0 if ctx.rank == 3 else 0.0), name="model")
        except (ReplicaDriftError, RemoteRankError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    mesh = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    errors = run_ranks(work, 4, "processes", parallelism_config=mesh)
    # Ranks 1 and 3 hold the same shard.
    assert [error.partition(":")[0] for error in errors] == ["RemoteRankError", "ReplicaDriftError"] * 2
    assert "model['shard']" in errors[1]
