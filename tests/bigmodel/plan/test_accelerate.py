"""Maps, budgets and sizes are those of Accelerate, except for its known defects."""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from accelfn.bigmodel import (
    Place,
    PlanOptions,
    compute_module_sizes,
    find_tied_parameters,
    get_balanced_memory,
    get_max_layer_size,
    get_module_leaves,
    get_non_persistent_buffers,
    named_module_tensors,
    plan_device_map,
    read_shape,
)
from tests.bigmodel.plan.trees import Tree, build, trees

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def peer() -> Iterator[Any]:
    """Accelerate's module. It logs accelerators that this machine lacks."""
    logging.disable(logging.WARNING)
    yield importlib.import_module("accelerate.utils.modeling")
    logging.disable(logging.NOTSET)


@st.composite
def budgets(draw: st.DrawFn, tree: Tree) -> dict[Place, int]:
    total = 2 + read_shape(build(tree)).num_bytes
    places = draw(st.sampled_from([(), (0,), (0, 1), (0, 1, 2), ("cpu",), (0, "cpu"), (0, 1, "cpu")]))
    # Sizes at which nearly everything fits are where rules differ.
    return {place: draw(st.integers(0, total) | st.integers(total // 2, total)) for place in places}


def peer_map(
    peer: Any, model: nn.Module, sizes: dict[Place, int], no_split: tuple[str, ...], fallback: bool = False
) -> dict[str, Place] | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"clean_result": False, "fallback_allocation": fallback}
        try:
            return dict(peer.infer_auto_device_map(model, dict(sizes), list(no_split), **options))
        except IndexError:  # tied to a parameter beside modules
            return None


@settings(max_examples=150)
@given(
    trees(ties=False, bare=False),
    st.data(),
    st.sampled_from([(), ("A",), ("B",), ("A", "B")]),
    st.booleans(),
)
def test_models_without_ties(
    peer: Any, tree: Tree, data: st.DataObject, no_split: tuple[str, ...], fallback: bool
) -> None:
    model, sizes = build(tree), data.draw(budgets(tree))
    options = PlanOptions(no_split_module_classes=no_split, fallback_allocation=fallback)
    plan = plan_device_map(read_shape(model), sizes, options)
    assert dict(plan.entries) == peer_map(peer, model, sizes, no_split, fallback)


def an_accelerator(_: object) -> SimpleNamespace:
    return SimpleNamespace(type="cuda")


@given(trees(), st.booleans(), st.sampled_from([[], ["A"], ["A", "B"]]), st.data())
def test_balance(peer: Any, tree: Tree, low_zero: bool, classes: list[str], data: st.DataObject) -> None:
    """As it would be on a machine with accelerators: on others it fails for them."""
    model = build(tree)
    assume(read_shape(model).num_bytes)
    sizes = st.integers(1, 2 * read_shape(model).num_bytes)
    given_ = {number: data.draw(sizes) for number in range(data.draw(st.integers(2, 4)))}
    with pytest.MonkeyPatch.context() as patch:
        # torch.device(0) fails there without any accelerator.
        patch.setattr(peer.torch, "device", an_accelerator)
        theirs = peer.get_balanced_memory(
            model, dict(given_), no_split_module_classes=classes, low_zero=low_zero
        )
    assert get_balanced_memory(model, given_, classes, low_zero=low_zero) == theirs


@given(trees())
def test_sizes_names_and_ties(peer: Any, tree: Tree) -> None:
    model = build(tree)
    ours, theirs = compute_module_sizes(model), peer.compute_module_sizes(model)
    assert ours == theirs
    buffers = peer.compute_module_sizes(model, buffers_only=True)
    assert compute_module_sizes(model, buffers_only=True) == buffers
    assert sorted(get_module_leaves(ours)) == sorted(peer.get_module_leaves(theirs))
    parts = [*model.named_children()]
    for no_split in ([], ["A"], ["B"]):
        assert get_max_layer_size(parts, ours, no_split) == peer.get_max_layer_size(parts, theirs, no_split)
    for first in (False, True):
        for second in (False, True):
            found = peer.get_non_persistent_buffers(model, recurse=first, fqns=second)
            # Those of the model itself begin with a dot there.
            plain = {name.removeprefix(".") for name in found}
            assert get_non_persistent_buffers(model, first, second) == plain
            listed = [name for name, _ in peer.named_module_tensors(model, first, second)]
            assert [name for name, _ in named_module_tensors(model, first, second)] == listed
    assert sorted(find_tied_parameters(model)) == sorted(peer.find_tied_parameters(model))
