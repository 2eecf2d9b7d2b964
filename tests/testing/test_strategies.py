import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st

import accelfn.testing
from accelfn.testing import strategies
from accelfn.testing.strategies import (
    DTYPES,
    FLOAT8,
    Mismatched,
    dtypes,
    mismatched_trees,
    rank_trees,
    tensors,
    trees,
    worlds,
)
from accelfn.tree import flatten

FAST = settings(max_examples=2000, database=None)


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


@pytest.mark.parametrize("dtype", [*DTYPES, *FLOAT8], ids=str)
def test_every_dtype_can_be_drawn(dtype: torch.dtype) -> None:
    assert find(tensors(dtypes(float8=True)), lambda one: one.dtype == dtype, settings=FAST).dtype == dtype


def test_odd_tensors_can_be_drawn() -> None:
    assert find(tensors(), lambda one: not one.dim(), settings=FAST).dim() == 0
    assert find(tensors(), lambda one: one.dim() > 1 and not one.numel(), settings=FAST).numel() == 0
    assert not find(tensors(), lambda one: not one.is_contiguous(), settings=FAST).is_contiguous()
    assert find(tensors(), lambda one: one.storage_offset() > 0, settings=FAST).storage_offset()


@pytest.mark.parametrize(
    "kind",
    ["dict", "list", "tuple", "Pair", "OrderedDict", "defaultdict", "deque", "Sample", "NoneType", "Tensor"],
)
def test_every_container_can_be_drawn(kind: str) -> None:
    assert type(find(trees(), lambda tree: type(tree).__name__ == kind, settings=FAST)).__name__ == kind


@given(worlds(), st.data())
def test_rank_trees_have_one_form(size: int, data: st.DataObject) -> None:
    ranked = data.draw(rank_trees(size, float8=True))
    assert len(ranked) == size
    assert [form(tree) for tree in ranked] == [form(ranked[0])] * size


def test_rank_trees_differ_in_values_and_in_the_order_of_dicts() -> None:
    pair = find(rank_trees(2), lambda ranked: str(ranked[0]) != str(ranked[1]), settings=FAST)
    assert form(pair[0]) == form(pair[1])

    def turned(ranked: list[Any]) -> bool:
        return type(ranked[0]) is dict and [*ranked[0]] != [*ranked[1]]

    assert turned(find(rank_trees(2), turned, settings=FAST))


@given(st.integers(2, 5).flatmap(mismatched_trees))
def test_exactly_one_tree_is_the_odd_one(drawn: Mismatched) -> None:
    forms = [form(tree) for tree in drawn.trees]
    others = [one for rank, one in enumerate(forms) if rank != drawn.rank]
    assert others == [others[0]] * len(others)
    assert forms[drawn.rank] != others[0]
    assert drawn.paths


@pytest.mark.parametrize(
    ("package", "module"),
    [("hypothesis", "accelfn.testing.strategies"), ("pytest", "accelfn.testing.plugin")],
)
def test_a_missing_extra_is_one_sentence_with_the_command(package: str, module: str) -> None:
    probe = (
        f"import sys\nsys.modules[{package!r}] = None\n"
        "import accelfn.testing\nfrom accelfn.errors import MissingExtraError\n"
        f"try:\n    import {module}\nexcept MissingExtraError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout == f"{module} needs {package}. Install it: pip install 'accelfn[testing]'\n"


def test_importing_the_package_imports_no_extra() -> None:
    probe = (
        "import sys, accelfn.testing\n"
        "print([name for name in ('hypothesis', 'pytest') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_strategies_are_found_beside_run_ranks() -> None:
    for name in ("Mismatched", "mismatched_trees", "rank_trees", "schedules", "tensors", "trees", "worlds"):
        assert getattr(accelfn.testing, name) is getattr(strategies, name)
    with pytest.raises(AttributeError, match=r"module 'accelfn\.testing' has no attribute 'schedulers'"):
        getattr(accelfn.testing, "schedulers")  # noqa: B009 -- it isn't there
