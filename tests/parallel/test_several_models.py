"""Several models in one program, each with a plan of its own; and adapters on a frozen model."""

# torch leaves backward and manual_seed partly untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import accelfn as af
from accelfn.context import Context
from accelfn.testing import run_ranks
from tests.parallel.layouts import LAYOUTS
from tests.parallel.tensor_models import GPT, LENGTH, VOCABULARY

_PENALTY = 1e-3  # on the weights

_ROWS, _STEPS, _DECAY = 4, 3, 0.9


def ids_of(step: int) -> torch.Tensor:
    """Return the token ids of a batch over all ranks."""
    return torch.randint(0, VOCABULARY, (_ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def own(ctx: Context, rows: torch.Tensor) -> torch.Tensor:
    """Return the rows of a batch that this rank reads."""
    return rows.tensor_split(ctx.axis_size("dp"))[ctx.coordinate("dp")]


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters of a model, whole. Ranks: every rank."""
    named = af.unwrap_model(model).named_parameters()
    found: dict[str, torch.Tensor] = {}
    for name, one in named:
        value: Any = one.detach()
        found[name] = (value.full_tensor() if hasattr(value, "full_tensor") else value).clone()
    return found


def close(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        torch.allclose(one[name], other[name], rtol=1e-5, atol=1e-6) for name in one
    )


class Models(NamedTuple):
    """What a distillation needs."""

    student: nn.Module
    average: nn.Module  # of the student over time
    teacher: nn.Module
    optimizer: torch.optim.Optimizer

    def kept(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"student": self.student, "average": self.average, "optimizer": self.optimizer}


def make_models(ctx: Context, seed: int) -> Models:
    student: nn.Module = GPT(seed=seed)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(student.parameters(), lr=0.01, eps=1e-3)
    average = copy.deepcopy(student).requires_grad_(False)  # before it is sharded: torch copies no shards
    student, optimizer, average = af.prepare(ctx, student, optimizer, average)
    teacher: nn.Module = GPT(seed=9).requires_grad_(False).eval()
    teacher = af.prepare_model(ctx, teacher, evaluation_mode=True)
    return Models(student, average, teacher, optimizer)


def with_penalty(ctx: Context, models: Models, loss: torch.Tensor, scaler: af.ScalerState) -> af.ScalerState:
    """Go backward from a loss with an L2 penalty on the weights: in the loss, or added to its gradients."""
    if ctx.num_processes == 1:
        squares = sum(one.square().sum() for one in models.student.parameters())
        return af.backward(ctx, loss + _PENALTY * squares, scaler)
    scaler = af.unscale_gradients(ctx, models.optimizer, af.backward(ctx, loss, scaler))
    with torch.no_grad():
        for one in models.student.parameters():  # which are shards again, as they weren't before the backward
            assert one.grad is not None
            one.grad.add_(one, alpha=2 * _PENALTY)
    return scaler


def distil(ctx: Context, models: Models, steps: range) -> list[float]:
    """Train the student on the teacher's guesses; return the losses."""
    losses: list[float] = []
    scaler = af.init_scaler(ctx)
    for step in steps:
        ids = own(ctx, ids_of(step))
        with torch.no_grad():
            wanted = models.teacher(ids).softmax(-1)
        loss = F.cross_entropy(models.student(ids).flatten(0, 1), wanted.flatten(0, 1))
        scaler = with_penalty(ctx, models, loss, scaler)
        scaler = af.optimizer_step(ctx, models.optimizer, scaler)
        with torch.no_grad():
            pairs = zip(models.average.parameters(), models.student.parameters(), strict=True)
            for slow, fast in pairs:
                slow.lerp_(fast, 1 - _DECAY)
        losses.append(float(af.reduce(ctx.along("dp"), loss.detach(), "mean")))
    return losses


@pytest.mark.parametrize("name", ["fsdp2", "tp2"])
def test_a_sharded_student_learns_from_a_whole_teacher_beside_its_average(name: str, tmp_path: Path) -> None:
    def work(ctx: Context) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
        models = make_models(ctx, seed=0)
        assert not any(hasattr(one, "placements") for one in models.teacher.parameters())
        if ctx.num_processes > 1:
            assert all(hasattr(one, "placements") for one in models.average.parameters())
        losses = distil(ctx, models, range(1))
        folder = tmp_path / str(ctx.num_processes)
        af.save_state(ctx, folder, models.kept())
        again = make_models(ctx, seed=1)
        af.load_state(ctx, folder, again.kept())
        losses += distil(ctx, again, range(1, _STEPS))
        return losses, [whole(again.student), whole(again.average), whole(again.teacher)]

    ranks = run_ranks(work, 2, "processes", timeout_s=60.0, parallelism_config=LAYOUTS[name].config())
    losses, weights = work(Context())
    assert weights[0]["norm.weight"].ne(weights[1]["norm.weight"]).any()
    for found, models in ranks:
        assert found == pytest.approx(losses, rel=1e-5)
        assert all(close(one, other) for one, other in zip(models, weights, strict=True))


def test_optimizers_step_on_shards_as_on_the_whole() -> None:
    names = ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "ASGD"]
    x = torch.arange(8.0).view(2, 4) / 8

    def step(ctx: Context, name: str) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
        model, optimizer = af.prepare(ctx, model, optimizer)
        scaler = af.init_scaler(ctx)
        for _ in range(2):
            scaler = af.backward(ctx, model(x).square().sum(), scaler)
            scaler = af.optimizer_step(ctx, optimizer, scaler)
        return whole(model)

    def work(ctx: Context) -> list[str]:
        return [name for name in names if not close(step(ctx, name), step(Context(), name))]

    config = af.ParallelismConfig(dp_shard_size=2)
    assert run_ranks(work, 2, "processes", parallelism_config=config) == [[], []]


class Adapted(nn.Module):
    """A frozen linear layer, and what is learned beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted(seed: int) -> nn.Module:
    """Return a frozen model with adapters."""
    model = GPT(seed=seed).requires_grad_(False)
    for block in model.blocks:
        for name in ("up", "down"):
            setattr(block, name, Adapted(block.get_submodule(name)))  # pyright: ignore[reportArgumentType]
    return model


def test_adapters_on_a_frozen_sharded_model_train_as_in_one_process(tmp_path: Path) -> None:
    def work(ctx: Context) -> tuple[list[float], dict[str, torch.Tensor]]:
        model = adapted(0)
        trained = [one for one in model.parameters() if one.requires_grad]
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained, lr=0.01, eps=1e-3)
        model, optimizer = af.prepare(ctx, model, optimizer)
        scaler = af.init_scaler(ctx)
        norms: list[float] = []
        for step in range(_STEPS):
            ids = own(ctx, ids_of(step))
            loss = F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
            scaler = af.backward(ctx, loss, scaler)
            norms.append(float(af.clip_grad_norm_(ctx, model.parameters(), 0.1, scaler_state=scaler)))
            scaler = af.optimizer_step(ctx, optimizer, scaler)
        folder = tmp_path / str(ctx.num_processes)
        af.save_state(ctx, folder, {"model": model, "optimizer": optimizer})
        fresh = af.prepare(ctx, adapted(1))
        af.load_state(ctx, folder, {"model": fresh}, partial=True)
        assert close(whole(fresh), whole(model))
        return norms, whole(model)

    config = af.ParallelismConfig(dp_shard_size=2)
    ranks = run_ranks(work, 2, "processes", timeout_s=60.0, parallelism_config=config)
    norms, weights = work(Context())
    start = dict(adapted(0).named_parameters())
    for found, learned in ranks:
        assert found == pytest.approx(norms, rel=1e-5)
        assert close(learned, weights)
        for name, one in start.items():
            assert torch.equal(learned[name], one) is not one.requires_grad
