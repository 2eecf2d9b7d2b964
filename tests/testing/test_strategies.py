import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import accelfn.testing
from accelfn.testing import strategies
from accelfn.testing.strategies import (
    DTYPES,
    FLOAT8,
    Mismatched,
    dtypes,
    gradients,
    masks,
    mismatched_trees,
    parameters,
    random_keys,
    rank_trees,
    tensors,
    worlds,
)
from accelfn.tree import flatten


def form(tree: Any) -> Any:
    leaves, structure = flatten(tree)
    return structure.describe(), [(leaf.dtype, leaf.shape) for leaf in leaves]


@given(tensors(dtypes(float8=True)))
def test_values_are_small_integers(tensor: torch.Tensor) -> None:
    wide = tensor.to(torch.complex128)
    assert torch.equal(wide, wide.real.round() + 1j * wide.imag.round())
    assert bool((wide.real.abs() <= 4).all())
    if tensor.dtype in FLOAT8:  # sums of five are exact
        assert torch.equal((5 * tensor.float()).to(tensor.dtype).float(), 5 * tensor.float())


def drawn(strategy: st.SearchStrategy[Any], number: int) -> list[Any]:
    found: list[Any] = []

    @settings(max_examples=number, database=None, phases=[Phase.generate], derandomize=True)
    @given(strategy)
    def draw(value: Any) -> None:
        found.append(value)

    draw()
    return found


def test_odd_tensors_of_every_dtype_can_be_drawn() -> None:
    found = drawn(tensors(dtypes(float8=True)), 200)
    assert {tensor.dtype for tensor in found} == {*DTYPES, *FLOAT8}
    assert any(not tensor.dim() for tensor in found)
    assert any(tensor.dim() > 1 and not tensor.numel() for tensor in found)
    assert any(not tensor.is_contiguous() for tensor in found)
    assert any(tensor.storage_offset() for tensor in found)


def test_every_container_can_be_drawn_and_ranks_differ_in_values_and_in_the_order_of_dicts() -> None:
    found = drawn(rank_trees(2), 400)  # what is drawn depends on the modules that are loaded, too
    kinds = {"dict", "list", "tuple", "Pair", "OrderedDict", "defaultdict", "deque", "Sample", "NoneType"}
    assert {type(first).__name__ for first, _ in found} == {*kinds, "Tensor"}
    assert any(str(first) != str(second) for first, second in found)
    assert any(type(first) is dict and [*first] != [*second] for first, second in found)


def test_parameters_have_every_shape_and_sums_that_are_exact() -> None:
    def both(params: Any) -> st.SearchStrategy[Any]:
        return st.tuples(st.just(params), gradients(params), masks(params))

    found = drawn(parameters().flatmap(both), 200)
    leaves = [leaf for params, _, _ in found for leaf in flatten(params)[0]]
    assert {leaf.dtype for leaf in leaves} == {torch.float32}
    assert {0, 1, 2} == {leaf.dim() for leaf in leaves}
    assert {0, 1, 3, 5} <= {leaf.shape[0] for leaf in leaves if leaf.dim()}
    assert all(torch.equal(2 * leaf, (2 * leaf).round()) and bool((leaf.abs() <= 2).all()) for leaf in leaves)
    for params, grads, mask in found:
        assert type(params) is dict
        assert flatten(params)[0]
        assert form(grads) == form(params)
        assert flatten(mask)[1] == flatten(params)[1]
        assert {type(one) for one in flatten(mask)[0]} <= {bool}
    keys = drawn(random_keys(), 50)
    assert len({tuple(one.tolist()) for one in keys}) > 40
    assert all(one.shape == (2,) and one.dtype == torch.int64 for one in keys)


@pytest.mark.slow
def test_extras_are_imported_where_they_are_used_and_a_missing_one_is_one_sentence_with_the_command() -> None:
    probe = """
import sys
sys.modules["hypothesis"] = sys.modules["pytest"] = None
import accelfn.testing
from accelfn.errors import MissingExtraError
try:
    import accelfn.testing.strategies
except MissingExtraError as error:
    print(error)
try:
    import accelfn.testing.plugin
except MissingExtraError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"accelfn.testing.{module} needs {package}. Install it: pip install 'accelfn[testing]'"
        for module, package in (("strategies", "hypothesis"), ("plugin", "pytest"))
    ]


@settings(max_examples=10)
@given(worlds(), st.data())
def test_rank_trees_have_one_form(size: int, data: st.DataObject) -> None:
    ranked = data.draw(rank_trees(size, float8=True))
    assert len(ranked) == size
    assert [form(tree) for tree in ranked] == [form(ranked[0])] * size


@settings(max_examples=10)
@given(st.integers(2, 5).flatmap(mismatched_trees))
def test_exactly_one_tree_is_the_odd_one(drawn: Mismatched) -> None:
    forms = [form(tree) for tree in drawn.trees]
    others = [one for rank, one in enumerate(forms) if rank != drawn.rank]
    assert others == [others[0]] * len(others)
    assert forms[drawn.rank] != others[0]
    assert drawn.paths


def test_strategies_are_found_beside_run_ranks() -> None:
    for name in ("Mismatched", "mismatched_trees", "rank_trees", "schedules", "tensors", "trees", "worlds"):
        assert getattr(accelfn.testing, name) is getattr(strategies, name)
    with pytest.raises(AttributeError, match=r"module 'accelfn\.testing' has no attribute 'schedulers'"):
        getattr(accelfn.testing, "schedulers")  # noqa: B009 -- it isn't there
