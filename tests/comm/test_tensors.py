"""Laws of the operations on trees across ranks, against a reference that needs no ranks."""

import functools
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BatchEncoding

from accelfn.comm import broadcast, gather, pad_across_processes, reduce, scatter, split_sizes
from accelfn.context import Context
from accelfn.errors import MismatchError, RemoteRankError
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
from accelfn.tree import flatten, listify, map_tensors
from tests.comm.seam import counted, failure, split_up

KINDS: tuple[Where, ...] = ("memory", "gloo", "processes")
MEBI = 1 << 20


def bits(tree: Any) -> list[Any]:
    """Give the leaves in a form that can be compared, by path: dicts may be filled in any order."""
    leaves, structure = flatten(tree)
    forms = [
        (leaf.dtype, tuple(leaf.shape), listify(leaf.to(torch.complex128).reshape(-1))) for leaf in leaves
    ]
    return sorted(zip(structure.paths(), forms, strict=True), key=lambda item: item[0])


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


def averaged(column: list[torch.Tensor]) -> torch.Tensor:
    dtype = column[0].dtype
    wide = torch.stack([leaf.to(torch.complex128 if dtype.is_complex else torch.float64) for leaf in column])
    return (wide.sum(0) / len(column)).to(dtype)


def memory(tree: Any) -> set[int]:
    """Say which blocks of memory the leaves of ``tree`` use."""
    return {leaf.untyped_storage().data_ptr() for leaf in flatten(tree)[0] if leaf.numel()}


def everywhere(
    operation: Callable[[Context, Any], Any], ranked: list[Any], *, split: bool, on: Where = "memory"
) -> list[Any]:
    """Run ``operation`` on each rank's tree, and check what holds for all operations.

    Inputs stay as they are, structures and types are kept, and no result shares memory with anything of
    another rank: after every rank has overwritten its result, all inputs are still what they were.
    """
    before = [bits(tree) for tree in ranked]

    def work(ctx: Context) -> Any:
        result = operation(split_up(ctx) if split else ctx, ranked[ctx.rank])
        given = ranked[ctx.rank]
        assert type(result) is type(given)
        assert flatten(result)[1] == flatten(given)[1]
        assert ctx.num_processes > 1 or memory(result) == memory(given)
        return result

    results = run_ranks(work, len(ranked), on)
    assert [bits(tree) for tree in ranked] == before
    kept = [bits(tree) for tree in results]
    if len(ranked) > 1 and on != "processes":
        own = [
            {leaf.untyped_storage().data_ptr() for leaf in flatten(tree)[0] if leaf.numel()}
            for tree in ranked
        ]
        for rank, result in enumerate(results):
            held = memory(result)
            for other in range(len(ranked)):
                if other != rank:
                    assert not held & own[other], "a result shares memory with the input of another rank"
        for rank, result in enumerate(results):
            for leaf in flatten(result)[0]:
                if not any(leaf is mine for mine in flatten(ranked[rank])[0]) and leaf.is_contiguous():
                    leaf.zero_()
            for later in range(rank + 1, len(ranked)):
                assert bits(results[later]) == kept[later], "two results share memory"
        assert [bits(tree) for tree in ranked] == before
    return kept


def ranked_trees(*, rows: bool = False, kinds: st.SearchStrategy[torch.dtype] | None = None) -> Any:
    """Draw one tree per rank, in worlds of 1 to 5."""
    leaf = tensors(
        dtypes(float8=True) if kinds is None else kinds, shapes(min_dims=1 if rows else 0), contiguous=True
    )
    return worlds().flatmap(lambda size: rank_trees(size, trees(leaf)))


# --- the laws ------------------------------------------------------------------------------------


@given(ranked_trees(), st.booleans())
def test_gather_joins_rows_in_rank_order(ranked: list[Any], split: bool) -> None:
    expected = bits(by_leaf(joined, ranked))
    assert everywhere(gather, ranked, split=split) == [expected] * len(ranked)


@given(ranked_trees(), st.booleans())
def test_reduce_sums_exactly(ranked: list[Any], split: bool) -> None:
    expected = bits(by_leaf(summed, ranked))
    assert everywhere(reduce, ranked, split=split) == [expected] * len(ranked)


@given(
    ranked_trees(kinds=dtypes(float8=True).filter(lambda kind: not kind.is_complex)),
    st.booleans(),
    st.booleans(),
)
def test_reduce_finds_extremes(ranked: list[Any], largest: bool, split: bool) -> None:
    def operation(ctx: Context, tree: Any) -> Any:
        return reduce(ctx, tree, "max" if largest else "min")

    expected = bits(by_leaf(functools.partial(extreme, largest=largest), ranked))
    assert everywhere(operation, ranked, split=split) == [expected] * len(ranked)


def real_kinds() -> st.SearchStrategy[torch.dtype]:
    return st.sampled_from((torch.float32, torch.float64, torch.complex64))


@given(ranked_trees(kinds=real_kinds()), st.booleans())
def test_reduce_averages(ranked: list[Any], split: bool) -> None:
    expected = bits(by_leaf(averaged, ranked))
    found = everywhere(lambda ctx, tree: reduce(ctx, tree, "mean"), ranked, split=split)
    assert all(one == found[0] for one in found)
    for (path, (dtype, shape, values)), (other, (kind, form, references)) in zip(
        found[0], expected, strict=True
    ):
        assert (path, dtype, shape) == (other, kind, form)
        assert values == pytest.approx(references, rel=1e-6)


@given(ranked_trees(kinds=dtypes(float8=True).filter(lambda kind: kind.is_floating_point)), st.booleans())
def test_reduce_scales_after_the_sum(ranked: list[Any], split: bool) -> None:
    def halved(column: list[torch.Tensor]) -> torch.Tensor:
        return (summed(column).double() * 0.5).to(column[0].dtype)

    expected = bits(by_leaf(halved, ranked))

    def work(ctx: Context) -> Any:
        return bits(reduce(split_up(ctx) if split else ctx, ranked[ctx.rank], scale=0.5))

    before = [bits(tree) for tree in ranked]
    assert run_ranks(work, len(ranked)) == [expected] * len(ranked)
    assert [bits(tree) for tree in ranked] == before


@given(ranked_trees(), st.booleans())
def test_reduce_none_leaves_all_as_it_is(ranked: list[Any], split: bool) -> None:
    found = everywhere(lambda ctx, tree: reduce(ctx, tree, "none"), ranked, split=split)
    assert found == [bits(tree) for tree in ranked]


@given(ranked_trees(), st.booleans(), st.data())
def test_broadcast_gives_all_what_one_has(ranked: list[Any], split: bool, data: st.DataObject) -> None:
    source = data.draw(st.integers(0, len(ranked) - 1))
    expected = bits(ranked[source])
    found = everywhere(lambda ctx, tree: broadcast(ctx, tree, source), ranked, split=split)
    assert found == [expected] * len(ranked)


@given(ranked_trees(rows=True), st.booleans(), st.data())
def test_scatter_then_gather_gives_the_tree_back(ranked: list[Any], split: bool, data: st.DataObject) -> None:
    source = data.draw(st.integers(0, len(ranked) - 1))
    before = [bits(tree) for tree in ranked]

    def work(ctx: Context) -> Any:
        ctx = split_up(ctx) if split else ctx
        tree = ranked[ctx.rank]
        part = scatter(ctx, tree if ctx.rank == source else None, source)
        assert flatten(part)[1] == flatten(ranked[source])[1]
        if ctx.num_processes == 1:
            assert part is tree
        return part

    parts = run_ranks(work, len(ranked))
    assert [bits(tree) for tree in ranked] == before
    for leaves, whole in zip(
        zip(*(flatten(part)[0] for part in parts), strict=True), flatten(ranked[source])[0], strict=True
    ):
        assert [len(leaf) for leaf in leaves] == split_sizes(len(whole), len(ranked))
        assert bits(torch.cat(list(leaves))) == bits(whole)
    if len(ranked) > 1:
        for part in parts:
            map_tensors(torch.Tensor.zero_, part)
        assert [bits(tree) for tree in ranked] == before


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


@given(uneven_trees(), st.booleans(), st.booleans(), st.sampled_from((0, 1)))
def test_padding_can_be_cut_off_again(
    drawn: tuple[list[Any], int], first: bool, split: bool, fill: int
) -> None:
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
            assert bits(leaf.narrow(dim, missing if first else 0, old.shape[dim])) == bits(old)
            filling = leaf.narrow(dim, 0 if first else old.shape[dim], missing)
            assert bool((filling.to(torch.complex128) == fill).all())
            assert missing or leaf is old


OPERATIONS: tuple[Callable[[Context, Any], Any], ...] = (
    gather,
    reduce,
    functools.partial(reduce, reduction="max"),
    functools.partial(broadcast, from_process=1),
    functools.partial(scatter, from_process=1),
    functools.partial(pad_across_processes, dim=-1),
)
NAMES = ("gather", "reduce", "reduce max", "broadcast", "scatter", "pad")
each_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=NAMES)


# Padding is for trees that differ in length, and scatter takes the tree of one rank.
@pytest.mark.parametrize(
    "operation", [OPERATIONS[0], OPERATIONS[1], OPERATIONS[3]], ids=("gather", "reduce", "broadcast")
)
@given(st.integers(2, 5).flatmap(mismatched_trees), st.booleans(), st.booleans())
def test_trees_that_differ_give_every_rank_one_error(
    operation: Callable[[Context, Any], Any], drawn: Mismatched, split: bool, debug: bool
) -> None:
    def work(ctx: Context) -> Any:
        return operation(split_up(ctx) if split else ctx, drawn.trees[ctx.rank])

    errors = run_ranks(failure(work), len(drawn.trees), debug=debug)
    assert {type(error) for error in errors} == {MismatchError}
    assert len({str(error) for error in errors}) == 1
    rows = errors[0].rows
    assert {row.rank for row in rows} == {drawn.rank}
    assert {row.path for row in rows} == set(drawn.paths)
    lines = str(errors[0]).splitlines()
    for row in rows:
        line = next(line for line in lines if line.startswith(f"  {row.rank} ") and row.path in line)
        assert (
            row.found.rstrip() in line
        )  # a long text is cut off, perhaps at a space, and a line ends with none
        assert row.expected.rstrip() in line


@given(st.integers(2, 5).flatmap(rank_trees), st.booleans())
def test_dicts_that_were_filled_in_another_order_keep_their_leaves(ranked: list[Any], split: bool) -> None:
    trees = [{"tree": tree, "rank": torch.tensor([rank])} for rank, tree in enumerate(ranked)]
    turned = [dict(reversed(tree.items())) if rank % 2 else tree for rank, tree in enumerate(trees)]
    expected = bits(by_leaf(joined, trees))
    results = run_ranks(lambda ctx: gather(split_up(ctx) if split else ctx, turned[ctx.rank]), len(ranked))
    assert [bits(result) for result in results] == [expected] * len(ranked)
    assert [list(result) for result in results] == [list(tree) for tree in turned]


def test_leaves_above_a_mebibyte_travel_alone_and_arrive_alike() -> None:
    def tree(rank: int) -> Any:
        large = torch.arange(MEBI // 4 + 3, dtype=torch.int32) + rank
        return {
            "large": large,
            "turned": large.view(-1, 1).T,
            "small": torch.tensor([rank]),
            "one": large[:2],
        }

    ranked = [tree(rank) for rank in range(3)]
    expected = by_leaf(summed, ranked)
    assert everywhere(reduce, ranked, split=False) == [bits(expected)] * 3
    ranked = [tree(rank) for rank in range(3)]
    assert everywhere(gather, ranked, split=False) == [bits(by_leaf(joined, ranked))] * 3
    ranked = [tree(rank) for rank in range(3)]
    assert everywhere(broadcast, ranked, split=False) == [bits(ranked[0])] * 3


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("negative", [False, True], ids=("conjugate", "negative"))
@each_operation
def test_lazy_views_travel(operation: Callable[[Context, Any], Any], negative: bool, split: bool) -> None:
    lazy = torch.complex(torch.arange(40.0), torch.ones(40)).conj()
    lazy = lazy.imag if negative else lazy
    if getattr(operation, "keywords", {}).get("reduction") == "max":
        lazy = lazy.imag if lazy.is_complex() else lazy  # complex numbers have no maximum

    def work(leaf: torch.Tensor) -> Any:
        return run_ranks(lambda ctx: bits(operation(split_up(ctx) if split else ctx, leaf)), 2)

    assert work(lazy) == work(lazy.resolve_conj().resolve_neg().clone())


def test_one_process_gives_back_what_it_got() -> None:
    ctx = Context()
    tree = {"x": torch.ones(2), "n": None}
    for operation in (gather, reduce, broadcast, scatter, pad_across_processes):
        assert cast("Any", operation)(ctx, tree) is tree
    assert listify(gather(ctx, torch.tensor(3))) == [3]
    assert reduce(ctx, tree, "mean") is tree


def test_results_are_detached() -> None:
    def work(ctx: Context) -> list[bool]:
        weight = torch.ones(2, requires_grad=True)
        results = (gather(ctx, weight), reduce(ctx, weight), broadcast(ctx, weight, 1))
        return [result.requires_grad for result in results]

    # Whoever sends gets its own tensor back.
    assert run_ranks(work, 2) == [[False, False, False], [False, False, True]]


# --- how often it speaks -------------------------------------------------------------------------


def many_leaves(rank: int) -> Any:
    return {
        "floats": [torch.full((30,), float(rank)) for _ in range(10)],
        "ints": [torch.full((20,), rank) for _ in range(10)],
    }


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (gather, {"all_gather_bytes": 1, "all_gather": 2}),
        (reduce, {"all_gather_bytes": 1, "all_reduce": 2}),
        (broadcast, {"all_gather_bytes": 1, "broadcast": 2}),
    ],
    ids=("gather", "reduce", "broadcast"),
)
def test_there_is_one_collective_per_dtype(operation: Any, expected: dict[str, int]) -> None:
    def work(ctx: Context, split: bool) -> Any:
        watched, calls = counted(ctx)
        operation(split_up(watched) if split else watched, many_leaves(ctx.rank))
        return dict(calls)

    assert run_ranks(functools.partial(work, split=True), 3) == [expected] * 3
    assert run_ranks(functools.partial(work, split=False), 3) == [{"all_gather_bytes": 1}] * 3


# --- the same on every kind of world -------------------------------------------------------------


def conformance_trees(rank: int) -> list[Any]:
    """Give trees of every container, dtype and shape, with values of this rank."""

    def leaf(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return ((torch.arange(torch.Size(shape).numel()) + rank) % 2).to(dtype).view(shape)

    return [
        {str(dtype): leaf(dtype, 3, 2) for dtype in DTYPES},
        [leaf(dtype, 1500) for dtype in DTYPES if not dtype.is_complex],
        Pair({"a": leaf(torch.float32, 1)}, Sample((leaf(torch.int64, 4, 1).T,), None)),
        BatchEncoding({"input_ids": leaf(torch.int64, 2, 5), "inner": [leaf(torch.bool, 2)]}),
        {"empty": leaf(torch.float32, 0, 2), "other": leaf(torch.float64, 2, 0)},
        [],
        None,
    ]


def references(ranked: list[Any], rank: int) -> dict[str, Any]:
    size = len(ranked)
    complex_free = not any(leaf.is_complex() for leaf in flatten(ranked[0])[0])
    wanted: dict[str, Any] = {
        "gather": by_leaf(joined, ranked),
        "reduce": by_leaf(summed, ranked),
        "broadcast": ranked[1],
        "scatter": map_tensors(lambda leaf: leaf.tensor_split(size)[rank], ranked[1]),
        "pad": ranked[rank],
    }
    if complex_free:
        wanted["reduce max"] = by_leaf(functools.partial(extreme, largest=True), ranked)
    return {name: bits(tree) for name, tree in wanted.items()}


@pytest.mark.parametrize("split", [False, True], ids=("whole", "split"))
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("on", KINDS)
def test_all_worlds_conform(on: Where, size: int, split: bool) -> None:
    def work(ctx: Context) -> Any:
        ctx = split_up(ctx) if split else ctx
        found: list[Any] = []
        for tree in conformance_trees(ctx.rank):
            complex_free = not any(leaf.is_complex() for leaf in flatten(tree)[0])
            found.append(
                {
                    name: bits(operation(ctx, tree))
                    for name, operation in zip(NAMES, OPERATIONS, strict=True)
                    if complex_free or name != "reduce max"
                }
            )
        return found

    ranked = list(zip(*(conformance_trees(rank) for rank in range(size)), strict=True))
    for rank, found in enumerate(run_ranks(work, size, on)):
        assert found == [references(list(trees), rank) for trees in ranked]


# --- what is refused -----------------------------------------------------------------------------

on_each_world = pytest.mark.parametrize("on", KINDS)
BAD_LEAVES = (
    (lambda: "text", "tree['x'] must be a tensor, got str"),
    (
        lambda: torch.eye(2).to_sparse(),
        "tree['x'] must be a dense tensor with data, got one of layout torch.sparse_coo",
    ),
    (
        lambda: torch.zeros(2, device="meta"),
        "tree['x'] must be a dense tensor with data, got one on the meta device",
    ),
)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize(("make", "said"), BAD_LEAVES, ids=("str", "sparse", "meta"))
@each_operation
def test_a_leaf_that_can_not_travel_is_named_on_every_rank(
    operation: Callable[[Context, Any], Any], make: Callable[[], Any], said: str, debug: bool
) -> None:
    def work(ctx: Context) -> Any:
        return operation(ctx, {"x": make() if ctx.rank == 1 else torch.zeros(2)})

    here, there, third = run_ranks(failure(work), 3, debug=debug, timeout_s=10)
    assert type(there) is TypeError
    assert said in str(there)
    for error in (here, third):
        assert isinstance(error, RemoteRankError)
        assert (error.rank, error.cause, error.message) == (1, "TypeError", str(there))
    assert str(here) == str(third)


REFUSED: tuple[tuple[Callable[[Context], Any], type[Exception], str], ...] = (
    (
        lambda ctx: broadcast(ctx, torch.zeros(1), 2),
        ValueError,
        "from_process must be a rank in 0..1, got 2",
    ),
    (
        lambda ctx: broadcast(ctx, torch.zeros(1), -1),
        ValueError,
        "from_process must be a rank in 0..1, got -1",
    ),
    (
        lambda ctx: scatter(ctx, torch.zeros(2), 9),
        ValueError,
        "from_process must be a rank in 0..1, got 9",
    ),
    (
        lambda ctx: reduce(ctx, torch.zeros(1), "average"),
        ValueError,
        "must be one of sum, mean, max, min, none",
    ),
    (
        lambda ctx: reduce(ctx, torch.tensor([1]), "mean"),
        TypeError,
        "tree has dtype torch.int64, which can't",
    ),
    (
        lambda ctx: reduce(ctx, [torch.tensor([True])], scale=2.0),
        TypeError,
        "tree[0] has dtype torch.bool",
    ),
    (lambda ctx: reduce(ctx, torch.tensor([1j]), "max"), TypeError, "complex numbers have no max"),
    (lambda ctx: pad_across_processes(ctx, torch.tensor([1]), pad_index=0.5), TypeError, "pad_index=0.5"),
    (
        lambda ctx: pad_across_processes(ctx, torch.zeros(1 + ctx.rank, dtype=torch.uint8), pad_index=-1),
        TypeError,
        "tree has dtype torch.uint8, which can't represent pad_index=-1",
    ),
    (
        lambda ctx: pad_across_processes(ctx, torch.tensor([1]), pad_index=float("nan")),
        TypeError,
        "can't represent pad_index=nan",
    ),
)


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    REFUSED,
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bad_argument_is_refused_on_every_rank(
    call: Callable[[Context], Any], kind: type[Exception], said: str
) -> None:
    for error in run_ranks(failure(call), 2, timeout_s=10):
        assert type(error) is kind
        assert said in str(error)


OPTIONS: tuple[tuple[Callable[[Context, bool], Any], str], ...] = (
    (
        lambda ctx, odd: reduce(ctx, torch.zeros(1), "max" if odd else "sum"),
        "reduction='max' scale=1.0",
    ),
    (
        lambda ctx, odd: reduce(ctx, torch.zeros(1), scale=3.0 if odd else 1.0),
        "reduction='sum' scale=3.0",
    ),
    (lambda ctx, odd: broadcast(ctx, torch.zeros(1), int(odd)), "from 1"),
    (lambda ctx, odd: scatter(ctx, torch.zeros(1), int(odd)), "from 1"),
    (
        lambda ctx, odd: pad_across_processes(ctx, torch.zeros(1), -1 if odd else 0),
        "dim=-1",
    ),
    (
        lambda ctx, odd: pad_across_processes(ctx, torch.zeros((1,) * (1 + odd))),
        "float32 of 2 dimensions",
    ),
)


@pytest.mark.parametrize("elements", [2, 1 << 20], ids=("small", "large"))
def test_a_mean_or_scale_of_halves_is_not_cut_off_by_its_sum(elements: int) -> None:
    large = torch.full((elements,), 60000.0, dtype=torch.float16)
    assert run_ranks(lambda ctx: bool((reduce(ctx, large, "mean") == large).all()), 2) == [True] * 2
    if elements == 2:
        assert run_ranks(lambda ctx: bool((reduce(ctx, large, scale=0.5) == large).all()), 2) == [True] * 2
        wide = torch.full((2,), 288.0)
        eighth = wide.to(torch.float8_e4m3fn)
        assert run_ranks(lambda ctx: bool((reduce(ctx, eighth, "mean").float() == wide).all()), 2)[0]


@pytest.mark.parametrize(
    ("operation", "arguments"),
    [
        (pad_across_processes, {"pad_index": 1e6}),
        (pad_across_processes, {"pad_index": "x"}),
        (pad_across_processes, {"dim": "a"}),
        (broadcast, {"from_process": 1.0}),
        (reduce, {"scale": "a"}),
    ],
)
def test_arguments_of_a_wrong_kind_are_refused_by_all(operation: Any, arguments: dict[str, Any]) -> None:
    def attempt(ctx: Context) -> str:
        with pytest.raises(TypeError) as caught:
            operation(ctx, torch.ones(1 + ctx.rank, dtype=torch.float16), **arguments)
        return str(caught.value).partition(":")[0]

    assert run_ranks(attempt, 2) == [operation.__name__] * 2
