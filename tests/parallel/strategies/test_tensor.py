"""Ranks that share each layer compute as one process does, by every style and word of a plan."""

# torch leaves backward and manual_seed partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import accelfn as af
from accelfn import Context
from accelfn.config import TorchTensorParallelConfig
from accelfn.errors import ConfigurationError
from accelfn.testing import run_ranks
from tests.parallel.tensor_models import GPT, PLAN, SEQUENCE, VOCABULARY, Adapted, make_batch, summed_loss

TP = af.ParallelismConfig(tp_size=2)


def spread(ctx: Context, model: nn.Module, plan: Mapping[str, str]) -> Any:
    """Share a model's layers by a plan that it has itself."""
    vars(model)["tp_plan"] = dict(plan)
    return af.prepare_model(ctx, model)


def whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(one.grad) for name, one in model.named_parameters() if one.grad is not None}


def difference(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


class Case(NamedTuple):
    """A model, its plan, and whether its blocks are compiled."""

    options: dict[str, Any]
    plan: Mapping[str, str]
    is_compiled: bool = False


NORMED = {"blocks.*.attn.head_norm": "heads"}
CASES = [
    Case({"norms_heads": True}, {**PLAN, **NORMED}),
    Case({}, SEQUENCE),
    Case({"tied": False, "norms_heads": True}, {**SEQUENCE, **NORMED}),
    Case({}, PLAN, is_compiled=True),
    Case({}, SEQUENCE, is_compiled=True),
]
# A norm of heads that is taken for whole: that gradients are compared shows it.
WRONG = Case({"norms_heads": True}, {**PLAN, "blocks.*.attn.head_norm": "whole"})


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's compiler looks at it
def test_loss_and_gradients_are_those_of_one_process(is_compiled: bool) -> None:
    cases = [case for case in CASES if case.is_compiled == is_compiled]

    def against_plain(ctx: Context, case: Case) -> tuple[float, float, list[str]]:
        plain, model = GPT(**case.options), spread(ctx, GPT(**case.options), case.plan)
        if case.is_compiled:
            for block in model.blocks:
                block.compile(backend="aot_eager", fullgraph=True)
        losses = [summed_loss(one, make_batch(1))[0] for one in (plain, model)]
        for loss in losses:
            loss.backward()
        astray = [name for name, one in model.named_parameters() if one.placements != one.grad.placements]
        off = float((losses[0] / losses[1] - 1).detach().abs())
        return off, difference(gradients_of(plain), gradients_of(model)), astray

    def work(ctx: Context) -> list[tuple[float, float, list[str]]]:
        return [against_plain(ctx, case) for case in (*cases, WRONG)]

    for *right, wrong in run_ranks(work, 2, "processes", parallelism_config=TP, timeout_s=90):
        for case, (loss, gradients, astray) in zip(cases, right, strict=True):
            assert astray == []
            assert loss < 1e-6
            assert gradients < 2e-5, case  # of sums over 20 tokens, up to 50
        assert wrong[1] > 1e-2


@pytest.mark.slow
def test_adapters_are_split_with_their_layers_by_the_plan_of_the_model_inside() -> None:
    def against_plain(ctx: Context) -> tuple[float, float]:
        plain = Adapted()
        model: Any = af.prepare_model(ctx, Adapted())
        losses = [summed_loss(one, make_batch(1))[0] for one in (plain, model)]
        for loss in losses:
            loss.backward()
        off = float((losses[0] / losses[1] - 1).detach().abs())
        return off, difference(gradients_of(plain), gradients_of(model))

    config = af.ParallelismConfig(tp_size=2, tp_handler=TorchTensorParallelConfig(plan=PLAN))
    for loss, gradients in run_ranks(against_plain, 2, "processes", parallelism_config=config):
        assert loss < 1e-6
        assert gradients < 2e-5


@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"tp_size": 2, "dp_shard_size": 2}], ids=str)
def test_an_average_of_the_model_is_split_as_the_model_is(sizes: dict[str, Any]) -> None:
    def work(ctx: Context) -> list[bool]:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
        average: Any = cast("Any", AveragedModel)(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        plain: Any = copy.deepcopy((model, average))
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, average, optimizer = af.prepare(ctx, model, average, optimizer)
        other = torch.optim.SGD(plain[0].parameters(), lr=0.1)
        for _ in range(2):
            scaler = af.backward(ctx, model(torch.ones(2, 4)).square().mean(), af.init_scaler(ctx))
            af.optimizer_step(ctx, optimizer, scaler)
            plain[0](torch.ones(2, 4)).square().mean().backward()
            other.step()
            other.zero_grad()
            average.update_parameters(model)
            plain[1].update_parameters(plain[0])
        pairs = zip(average.parameters(), plain[1].parameters(), strict=True)
        return [torch.allclose(whole(one), expected, atol=1e-6) for one, expected in pairs]

    handler = TorchTensorParallelConfig(plan={"0": "colwise", "1": "rowwise"})
    config = af.ParallelismConfig(**sizes, tp_handler=handler)
    world_size: int = sizes["tp_size"] * sizes.get("dp_shard_size", 1)
    assert run_ranks(work, world_size, "processes", parallelism_config=config) == [[True] * 4] * world_size


def test_a_loss_of_logits_that_stay_split() -> None:
    def train(ctx: Context) -> tuple[float, float, tuple[int, ...], bool]:
        plain = GPT()
        model: Any = af.prepare_model(ctx, GPT(views_by_count=True))  # whose heads are counted anew
        batch = make_batch(1)
        expected, _ = summed_loss(plain, batch)
        expected.backward()
        with loss_parallel():
            loss, _ = summed_loss(model, batch)
            loss.backward()
        split = model(batch[0]).to_local()
        with torch.no_grad():
            close = torch.allclose(model(batch[0]), plain(batch[0]), atol=1e-5)
        off = float((whole(loss) / expected - 1).detach().abs())
        return off, difference(gradients_of(plain), gradients_of(model)), tuple(split.shape), close

    handler = TorchTensorParallelConfig(plan=PLAN, loss_parallel=True)
    config = af.ParallelismConfig(tp_size=2, tp_handler=handler)
    for loss, gradients, shape, close in run_ranks(train, 2, "processes", parallelism_config=config):
        assert loss < 1e-6
        assert gradients < 2e-5
        assert shape == (4, 8, VOCABULARY // 2)
        assert close


def test_a_penalty_on_parameters_that_ranks_share_is_added_as_a_plain_tensor() -> None:
    def penalised(loss: torch.Tensor, penalties: list[Any]) -> torch.Tensor:
        return loss + 0.1 * cast("torch.Tensor", sum(penalties))

    def train(ctx: Context) -> float:
        plain = GPT()
        model: Any = af.prepare_model(ctx, GPT())
        batch = make_batch(1)
        squares = [one.square().sum() for one in plain.parameters()]
        penalised(summed_loss(plain, batch)[0], squares).backward()

        def backward(squares: list[Any]) -> None:
            af.backward(ctx, penalised(summed_loss(model, batch)[0], squares), af.init_scaler(ctx))

        with pytest.raises(ConfigurationError, match=r"backward: .* along tp share .* penalty\.full_tensor"):
            backward([one.square().sum() for one in model.parameters()])
        model.zero_grad()
        backward([one.square().sum().full_tensor() for one in model.parameters()])
        return difference(gradients_of(plain), gradients_of(model))

    handler = TorchTensorParallelConfig(plan=PLAN)
    config = af.ParallelismConfig(tp_size=2, tp_handler=handler)
    assert max(run_ranks(train, 2, "processes", parallelism_config=config)) < 2e-5


def test_a_second_model_is_trained_whole_beside_one_that_ranks_share() -> None:
    def train(ctx: Context) -> tuple[float, list[torch.Tensor]]:
        model: Any = GPT()
        critic: Any = nn.Sequential(nn.Linear(VOCABULARY, 1), nn.Tanh())
        for parameter in critic.parameters():
            nn.init.ones_(parameter)
        optimizer = torch.optim.SGD([*critic.parameters()], lr=0.5)
        model = af.prepare_model(ctx, model)
        if ctx.num_processes > 1:
            whole_plan = af.plan_model(ctx, critic, engine="ddp")
            with pytest.raises(ConfigurationError, match=r'engine="ddp"'):
                af.prepare_model(ctx, critic)
            critic = af.prepare_model(ctx, critic, plan=whole_plan)
        optimizer = af.prepare(ctx, optimizer)
        scaler = af.backward(ctx, critic(model(make_batch(1)[0])).square().mean(), af.init_scaler(ctx))
        norm = float(af.clip_grad_norm_(ctx, critic.parameters(), 1e9, scaler_state=scaler))
        af.optimizer_step(ctx, optimizer, scaler)
        return norm, [one.detach() for one in critic.parameters()]

    handler = TorchTensorParallelConfig(plan=PLAN)
    norm, expected = train(Context())
    for own, found in run_ranks(
        train, 2, "processes", parallelism_config=af.ParallelismConfig(tp_size=2, tp_handler=handler)
    ):
        assert own == pytest.approx(norm)
        assert all(map(torch.allclose, found, expected))
