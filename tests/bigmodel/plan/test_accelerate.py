"""Device maps are those of Accelerate, except for its known defects."""

from __future__ import annotations

import importlib
import logging
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from accelfn.bigmodel import PlanOptions, plan_device_map, read_shape
from accelfn.bigmodel.devices import Place
from tests.bigmodel.plan.trees import Tree, build, trees

# Untyped: its annotations name types that its functions don't accept.
PEER: Any = importlib.import_module("accelerate.utils.modeling")


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """Accelerate logs accelerators that this machine lacks."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@st.composite
def budgets(draw: st.DrawFn, tree: Tree) -> dict[Place, int]:
    total = 2 + read_shape(build(tree)).num_bytes
    places = draw(st.sampled_from([(), (0,), (0, 1), (0, 1, 2), ("cpu",), (0, "cpu"), (0, 1, "cpu")]))
    # Sizes at which nearly everything fits are where rules differ.
    return {place: draw(st.integers(0, total) | st.integers(total // 2, total)) for place in places}


def peer_map(
    model: nn.Module, sizes: dict[Place, int], no_split: tuple[str, ...], fallback: bool = False
) -> dict[str, Place] | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"clean_result": False, "fallback_allocation": fallback}
        try:
            return dict(PEER.infer_auto_device_map(model, dict(sizes), list(no_split), **options))
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
    tree: Tree, data: st.DataObject, no_split: tuple[str, ...], fallback: bool
) -> None:
    model, sizes = build(tree), data.draw(budgets(tree))
    options = PlanOptions(no_split_module_classes=no_split, fallback_allocation=fallback)
    plan = plan_device_map(read_shape(model), sizes, options)
    assert dict(plan.entries) == peer_map(model, sizes, no_split, fallback)


# Not BERT, whose map lacks buffers of split modules there, nor BART, for which it reserves memory for a layer
# that is allocated already.
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": (
        "LlamaForCausalLM",
        {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "tie_word_embeddings": True},
    ),
    "mixtral": (
        "MixtralForCausalLM",
        {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_local_experts": 2},
    ),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 64, "n_layer": 3, "n_head": 4}),
    "t5": ("T5ForConditionalGeneration", {"d_model": 64, "d_ff": 128, "num_layers": 3, "num_heads": 4}),
}


@pytest.mark.parametrize("name", SMALL)
def test_architectures(name: str) -> None:
    transformers: Any = pytest.importorskip("transformers")
    kind: Any = getattr(transformers, SMALL[name][0])
    with torch.device("meta"):
        model = kind(kind.config_class(**SMALL[name][1], vocab_size=500))
    shape = read_shape(model)
    rng = random.Random(0)
    compared = 0
    for _ in range(25):
        sizes: dict[Place, int] = {place: rng.randint(0, shape.num_bytes) for place in (0, 1, "cpu")}
        no_split = rng.choice([(), shape.no_split_classes])
        expected = peer_map(model, sizes, no_split)
        if expected is not None:
            options = PlanOptions(no_split_module_classes=no_split)
            assert dict(plan_device_map(shape, sizes, options).entries) == expected
            compared += 1
    assert compared >= 10
