"""Several models in one program, each with a plan of its own."""

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
from tests.parallel.shard_models import whole
from tests.parallel.tensor_models import GPT, LENGTH, VOCABULARY

_ROWS, _STEPS, _DECAY = 4, 3, 0.9


def ids_of(step: int) -> torch.Tensor:
    """Return the token ids of a batch over all ranks."""
    return torch.randint(0, VOCABULARY, (_ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


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


def distil(ctx: Context, models: Models, steps: range) -> list[float]:
    """Train the student on the teacher's guesses; return the losses."""
    losses: list[float] = []
    scaler = af.init_scaler(ctx)
    for step in steps:
        ids = af.split_between_processes(ctx.along("dp"), ids_of(step))
        with torch.no_grad():
            wanted = models.teacher(ids).softmax(-1)
        loss = F.cross_entropy(models.student(ids).flatten(0, 1), wanted.flatten(0, 1))
        scaler = af.backward(ctx, loss, scaler)
        scaler = af.optimizer_step(ctx, models.optimizer, scaler)
        with torch.no_grad():
            pairs = zip(models.average.parameters(), models.student.parameters(), strict=True)
            for slow, fast in pairs:
                slow.lerp_(fast, 1 - _DECAY)
        losses.append(float(af.reduce(ctx.along("dp"), loss.detach(), "mean")))
    return losses


@pytest.mark.parametrize("name", ["fsdp2", pytest.param("tp2", marks=pytest.mark.slow)])
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
