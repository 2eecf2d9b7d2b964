"""Every layout of ranks trains as one plain process does: the loss, the norm before clipping, the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import accelfn as af
from accelfn.testing import run_ranks
from tests.parallel.tensor_models import GPT, LENGTH, PLAN, VOCABULARY

_ROWS = 8  # of a batch over all ranks
_STEPS = 3  # of the optimizer
_MAX_NORM = 0.1  # less than any norm here, so that each step is clipped


class Layout(NamedTuple):
    """Sizes of a mesh, and whether its ranks share parameters."""

    replicate: int = 1
    shard: int = 1
    tp: int = 1

    @property
    def size(self) -> int:
        return self.replicate * self.shard * self.tp

    def options(self) -> dict[str, Any]:
        """Arguments of ``init_context``."""
        handler = af.config.TorchTensorParallelConfig(plan=PLAN) if self.tp > 1 else None
        config = af.ParallelismConfig(
            dp_replicate_size=self.replicate,
            dp_shard_size=self.shard,
            tp_size=self.tp,
            tp_handler=handler,
        )
        plugin = {"fsdp_plugin": af.FullyShardedDataParallelPlugin(fsdp_version=2)} if self.shard > 1 else {}
        return {"parallelism_config": config, **plugin}


LAYOUTS = {
    "dp4": Layout(replicate=4),
    "fsdp2": Layout(shard=2),
    "fsdp4": Layout(shard=4),
    "hsdp2x2": Layout(replicate=2, shard=2),
    "tp2": Layout(tp=2),
    "tp2xdp2": Layout(replicate=2, tp=2),
    "tp2xfsdp2": Layout(shard=2, tp=2),
}


class Case(NamedTuple):
    """How a model is trained."""

    accumulation: int
    optimizer: str
    weighted: bool

    def __str__(self) -> str:
        return f"{self.optimizer}, {self.accumulation} a window, {'weighted' if self.weighted else 'mean'}"


CASES = [Case(k, name, weighted) for k in (1, 3) for name in ("AdamW", "SGD") for weighted in (False, True)]


class Seen(NamedTuple):
    """What a training run came to: by optimizer step, and at its end."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]


def make_data(case: Case) -> TensorDataset:
    """Make token ids and labels; where losses are weighted, rows have very different numbers of labels."""
    random = torch.Generator().manual_seed(3)
    num_rows = _ROWS * case.accumulation * _STEPS
    ids = torch.randint(0, VOCABULARY, (num_rows, LENGTH + 1), generator=random)
    labels = ids[:, 1:].clone()
    if case.weighted:
        share = torch.rand(num_rows, 1, generator=random)
        labels[torch.rand(labels.shape, generator=random) < share] = -100
    return TensorDataset(ids[:, :-1].contiguous(), labels)


def make_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """Make the optimizer. Adam divides by what may be rounding alone, which a large ``eps`` keeps small."""
    if case.optimizer == "SGD":
        return torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3)


def loss_of(model: nn.Module, case: Case, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the sum of the losses of all labels if they are weighted, else their mean."""
    logits = model(ids).flatten(0, 1).float()
    return F.cross_entropy(logits, labels.flatten(), reduction="sum" if case.weighted else "mean")


def plain(case: Case) -> Seen:
    """Train in one process, by hand."""
    model = GPT()
    optimizer = make_optimizer(case, model)
    batches = iter(DataLoader[Any](make_data(case), batch_size=_ROWS))
    losses: list[float] = []
    norms: list[float] = []
    for _ in range(_STEPS):
        window = [next(batches) for _ in range(case.accumulation)]
        count = sum(int((labels != -100).sum()) for _, labels in window) if case.weighted else len(window)
        total = 0.0
        for ids, labels in window:
            loss = loss_of(model, case, ids, labels) / count
            loss.backward()  # pyright: ignore[reportUnknownMemberType]
            total += loss.item()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), _MAX_NORM)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return Seen(losses, norms, {name: one.detach() for name, one in model.named_parameters()})


def weight_of(case: Case, labels: torch.Tensor) -> torch.Tensor | None:
    """Return what a summed loss is divided by."""
    return (labels != -100).sum() if case.weighted else None


def by_functions(ctx: af.Context, case: Case) -> Iterator[tuple[torch.Tensor, torch.Tensor | None, Any, Any]]:
    """Train with the functions; yield the loss and weight of each batch, the model, and the norm of a step."""
    model: nn.Module = GPT()
    optimizer = make_optimizer(case, model)
    loader = DataLoader[Any](make_data(case), batch_size=_ROWS // ctx.axis_size("dp"))
    model, optimizer, loader = af.prepare(ctx, model, optimizer, loader)
    scaler = af.init_scaler(ctx)
    for (ids, labels), micro in af.microbatches(ctx, loader):
        norm = None
        weight = weight_of(case, labels)
        with af.accumulate(ctx, micro, model):
            loss = loss_of(model, case, ids, labels)
            scaler = af.backward(ctx, loss, scaler, micro, weight=weight)
        if micro.sync:
            scaler = af.unscale_gradients(ctx, optimizer, scaler)
            norm = af.clip_grad_norm_(ctx, model.parameters(), _MAX_NORM, scaler_state=scaler)
            scaler = af.optimizer_step(ctx, optimizer, scaler)
        yield loss.detach(), weight, model, norm


def by_shim(ctx: af.Context, case: Case) -> Iterator[tuple[torch.Tensor, torch.Tensor | None, Any, Any]]:
    """Train with an Accelerator; as :func:`by_functions`."""
    accelerator = af.Accelerator(context=ctx)
    model: nn.Module = GPT()
    optimizer: Any = make_optimizer(case, model)
    loader: Any = DataLoader[Any](make_data(case), batch_size=_ROWS // ctx.axis_size("dp"))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for ids, labels in loader:
        norm = None
        weight = weight_of(case, labels)
        with accelerator.accumulate(model):
            loss = loss_of(model, case, ids, labels)
            accelerator.backward(loss, weight=weight)
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(model.parameters(), _MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
        yield loss.detach(), weight, model, norm


def whole(value: Any) -> torch.Tensor:
    """Return a parameter of all ranks."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def train(ctx: af.Context, case: Case, way: Callable[..., Iterator[Any]]) -> Seen:
    """Train on this rank."""
    ctx = ctx.replace(gradient_accumulation_steps=case.accumulation)
    dp = ctx.along("dp")
    losses: list[float] = []
    norms: list[float] = []
    total, count = torch.zeros(()), torch.zeros(())
    model: Any = None
    for loss, weight, prepared, norm in way(ctx, case):
        model = prepared
        total += whole(loss)
        count += 1 if weight is None else weight
        if norm is not None:
            both = af.reduce(dp, torch.stack([total, count]))
            losses.append(float(both[0] / both[1]))
            norms.append(float(norm))
            total, count = torch.zeros(()), torch.zeros(())
    named = af.unwrap_model(model).named_parameters()
    return Seen(losses, norms, {name: whole(one.detach()).clone() for name, one in named})


def far(one: list[float], other: list[float]) -> float:
    """Return the largest relative difference."""
    assert len(one) == len(other) == _STEPS
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def moved(seen: Seen, reference: Seen) -> float:
    """Return how far the weights are from the reference's, beside the way that those went."""
    start = dict(GPT().named_parameters())
    assert seen.weights.keys() == reference.weights.keys() == start.keys()
    way = torch.cat([(reference.weights[name] - start[name].detach()).flatten() for name in start])
    off = torch.cat([(seen.weights[name] - reference.weights[name]).flatten() for name in start])
    return float(off.norm() / way.norm())


@pytest.mark.parametrize("way", [by_functions, by_shim])
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("name", [*LAYOUTS])
def test_every_layout_trains_as_one_process(
    name: str, precision: str, way: Callable[..., Iterator[Any]]
) -> None:
    layout = LAYOUTS[name]

    def work(ctx: af.Context) -> list[Seen]:
        return [train(ctx, case, way) for case in CASES]

    options = cast("dict[str, Any]", {"mixed_precision": precision, **layout.options()})
    ranks = run_ranks(work, layout.size, on="processes", timeout_s=120.0, **options)
    loss_bound, norm_bound, way_bound = (1e-5, 1e-5, 1e-4) if precision == "no" else (0.01, 0.05, 0.2)
    for index, case in enumerate(CASES):
        reference = plain(case)
        for seen in (rank[index] for rank in ranks):
            found = (
                far(seen.losses, reference.losses),
                far(seen.norms, reference.norms),
                moved(seen, reference),
            )
            assert found[0] < loss_bound, f"{case}: {found}"
            assert found[1] < norm_bound, f"{case}: {found}"
            assert found[2] < way_bound, f"{case}: {found}"
