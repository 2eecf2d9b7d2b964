"""Models cut into stages: what is sent between them, what can't be cut, and plans of stages."""

# torch leaves backward partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import accelfn as af
from accelfn import Context
from accelfn.errors import ConfigurationError, RemoteRankError
from accelfn.parallel import plan_stages, read_facts
from accelfn.testing import run_ranks

WIDTH = 8


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x + torch.tanh(self.linear(x) + bias), None


class Net(nn.Module):
    """With a parameter of its own, operations between its layers, layers in a tuple, and a tied head."""

    def __init__(self, depth: int, tied: bool = True) -> None:
        super().__init__()
        torch.manual_seed(depth)
        self.positions = nn.Parameter(torch.randn(5, WIDTH))
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(depth))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, *, factor: float = 1.0) -> torch.Tensor:
        x = self.embed(ids) + self.positions[: ids.shape[1]]
        bias = torch.where(ids > 5, factor, 0.0).unsqueeze(-1).to(x) + torch.zeros_like(x)
        for layer in self.layers[:]:
            x = F.gelu(x)
            x = layer(x, bias)[0]
        return self.head(self.norm(x))


IDS = torch.arange(10).reshape(2, 5)


class Changed(Net):
    """A net whose forward does something else, by ``how``."""

    def __init__(self, how: str) -> None:
        super().__init__(2)
        self.how = how
        if how == "unused":
            self.layers[1].register_forward_pre_hook(lambda module, args: (args[0], torch.zeros(())))
        if how == "object":
            self.layers[0].register_forward_hook(lambda module, args, output: (output[0], {"no tensor"}))

    def forward(self, ids: torch.Tensor, *, factor: float = 1.0) -> Any:
        x = self.embed(ids)
        first, second = self.layers
        bias = torch.zeros(())
        if self.how in ("condition", "unused"):
            bias = self.embed(ids.flip(0))
        if self.how == "weight":
            bias = self.embed.weight[0]
        if self.how == "value" and x.sum() > 0:
            bias = bias + 1
        if self.how == "write":
            buffer = torch.zeros(2, 5, WIDTH)
            buffer[:, :] = x
            bias = buffer
        if self.how == "object":
            return second(x, first(x, bias)[1])[0]
        if self.how == "reverse":
            return first(second(x, bias)[0], bias)[0]
        y = first(x, bias)[0]
        if self.how == "ends":
            return y
        z = second(torch.ones(2, 5, WIDTH) if self.how == "fresh" else y, bias)[0]
        if self.how == "twice":
            z = second(first(z, bias)[0], bias)[0]
        if self.how == "skip":
            return {"z": z, "x": [x]}
        if self.how == "late":
            return z + self.embed(ids)
        return self.norm(z + x) if self.how == "beside" else z


# What is sent to a later block, beside its own input, of what earlier stages have computed.
SENT = ("condition", "weight", "unused")
REFUSED = {
    "beside": "norm is called on stage 1, and args[0] of its call depends on modules of other",
    "object": "layers.1 is the first block of stage 1, and args[1] of its call comes from",
    "value": "__bool__() was called on a tensor whose values are on another stage",
    "write": "__setitem__() wrote values",
    "reverse": "layers.0 is on stage 0, but the model calls it after the first block of",
    "ends": "forward ended without a call of layers.1, the first block of stage 1",
    "fresh": "layers.1 is the first block of stage 1, but nothing in its call comes from earlier blocks",
    "twice": "layers.0 is on stage 0, but the model calls it after the first block of stage 1",
    "skip": "output['x'][0] of the model depends on modules of other stages (embed, ",
    "late": "embed is on stage 0, but the model calls it after the first block of stage 1",
}


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients by all names of their parameters; zeros where there are none."""
    named = af.unwrap_model(model).named_parameters(remove_duplicate=False)
    return {name: torch.zeros_like(one) if one.grad is None else one.grad for name, one in named}


def squares(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).square().sum()


def test_stages_send_what_later_blocks_need_and_refuse_what_they_cannot_by_name() -> None:
    """In one world, whose ranks go on after each refusal."""

    def refusal(ctx: Context, how: str, **options: Any) -> str:
        model = af.prepare(ctx, Changed(how))
        with pytest.raises((ConfigurationError, RemoteRankError)) as caught:
            af.training.forward(ctx, model, IDS, **options)
        return str(caught.value)

    def trained(ctx: Context, how: str) -> tuple[float, dict[str, torch.Tensor]]:
        model = af.prepare(ctx, Changed(how))
        ((ids, micro),) = af.microbatches(ctx, [IDS])
        _, loss = af.forward_backward(ctx, model, squares, ids, af.init_scaler(ctx), micro)
        return loss.item(), gradients(model)

    def work(ctx: Context) -> tuple[dict[str, str], dict[str, Any]]:
        said = {how: refusal(ctx, how) for how in REFUSED}
        said["use_cache"] = refusal(ctx, "", use_cache=True)
        return said, {how: trained(ctx, how) for how in SENT}

    handler = af.config.PipelineParallelConfig(num_microbatches=1, schedule="gpipe")
    config = af.ParallelismConfig(pp_size=2, pp_handler=handler)
    for said, found in run_ranks(work, 2, "processes", parallelism_config=config, timeout_s=60):
        for how, words in REFUSED.items():
            assert words in said[how]
        assert "use_cache collects from all blocks" in said["use_cache"]
        for how, (loss, grads) in found.items():
            whole = Changed(how)
            expected = squares(whole, IDS)
            expected.backward()
            assert loss == pytest.approx(expected.item(), rel=1e-5)
            for name, one in grads.items():
                torch.testing.assert_close(one, gradients(whole)[name], rtol=1e-5, atol=1e-5)


# --- plans ---------------------------------------------------------------------------------------


def test_a_module_of_two_names_is_in_each_stage_that_calls_it() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, WIDTH)
            self.layers = nn.ModuleList(Layer() for _ in range(3))
            self.head = nn.ModuleDict({"embed": self.embed, "out": nn.Linear(WIDTH, 3)})

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x, _ = layer(x, torch.zeros(()))
            return self.head["out"](x + self.head["embed"](ids.flip(0)))

    plan = plan_stages(read_facts(Twice()), 3)
    assert [stage.modules for stage in plan.stages] == [("embed",), (), ("embed", "head")]
    assert plan.shared == {"embed.weight": (0, 2)}


def test_modules_are_in_the_order_of_their_calls() -> None:
    class Shuffled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.out = nn.Linear(WIDTH, 3)
            self.layers = nn.ModuleList(Layer() for _ in range(2))
            self.embed = nn.Embedding(11, WIDTH)
            self.unseen = nn.Linear(1, 1)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x, torch.zeros(()))[0]
            return self.out(self.norm(x))

    facts = read_facts(Shuffled())
    plan = plan_stages(facts, 2)
    assert [stage.modules for stage in plan.stages] == [("embed", "unseen"), ("norm", "out")]
    assert plan_stages(facts, 2, last=["embed"]).stages[0].modules == ("unseen",)


def test_stages_begin_with_items_of_a_sequence_or_with_other_modules_than_blocks() -> None:
    inner = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)))
    plan = plan_stages(read_facts(nn.ModuleDict({"all": inner})), 2)
    assert [stage.blocks for stage in plan.stages] == [("all.0",), ("all.1",)]
    plan = plan_stages(read_facts(Net(2)), 3, split=["layers.1", "head"])
    assert [stage.blocks for stage in plan.stages] == [("layers.0",), ("layers.1",), ("head",)]
    assert plan.stages[1].modules == ("norm",)
    with pytest.raises(ConfigurationError, match=r"split names layers\.1\.linear, but it can name"):
        plan_stages(read_facts(Net(2)), 2, split=["layers.1.linear"])


@given(costs=st.lists(st.integers(0, 20), min_size=1, max_size=7), data=st.data())
def test_costs_are_spread_so_that_the_largest_stage_is_minimal(costs: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    facts = read_facts(nn.Sequential(*(nn.Linear(1, 1) for _ in costs)))
    by_name = {str(index): float(cost) for index, cost in enumerate(costs)}
    plan = plan_stages(facts, num_stages, costs=by_name)
    assert [name for stage in plan.stages for name in stage.blocks] == list(by_name)
    assert all(stage.blocks for stage in plan.stages)

    def largest(starts: Sequence[int]) -> int:
        return max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *starts, len(costs))))

    every = itertools.combinations(range(1, len(costs)), num_stages - 1)
    found = max(sum(by_name[name] for name in stage.blocks) for stage in plan.stages)
    assert found == min(map(largest, every))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"num_stages": 4}, r"Net has 3 blocks, but 4 stages need at least one each: layers\.0, layers\.1"),
        ({"num_stages": 0}, "num_stages must be at least 1, got 0"),
        ({"num_stages": 3, "split": ["layers.1"]}, r"3 stages need 2 different ones, got layers\.1"),
        ({"num_stages": 3, "split": ["layers.2", "layers.1"]}, "in the model's order"),
        ({"num_stages": 2, "split": ["layers.0"]}, r"split names layers\.0, but it can name layers\.1, "),
        ({"num_stages": 2, "last": ["nowhere"]}, "last names nowhere, but it can name embed, norm, head"),
        ({"num_stages": 2, "costs": {"layers.7": 1.0}}, r"costs names layers\.7"),
    ],
)
def test_plans_that_cannot_be_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        plan_stages(read_facts(Net(3)), **options)


def test_a_plan_prints_as_a_table() -> None:
    plan = plan_stages(read_facts(Net(3)), 2)
    assert str(plan).splitlines() == [
        "stage  blocks                     other modules  parameters  size",
        "0      layers.0 ... layers.1 (2)  embed          272         1.1 kB",
        "1      layers.2                   norm, head     216         864 B",
        "positions is held by stages 0 and 1",
        "embed.weight is held by stages 0 and 1",
    ]
    assert plan.shared == {"positions": (0, 1), "embed.weight": (0, 1)}
    with pytest.raises(KeyError):
        plan.of("nowhere")
