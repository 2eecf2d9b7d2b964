# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import gc
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import Context
from accelfn.config import DistributedDataParallelKwargs
from accelfn.errors import ConfigurationError, MismatchError, NotAvailableError
from accelfn.parallel.strategies.replicate import replicate
from accelfn.testing import Where, run_ranks

Rows = tuple[torch.Tensor, torch.Tensor]


def rows(num: int, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 3, dtype=torch.float64, generator=generator)
    return x, torch.randn(num, 2, dtype=torch.float64, generator=generator)


def loss_of(model: nn.Module, data: Rows) -> torch.Tensor:
    return nn.functional.mse_loss(model(data[0]), data[1])


@pytest.mark.parametrize("on", ["memory", "processes"])
def test_a_line_is_searched_by_the_loss_of_all_ranks(on: Where) -> None:
    def run(ctx: Context) -> torch.Tensor:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        options: Any = {"lr": 30, "max_iter": 6, "line_search_fn": "strong_wolfe"}
        model, optimizer = af.prepare(ctx, model, torch.optim.LBFGS(model.parameters(), **options))
        x, y = (one[ctx.rank :: ctx.num_processes] for one in rows(24))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, (x, y))
            af.backward(ctx, loss, af.init_scaler(ctx))
            return loss

        optimizer.step(closure)
        return torch.cat([one.detach().flatten() for one in model.parameters()])

    (alone,) = run_ranks(run, 1)
    for found in run_ranks(run, 2, on):
        torch.testing.assert_close(found, alone)


@pytest.mark.parametrize("on", ["memory", "processes"])
def test_sparse_gradients_are_averaged_as_such(on: Where) -> None:
    def run(ctx: Context) -> torch.Tensor:
        torch.manual_seed(0)
        model: nn.Module = nn.Embedding(6, 2, sparse=True)
        model, optimizer = af.prepare(ctx, model, torch.optim.SparseAdam(model.parameters(), lr=0.1))
        scaler = af.init_scaler(ctx)
        for ids in torch.tensor([[1, 2], [2, 3], [5, 5]]):
            loss = model(ids[ctx.rank :: ctx.num_processes]).square().mean()
            scaler = af.optimizer_step(ctx, optimizer, af.backward(ctx, loss, scaler))
        return next(model.parameters()).detach()

    (alone,) = run_ranks(run, 1)
    for found in run_ranks(run, 2, on):
        torch.testing.assert_close(found, alone)


@pytest.mark.parametrize("on", ["memory", "processes"])
def test_what_ranks_would_each_change_by_their_own_rows_is_refused(on: Where) -> None:
    def step(parameter: torch.Tensor) -> None:
        raise AssertionError("stepped")

    def run(ctx: Context) -> None:
        inner: Any = nn.Sequential(nn.Embedding(4, 2, max_norm=1.0), nn.Linear(2, 1))
        with pytest.raises(ConfigurationError, match=r"prepare_model: 0 is an embedding with max_norm"):
            af.prepare_model(ctx, inner)
        inner[0].max_norm = None
        removed = inner[1].weight.register_post_accumulate_grad_hook(step)
        with pytest.raises(ConfigurationError, match=r"prepare_model: .*\(1, 2\) has a hook after the acc"):
            af.prepare_model(ctx, inner)
        removed.remove()
        model = af.prepare_model(ctx, inner)
        inner[1].weight.register_post_accumulate_grad_hook(step)
        with pytest.raises(ConfigurationError, match=r"backward: .* has a hook after the accumulation"):
            af.backward(ctx, model(torch.tensor([ctx.rank])).sum(), af.init_scaler(ctx))

    run_ranks(run, 2, on)


@pytest.mark.parametrize("on", ["memory", "processes"])
def test_models_that_differ_are_an_error_on_every_rank(on: Where) -> None:
    def run(ctx: Context) -> str:
        with pytest.raises(MismatchError) as caught:
            replicate(ctx, nn.Linear(1 + ctx.rank, 1))
        return str(caught.value)

    first, second = run_ranks(run, 2, on)
    assert first == second
    assert "\n  1 " in first
    assert "weight" in first


def train(ctx: Context, wrapped: bool = True) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if wrapped:
        model, optimizer = af.prepare(ctx, model, optimizer)
    scaler = af.init_scaler(ctx)
    x, y = rows(24)
    mine = [
        (
            x[start : start + 4][ctx.rank :: ctx.num_processes],
            y[start : start + 4][ctx.rank :: ctx.num_processes],
        )
        for start in range(0, 24, 4)
    ]
    for data, micro in af.microbatches(ctx, mine):
        with af.accumulate(ctx, micro, model):
            scaler = af.backward(ctx, loss_of(model, data), scaler, micro)
        if micro.sync:
            scaler = af.optimizer_step(ctx, optimizer, scaler)
    return {name: value.detach().clone() for name, value in af.unwrap_model(model).state_dict().items()}


@pytest.mark.parametrize("on", ["memory", pytest.param("processes", marks=pytest.mark.slow)])
def test_frozen_models_are_rank_0s_too(on: Where) -> None:
    def run(ctx: Context, **options: Any) -> list[float]:
        model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1)).requires_grad_(False)
        for tensor in model.state_dict().values():
            tensor.fill_(ctx.rank + 1)
        model = af.prepare_model(ctx, model, **options)
        return [float(tensor) for tensor in model.state_dict().values()]

    assert run_ranks(run, 2, on) == [[1.0] * 7] * 2
    assert run_ranks(lambda ctx: run(ctx, evaluation_mode=True), 2) == [[1.0] * 7, [2.0] * 7]


def test_what_torch_gets_wrong_with_a_static_graph_is_refused() -> None:
    class Box(NamedTuple):
        value: torch.Tensor

    @dataclass
    class Output:
        value: torch.Tensor

    class Returning(nn.Linear):
        kind: Any = Box

        def forward(self, x: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
            return self.kind(super().forward(x))

    def run(ctx: Context) -> None:
        static = ctx.replace(kwargs_handlers=[DistributedDataParallelKwargs(static_graph=True)])
        x = torch.ones(2, 2)
        inner = Returning(2, 1)
        model: Any = af.prepare(static, inner)
        for _ in range(2):
            model(x).value.sum().backward()
        inner.kind = Output
        with pytest.raises(ConfigurationError, match="can't look into a Output"):
            model(x)
        inner.kind = Box
        loss = model(x).value.sum()
        loss.backward(retain_graph=True)
        with pytest.raises(ConfigurationError, match="one backward pass for each forward pass"):
            loss.backward()
        inner.bias.requires_grad_(False)
        with pytest.raises(ConfigurationError, match=r"bias was frozen after prepare\. Freeze it before, or"):
            model(x)

    run_ranks(run, 2, "processes")


COMPRESSIONS: list[dict[str, Any]] = [
    {"comm_hook": "fp16"},
    {"comm_hook": "power_sgd", "comm_state_option": {"matrix_approximation_rank": 2}},
    {"comm_hook": "power_sgd", "comm_wrapper": "fp16"},
    {"comm_hook": "power_sgd", "comm_state_option": {"start_powerSGD_iter": 2, "warm_start": False}},
    {"comm_hook": "fp16", "static_graph": True, "gradient_as_bucket_view": True},
]


def test_compressed_gradients_train_nearly_as_well() -> None:
    def run(ctx: Context) -> list[dict[str, torch.Tensor]]:
        handlers = [DistributedDataParallelKwargs(**options) for options in COMPRESSIONS]
        return [train(ctx.replace(kwargs_handlers=[handler])) for handler in handlers]

    alone = train(Context())
    for first, second, options in zip(*run_ranks(run, 2, "processes"), COMPRESSIONS, strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
        torch.testing.assert_close(first, alone, rtol=0.2, atol=0.05)
        assert any(not torch.equal(first[name], alone[name]) for name in alone), options


OPTIONS: list[dict[str, Any]] = [
    {"static_graph": True},
    {"gradient_as_bucket_view": True},
    {"bucket_cap_mb": 1},
    {"broadcast_buffers": False},
]


def test_each_option_of_ddp_is_passed_on() -> None:
    def run(ctx: Context) -> None:
        for options in OPTIONS:
            handler = DistributedDataParallelKwargs(**options)
            model = af.prepare(ctx.replace(kwargs_handlers=[handler]), nn.Linear(2, 2))
            for name, value in options.items():
                if name == "bucket_cap_mb":
                    assert cast("Any", model).bucket_bytes_cap == value << 20
                else:
                    assert getattr(model, name) == value

    run_ranks(run, 2, "processes")


@pytest.mark.parametrize("broadcast_buffers", [True, False])
def test_buffers_are_rank_0s_before_each_forward_unless_told_otherwise(broadcast_buffers: bool) -> None:
    def run(ctx: Context) -> float:
        handler = DistributedDataParallelKwargs(broadcast_buffers=broadcast_buffers)
        inner = nn.BatchNorm1d(1, momentum=0.0)
        model = af.prepare(ctx.replace(kwargs_handlers=[handler]), inner)
        assert inner.running_mean is not None
        inner.running_mean.fill_(float(ctx.rank + 1))
        model(torch.zeros(2, 1)).sum().backward()
        return float(inner.running_mean)

    expected = [1.0, 1.0] if broadcast_buffers else [1.0, 2.0]
    assert run_ranks(run, 2, "processes") == expected
    assert run_ranks(run, 2) == expected


def test_a_compression_that_cannot_be_had_is_refused_by_name() -> None:
    def refused(ctx: Context, error: type[Exception], match: str, **options: Any) -> None:
        own = ctx.replace(kwargs_handlers=[DistributedDataParallelKwargs(**options)])
        with pytest.raises(error, match=match):
            replicate(own, nn.Linear(3, 2))

    def on_processes(ctx: Context) -> None:
        wrong = {"comm_hook": "power_sgd", "comm_state_option": {"rank": 2}}
        refused(
            ctx, ConfigurationError, r"options of torch's PowerSGDState, got {'rank': 2}.*'rank'", **wrong
        )
        # Torch 2.13 fails in the step in which this one begins to compress.
        refused(ctx, NotAvailableError, "Use comm_hook='power_sgd'", comm_hook="batched_power_sgd")
        refused(ctx, ConfigurationError, "comm_hook='bf16' is not supported by torch", comm_hook="bf16")

    run_ranks(on_processes, 2, "processes")
    run_ranks(
        lambda ctx: refused(ctx, NotAvailableError, "ranks that are threads don't send", comm_hook="fp16"), 2
    )


def prepare_again(ctx: Context) -> list[int]:
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    for _ in range(5):
        prepared = af.prepare_model(ctx, model)
        prepared(torch.ones(4, 2)).sum().backward()
        del prepared
        gc.collect()
    hooks = [getattr(one, "_post_accumulate_grad_hooks", None) or () for one in model.parameters()]
    state = vars(model)
    return [len(found) for found in (*hooks, state["_forward_hooks"], state["_forward_pre_hooks"])]


@pytest.mark.slow
def test_a_wrapper_takes_its_hooks_along() -> None:
    assert run_ranks(prepare_again, 2, "processes", cpu=True) == [[0] * 6] * 2
