"""A plan for tensor parallelism: patterns become styles, and one error lists everything wrong."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accelfn.config import TorchTensorParallelConfig
from accelfn.errors import ConfigurationError
from accelfn.parallel.facts import ModelFacts, read_facts
from accelfn.parallel.strategies.tensor import STYLE_OF_WORD, TensorPlan, plan_tensor
from tests.parallel.tensor_models import GPT, PLAN, SEQUENCE, Adapted


def facts_of(**options: bool) -> ModelFacts:
    return read_facts(GPT(**options))


def plan(words: Mapping[str, str] | None, facts: ModelFacts, size: int = 2) -> TensorPlan:
    return plan_tensor(TorchTensorParallelConfig(plan=words), facts, size)


def refusal(words: Mapping[str, str] | None, facts: ModelFacts, size: int = 2) -> str:
    with pytest.raises(ConfigurationError) as caught:
        plan(words, facts, size)
    return str(caught.value)


def test_each_module_with_parameters_gets_a_style() -> None:
    found = plan(PLAN, facts_of(views_by_count=True))
    assert found.styles["blocks.1.attn.q"] == "colwise"
    assert found.styles["blocks.0.down"] == "rowwise"
    assert found.styles["positions"] == found.styles["norm"] == "whole"
    assert "blocks.0.dropout" not in found.styles
    assert found.heads["blocks.0.attn"] == {"num_heads": (4, 2)}
    assert not found.splits_sequence
    assert plan(SEQUENCE, facts_of()).splits_sequence


def test_all_that_is_wrong_is_said_at_once() -> None:
    said = refusal(
        {
            "block.*.attn.q": "colwise",
            "blocks.*.attn.k": "column",
            "blocks.*.norm1": "rowwise",
            "blocks.*": "whole",
            "blocks.*.up": "colwise",
            "blocks.*.u*": "rowwise",
            "head": "gather",
        },
        facts_of(),
        3,
    )
    assert "GPT with tp_size=3" in said
    assert "'block.*.attn.q' matches no module." in said
    assert "'blocks.*.attn.k': unknown style 'column'. Use one of colwise, " in said
    assert "blocks.*.norm1 is of class LayerNorm, which can't be 'rowwise': nn.Linear can be " in said
    divisible = "dim 0 of its weight has size {}, which isn't divisible by tp_size=3. Pad it by {}"
    assert f"blocks.*.up (colwise): {divisible.format(64, 2)}" in said
    assert f"head (gather): {divisible.format(32, 1)}" in said
    assert said.count("isn't divisible by") == 2  # of both blocks, and of the head
    assert "'blocks.*.u*': blocks.*.up would be 'rowwise', and by another pattern is 'colwise'" in said
    assert "embed.weight and head.weight are one tied parameter" in said


@pytest.mark.parametrize("missing", ["embed", "head"])
def test_tied_weights_are_laid_out_alike(missing: str) -> None:
    words = {pattern: word for pattern, word in PLAN.items() if pattern != missing}
    said = refusal(words, facts_of())
    assert (
        "embed.weight and head.weight are one tied parameter, but the plan lays them out differently" in said
    )
    assert f"{missing}.weight is whole" in said
    assert plan(words, facts_of(tied=False)).styles[missing] == "whole"


def test_heads_that_share_keys_are_divisible_too() -> None:
    attention = nn.Module()
    vars(attention)["head_dim"] = 4
    attention.q, attention.k, attention.o = nn.Linear(16, 32), nn.Linear(16, 8), nn.Linear(32, 16)
    model = nn.Module()
    model.attention = attention
    words = {"attention.[qk]": "colwise", "attention.o": "rowwise"}
    assert plan(words, read_facts(model)).styles["attention.k"] == "colwise"
    assert "attention.k has 2 heads of 4, which tp_size=4 doesn't divide" in refusal(
        words, read_facts(model), 4
    )


def test_a_plan_fits_the_model_that_peft_has_wrapped() -> None:
    names = {"q": "lora_B", "o": "lora_A"}  # the factor that is split with the layer
    found = plan(PLAN, read_facts(Adapted())).styles
    for layer, factor in names.items():
        inside = f"base_model.model.blocks.0.attn.{layer}"
        style = PLAN[f"blocks.*.attn.{layer}"]
        split = {name for name, word in found.items() if name.startswith(inside) and word == style}
        assert split == {f"{inside}.base_layer", f"{inside}.{factor}.default"}
    assert found["base_model.model.head.base_layer"] == "gather"
    assert found["base_model.model.head.lora_B.default"] == "whole", "as what is gathered"
    assert found["base_model.model.blocks.1.attn.q"] == "colwise"


def test_a_module_between_split_layers_must_be_named() -> None:
    facts = facts_of(norms_heads=True)
    assert "blocks.*.attn.head_norm is beside colwise and rowwise layers" in refusal(PLAN, facts)
    for style in ("heads", "whole"):
        assert (
            plan({**PLAN, "blocks.*.attn.head_norm": style}, facts).styles["blocks.0.attn.head_norm"] == style
        )


def test_the_model_s_own_plan_may_name_what_it_has_not() -> None:
    facts = facts_of()._replace(tp_plan={**PLAN, "vision.*.q": "colwise", "blocks.*.experts": "grouped_gemm"})
    assert plan(None, facts).styles["head"] == "gather"
    assert plan(None, facts).heads == {}  # such models view by -1
    nothing = facts._replace(tp_plan={"vision.*.q": "colwise"})
    assert "the model's own tp_plan doesn't fit GPT" in refusal(None, nothing)
    assert "none of its patterns matches a module" in refusal(None, nothing)


def test_experts_of_the_model_s_own_plan_are_refused_by_name() -> None:
    facts = facts_of()._replace(tp_plan={**PLAN, "blocks.*.attn": "moe_tp_experts", "norm.weight": "colwise"})
    assert "'blocks.*.attn': unknown style 'moe_tp_experts'" in refusal(None, facts)


def test_what_another_module_holds_of_a_split_layer_follows_it() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = nn.Linear(4, 6)
            self.bias = self.decoder.bias

    model = nn.Sequential(Head())
    found = plan({"0.decoder": "gather"}, read_facts(model))
    assert found.follows == {"0.bias": "0.decoder.bias"}
    assert found.dims == {"0.decoder.weight": 0, "0.decoder.bias": 0, "0.bias": 0}


def test_logits_that_stay_split_are_those_of_the_head() -> None:
    facts = facts_of()
    record = TorchTensorParallelConfig(plan={**PLAN, "blocks.*.up": "gather"}, loss_parallel=True)
    assert plan_tensor(record, facts, 2).logits == {"head"}
    nothing = TorchTensorParallelConfig(
        plan={one: word for one, word in PLAN.items() if one not in ("head", "embed")}, loss_parallel=True
    )
    with pytest.raises(ConfigurationError, match="loss_parallel=True: no linear layer outside of the blocks"):
        plan_tensor(nothing, facts_of(tied=False), 2)


@given(
    st.dictionaries(
        st.sampled_from([*PLAN, "norm", "blocks.0.attn.q"]), st.sampled_from(sorted(STYLE_OF_WORD))
    )
)
def test_a_plan_covers_the_model_or_is_refused_before_anything_is_touched(words: dict[str, str]) -> None:
    facts = facts_of(tied=False)
    try:
        found = plan(words, facts)
    except ConfigurationError:
        return
    assert {name.rpartition(".")[0] for name in facts.shapes} == found.styles.keys()
    for name, shape in found.local(facts).shapes.items():
        dim = found.dims.get(name)
        whole = tuple(size * 2 if index == dim else size for index, size in enumerate(shape))
        assert whole == facts.shapes[name]
