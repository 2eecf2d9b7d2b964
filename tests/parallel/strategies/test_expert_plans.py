"""The plan finds the modules that hold experts; a model that doesn't fit is refused unchanged."""

from __future__ import annotations

import re
from typing import Any, cast

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.config import ExpertParallelConfig
from accelfn.errors import ConfigurationError
from accelfn.parallel import read_facts
from accelfn.parallel.plan import plan_at
from accelfn.parallel.strategies.experts import plan_experts
from tests.parallel.expert_models import HIDDEN, WIDTH, Experts, SparseGPT
from tests.parallel.tensor_models import GPT, Block


class Nameless(nn.Module):
    """Experts that don't say how many they are."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 2, 2))

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Listed(nn.Module):
    """Experts that are modules of their own, beside others."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        self.inner = nn.ModuleDict({"experts": Nameless()})


def test_modules_that_say_their_number_are_found() -> None:
    facts = read_facts(SparseGPT())
    plan = plan_experts(ExpertParallelConfig(), facts, 2)
    assert {name: (held.num_experts, held.takes) for name, held in plan.modules.items()} == {
        "blocks.0.experts": (4, "counts"),
        "blocks.1.experts": (6, "counts"),
    }
    assert set(plan.names) == {
        f"blocks.{block}.experts.{leaf}" for block in (0, 1) for leaf in ("up", "down")
    }
    local = plan.local(facts)
    assert local.shapes["blocks.1.experts.up"] == (3, WIDTH, HIDDEN)
    changed = {name for name in facts.names if local.shapes[name] != facts.shapes[name]}
    assert changed == set(plan.names)


def refused(record: ExpertParallelConfig, model: nn.Module, size: int) -> str:
    with pytest.raises(ConfigurationError) as caught:
        plan_experts(record, read_facts(model), size)
    return str(caught.value)


def test_what_holds_no_experts_is_refused() -> None:
    said = refused(ExpertParallelConfig(), GPT(), 2)
    assert "no module of GPT is recognised as a module of experts" in said
    assert "(num_experts, ...)" in said
    said = refused(ExpertParallelConfig(experts="blocks.*.moe"), SparseGPT(), 2)
    assert "'blocks.*.moe' matches no module of SparseGPT" in said
    said = refused(ExpertParallelConfig(experts="experts"), Listed(), 2)
    assert "experts (ModuleList) isn't a module of experts: it has modules with parameters inside" in said
    said = refused(ExpertParallelConfig(experts="blocks.0.router"), SparseGPT(), 2)
    assert "its forward takes neither two nor three arguments" in said
    wrong = Experts(4)
    wrong.num_experts = 5
    said = refused(ExpertParallelConfig(experts="0"), nn.Sequential(wrong), 2)
    assert "and num_experts is 5" in said


def test_what_does_not_divide_is_refused_with_what_would() -> None:
    said = refused(ExpertParallelConfig(), SparseGPT(), 4)
    assert "blocks.1.experts has 6 experts, which 4 doesn't divide. Use one of 1, 2, 3, 6." in said
    assert "blocks.0.experts" not in said


def test_experts_that_share_a_parameter_are_refused() -> None:
    model = SparseGPT()
    blocks = cast("Any", model.blocks)
    blocks[1].experts = Experts(4)
    blocks[1].experts.up = blocks[0].experts.up
    said = refused(ExpertParallelConfig(), model, 2)
    assert "blocks.0.experts.up and blocks.1.experts.up are one tied parameter" in said


def sparse_context(size: int, tp_size: int = 1) -> af.Context:
    config = af.ParallelismConfig(dp_shard_size=size // tp_size, ep_size=2, tp_size=tp_size)
    return af.plan_context(size, parallelism_config=config)


def test_a_model_s_plan_says_where_experts_are() -> None:
    plan = af.plan_model(sparse_context(8), SparseGPT())
    assert plan.rows()["experts"] == (
        "4 or 6 of blocks.0.experts, blocks.1.experts, spread over 2 ranks: 2 or 3 on each, sharded over 4"
    )
    assert plan.shard is not None
    assert plan.shard.units == ("blocks.1.experts", "blocks.1", "blocks.0.experts", "blocks.0", "")
    # Neither two nor three experts can be shared by four ranks: a dim of each of them is.
    assert plan.shard.expert_dims == dict.fromkeys(plan.shard.expert_dims, 1)
    assert af.plan_model(sparse_context(8), SparseGPT(), engine="ddp").experts is None


def test_stages_have_plans_of_their_own_experts() -> None:
    model: Any = SparseGPT()
    model.blocks[0] = Block(views_by_count=False, norms_heads=False, dropout=0.0)
    model._no_split_modules = ["Block", "SparseBlock"]
    config = af.ParallelismConfig(pp_size=2, dp_shard_size=2, ep_size=2)
    ctx = af.plan_context(4, parallelism_config=config)
    first, second = (plan_at(ctx, model, place) for place in (0, 1))
    assert first.experts is None
    assert "experts" not in first.rows()
    assert second.experts is not None
    assert [*second.experts.modules] == ["blocks.1.experts"]
    assert set(second.experts.names) == {"blocks.1.experts.up", "blocks.1.experts.down"}


def test_what_is_not_there_yet_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="expert and tensor parallelism can't be combined"):
        af.plan_model(sparse_context(4, tp_size=2), SparseGPT())
    compiled = sparse_context(4).replace(dynamo_backend="eager")
    with pytest.raises(ConfigurationError, match="which no compiled block supports"):
        af.plan_model(compiled, SparseGPT())
    odd = nn.Sequential(Nameless())
    config = af.ParallelismConfig(dp_shard_size=6, ep_size=2, ep_handler=ExpertParallelConfig(experts="0"))
    message = re.escape("0.weight can't be sharded over the 3 ranks with the same experts")
    with pytest.raises(ConfigurationError, match=message):
        af.plan_model(af.plan_context(6, parallelism_config=config), odd)
