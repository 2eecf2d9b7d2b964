"""A small model, and its training by DeepSpeed through the functions and the shim, and by hand."""

# torch and DeepSpeed leave much untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from __future__ import annotations

import copy
import logging
import os
import signal
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

import accelfn as af
from accelfn import Context
from accelfn.config import DeepSpeedPlugin
from accelfn.testing import run_ranks

T = TypeVar("T")
ROWS, WIDTH, BATCH = 72, 8, 8
Weights = dict[str, torch.Tensor]


class Run(NamedTuple):
    """What a training left behind: the mean loss of each batch, norms before clipping, the parameters."""

    losses: list[float]
    norms: list[float]
    weights: Weights


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 1))


def rows() -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    return [(one, one.sum(0, keepdim=True)) for one in x]


def loader(ctx: Context) -> Any:
    return torch.utils.data.DataLoader(rows(), batch_size=BATCH // ctx.num_processes)  # pyright: ignore[reportArgumentType]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def half_of(step: int) -> float:
    return 1.0 if step < 1 else 0.5


def squares(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (model(x) - y).square()


def config(stage: int, *, offload: bool = False, dummy: bool = False, **more: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": stage}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    whole: dict[str, Any] = {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False, **more}
    if dummy:
        # torch's own optimizer, which needs no compiler.
        whole["optimizer"] = {
            "type": "AdamW",
            "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True},
        }
    return whole


def with_deepspeed(
    ctx: Context, stage: int, dtype: str = "no", steps: int = 1, *, dummy: bool = False, offload: bool = False
) -> Context:
    plugin = DeepSpeedPlugin(hf_ds_config=config(stage, offload=offload, dummy=dummy))
    return ctx.replace(mixed_precision=dtype, gradient_accumulation_steps=steps, deepspeed_plugin=plugin)


def on_processes(fn: Callable[[Context], T], size: int = 2, **options: Any) -> list[T]:
    """Run ``fn`` on processes without DeepSpeed's warnings, which are about its own calls of torch."""

    def quiet(ctx: Context) -> T:
        warnings.simplefilter("ignore")
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        return fn(ctx)

    return run_ranks(quiet, size, on="processes", timeout_s=110, **options)


def objects(ctx: Context, dummy: bool) -> tuple[nn.Module, Any, Any, Any]:
    """Make a model, its optimizer and schedule, by torch or for DeepSpeed to make, and a loader."""
    model = make()
    if not dummy:
        optimizer = adamw(model.parameters())
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, half_of), loader(ctx)
    stands = af.engines.DummyOptim(model.parameters(), lr=1e-2, weight_decay=0.1)
    schedule = af.engines.DummyScheduler(
        stands, lr_scheduler_callable=lambda one: torch.optim.lr_scheduler.LambdaLR(one, half_of)
    )
    return model, stands, schedule, loader(ctx)


def by_functions(
    ctx: Context,
    *,
    dummy: bool = False,
    weighted: bool = False,
    max_norm: float | None = 0.5,
    load: str | None = None,
    save: tuple[int, str] | None = None,
    die_at: int | None = None,
) -> Run:
    model, optimizer, scheduler, batches = af.prepare(ctx, *objects(ctx, dummy))
    scaler = af.init_scaler(ctx)
    tree: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": batches}
    if load is not None:
        scaler = af.load_state(ctx, load, {**tree, "scaler": scaler})["scaler"]
    losses: list[float] = []
    norms: list[torch.Tensor] = []
    num_steps = 0
    for (x, y), micro in af.microbatches(ctx, batches):
        with af.accumulate(ctx, micro, model):
            each = squares(model, x, y)
            loss, weight = (each.sum(), len(x)) if weighted else (each.mean(), None)
            scaler = af.backward(ctx, loss, scaler, micro, weight)
        losses.append(float(af.reduce(ctx, each.detach().mean(), "mean")))
        if micro.sync:
            if max_norm is not None:
                scaler = af.unscale_gradients(ctx, optimizer, scaler)
                norms.append(af.clip_grad_norm_(ctx, model.parameters(), max_norm, scaler_state=scaler))
            scaler = af.optimizer_step(ctx, optimizer, scaler, scheduler=scheduler)
            num_steps += 1
            if save is not None and num_steps == save[0]:
                af.save_state(ctx, save[1], {**tree, "scaler": scaler})
            if num_steps == die_at and ctx.rank == ctx.num_processes - 1:
                os.kill(os.getpid(), signal.SIGKILL)
    return Run(losses, [float(norm) for norm in norms], weights_of(ctx, model))


def by_shim(ctx: Context, *, dummy: bool = False, folder: str | None = None) -> Run:
    """Train with an Accelerator; with a folder, go through a checkpoint after the first step."""
    accelerator = af.Accelerator(context=ctx)
    model, optimizer, scheduler, batches = accelerator.prepare(*objects(ctx, dummy))
    losses: list[float] = []
    norms: list[Any] = []
    for x, y in batches:
        with accelerator.accumulate(model):
            each = squares(model, x, y)
            accelerator.backward(each.mean())
            losses.append(float(accelerator.reduce(each.detach().mean(), "mean")))
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if folder is not None and len(norms) == 1 and accelerator.sync_gradients:
            accelerator.save_state(folder)
            accelerator.load_state(folder)
    return Run(losses, [float(norm) for norm in norms], weights_of(ctx, model))


def weights_of(ctx: Context, model: nn.Module) -> Weights:
    found = af.get_state_dict(ctx, model)
    return {name: value.detach().float().clone() for name, value in found.items()}


def by_hand(dtype: str, steps: int, max_norm: float | None = 0.5) -> Run:
    """Train on one process with torch alone; in bf16 with parameters in float32 beside, as ZeRO does."""
    model = make()
    low = copy.deepcopy(model).bfloat16() if dtype == "bf16" else model
    optimizer = adamw(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, half_of)
    data = rows()
    losses: list[float] = []
    norms: list[float] = []
    batches = [data[start : start + BATCH] for start in range(0, ROWS, BATCH)]
    windows = [batches[start : start + steps] for start in range(0, len(batches), steps)]
    for window in windows:
        for batch in window:
            x, y = torch.stack([one for one, _ in batch]), torch.stack([two for _, two in batch])
            loss = (low(x.to(next(low.parameters()).dtype)).float() - y).square().mean()
            (loss / len(window)).backward()
            losses.append(float(loss.detach()))
        for own, other in zip(model.parameters(), low.parameters(), strict=True):
            if own is not other:
                assert other.grad is not None
                own.grad, other.grad = other.grad.float(), None
        if max_norm is not None:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for own, other in zip(model.parameters(), low.parameters(), strict=True):
                if own is not other:
                    other.copy_(own)
    return Run(losses, norms, {name: one.detach().clone() for name, one in model.named_parameters()})


def distances(one: Run, other: Run) -> tuple[float, float, float]:
    """Return the largest relative differences of losses and norms, and the largest of parameters."""

    def relative(own: list[float], others: list[float]) -> float:
        assert len(own) == len(others)
        return max((abs(a - b) / max(abs(b), 1e-6) for a, b in zip(own, others, strict=True)), default=0.0)

    assert one.weights.keys() == other.weights.keys()
    parameters = max(float((one.weights[name] - other.weights[name]).abs().max()) for name in one.weights)
    return relative(one.losses, other.losses), relative(one.norms, other.norms), parameters
