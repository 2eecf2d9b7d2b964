"""Checks of training: on whatever mesh, the ranks together learn what one process learns."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelfn.accelerator import Accelerator
from accelfn.comm import check_replicas, set_seed
from accelfn.context import Context, World
from accelfn.context.config import DataLoaderConfiguration, GradScalerKwargs
from accelfn.data import microbatches
from accelfn.launch.selftest.trial import Trial, demand
from accelfn.training import (
    accumulate,
    backward,
    init_scaler,
    optimizer_step,
    prepare,
    unwrap_model,
)

__all__ = (
    "check_accelerator",
    "check_accumulation",
    "check_bf16",
    "check_configured",
    "check_fp32",
    "make_parts",
    "train",
    "width_for",
)

_ROWS_PER_RANK = 4
_STEPS = 6


class _Small(nn.Sequential):
    """What all checks train. It says how ranks along tp share its layers."""

    tp_plan: ClassVar[Mapping[str, str]] = MappingProxyType({"0": "colwise", "2": "rowwise"})


def width_for(ctx: Context) -> int:
    """Return a width of the model that the ranks along tp can share."""
    return 16 * ctx.axis_size("tp")


def make_parts(ctx: Context, batch_size: int, num_rows: int, width: int) -> tuple[nn.Module, Any, Any]:
    """Make a small model, an optimizer with memory and a shuffled loader, the same on every rank.

    Args:
        ctx: Says where the model lies until it is prepared.
        batch_size: Of the loader.
        num_rows: Of the data.
        width: Of the hidden layer.
    """
    state = torch.get_rng_state()
    set_seed(3)
    model = _Small(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 1)).to(ctx.device)
    inputs = torch.randn(num_rows, 6)
    targets = inputs.sum(1, keepdim=True).sin()
    torch.set_rng_state(state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader: DataLoader[Any] = DataLoader(TensorDataset(inputs, targets), batch_size, shuffle=True)
    return model, optimizer, loader


def train(trial: Trial, ctx: Context, batch_size: int, num_rows: int) -> dict[str, torch.Tensor]:
    """Train for two epochs; give the weights on the CPU."""
    ctx = ctx.replace(dataloader_config=DataLoaderConfiguration(data_seed=9))
    parts = make_parts(ctx, batch_size, num_rows, width_for(trial.ctx))
    model, optimizer, loader = prepare(ctx, *parts)
    if trial.spoils("model"):
        with torch.no_grad():
            next(iter(model.parameters())).add_(0.5)
    scaler = init_scaler(ctx)
    for _ in range(2):
        for (inputs, targets), micro in microbatches(ctx, loader):
            with accumulate(ctx, micro, model):
                loss = nn.functional.mse_loss(model(inputs).float(), targets)
                scaler = backward(ctx, loss, scaler, micro)
            if micro.sync:
                scaler = optimizer_step(ctx, optimizer, scaler, max_norm=5.0)
    weights = unwrap_model(model).state_dict()
    check_replicas(ctx, weights, name="weights after training")
    return {name: _whole(tensor).float().cpu() for name, tensor in weights.items()}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """Bring together what ranks hold of a tensor. Every rank gets it."""
    gather: Callable[[], torch.Tensor] | None = getattr(tensor, "full_tensor", None)  # of a DTensor
    return (tensor if gather is None else gather()).detach()


def _alone(ctx: Context) -> Context:
    """Return a world of one on this rank's device, configured alike."""
    return Context(world=World(device=ctx.device), precision=ctx.precision, accumulation=ctx.accumulation)


def _compare(trial: Trial, ctx: Context, tolerance: float) -> str:
    """Train on all ranks, and on this one alone with the batches of all, and compare the weights."""
    size, window = ctx.axis_size("dp"), ctx.gradient_accumulation_steps
    num_rows = _ROWS_PER_RANK * size * window * _STEPS // 2
    together = train(trial, ctx, _ROWS_PER_RANK, num_rows)
    quiet = dataclasses.replace(trial, fault="")
    alone = train(quiet, _alone(ctx), _ROWS_PER_RANK * size, num_rows)
    furthest = max(float((together[name] - alone[name]).abs().max()) for name in alone)
    demand(
        furthest <= tolerance,
        f"the weights are {furthest:.2g} away from those of one process; at most {tolerance:g} is rounding",
    )
    return f"within {furthest:.1e}"


def check_fp32(trial: Trial) -> str:
    """In full precision."""
    return _compare(trial, trial.ctx.replace(mixed_precision="no", gradient_accumulation_steps=1), 1e-4)


def check_accumulation(trial: Trial) -> str:
    """Over windows of three batches."""
    return _compare(trial, trial.ctx.replace(mixed_precision="no", gradient_accumulation_steps=3), 1e-4)


def check_bf16(trial: Trial) -> str:
    """In bf16."""
    return _compare(trial, trial.ctx.replace(mixed_precision="bf16", gradient_accumulation_steps=1), 5e-2)


def check_configured(trial: Trial) -> str:
    """With all that is configured: precision, accumulation, and how models are prepared."""
    ctx = trial.ctx
    if ctx.mixed_precision == "fp16":
        # The first scale of a long run overflows now and then, and what overflows is another thing with
        # gradients of ranks than with those of one process: then one of the two skips a step.
        ctx = ctx.replace(kwargs_handlers=[GradScalerKwargs(init_scale=256.0)])
    said = _compare(trial, ctx, 1e-4 if ctx.mixed_precision == "no" else 5e-2)
    return f"{ctx.mixed_precision}, {ctx.gradient_accumulation_steps} per window, {said}"


def check_accelerator(trial: Trial) -> str:
    """The Accelerator trains to the same bits as the functions."""
    ctx = trial.ctx.replace(mixed_precision="no", gradient_accumulation_steps=1)
    num_rows = _ROWS_PER_RANK * ctx.axis_size("dp") * _STEPS
    expected = train(trial, ctx, _ROWS_PER_RANK, num_rows)
    accelerator = Accelerator(
        mixed_precision="no",
        gradient_accumulation_steps=1,
        dataloader_config=DataLoaderConfiguration(data_seed=9),
    )
    try:
        parts = make_parts(ctx, _ROWS_PER_RANK, num_rows, width_for(ctx))
        model, optimizer, loader = accelerator.prepare(*parts)
        for _ in range(2):
            for inputs, targets in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(nn.functional.mse_loss(model(inputs).float(), targets))
                    accelerator.clip_grad_norm_(model.parameters(), 5.0)
                    optimizer.step()
                    optimizer.zero_grad()
        found = accelerator.unwrap_model(model).state_dict()
        other = [
            name for name, tensor in expected.items() if not torch.equal(tensor, _whole(found[name]).cpu())
        ]
    finally:
        accelerator.close()
    demand(not other, f"{', '.join(other)} have other bits")
    return "the same bits"
