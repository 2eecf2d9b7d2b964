"""The budget of a mesh is what ranks really hold and receive, to the byte."""

# torch leaves backward and its optimizers partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, cast

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn

import accelfn as af
from accelfn import Context, FullyShardedDataParallelPlugin, ParallelismConfig
from accelfn.errors import ConfigurationError
from accelfn.parallel import Budget, read_facts
from accelfn.testing import run_ranks
from tests.parallel.expert_models import SparseGPT
from tests.parallel.tensor_models import GPT, LENGTH, PLAN
from tests.parallel.traffic import Traffic, held

FSDP = FullyShardedDataParallelPlugin(fsdp_version=2)
WINDOW = af.GradientAccumulationPlugin(num_steps=2)


class Odd(nn.Module):
    """Blocks whose rows no even number divides, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)) for _ in range(3))
        self.blocks[1].requires_grad_(False)
        self.out = nn.Linear(3, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.out(x)


class Found(NamedTuple):
    """What a rank of a real run planned, held and received."""

    budget: Budget
    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    unreduced: int
    received: dict[str, int]


def fsdp_groups(model: nn.Module) -> list[Any]:
    """List torch's records of the units; it has no public way to ask."""
    units = [cast("Any", one) for one in model.modules() if hasattr(one, "_get_fsdp_state")]
    return [group for unit in units for group in unit._get_fsdp_state()._fsdp_param_groups]


def gathered(groups: list[Any]) -> int:
    """Return the bytes of gathered parameters, and of those still being gathered."""
    found = [tensor for group in groups for one in group.fsdp_params for tensor in one.all_gather_outputs]
    coming = [group._all_gather_result for group in groups if group._all_gather_result is not None]
    return held([*found, *(one.all_gather_output for one in coming)])


def train(ctx: Context) -> Found:
    """Train for two windows of two batches, and look at the second."""
    model: Any = GPT() if ctx.axis_size("tp") > 1 else SparseGPT() if ctx.axis_size("ep") > 1 else Odd()
    takes_ids = isinstance(model, GPT)
    budget = af.plan_memory(ctx, model)
    model, optimizer = af.prepare(
        ctx, model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    )
    parameters = list(model.parameters())
    groups, scaler = fsdp_groups(model), af.init_scaler(ctx)
    seen: list[int] = [0]
    gradients, unreduced, received = 0, 0, dict[str, int]()

    def look_back(gradient: torch.Tensor) -> None:
        seen.append(gathered(groups))

    def look(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        seen.append(gathered(groups))
        if output.requires_grad:
            cast("Any", output).register_hook(look_back)

    for block in model.blocks:
        next(block.children()).register_forward_hook(look)
    batch = torch.zeros(2, LENGTH, dtype=torch.long) if takes_ids else torch.ones(2, 3)
    for _ in range(2):
        whole: list[Any] = []
        with Traffic() as traffic:
            for x, micro in af.microbatches(ctx, [batch, batch]):
                with af.accumulate(ctx, micro, model):
                    scaler = af.backward(ctx, model(x).square().mean(), scaler, micro)
                if not micro.sync:
                    records = [one for group in groups for one in group.fsdp_params]
                    whole += [one.unsharded_accumulated_grad for one in records]
                    whole += [one._unsharded_param.grad for one in records]
                    unreduced = held([one for one in whole if one is not None])
        gradients = held([one.grad for one in parameters if one.grad is not None])
        scaler = af.optimizer_step(ctx, optimizer, scaler)
        received = dict(traffic.received)
    states = held([one for state in optimizer.state.values() for one in state.values()])
    return Found(budget, held(parameters), gradients, states, max(seen), unreduced, received)


def of_ranks(size: int, **options: Any) -> list[Found]:
    return run_ranks(train, size, on="processes", gradient_accumulation_plugin=WINDOW, **options)


@pytest.mark.parametrize(
    ("replicate", "plugin"),
    [
        pytest.param(1, FSDP, id="fsdp2"),
        pytest.param(2, replace(FSDP, reshard_after_forward=False), id="hsdp2x2", marks=pytest.mark.slow),
    ],
)
def test_shards_hold_and_receive_what_was_planned(
    replicate: int, plugin: FullyShardedDataParallelPlugin
) -> None:
    config = ParallelismConfig(dp_replicate_size=replicate, dp_shard_size=2)
    ranks = of_ranks(2 * replicate, fsdp_plugin=plugin, parallelism_config=config, mixed_precision="bf16")
    budget = ranks[0].budget
    assert all(one.budget == budget for one in ranks)
    assert budget.padding > 0  # rows are odd
    for one in ranks:
        planned = budget.parameters, budget.gradients, budget.gathered, budget.unreduced
        assert (one.parameters, one.gradients, one.gathered, one.unreduced) == planned
        assert one.optimizer <= budget.optimizer  # the last rank has fewer rows
        received = one.received
        assert received["allgather"] + received["reduce_scatter"] == budget.moved["dp_shard"]
        assert received.get("allreduce", 0) == budget.moved.get("dp_replicate", 0)
    assert ranks[0].optimizer == budget.optimizer


@pytest.mark.slow
def test_shared_layers_hold_what_was_planned() -> None:
    handler = af.config.TorchTensorParallelConfig(plan={**PLAN, "positions": "gather"})
    for one in of_ranks(2, parallelism_config=ParallelismConfig(tp_size=2, tp_handler=handler)):
        budget = one.budget
        planned = budget.parameters, budget.gradients, budget.optimizer
        assert (one.parameters, one.gradients, one.optimizer) == planned
        assert (budget.gathered, budget.unreduced, budget.moved) == (0, 0, {})


def test_experts_hold_and_receive_what_was_planned() -> None:
    config = ParallelismConfig(dp_shard_size=2, ep_size=2)
    for one in of_ranks(2, fsdp_plugin=FSDP, parallelism_config=config):
        budget, received = one.budget, one.received
        planned = budget.parameters, budget.gradients, budget.unreduced
        assert (one.parameters, one.gradients, one.unreduced) == planned
        assert one.gathered <= budget.gathered
        assert received["allgather"] + received["reduce_scatter"] == sum(budget.moved.values())


def test_stages_hold_at_most_what_was_planned() -> None:
    handler = af.config.PipelineParallelConfig(split=("blocks.1",))  # the second stage is the larger one
    config = ParallelismConfig(pp_size=2, dp_shard_size=2, pp_handler=handler)
    model = GPT(num_blocks=3)

    def work(ctx: Context) -> tuple[Budget, int, int, int]:
        prepared, optimizer = af.prepare(ctx, model, torch.optim.AdamW(model.parameters()))
        parameters = list(prepared.parameters())
        for one in parameters:
            one.grad = torch.zeros_like(one)
        optimizer.step()
        states = [one for state in optimizer.state.values() for one in state.values()]
        gradients = held([one.grad for one in parameters if one.grad is not None])
        return af.plan_memory(ctx, GPT(num_blocks=3)), held(parameters), gradients, held(states)

    ranks = run_ranks(work, 4, on="processes", parallelism_config=config)
    budget = ranks[0][0]
    assert [one[0] for one in ranks] == [budget] * 4
    assert budget == af.plan_memory(af.plan_context(4, parallelism_config=config), model)
    most = [max(sizes) for sizes in zip(*(one[1:] for one in ranks), strict=True)]
    assert most == [budget.parameters, budget.gradients, budget.optimizer]
    assert budget.whole == held(list(GPT(num_blocks=3).parameters()))
    assert (
        2 * budget.parameters > budget.whole / 2
    )  # of two stages one has more blocks, and both the tied weight


@given(
    shapes=st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3), min_size=1, max_size=5),
    num_shards=st.integers(2, 50),
    copies=st.integers(1, 3),
)
def test_shards_are_those_that_torch_cuts(shapes: list[list[int]], num_shards: int, copies: int) -> None:
    model = nn.Module()
    for index, shape in enumerate(shapes):
        model.register_parameter(f"p{index}", nn.Parameter(torch.empty(shape, device="meta")))
    config = ParallelismConfig(dp_shard_size=num_shards, dp_replicate_size=copies)
    ctx = af.plan_context(num_shards * copies, fsdp_plugin=FSDP, parallelism_config=config)
    budget = af.plan_memory(ctx, model)
    of_torch = [one.chunk(num_shards) for one in model.parameters()]
    assert budget.parameters == budget.gradients == sum(parts[0].nbytes for parts in of_torch)
    assert budget.whole == sum(part.nbytes for parts in of_torch for part in parts)
    assert budget.padding == budget.parameters - sum(one.nbytes // num_shards for one in model.parameters())
    assert budget.optimizer == 2 * budget.parameters + 4 * len(shapes)
    assert budget.held == budget.parameters + budget.gradients + budget.optimizer


def test_copies_hold_all_and_the_buckets_of_their_averages() -> None:
    facts = read_facts(Odd())
    trained = facts.size_bytes(*facts.trainable)
    budget = af.plan_memory(af.plan_context(4), facts, optimizer="sgd")
    assert (budget.parameters, budget.gradients, budget.buckets) == (budget.whole, trained, trained)
    assert budget.moved == {"dp_replicate": trained * 2 * 3 // 4}
    views = af.config.DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    ctx = af.plan_context(4, kwargs_handlers=[views])
    assert af.plan_memory(ctx, facts).buckets == 0
    assert af.plan_memory(af.plan_context(1), facts).moved == {}


def test_a_window_that_is_reduced_in_each_batch_holds_shards_and_sends_more() -> None:
    each = af.GradientAccumulationPlugin(num_steps=3, sync_each_batch=True)
    once, often = (
        af.plan_memory(af.plan_context(2, fsdp_plugin=FSDP, gradient_accumulation_plugin=one), Odd())
        for one in (af.GradientAccumulationPlugin(num_steps=3), each)
    )
    assert once.unreduced == read_facts(Odd()).size_bytes(*read_facts(Odd()).trainable)
    assert often.unreduced == 0
    assert often.moved["dp_shard"] == once.moved["dp_shard"] + 2 * often.gradients


def test_a_budget_prints_as_a_table() -> None:
    ctx = af.plan_context(1000, fsdp_plugin=FSDP, mixed_precision="bf16", gradient_accumulation_steps=2)
    with torch.device("meta"):
        model = nn.Sequential(nn.ModuleList(nn.Linear(3000, 3000, bias=False) for _ in range(4)), nn.ReLU())
    offloaded = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_offload=True)
    assert str(af.plan_memory(ctx, model)) == (
        "parameters      144.0 kB  of 144.0 MB\n"
        "gradients       144.0 kB\n"
        "optimizer       288.0 kB  states of adamw\n"
        "held            576.0 kB  on each of 1,000 ranks at most; activations not included\n"
        "gathered         36.0 MB  gathered units, while they compute\n"
        "unreduced       144.0 MB  unsharded gradients, until the last batch of a window\n"
        "reduced          54.0 MB  unsharded gradients, while they are averaged\n"
        "along dp_shard  431.6 MB  received in an optimizer step"
    )
    text = str(af.plan_memory(af.plan_context(7, fsdp_plugin=offloaded), model, optimizer="sgd"))
    assert "of 144.0 MB, in host memory, " in text
    assert "of it padding" in text
    assert "states of" not in text


def test_a_peak_has_gradients_beside_activations_only_where_they_accumulate() -> None:
    x = torch.empty(64, 3)
    once = af.plan_memory(af.plan_context(2, fsdp_plugin=FSDP), Odd(), batch=x)
    assert once.activations is not None
    gradients = once.gradients + once.reduced
    assert once.total - once.peak == min(gradients, once.activations + once.temporary) > 0
    # In float32: those of a block, with the padding of uneven rows, and the copy that is averaged.
    assert once.reduced == 2 * 4 * (6 * 3 + 6 + 4 * 5 + 4)
    assert "peak" in str(once)
    window = af.GradientAccumulationPlugin(num_steps=2)
    ctx = af.plan_context(2, fsdp_plugin=FSDP, gradient_accumulation_plugin=window)
    assert (often := af.plan_memory(ctx, Odd(), batch=x)).peak == often.total
    assert "peak" not in str(often)


def test_what_can_not_be_planned_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown optimizer 'rmsprob'.*Did you mean 'rmsprop'"):
        af.plan_memory(Context(), Odd(), optimizer="rmsprob")
    with pytest.raises(ConfigurationError, match="num_processes=9"):
        af.plan_context(9, parallelism_config=ParallelismConfig(dp_shard_size=2))
    with pytest.raises(TypeError, match="the first argument must be the Context"):
        af.plan_memory(cast("Any", Odd()), Odd())
    with pytest.raises(TypeError, match=r"the model must be a torch\.nn\.Module, got None"):
        af.plan_memory(Context(), cast("Any", None))
    made = torch.optim.SGD(Odd().parameters())
    with pytest.raises(ConfigurationError, match=r"got an object of type SGD\. Pass the class, such as"):
        af.plan_memory(Context(), Odd(), optimizer=cast("Any", made))
