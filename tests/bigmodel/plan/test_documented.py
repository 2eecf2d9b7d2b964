"""Plans beside the documented loop, and that beside Accelerate itself."""

from __future__ import annotations

import importlib
import logging
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st
from torch import nn

from accelfn.bigmodel import PlanOptions, plan_device_map, read_shape
from accelfn.bigmodel.devices import Place
from tests.bigmodel.plan.documented import documented_map
from tests.bigmodel.plan.trees import Tree, build, trees

# Not typed: its annotations name types that its functions don't take.
PEER: Any = importlib.import_module("accelerate.utils.modeling")

CLASSES = st.sampled_from([(), ("A",), ("B",), ("A", "B")])


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """Numbers of accelerators that this machine lacks are logged."""
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@st.composite
def budgets(draw: st.DrawFn, tree: Tree) -> dict[Place, int]:
    total = 2 + read_shape(build(tree)).num_bytes
    places = draw(st.sampled_from([(), (0,), (0, 1), (0, 1, 2), ("cpu",), (0, "cpu"), (0, 1, "cpu")]))
    # Sizes at which nearly all fits are where rules differ.
    return {place: draw(st.integers(0, total) | st.integers(total // 2, total)) for place in places}


def their_map(
    model: nn.Module, given: dict[Place, int], no_split: tuple[str, ...], fallback: bool
) -> dict[str, Place] | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return dict(
                PEER.infer_auto_device_map(
                    model,
                    max_memory=dict(given),
                    no_split_module_classes=list(no_split),
                    clean_result=False,
                    fallback_allocation=fallback,
                )
            )
        except IndexError:
            return None


def our_map(
    model: nn.Module, given: dict[Place, int], no_split: tuple[str, ...], fallback: bool
) -> dict[str, Place]:
    options = PlanOptions(no_split_module_classes=no_split, fallback_allocation=fallback)
    return dict(plan_device_map(read_shape(model), given, options).entries)


@settings(max_examples=150)
@given(trees(ties=False), st.data(), CLASSES, st.booleans())
def test_a_model_without_ties_is_spread_as_by_accelerate(
    tree: Tree, data: st.DataObject, no_split: tuple[str, ...], fallback: bool
) -> None:
    model, given_ = build(tree), data.draw(budgets(tree))
    shape = read_shape(model)
    documented, odd = documented_map(shape, given_, no_split, fallback)
    assert their_map(model, given_, no_split, fallback) == documented
    # What a split module has of buffers has no place in the documented map, unless it is the whole model.
    lost = any(module.children and module.name and module.buffers for module in shape.root.modules())
    if not odd and not lost:
        assert our_map(model, given_, no_split, fallback) == documented
    event(f"lost: {lost}")
    event(f"odd: {sorted(odd)}")


@settings(max_examples=150)
@given(trees(bare=False), st.data(), CLASSES)
def test_a_model_with_ties_is_spread_as_by_accelerate(
    tree: Tree, data: st.DataObject, no_split: tuple[str, ...]
) -> None:
    model, given_ = build(tree), data.draw(budgets(tree))
    shape = read_shape(model)
    # In which order it takes several groups depends on the hashes of their names.
    assume(len(shape.ties) == 1)
    documented, odd = documented_map(shape, given_, no_split)
    theirs = their_map(model, given_, no_split, False)
    assert theirs == (None if "crashed" in odd else documented)
    if not odd:
        assert our_map(model, given_, no_split, False) == documented
    event(f"odd: {sorted(odd)}")


# --- architectures of transformers ---------------------------------------------------------------

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
    "bart": (
        "BartForConditionalGeneration",
        {
            "d_model": 64,
            "encoder_layers": 2,
            "decoder_layers": 3,
            "encoder_ffn_dim": 96,
            "decoder_ffn_dim": 96,
        },
    ),
    "bert": (
        "BertForMaskedLM",
        {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96},
    ),
}


@pytest.mark.parametrize("name", SMALL)
def test_architectures_are_spread_as_by_accelerate(name: str) -> None:
    transformers: Any = pytest.importorskip("transformers")
    kind: Any = getattr(transformers, SMALL[name][0])
    with torch.device("meta"):
        model = kind(kind.config_class(**SMALL[name][1], vocab_size=500))
    shape = read_shape(model)
    rng = random.Random(0)
    same = 0
    for _ in range(25):
        given_: dict[Place, int] = {place: rng.randint(0, shape.num_bytes) for place in (0, 1, "cpu")}
        no_split = rng.choice([(), shape.no_split_classes])
        theirs = their_map(model, given_, no_split, False)
        documented, odd = documented_map(shape, given_, no_split)
        ours = plan_device_map(shape, given_, PlanOptions(no_split_module_classes=no_split)).entries
        # BERT splits modules with buffers of their own, and has a bias that is tied beside modules.
        assert name == "bert" or not odd
        if theirs is None or odd:
            continue
        assert theirs == documented
        lost = [leaf.name for leaf in shape.root.leaves() if leaf.kind != "parameter" and leaf.name in ours]
        if name != "bert" or not lost:
            assert ours == theirs
            same += 1
    assert same >= 10
