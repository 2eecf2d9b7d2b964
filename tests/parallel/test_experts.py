"""Ranks that hold different experts train a model as one process does."""

# torch leaves backward and manual_seed partly untyped, and transformers much.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import accelfn as af
from accelfn import Context
from accelfn.errors import ConfigurationError
from accelfn.parallel.experts import Exchange, combine, dispatch, plan_route
from accelfn.parallel.norm import clip_norm_
from accelfn.testing import run_ranks
from tests.parallel.expert_models import WIDTH, Experts, SparseGPT
from tests.parallel.layouts import LAYOUTS
from tests.parallel.tensor_models import make_batch, summed_loss


def exchange_of(ctx: Context) -> Exchange:
    """Return what stands for torch's all-to-all where ranks are threads."""

    def exchange(rows: torch.Tensor, receive: list[int] | None, send: list[int] | None) -> torch.Tensor:
        shares = [len(rows) // ctx.num_processes] * ctx.num_processes if send is None else send
        parts = list(cast("Any", rows).split(shares))
        came: list[torch.Tensor] = [one[ctx.rank] for one in af.gather_object(ctx, [parts])]
        assert receive is None or [len(one) for one in came] == receive
        return torch.cat(came)

    return exchange


@st.composite
def all_counts(draw: st.DrawFn) -> list[list[int]]:
    """Draw how many rows each rank has for each expert; often none."""
    size, own = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    few = st.lists(st.sampled_from([0, 0, 1, 2, 5]), min_size=size * own, max_size=size * own)
    return draw(st.lists(few, min_size=size, max_size=size))


@given(all_counts())
def test_rows_reach_their_experts_and_come_back(counts: list[list[int]]) -> None:
    size, own = len(counts), len(counts[0]) // len(counts)

    def work(ctx: Context) -> list[list[float]]:
        mine, exchange = torch.tensor(counts[ctx.rank]), exchange_of(ctx)
        experts = torch.arange(size * own).repeat_interleave(mine)
        rows = torch.stack([experts.double(), torch.full_like(experts, ctx.rank).double()], 1)
        route = plan_route(mine, size, exchange)
        came = dispatch(rows, route, exchange)
        assert route.counts.tolist() == [
            sum(one[ctx.rank * own + expert] for one in counts) for expert in range(own)
        ]
        torch.testing.assert_close(combine(came, route, exchange), rows, rtol=0, atol=0)
        return cast("Any", came).tolist()

    for rank, came in enumerate(run_ranks(work, size)):
        assert came == [
            [float(expert), float(source)]
            for expert in range(rank * own, (rank + 1) * own)
            for source in range(size)
            for _ in range(counts[source][expert])
        ]


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(one.grad) for name, one in model.named_parameters() if one.grad is not None}


def furthest(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """Return the largest difference of a gradient, beside its largest entry; not of rounding alone."""
    assert found.keys() == expected.keys()
    sizes = {name: float(one.abs().max()) for name, one in expected.items()}
    return max(
        float((found[name].float() - expected[name]).abs().max()) / size
        for name, size in sizes.items()
        if size > 1e-4
    )


class Policy(NamedTuple):
    """In what a sharded model computes and reduces, and how near its gradients are."""

    param: torch.dtype | None
    reduce: torch.dtype | None
    bound: float


POLICIES = (
    Policy(None, None, 1e-5),
    Policy(None, torch.bfloat16, 0.02),
    Policy(None, torch.float16, 0.003),
)


# Torch's own divisor of the gradients of experts divides twice where one rank has their shards (ep2), or
# where they are reduced in float16: then each is a half of what it should be, and nothing fails.
@pytest.mark.parametrize("name", ["ep2", "ep2xfsdp2"])
def test_gradients_of_experts_are_averaged_once(name: str) -> None:
    def work(ctx: Context) -> list[float]:
        plain = SparseGPT()
        batches = [make_batch(rank) for rank in range(ctx.num_processes)]
        torch.stack([summed_loss(plain, one)[0] for one in batches]).mean().backward()
        expected = gradients_of(plain)
        found: list[float] = []
        for policy in POLICIES:
            torchs = MixedPrecisionPolicy(param_dtype=policy.param, reduce_dtype=policy.reduce)
            plugin = af.FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=torchs)
            model = af.prepare_model(ctx.replace(fsdp_plugin=plugin), SparseGPT())
            summed_loss(model, batches[ctx.rank])[0].backward()
            norm = clip_norm_(ctx, list(model.parameters()), math.inf)
            norm /= clip_norm_(Context(), list(plain.parameters()), math.inf)
            found.append(max(furthest(gradients_of(model), expected), abs(float(norm) - 1)))
        return found

    layout = LAYOUTS[name]
    for found in run_ranks(work, layout.size, "processes", parallelism_config=layout.config()):
        for policy, far in zip(POLICIES, found, strict=True):
            assert far < policy.bound, policy


def make_sparse(kind: str) -> nn.Module:
    """Make a small model of transformers with experts, whose loss has a part that balances them."""
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    common: dict[str, Any] = {
        "vocab_size": 32,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 32,
        "initializer_range": 0.3,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
        "use_cache": False,
        "pad_token_id": 0,
    }
    if kind == "mixtral":
        config = transformers.MixtralConfig(**common, intermediate_size=24, num_local_experts=4)
        return transformers.MixtralForCausalLM(config)
    config = transformers.Qwen2MoeConfig(
        **common,
        intermediate_size=24,
        moe_intermediate_size=12,
        shared_expert_intermediate_size=12,
        num_experts=8,
    )
    return transformers.Qwen2MoeForCausalLM(config)


def own_loss(model: nn.Module, seed: int) -> torch.Tensor:
    ids, _ = make_batch(seed)
    return model(input_ids=ids, labels=ids).loss


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe"])
def test_models_of_transformers_have_the_gradients_of_one_process(kind: str, tmp_path: Path) -> None:
    state = dict(make_sparse(kind).state_dict())  # imports transformers once, and not in each rank

    def work(ctx: Context) -> tuple[float, float]:
        plain = make_sparse(kind)
        losses = [own_loss(plain, rank) for rank in range(ctx.num_processes)]
        torch.stack(losses).mean().backward()
        expected = gradients_of(plain)
        plugin = af.FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=True)
        recomputed = af.prepare_model(ctx.replace(fsdp_plugin=plugin), make_sparse(kind))
        model = af.prepare_model(ctx, make_sparse(kind))
        for one in (model, recomputed):
            loss = own_loss(one, ctx.rank)
            torch.testing.assert_close(loss, losses[ctx.rank])
            loss.backward()
        af.check_replicas(ctx, model)
        af.save_model(ctx, model, tmp_path)
        with af.init_empty_weights():
            empty = make_sparse(kind)
        fresh = af.prepare_model(ctx, empty)
        af.load_model(fresh, tmp_path)
        assert all(torch.equal(whole(value), state[name]) for name, value in fresh.state_dict().items())
        return furthest(gradients_of(model), expected), furthest(gradients_of(recomputed), expected)

    layout = LAYOUTS["ep2xfsdp2"]
    for found in run_ranks(work, layout.size, "processes", parallelism_config=layout.config()):
        assert max(found) < 1e-5


class Skipping(Experts):
    """Leaves out those who see no row, as transformers does."""

    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        parts: tuple[torch.Tensor, ...] = cast("Any", x).split(cast("Any", counts).tolist())
        made = [part @ self.up[i] @ self.down[i] for i, part in enumerate(parts) if len(part)]
        return torch.cat(made) if made else x


class Skewed(nn.Module):
    """Sends all rows to one expert, or says a wrong number of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = Skipping(4)
        for one in self.parameters():
            nn.init.normal_(one)

    def forward(self, x: torch.Tensor, counts: list[int]) -> torch.Tensor:
        return self.experts(x, torch.tensor(counts))


def test_a_rank_whose_experts_see_no_row_takes_part() -> None:
    def work(ctx: Context) -> float:
        x = torch.rand(6, WIDTH, generator=torch.Generator().manual_seed(ctx.rank))
        plain, model = Skewed(), af.prepare_model(ctx, Skewed())
        counts = [[0, 6, 0, 0], [6, 0, 0, 0]]
        with pytest.raises(ConfigurationError, match=r"experts: counts must be .* \[4\].* got \[2\]"):
            model(x, [3, 3])
        with pytest.raises(ConfigurationError, match="experts: counts add up to 5, but x has 6 rows"):
            model(x, [5, 0, 0, 0])
        rows = af.gather(ctx, x).view(2, 6, WIDTH)
        losses = [plain(one, of).square().sum() for one, of in zip(rows, counts, strict=True)]
        torch.stack(losses).mean().backward()
        model(x, counts[ctx.rank]).square().sum().backward()
        if any(one.grad is None for one in model.parameters()):
            return float("inf")
        return max(
            float((whole(one.grad) - cast("Any", other.grad)).abs().max())
            for one, other in zip(model.parameters(), plain.parameters(), strict=True)
        )

    assert max(run_ranks(work, 2, "processes", parallelism_config=LAYOUTS["ep2"].config())) < 1e-4


def test_a_loss_may_use_experts_outside_of_the_forward_pass() -> None:
    def penalty(model: nn.Module) -> torch.Tensor:
        return torch.stack([whole(one).square().sum() for one in model.parameters()]).sum()

    def work(ctx: Context) -> float:
        x, counts = torch.rand(6, WIDTH, generator=torch.Generator().manual_seed(0)), [1, 2, 2, 1]
        plain, model = Skewed(), af.prepare_model(ctx, Skewed())
        for one in (plain, model):
            (one(x, counts).square().sum() + penalty(one)).backward()
        return furthest(gradients_of(model), gradients_of(plain))

    assert max(run_ranks(work, 2, "processes", parallelism_config=LAYOUTS["ep2"].config())) < 1e-5
