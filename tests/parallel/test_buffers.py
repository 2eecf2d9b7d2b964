"""Buffers that forward passes change: rank 0's before each pass, in every layout, or refused by name."""

# torch leaves backward partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn import Context, FullyShardedDataParallelPlugin, ParallelismConfig
from accelfn.errors import ConfigurationError, MismatchError, RemoteRankError
from accelfn.parallel.strategies.recompute import recompute
from accelfn.testing import Where, run_ranks


class Statistics(nn.Module):
    """Buffers of each kind: changed by torch, replaced, changed in place and not saved, constant."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("calls", torch.zeros(()), persistent=False)
        self.register_buffer("scale", torch.ones(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean: torch.Tensor = (self.mean + x.detach().mean(0)) / 2
            self.calls += x.detach().sum()
        return self.norm(self.line(x)) * self.scale + self.mean + self.calls

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).square().mean()


def filled(model: nn.Module) -> Any:
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters(), 1):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) / number)
    return model


def rows(rank: int, step: int) -> torch.Tensor:
    return torch.arange(8.0).view(4, 2).sin() * (rank + 1) + step


def buffers_of(model: nn.Module) -> list[list[float]]:
    return [buffer.flatten().tolist() for buffer in af.unwrap_model(model).buffers()]


def train(ctx: Context, num_steps: int = 3) -> Any:
    """Train, evaluate twice; return the outputs and the buffers."""
    model = filled(Statistics())
    model = af.prepare(ctx, model)
    af.parallel.register_forward_method(model, "loss")
    for step in range(num_steps):
        with af.no_sync(ctx, model) if step == 0 else af.training.trigger_sync_in_backward(ctx, model):
            batch = rows(ctx.rank, step)
            loss = model.loss(batch) if step == 1 else model(batch).square().mean()
            loss.backward()
    model.eval()
    with torch.no_grad():
        outputs = [model(rows(0, 9)).tolist() for _ in range(2)]
    return outputs, buffers_of(model)


@pytest.mark.parametrize(
    ("on", "options"),
    [
        pytest.param("memory", {}, id="threads"),
        pytest.param("processes", {}, id="processes", marks=pytest.mark.slow),
        pytest.param(
            "processes", {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=2)}, id="shards"
        ),
    ],
)
def test_ranks_compute_with_rank_0s_buffers_in_windows_methods_and_evaluations(
    on: Where, options: dict[str, Any]
) -> None:
    # Weights don't change, so rank 0's buffers depend on its own rows alone.
    expected = train(Context())
    for found in run_ranks(train, 2, on, **options):
        torch.testing.assert_close(found, expected)
    assert expected[0][0] == expected[0][1]


@pytest.mark.parametrize("on", ["memory", "processes"])
@pytest.mark.parametrize("unwraps", [False, True])
def test_the_main_process_evaluates_alone_between_steps(on: Where, unwraps: bool) -> None:
    def run(ctx: Context) -> list[Any]:
        model: Any = filled(Statistics())
        model, optimizer = af.prepare(ctx, model, torch.optim.SGD(model.parameters(), lr=0.1))
        scaler, seen = af.init_scaler(ctx), list[Any]()
        for step in range(3):
            scaler = af.backward(ctx, model(rows(ctx.rank, step)).square().mean(), scaler)
            scaler = af.optimizer_step(ctx, optimizer, scaler)
            seen.append(buffers_of(model))
            if ctx.is_main_process:
                evaluated = af.unwrap_model(model) if unwraps else model
                with torch.no_grad():
                    evaluated.eval()(rows(0, 9))
                evaluated.train()
        return seen

    first, second = run_ranks(run, 2, on)
    assert first == second
    assert first[0] != first[1]


def test_the_main_process_alone_is_told_that_shards_need_all_ranks() -> None:
    def run(ctx: Context) -> None:
        model = af.prepare(ctx, filled(Statistics()))
        model(rows(ctx.rank, 0)).square().mean().backward()
        if ctx.is_main_process:
            with torch.no_grad():
                model(rows(0, 0))
        model(rows(ctx.rank, 1))

    with pytest.raises(MismatchError, match=r"If forward is inside `if .* is_main_process`, move it out"):
        run_ranks(run, 2, "processes", fsdp_plugin=FullyShardedDataParallelPlugin())


def test_constant_buffers_and_copies_send_nothing() -> None:
    def run(ctx: Context) -> tuple[int, int]:
        sent: list[int] = []
        broadcast = ctx.collectives.broadcast

        def counted(buffer: torch.Tensor, source: int) -> None:
            sent.append(buffer.numel())
            broadcast(buffer, source)

        collectives = dataclasses.replace(ctx.collectives, broadcast=counted)
        ctx = dataclasses.replace(ctx, collectives=collectives)
        model: Any = af.prepare(ctx, filled(Statistics()))
        before = len(sent)
        model.eval()
        for step in range(3):
            model(rows(ctx.rank, step)).sum().backward()
        constant = len(sent) - before
        model.train()(rows(ctx.rank, 0))
        other = copy.deepcopy(model)
        if ctx.rank == 0:  # an average of the weights may be looked at by one rank
            with torch.no_grad():
                other.eval()(rows(0, 0))
        return constant, len(sent) - before

    assert run_ranks(run, 2) == [(0, 0), (0, 0)]


def test_a_pass_that_waits_for_its_backward_pass_keeps_what_it_saved() -> None:
    def run(ctx: Context) -> list[float]:
        model = af.prepare(ctx, filled(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))
        (model(rows(ctx.rank, 0)) + model(rows(ctx.rank, 1))).square().sum().backward()
        return [float(parameter.grad.sum()) for parameter in model.parameters() if parameter.grad is not None]

    first, second = run_ranks(run, 2)
    assert first == second
    assert len(first) == 4


def test_a_recomputed_block_changes_its_buffers_once() -> None:
    def gradients(*recomputed: str) -> tuple[Any, Any]:
        model = nn.Sequential(nn.Linear(2, 2), filled(Statistics()))
        recompute(Context(), filled(model), recomputed)
        for step in range(2):
            loss = model(rows(0, step)).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
        return [parameter.grad for parameter in model.parameters()], buffers_of(model)

    torch.testing.assert_close(gradients("1"), gradients())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(*x.shape[:2], 2, 1).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return self.norm(self.line(y.transpose(1, 2).flatten(2)).transpose(1, 2)).transpose(1, 2)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["cp", "sp", "pp"])
def test_buffers_of_a_part_of_the_data_are_refused(axis: str) -> None:
    """Of some positions, or of a microbatch."""

    def run(ctx: Context) -> None:
        model = af.prepare(ctx, Blocks())
        ((_, micro),) = af.microbatches(ctx, [0])
        scaler, batch = af.init_scaler(ctx), rows(ctx.rank * (axis != "pp"), 0).view(4, 1, 2).expand(4, 2, 2)
        with pytest.raises(
            (ConfigurationError, RemoteRankError),
            match=r"blocks\.\d\.norm\.(running_mean|num_batches_tracked)",
        ):
            af.forward_backward(ctx, model, loss_of, batch, scaler, micro)

    options: Any = {f"{axis}_size": 2}
    run_ranks(run, 2, "processes", parallelism_config=ParallelismConfig(**options))
