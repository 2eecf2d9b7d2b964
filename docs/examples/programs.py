"""Train a small model in programs that nobody wrote, and find the feature that is wrong on several ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accelfn.testing.programs import Draft, Program, Report, campaign, feature, training_programs


def build_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)  # pyright: ignore[reportUnknownMemberType]
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def make_rows() -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [(x, x.mean(0, keepdim=True)) for x in torch.randn(16, 4, generator=random)]


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


@feature("scaled", (False, True))
def scaled(program: Program, draft: Draft) -> None:
    """Multiply the loss by the number of ranks, as some do for gradients that are averaged."""
    if program["scaled"]:
        draft.add("scored", 'loss = loss * ctx.axis_size("dp")')


def look(max_programs: int = 120) -> Report:
    """Draw programs until a training differs from one process."""
    grammar = training_programs(build_model, make_rows, loss_of, features=[scaled])
    return campaign(grammar, minutes=2.0, max_programs=max_programs, max_findings=1, seed=1)


if __name__ == "__main__":
    report = look()
    print(report)
    for shrunk in report.findings:
        print(shrunk.program.source())
