"""Ranks that hold different experts train a model as one process does."""

# torch leaves backward and manual_seed partly untyped, and transformers much.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import accelfn as af
from accelfn import Context
from accelfn.errors import ConfigurationError
from accelfn.parallel.norm import clip_norm_
from accelfn.testing import run_ranks
from tests.parallel.expert_models import WIDTH, Experts, SparseGPT
from tests.parallel.layouts import LAYOUTS
from tests.parallel.tensor_models import make_batch, summed_loss
from tests.parallel.traffic import Traffic


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


POLICIES = (Policy(None, None, 1e-5), Policy(None, torch.bfloat16, 0.02), Policy(None, torch.float16, 0.003))


# Torch's own divisor of the gradients of experts divides twice where one rank has their shards (ep2), or
# where they are reduced in float16: then each is a half of what it should be, and nothing fails.
@pytest.mark.parametrize("name", ["ep2", pytest.param("ep2xfsdp2", marks=pytest.mark.slow)])
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


def make_mixtral() -> nn.Module:
    """Make a small model of transformers with experts, whose loss has a part that balances them."""
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        initializer_range=0.3,
        output_router_logits=True,
        router_aux_loss_coef=0.5,
        use_cache=False,
    )
    return transformers.MixtralForCausalLM(config)


def own_loss(model: nn.Module, seed: int) -> torch.Tensor:
    ids, _ = make_batch(seed)
    return model(input_ids=ids, labels=ids).loss


@pytest.mark.slow
def test_a_model_of_transformers_has_the_gradients_of_one_process(tmp_path: Path) -> None:
    state = dict(make_mixtral().state_dict())  # imports transformers once, and not in each rank

    def work(ctx: Context) -> tuple[float, float]:
        plain = make_mixtral()
        losses = [own_loss(plain, rank) for rank in range(ctx.num_processes)]
        torch.stack(losses).mean().backward()
        expected = gradients_of(plain)
        plugin = af.FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=True)
        recomputed = af.prepare_model(ctx.replace(fsdp_plugin=plugin), make_mixtral())
        model = af.prepare_model(ctx, make_mixtral())
        for one in (model, recomputed):
            with Traffic() as traffic:
                loss = own_loss(one, ctx.rank)
            assert traffic.syncs == 1  # in transformers; that each layer lists its rows by rank isn't seen
            torch.testing.assert_close(loss, losses[ctx.rank])
            loss.backward()
        af.comm.check_replicas(ctx, model)
        af.save_model(ctx, model, tmp_path)
        with af.init_empty_weights():
            empty = make_mixtral()
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
