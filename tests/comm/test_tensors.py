"""Laws of the operations on trees across ranks, against a reference that needs no ranks."""

import operator
from collections import UserDict
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from accelfn.comm import (
    broadcast,
    check_replicas,
    gather,
    pad_across_processes,
    reduce,
    scatter,
    split_sizes,
    verify_structure,
)
from accelfn.context import Context
from accelfn.errors import NotAvailableError, RemoteRankError
from accelfn.testing import Where, run_ranks
from accelfn.testing.strategies import (
    DTYPES,
    Mismatched,
    Pair,
    Sample,
    dtypes,
    mismatched_trees,
    rank_trees,
    shapes,
    tensors,
    trees,
    worlds,
)
from accelfn.tree import flatten, map_tensors
from tests.comm.seam import counted, failure, same_mismatch, split_up
from tests.trees import values


def by_leaf(function: Callable[[list[torch.Tensor]], torch.Tensor], ranked: list[Any]) -> Any:
    """Apply ``function`` to what all ranks have of each leaf: the reference of every operation."""
    structure = flatten(ranked[0])[1]
    columns = zip(*(flatten(tree)[0] for tree in ranked), strict=True)
    return structure.unflatten([function(list(column)) for column in columns])


def joined(column: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([leaf if leaf.dim() else leaf.reshape(1) for leaf in column])


def summed(column: list[torch.Tensor]) -> torch.Tensor:
    dtype = column[0].dtype
    if dtype == torch.bool:
        return torch.stack(column).any(0)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return torch.stack([leaf.to(wide) for leaf in column]).sum(0).to(dtype)


def extreme(column: list[torch.Tensor], *, largest: bool) -> torch.Tensor:
    stacked = torch.stack([leaf.double() for leaf in column])
    return (stacked.amax(0) if largest else stacked.amin(0)).to(column[0].dtype)


def scaled(column: list[torch.Tensor], scale: float) -> torch.Tensor:
    wide = torch.complex128 if column[0].is_complex() else torch.float64
    return (torch.stack([leaf.to(wide) for leaf in column]).sum(0) * scale).to(column[0].dtype)


def storages(tree: Any) -> set[int]:
    """Say which blocks of memory the leaves of ``tree`` use."""
    return {leaf.untyped_storage().data_ptr() for leaf in flatten(tree)[0] if leaf.numel()}


def everywhere(operation: Callable[[Context, Any], Any], ranked: list[Any], *, split: bool) -> list[Any]:
    """Run ``operation`` on each rank's tree, and check what holds for all operations.

    Inputs stay as they are, structures and types are kept, and no result shares memory with anything of
    another rank: after every rank has overwritten its result, all inputs are still what they were.
    """
    before = [values(tree) for tree in ranked]

    def work(ctx: Context) -> Any:
        given = ranked[ctx.rank]
        result = operation(split_up(ctx) if split else ctx, given)
        assert (type(result), flatten(result)[1]) == (type(given), flatten(given)[1])
        return result

    results = run_ranks(work, len(ranked))
    kept = [values(tree) for tree in results]
    for rank, result in enumerate(results):
        others = [tree for other, tree in enumerate(ranked) if other != rank]
        assert not any(storages(result) & storages(tree) for tree in others), "memory of another rank's input"
        own = storages(ranked[rank])
        for leaf in flatten(result)[0]:
            if leaf.is_contiguous() and not storages(leaf) & own:
                leaf.zero_()
        for later in range(rank + 1, len(ranked)):
            assert values(results[later]) == kept[later], "two results share memory"
    assert [values(tree) for tree in ranked] == before
    return kept


def ranked_trees(*, rows: bool = False, kinds: st.SearchStrategy[torch.dtype] | None = None) -> Any:
    """Draw one tree per rank, in worlds of 1 to 5."""
    leaf = tensors(
        dtypes(float8=True) if kinds is None else kinds, shapes(min_dims=1 if rows else 0), contiguous=True
    )
    return worlds().flatmap(lambda size: rank_trees(size, trees(leaf)))


# Trees are drawn slowly.
heavy = settings(max_examples=12)

# --- the laws ------------------------------------------------------------------------------------


@heavy
@given(ranked_trees(), st.booleans())
def test_gather_joins_rows_in_rank_order(ranked: list[Any], split: bool) -> None:
    expected = values(by_leaf(joined, ranked))
    assert everywhere(gather, ranked, split=split) == [expected] * len(ranked)


ANY_KIND = dtypes(float8=True)
REAL = ANY_KIND.filter(lambda kind: not kind.is_complex)
# Options of reduce, what they do to a column of leaves, and the dtypes for which they are.
REDUCTIONS: tuple[tuple[dict[str, Any], Callable[[list[torch.Tensor]], torch.Tensor], Any], ...] = (
    ({}, summed, ANY_KIND),
    ({"reduction": "max"}, partial(extreme, largest=True), REAL),
    ({"reduction": "min"}, partial(extreme, largest=False), REAL),
    ({"scale": 0.5}, partial(scaled, scale=0.5), ANY_KIND.filter(lambda kind: kind.is_floating_point)),
)


@heavy
@given(st.sampled_from(REDUCTIONS), st.booleans(), st.data())
def test_reduce_is_exact(case: Any, split: bool, data: st.DataObject) -> None:
    options, reference, kinds = case
    ranked = data.draw(ranked_trees(kinds=kinds))
    expected = values(by_leaf(reference, ranked))
    found = everywhere(lambda ctx, tree: reduce(ctx, tree, **options), ranked, split=split)
    assert found == [expected] * len(ranked)


@heavy
@given(ranked_trees(kinds=st.sampled_from((torch.float32, torch.float64, torch.complex64))), st.booleans())
def test_reduce_averages(ranked: list[Any], split: bool) -> None:
    expected = values(by_leaf(lambda column: scaled(column, 1 / len(ranked)), ranked))
    found = everywhere(lambda ctx, tree: reduce(ctx, tree, "mean"), ranked, split=split)
    assert all(tree == found[0] for tree in found)
    for (path, (*form, numbers)), (other, (*wanted, references)) in zip(found[0], expected, strict=True):
        assert (path, form) == (other, wanted)
        assert numbers == pytest.approx(references, rel=1e-6)


@heavy
@given(ranked_trees(), st.booleans(), st.data())
def test_broadcast_gives_all_what_one_has(ranked: list[Any], split: bool, data: st.DataObject) -> None:
    source = data.draw(st.integers(0, len(ranked) - 1))
    expected = values(ranked[source])
    found = everywhere(lambda ctx, tree: broadcast(ctx, tree, source), ranked, split=split)
    assert found == [expected] * len(ranked)


@heavy
@given(ranked_trees(rows=True), st.booleans(), st.data())
def test_scatter_then_gather_gives_the_tree_back(ranked: list[Any], split: bool, data: st.DataObject) -> None:
    source = data.draw(st.integers(0, len(ranked) - 1))
    before = [values(tree) for tree in ranked]

    def work(ctx: Context) -> Any:
        ctx = split_up(ctx) if split else ctx
        tree = ranked[ctx.rank]
        part = scatter(ctx, tree if ctx.rank == source else None, source)
        assert flatten(part)[1] == flatten(ranked[source])[1]
        if ctx.num_processes == 1:
            assert part is tree
        return part

    parts = run_ranks(work, len(ranked))
    assert [values(tree) for tree in ranked] == before
    for leaves, whole in zip(
        zip(*(flatten(part)[0] for part in parts), strict=True), flatten(ranked[source])[0], strict=True
    ):
        assert [len(leaf) for leaf in leaves] == split_sizes(len(whole), len(ranked))
        assert values(torch.cat(list(leaves))) == values(whole)
    if len(ranked) > 1:
        for part in parts:
            map_tensors(torch.Tensor.zero_, part)
        assert [values(tree) for tree in ranked] == before


@st.composite
def uneven_trees(draw: st.DrawFn) -> tuple[list[Any], int]:
    """Draw trees that agree but for the length of one dimension, which not every leaf has."""
    dim = draw(st.integers(-2, 1))
    ranked = draw(ranked_trees())

    def shorten(leaf: torch.Tensor) -> torch.Tensor:
        if not -leaf.dim() <= dim < leaf.dim():
            return leaf
        return leaf.narrow(dim, 0, draw(st.integers(0, leaf.shape[dim])))

    return [map_tensors(shorten, tree) for tree in ranked], dim


@heavy
@given(uneven_trees(), st.booleans(), st.booleans(), st.sampled_from((0, 1)))
def test_padding_can_be_cut_off(drawn: tuple[list[Any], int], first: bool, split: bool, fill: int) -> None:
    ranked, dim = drawn

    def operation(ctx: Context, tree: Any) -> Any:
        return pad_across_processes(ctx, tree, dim, fill, first)

    def work(ctx: Context) -> Any:
        return operation(split_up(ctx) if split else ctx, ranked[ctx.rank])

    everywhere(operation, ranked, split=split)
    for padded, tree in zip(run_ranks(work, len(ranked)), ranked, strict=True):
        assert type(padded) is type(tree)
        columns = zip(*(flatten(one)[0] for one in ranked), strict=True)
        for leaf, old, column in zip(flatten(padded)[0], flatten(tree)[0], columns, strict=True):
            assert leaf.dtype == old.dtype
            if not -old.dim() <= dim < old.dim():
                assert leaf is old
                continue
            longest = max(one.shape[dim] for one in column)
            missing = longest - old.shape[dim]
            assert leaf.shape[dim] == longest
            assert values(leaf.narrow(dim, missing if first else 0, old.shape[dim])) == values(old)
            filling = leaf.narrow(dim, 0 if first else old.shape[dim], missing)
            assert bool((filling.to(torch.complex128) == fill).all())
            assert missing or leaf is old


OPERATIONS: dict[str, Callable[[Context, Any], Any]] = {
    "gather": gather,
    "reduce": reduce,
    "reduce max": partial(reduce, reduction="max"),
    "broadcast": partial(broadcast, from_process=1),
    "scatter": partial(scatter, from_process=1),
    "pad": partial(pad_across_processes, dim=-1),
}
each_operation = pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)


# Padding is for trees that differ in length, and scatter takes the tree of one rank.
@heavy
@given(
    st.sampled_from((gather, reduce, broadcast, check_replicas, verify_structure)),
    st.integers(2, 5).flatmap(mismatched_trees),
    st.booleans(),
    st.booleans(),
)
def test_trees_that_differ_give_every_rank_one_error(
    operation: Any, drawn: Mismatched, split: bool, debug: bool
) -> None:
    def work(ctx: Context) -> Any:
        return operation(split_up(ctx) if split else ctx, drawn.trees[ctx.rank])

    error = same_mismatch(run_ranks(failure(work), len(drawn.trees), debug=debug))
    rows = error.rows
    assert {(row.rank, row.path) for row in rows} == {(drawn.rank, path) for path in drawn.paths}
    lines = str(error).splitlines()
    for row in rows:
        line = next(line for line in lines if line.startswith(f"  {row.rank} ") and row.path in line)
        # A long text is cut off, perhaps at a space, and a line ends with none.
        assert row.found.rstrip() in line
        assert row.expected.rstrip() in line


@heavy
@given(st.integers(2, 5).flatmap(rank_trees), st.booleans())
def test_dicts_that_were_filled_in_another_order_keep_their_leaves(ranked: list[Any], split: bool) -> None:
    trees = [{"tree": tree, "rank": torch.tensor([rank])} for rank, tree in enumerate(ranked)]
    turned = [dict(reversed(tree.items())) if rank % 2 else tree for rank, tree in enumerate(trees)]
    expected = values(by_leaf(joined, trees))
    results = run_ranks(lambda ctx: gather(split_up(ctx) if split else ctx, turned[ctx.rank]), len(ranked))
    assert [values(result) for result in results] == [expected] * len(ranked)
    assert [list(result) for result in results] == [list(tree) for tree in turned]


@pytest.mark.parametrize(
    ("operation", "reference"), [(reduce, summed), (gather, joined), (broadcast, operator.itemgetter(0))]
)
def test_leaves_above_a_mebibyte_travel_alone_and_arrive_alike(operation: Any, reference: Any) -> None:
    def tree(rank: int) -> Any:
        large = torch.arange((1 << 18) + 3, dtype=torch.int32) + rank
        views = {"turned": large.view(-1, 1).T, "few": large[:2]}
        return {"large": large, "small": torch.tensor([rank]), **views}

    ranked = [tree(rank) for rank in range(3)]
    expected = flatten(by_leaf(reference, ranked))[0]
    for result in run_ranks(lambda ctx: operation(ctx, ranked[ctx.rank]), 3):
        assert all(map(torch.equal, flatten(result)[0], expected))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("negative", [False, True], ids=("conjugate", "negative"))
@each_operation
def test_lazy_views_travel(operation: Callable[[Context, Any], Any], negative: bool, split: bool) -> None:
    lazy = torch.complex(torch.arange(40.0), torch.ones(40)).conj()
    lazy = lazy.imag if negative else lazy
    if getattr(operation, "keywords", {}).get("reduction") == "max":
        lazy = lazy.imag if lazy.is_complex() else lazy  # complex numbers have no maximum

    def work(leaf: torch.Tensor) -> Any:
        return run_ranks(lambda ctx: values(operation(split_up(ctx) if split else ctx, leaf)), 2)

    assert work(lazy) == work(lazy.resolve_conj().resolve_neg().clone())


def test_results_are_detached_and_one_process_gives_back_what_it_got() -> None:
    def work(ctx: Context) -> list[bool]:
        weight = torch.ones(2, requires_grad=True)
        results = (
            gather(ctx, weight),
            reduce(ctx, weight),
            reduce(ctx, weight, "none"),
            broadcast(ctx, weight),
            broadcast(ctx, weight.repeat(200_000)),  # too large for the opening exchange
            scatter(ctx, weight),
        )
        return [result.requires_grad for result in results]

    for size in (1, 2):
        assert run_ranks(work, size) == [[False] * 6] * size
    tree = {"x": torch.ones(2), "n": None}
    assert all(operation(Context(), tree) is tree for operation in (gather, reduce, broadcast, scatter))


@pytest.mark.parametrize("operation", [gather, reduce, broadcast, scatter, pad_across_processes])
@pytest.mark.parametrize("size", [1, 2])
def test_transforms_of_functions_are_refused_on_every_rank(operation: Any, size: int) -> None:
    def work(ctx: Context) -> str:
        with pytest.raises((NotAvailableError, RemoteRankError)) as caught:
            cast("Any", torch.func).grad(lambda x: operation(ctx, x).sum())(torch.ones(2))  # pyright: ignore[reportUnknownLambdaType]
        return str(caught.value)

    texts = run_ranks(work, size)
    assert all("it isn't differentiable" in text and "all_gather" in text for text in texts)


def test_padding_keeps_gradients_on_the_longest_rank_and_on_shorter_ones() -> None:
    def work(ctx: Context) -> float:
        x = torch.ones(2 + ctx.rank, requires_grad=True)
        (gradient,) = torch.autograd.grad(pad_across_processes(ctx, x).sum(), x)
        return float(gradient.sum())

    assert run_ranks(work, 2) == [2.0, 3.0]


# --- how often it speaks -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "collective"), [(gather, "all_gather"), (reduce, "all_reduce"), (broadcast, "broadcast")]
)
def test_there_is_one_collective_per_dtype(operation: Any, collective: str) -> None:
    def work(ctx: Context, split: bool) -> Any:
        watched, calls = counted(ctx)
        floats, integers = torch.full((30,), float(ctx.rank)), torch.full((20,), ctx.rank)
        operation(split_up(watched) if split else watched, [floats, integers] * 10)
        return dict(calls)

    expected = {"all_gather_bytes": 1, collective: 2}
    assert run_ranks(partial(work, split=True), 3) == [expected] * 3
    assert run_ranks(partial(work, split=False), 3) == [{"all_gather_bytes": 1}] * 3


# --- the same on every kind of world -------------------------------------------------------------


def conformance_trees(rank: int) -> list[Any]:
    """Give trees of every container, dtype and shape, with values of this rank."""

    def leaf(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return ((torch.arange(torch.Size(shape).numel()) + rank) % 2).to(dtype).view(shape)

    return [
        {str(dtype): leaf(dtype, 3, 2) for dtype in DTYPES},
        [leaf(dtype, 1500) for dtype in (torch.float64, torch.bfloat16, torch.int64, torch.bool)],
        Pair({"a": leaf(torch.float32, 1)}, Sample((leaf(torch.int64, 4, 1).T,), None)),
        UserDict({"input_ids": leaf(torch.int64, 2, 5), "inner": [leaf(torch.bool, 2)]}),
        {"empty": leaf(torch.float32, 0, 2), "other": leaf(torch.float64, 2, 0)},
        [],
        None,
    ]


def reference(name: str, ranked: list[Any], rank: int) -> Any:
    match name:
        case "gather":
            return by_leaf(joined, ranked)
        case "reduce":
            return by_leaf(summed, ranked)
        case "reduce max":
            return by_leaf(partial(extreme, largest=True), ranked)
        case "scatter":
            return map_tensors(lambda leaf: leaf.tensor_split(len(ranked))[rank], ranked[1])
        case _:
            return ranked[1 if name == "broadcast" else rank]


# Ranks of one node exchange through shared memory, those of several through sockets.
@pytest.mark.parametrize(
    ("on", "size", "num_nodes", "split"),
    [("memory", 3, 1, False), ("memory", 2, 1, True), ("processes", 2, 1, False), ("processes", 2, 2, False)],
)
def test_all_worlds_conform(on: Where, size: int, num_nodes: int, split: bool) -> None:
    def names(tree: Any) -> list[str]:
        is_complex = any(leaf.is_complex() for leaf in flatten(tree)[0])
        return [name for name in OPERATIONS if not (is_complex and name == "reduce max")]

    def work(ctx: Context) -> Any:
        ctx = split_up(ctx) if split else ctx
        return [
            {name: values(OPERATIONS[name](ctx, tree)) for name in names(tree)}
            for tree in conformance_trees(ctx.rank)
        ]

    columns = [list(trees) for trees in zip(*map(conformance_trees, range(size)), strict=True)]
    for rank, found in enumerate(run_ranks(work, size, on, num_nodes=num_nodes)):
        for results, ranked in zip(found, columns, strict=True):
            assert results == {name: values(reference(name, ranked, rank)) for name in names(ranked[0])}


# --- what is refused -----------------------------------------------------------------------------

BAD_LEAVES = (
    (lambda: "text", "tree['x'] must be a tensor, got str"),
    (lambda: torch.eye(2).to_sparse(), "a dense tensor with data, got one of layout torch.sparse_coo"),
    (lambda: torch.zeros(2, device="meta"), "a dense tensor with data, got one on the meta device"),
)


@pytest.mark.parametrize(("make", "said"), BAD_LEAVES, ids=("str", "sparse", "meta"))
@each_operation
def test_a_leaf_that_can_not_travel_is_named_on_every_rank(
    operation: Callable[[Context, Any], Any], make: Callable[[], Any], said: str
) -> None:
    def work(ctx: Context) -> Any:
        return operation(ctx, {"x": make() if ctx.rank == 1 else torch.zeros(2)})

    here, there, third = run_ranks(failure(work), 3, timeout_s=10)
    assert type(there) is TypeError
    assert said in str(there)
    for error in (here, third):
        assert isinstance(error, RemoteRankError)
        assert (error.rank, error.cause, error.message) == (1, "TypeError", str(there))
    assert str(here) == str(third)


ZERO = torch.zeros(1)
WRONG: Any = "a"
REFUSED: tuple[tuple[Callable[[Context], Any], type[Exception], str], ...] = (
    (lambda ctx: broadcast(ctx, ZERO, 2), ValueError, "from_process must be a rank in 0..1, got 2"),
    (lambda ctx: broadcast(ctx, ZERO, -1), ValueError, "from_process must be a rank in 0..1, got -1"),
    (lambda ctx: scatter(ctx, ZERO, 9), ValueError, "from_process must be a rank in 0..1, got 9"),
    (lambda ctx: reduce(ctx, ZERO, "average"), ValueError, "must be one of sum, mean, max, min, none"),
    (lambda ctx: reduce(ctx, torch.tensor([1]), "mean"), TypeError, "tree has dtype torch.int64, which"),
    (lambda ctx: reduce(ctx, [ZERO.bool()], scale=2.0), TypeError, "tree[0] has dtype torch.bool"),
    (lambda ctx: reduce(ctx, torch.tensor([1j]), "max"), TypeError, "complex numbers have no max"),
    (lambda ctx: pad_across_processes(ctx, torch.tensor([1]), pad_index=0.5), TypeError, "pad_index=0.5"),
    (
        lambda ctx: pad_across_processes(ctx, torch.zeros(1 + ctx.rank, dtype=torch.uint8), pad_index=-1),
        TypeError,
        "torch.uint8, which can't represent pad_index=-1",
    ),
    (lambda ctx: pad_across_processes(ctx, ZERO.int(), pad_index=torch.nan), TypeError, "can't represent"),
    (lambda ctx: pad_across_processes(ctx, ZERO.half(), pad_index=1e6), TypeError, "pad_across_processes: "),
    (lambda ctx: pad_across_processes(ctx, ZERO, pad_index=WRONG), TypeError, "pad_across_processes: "),
    (lambda ctx: pad_across_processes(ctx, ZERO, dim=WRONG), TypeError, "pad_across_processes: "),
    (lambda ctx: broadcast(ctx, ZERO, WRONG), TypeError, "broadcast: "),
    (lambda ctx: reduce(ctx, ZERO, scale=WRONG), TypeError, "reduce: "),
)


@pytest.mark.parametrize(
    ("call", "kind", "said"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_bad_argument_is_refused_on_every_rank(
    call: Callable[[Context], Any], kind: type[Exception], said: str
) -> None:
    for error in run_ranks(failure(call), 2, timeout_s=10):
        assert type(error) is kind
        assert said in str(error)


@pytest.mark.parametrize("elements", [2, 1 << 20], ids=("small", "large"))
def test_a_mean_or_scale_of_halves_is_not_cut_off_by_its_sum(elements: int) -> None:
    large = torch.full((elements,), 60000.0, dtype=torch.float16)
    assert run_ranks(lambda ctx: bool((reduce(ctx, large, "mean") == large).all()), 2) == [True] * 2
    if elements == 2:
        assert run_ranks(lambda ctx: bool((reduce(ctx, large, scale=0.5) == large).all()), 2) == [True] * 2
        wide = torch.full((2,), 288.0)
        eighth = wide.to(torch.float8_e4m3fn)
        assert run_ranks(lambda ctx: bool((reduce(ctx, eighth, "mean").float() == wide).all()), 2)[0]
