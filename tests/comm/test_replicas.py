"""Replicas that are equal pass; of others every rank names the same leaves and ranks."""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from accelfn.comm import check_replicas, gather
from accelfn.config import ParallelismConfig
from accelfn.context import Context
from accelfn.errors import Drift, RemoteRankError, ReplicaDriftError
from accelfn.testing import Where, run_ranks
from accelfn.testing.strategies import dtypes, shapes, tensors, trees
from accelfn.tree import flatten, listify, map_tensors
from tests.comm.seam import counted, failure, same_mismatch, split_up
from tests.trees import values

Work = Callable[[Context], Any]


def drift(work: Work, size: int, on: Where = "memory") -> ReplicaDriftError:
    """Give the one error that every rank raises."""
    errors = run_ranks(failure(work), size, on, timeout_s=20)
    assert [type(error) for error in errors] == [ReplicaDriftError] * size, errors
    assert len({str(error) for error in errors}) == 1
    assert len({error.rows for error in errors}) == 1
    return errors[0]


def copies(tree: Any, size: int) -> list[Any]:
    """Give each rank a tree of its own, of equal bits in contiguous tensors."""
    return [map_tensors(lambda leaf: leaf.contiguous().clone(), tree) for _ in range(size)]


def flip(tree: Any, index: int, byte: int, bit: int) -> Any:
    """Give a tree with one other bit in leaf ``index``."""
    leaves, structure = flatten(tree)
    flat = leaves[index].clone(memory_format=torch.contiguous_format).reshape(-1)
    flat.view(torch.uint8)[byte] ^= 1 << bit
    return structure.unflatten([*leaves[:index], flat.view(leaves[index].shape), *leaves[index + 1 :]])


def any_tree() -> st.SearchStrategy[Any]:
    return trees(tensors(dtypes(float8=True), shapes(max_side=5)))


# --- equal and not equal -------------------------------------------------------------------------


@given(any_tree(), st.integers(1, 4), st.booleans())
def test_equal_replicas_pass_and_stay_as_they_are(tree: Any, size: int, split: bool) -> None:
    # On rank 0 some leaves are views with gaps or turned dimensions: only their values count.
    ranked = [tree, *copies(tree, size - 1)]
    before = [values(own) for own in ranked]
    run_ranks(lambda ctx: check_replicas(split_up(ctx) if split else ctx, ranked[ctx.rank]), size)
    assert [values(own) for own in ranked] == before


@given(any_tree(), st.integers(2, 4), st.booleans(), st.data())
def test_a_flipped_bit_is_found_on_every_rank(tree: Any, size: int, split: bool, data: st.DataObject) -> None:
    tree = [tree, torch.zeros(2)]  # so that there is an element
    leaves, structure = flatten(tree)
    index = data.draw(st.sampled_from([index for index, leaf in enumerate(leaves) if leaf.numel()]))
    byte = data.draw(st.integers(0, leaves[index].numel() * leaves[index].dtype.itemsize - 1))
    odd = data.draw(st.integers(0, size - 1))
    ranked = [tree, *copies(tree, size - 1)]
    ranked[odd] = flip(ranked[odd], index, byte, data.draw(st.integers(0, 7)))

    def work(ctx: Context) -> Any:
        check_replicas(split_up(ctx) if split else ctx, ranked[ctx.rank], name="state")

    (row,) = drift(work, size).rows
    # Of two ranks the lower is right.
    assert (row.rank, row.reference) == ((odd, 1 if odd == 0 else 0) if size > 2 else (1, 0))
    assert row.path == structure.paths("state")[index]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((1, 2, 2), [(0, 1)]),
        ((2, 1, 2), [(1, 0)]),
        ((1, 2, 4), [(1, 0), (2, 0)]),
        ((1, 2, 2, 1), [(1, 0), (2, 0)]),
        ((9, 5, 1, 5), [(0, 1), (2, 1)]),
    ],
)
def test_most_ranks_are_the_reference_and_of_equally_many_the_lowest(
    values: tuple[float, ...], expected: list[tuple[int, int]]
) -> None:
    def work(ctx: Context) -> Any:
        error = failure(lambda ctx: check_replicas(ctx, torch.full((2, 3), values[ctx.rank])))(ctx)
        # Afterwards the ranks go on together.
        assert listify(gather(ctx, torch.tensor([ctx.rank]))) == list(range(len(values)))
        return error

    for error in run_ranks(work, len(values)):
        assert [(row.rank, row.reference) for row in error.rows] == expected


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
        assert drift(functools.partial(work, nested=nested), 3).rows == (Drift(2, expected, 0),)


def dtensor(ctx: Context, *, sharded: bool) -> Any:
    mesh = init_device_mesh("cpu", (ctx.num_processes,))
    local = torch.full((4,), 7 if ctx.rank == 1 else 5)
    return DTensor.from_local(local, mesh, [Shard(0) if sharded else Replicate()], run_check=False)


@pytest.mark.usefixtures("dtensors")
def test_of_a_replicated_dtensor_the_local_tensors_are_compared() -> None:
    error = drift(lambda ctx: check_replicas(ctx, [dtensor(ctx, sharded=False)]), 2, "processes")
    assert error.rows == (Drift(1, "tree[0]", 0),)


@pytest.mark.usefixtures("dtensors")
def test_a_sharded_dtensor_is_refused() -> None:
    work = failure(lambda ctx: check_replicas(ctx, [dtensor(ctx, sharded=True)], name="p"))
    for error in run_ranks(work, 2, "processes"):
        assert type(error) is TypeError
        assert str(error).startswith(
            "check_replicas: p[0] is a DTensor that is sharded on another mesh than the context's, "
            "with placements (Shard(dim=0),)"
        )


# --- how much it speaks --------------------------------------------------------------------------


@pytest.mark.parametrize("odd", [False, True])
def test_equal_replicas_take_one_exchange_and_others_two_whatever_their_size(odd: bool) -> None:
    def work(ctx: Context) -> Any:
        watched, calls = counted(ctx)
        with pytest.raises(ReplicaDriftError) if odd else nullcontext():
            check_replicas(watched, [torch.full((5,), ctx.rank * odd) for _ in range(1000)])
        return dict(calls)

    # Digests of that many leaves take several messages.
    for calls in run_ranks(work, 2):
        assert set(calls) == {"all_gather_bytes"}
        assert odd or calls == {"all_gather_bytes": 1}


class Without(TorchDispatchMode):
    """Let an operation of torch fail, on the thread of one rank."""

    def __init__(self, operation: Any) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType] -- torch leaves it untyped
        self.operation = operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is self.operation:
            raise MemoryError("no room")
        return func(*args, **(kwargs or {}))


def test_a_failure_on_one_rank_is_told_to_all_and_nobody_waits() -> None:
    def work(ctx: Context) -> Any:
        with Without(torch.ops.aten.mul.Tensor if ctx.rank == 1 else None):
            check_replicas(ctx, [torch.tensor(ctx.rank), torch.tensor(-ctx.rank)])

    here, there, third = run_ranks(failure(work), 3, timeout_s=10)
    assert type(there) is MemoryError
    for error in (here, third):
        assert isinstance(error, RemoteRankError)
        assert (error.rank, error.cause, error.message) == (1, "MemoryError", "no room")


# --- the same on every kind of world -------------------------------------------------------------


def test_processes_compare_as_threads_do() -> None:
    def work(ctx: Context, odd: int) -> Any:
        model, optimizer = trained()
        if ctx.rank == odd:
            spoil_parameter(model, optimizer)
            spoil_state(model, optimizer)
        large = torch.arange(600_000).view(2, -1).T.contiguous().T
        check_replicas(ctx, {"m": model, "o": optimizer, "x": large})

    assert run_ranks(functools.partial(work, odd=-1), 2, "processes") == [None] * 2
    rows = drift(functools.partial(work, odd=1), 2, "processes").rows
    paths = ("tree['m']['0.weight']", "tree['o']['state'][1]['exp_avg']")
    assert [(row.rank, row.path) for row in rows] == [(1, path) for path in paths]


# --- what is refused -----------------------------------------------------------------------------


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
    def errors(name: Any) -> list[Any]:
        return run_ranks(failure(lambda ctx: check_replicas(ctx, (), name=name if ctx.rank else "model")), 2)

    (row,) = same_mismatch(errors("optimizer")).rows
    assert row[2:] == ("name='model'", "name='optimizer'")
    assert str(errors(5)[1]) == "check_replicas: name must be a string, got 5."


@pytest.mark.usefixtures("dtensors")
def test_shards_are_compared_along_the_axes_that_replicate_them() -> None:
    def work(ctx: Context) -> str:
        assert ctx.mesh is not None
        mesh = ctx.mesh.device_mesh("dp_replicate", "shard")

        def tree(odd: float) -> Any:
            shard = torch.full((2,), float(ctx.coordinate("dp_shard")))
            shard[1] += odd
            spread = DTensor.from_local(shard, mesh, [Replicate(), Shard(0)], run_check=False)
            return {"shard": spread, "whole": torch.ones(2)}

        check_replicas(ctx, tree(0.0), name="model")
        error = failure(lambda ctx: check_replicas(ctx, tree(float(ctx.rank == 3)), name="model"))(ctx)
        return f"{type(error).__name__}: {error}"

    mesh = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    errors = run_ranks(work, 4, "processes", parallelism_config=mesh)
    # Ranks 1 and 3 hold the same shard.
    assert [error.partition(":")[0] for error in errors] == ["RemoteRankError", "ReplicaDriftError"] * 2
    assert "model['shard']" in errors[1]
