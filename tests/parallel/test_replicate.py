# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn import Context, DistributedDataParallelKwargs
from accelfn.errors import ConfigurationError, MismatchError, NotAvailableError
from accelfn.parallel.handle import joined, syncing
from accelfn.parallel.replicate import replicate
from accelfn.testing import Where, run_ranks

Rows = tuple[torch.Tensor, torch.Tensor]


class Twice(nn.Module):
    """A linear layer that can be reached by a method other than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2, dtype=torch.float64)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters(), 1):
                parameter.copy_(torch.linspace(-1, number, parameter.numel()).view_as(parameter))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def other(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * 2


def rows(num: int, seed: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, 3, dtype=torch.float64, generator=generator)
    return x, torch.randn(num, 2, dtype=torch.float64, generator=generator)


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def loss_of(model: nn.Module, data: Rows) -> torch.Tensor:
    return nn.functional.mse_loss(model(data[0]), data[1])


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 4), st.integers(1, 7))
def test_ranks_together_have_the_gradient_of_one_with_all_samples(
    world: int, batch: int, num_steps: int, num_batches: int
) -> None:
    total = rows(world * batch * num_batches)

    def run(ctx: Context) -> list[list[torch.Tensor]]:
        model = af.prepare(ctx, Twice())
        scaler = af.init_scaler(ctx)
        mine = [
            tuple(part[(index * world + ctx.rank) * batch :][:batch] for part in total)
            for index in range(num_batches)
        ]
        found: list[list[torch.Tensor]] = []
        for data, micro in af.microbatches(ctx, mine):
            with af.accumulate(ctx, micro, model):
                scaler = af.backward(ctx, loss_of(model, cast("Rows", data)), scaler, micro)
            if micro.sync:
                found.append(grads(model))
                model.zero_grad()
        return found

    windows = [(start, min(start + num_steps, num_batches)) for start in range(0, num_batches, num_steps)]
    for found in run_ranks(run, world, gradient_accumulation_steps=num_steps):
        assert len(found) == len(windows)
        for (start, end), window in zip(windows, found, strict=True):
            alone = Twice()
            begin, stop = start * world * batch, end * world * batch
            loss_of(alone, (total[0][begin:stop], total[1][begin:stop])).backward()
            torch.testing.assert_close(window, grads(alone))


def test_a_backward_that_failed_half_way_does_not_end_the_averaging() -> None:
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            raise MemoryError("no more")

    def run(ctx: Context) -> list[float]:
        model = cast("Twice", replicate(ctx, Twice()))
        weight = cast("torch.Tensor", Fails.apply(model.inner.weight))
        # The sum reaches the bias's hook first, and then the failure.
        with pytest.raises(MemoryError):
            (weight.sum() + model.inner.bias.sum()).backward()
        model.zero_grad()
        (model.inner.bias.sum() * ctx.rank).backward()
        return cast("list[float]", grads(model)[0].tolist())

    assert run_ranks(run, 2) == [[0.5, 0.5]] * 2


def test_models_and_buffers_start_as_on_rank_0() -> None:
    def run(ctx: Context) -> tuple[list[float], float, float]:
        model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
        with torch.no_grad():
            for tensor in [*model.parameters(), *model.buffers()]:
                tensor.fill_(ctx.rank + 1)
        replicate(ctx, model)
        started = [float(one.detach().sum()) for one in [*model.parameters(), *model.buffers()]]
        norm = cast("nn.BatchNorm1d", model[1])
        assert norm.running_mean is not None
        norm.running_mean = torch.full((1,), float(ctx.rank))  # another tensor than at the start
        model(torch.zeros(2, 1))
        mean = float(norm.running_mean)
        model.eval()
        norm.running_mean.fill_(ctx.rank)
        model(torch.zeros(2, 1))
        return started, mean, float(norm.running_mean)

    (first, mean, own), (second, other_mean, other) = run_ranks(run, 2)
    assert first == second == [1.0] * 7
    assert mean == other_mean
    assert (own, other) == (0.0, 1.0)  # in evaluation every rank keeps what it has


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


def test_a_frozen_model_is_left_alone() -> None:
    def run(ctx: Context) -> float:
        model = nn.Linear(1, 1).requires_grad_(False)
        model.weight.fill_(ctx.rank)
        assert replicate(ctx, model) is model
        return float(model.weight)

    assert run_ranks(run, 2) == [0.0, 1.0]


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


class Options(nn.Module):
    """A model with a buffer and a part that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.left_out = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).relu())


OPTIONS: list[tuple[dict[str, Any], bool]] = [
    ({"static_graph": True}, False),
    ({"find_unused_parameters": True}, False),
    ({"gradient_as_bucket_view": True}, True),
    ({"bucket_cap_mb": 1}, True),
    ({"broadcast_buffers": False}, True),
]


def test_each_option_of_ddp_is_applied_and_ranks_stay_equal() -> None:
    def run(ctx: Context) -> list[tuple[list[torch.Tensor], bool]]:
        return [trained(ctx, options, frozen) for options, frozen in OPTIONS]

    def trained(ctx: Context, options: dict[str, Any], frozen: bool) -> tuple[list[torch.Tensor], bool]:
        torch.manual_seed(0)
        inner = Options()
        inner.left_out.requires_grad_(not frozen)
        model = af.prepare(ctx.replace(kwargs_handlers=[DistributedDataParallelKwargs(**options)]), inner)
        for name, value in options.items():
            name = {"bucket_cap_mb": "bucket_bytes_cap"}.get(name, name)
            assert getattr(model, name) == (value << 20 if name == "bucket_bytes_cap" else value)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(3):
            x = rows(4, 2 * seed + ctx.rank)[0].float()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
        is_view = inner.first.weight.grad is not None and inner.first.weight.grad._is_view()
        return [one.detach() for one in model.parameters()], is_view

    for (first, is_view), (second, _), (options, _) in zip(
        *run_ranks(run, 2, "processes"), OPTIONS, strict=True
    ):
        assert all(map(torch.equal, first, second)), options
        assert is_view == ("gradient_as_bucket_view" in options)


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
        with pytest.raises(error, match=match):
            replicate(ctx.replace(kwargs_handlers=[DistributedDataParallelKwargs(**options)]), Twice())

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
        lambda ctx: refused(ctx, NotAvailableError, "ranks that are threads don't send", comm_hook="fp16"),
        2,
    )


def test_what_nobody_averages_is_let_through_and_what_ddp_cannot_do_is_refused() -> None:
    with syncing(True, nn.Linear(1, 1)):
        pass

    def run(ctx: Context) -> None:
        handlers = {
            "static_graph": DistributedDataParallelKwargs(static_graph=True),
            "find_unused_parameters": DistributedDataParallelKwargs(find_unused_parameters=True),
        }
        for name, handler in handlers.items():
            model = replicate(ctx.replace(kwargs_handlers=[handler]), Twice())
            with (
                pytest.raises(ConfigurationError, match=f"with {name}, Dist"),
                syncing(True, model),
            ):
                raise AssertionError

    run_ranks(run, 2, "processes")


def test_forward_passes_are_not_compared_where_that_is_said_and_else_they_are() -> None:
    def run(ctx: Context) -> list[int]:
        model, other = replicate(ctx, Twice()), replicate(ctx, Twice())
        call_log = ctx.collectives.call_log
        numbers = [call_log.number]
        x, _ = rows(2)
        with joined(model):
            with pytest.raises(KeyError), joined(model):
                raise KeyError
            if ctx.rank == 0:
                model(x)
            numbers.append(call_log.number)
        with joined(model):
            other(x)
            numbers.append(call_log.number)
        model(x)
        numbers.append(call_log.number)
        af.wait_for_everyone(ctx)
        return [number - numbers[0] for number in numbers]

    assert run_ranks(run, 2) == [[0, 0, 1, 2]] * 2
