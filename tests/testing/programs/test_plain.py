"""The reference against torch written by hand: an oracle that is wrong would be worse than none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from accelfn.testing.programs import plain, training_programs
from accelfn.testing.programs.run import run_reference

ROWS, WIDTH = 16, 3


def make_rows() -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(WIDTH, generator=draw), "y": torch.tensor(index % 2)} for index in range(ROWS)]


def build_model() -> nn.Module:
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def mean_loss(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def batches(size: int, *, filled: bool, drop_last: bool = False, number: int = ROWS) -> list[Any]:
    """Return batches as a DataLoader makes them; the last one may be filled up from the start."""
    rows = make_rows()[:number]
    rows += rows[: -len(rows) % size] if filled else []
    return [*DataLoader[Any](rows, batch_size=size, drop_last=drop_last)]  # pyright: ignore[reportArgumentType]


def windows(every: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(every), size):
        yield every[start : start + size]


class ByHand(NamedTuple):
    """A training in plain torch."""

    size: int
    window: int = 1
    ranks: int = 1
    max_norm: float = 1e9
    momentum: float = 0.0
    halve: bool = False
    drop_last: bool = False
    number: int = ROWS

    def epoch(self) -> list[Any]:
        filled = self.ranks > 1 and not self.drop_last
        return batches(self.size, filled=filled, drop_last=self.drop_last, number=self.number)

    def outputs(self, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Normalise the rows of each rank on their own; the statistics of the first one stay."""
        buffers = [*model.buffers()]
        before = [value.clone() for value in buffers]
        made = [model(x.chunk(self.ranks)[0])]
        first = [value.clone() for value in buffers]
        for rows in x.chunk(self.ranks)[1:]:
            for buffer, value in zip(buffers, before, strict=True):
                buffer.data = value.clone()
            made.append(model(rows))
        for buffer, value in zip(buffers, first, strict=True):
            buffer.data = value
        return torch.cat(made)

    def train(self) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
        """Train for two epochs; return losses, norms and the model's state."""
        model = build_model()
        rate, decay = (0.05, 0.1) if self.momentum else (0.1, 0.0)
        optimizer = torch.optim.SGD(model.parameters(), rate, self.momentum, weight_decay=decay)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        losses: list[float] = []
        norms: list[float] = []
        for _ in range(2):
            for parts in windows(self.epoch(), self.window):
                several = [F.cross_entropy(self.outputs(model, one["x"]), one["y"]) for one in parts]
                losses += [loss.item() for loss in several]
                torch.autograd.backward(torch.stack(several).mean())
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)))
                optimizer.step()  # pyright: ignore[reportUnknownMemberType]
                optimizer.zero_grad()
                if self.halve:
                    schedule.step()
        return losses, norms, dict(model.state_dict())


@pytest.mark.parametrize(
    ("text", "by_hand"),
    [
        ("", ByHand(2, number=8)),
        ("accumulation=3", ByHand(2, window=3, number=8)),
        ("batch=3 accumulation=2", ByHand(3, window=2, number=8)),
        ("rows=15 drop_last schedule", ByHand(2, number=7, drop_last=True, halve=True)),
        ("dp=2 batch=3 accumulation=2", ByHand(6, window=2, ranks=2)),
        ("shard=2 clip=norm optimizer=momentum", ByHand(4, ranks=2, max_norm=0.1, momentum=0.9)),
    ],
)
def test_the_reference_trains_as_torch_by_hand(text: str, by_hand: ByHand) -> None:
    grammar = training_programs(build_model, make_rows, mean_loss, sees_other_rows=True)
    program = grammar.program(text)
    plainest = program.reference()
    context = plain.Context(ranks=plainest["dp"], window=plainest["accumulation"], rank_by_rank=True)
    log = run_reference(program, context)
    losses, norms, state = by_hand.train()
    torch.testing.assert_close([float(one.tensor) for one in log.values["loss"]], losses)
    torch.testing.assert_close([float(one.tensor) for one in log.values["norm"]], norms)
    logged = {**log.states["model"].parameters, **log.states["model"].buffers}
    torch.testing.assert_close({name: value.to(state[name].dtype) for name, value in logged.items()}, state)


def test_a_sum_is_divided_once_by_the_weight_of_its_window() -> None:
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    nn.init.zeros_(model.weight)
    ctx, scaler = plain.Context(window=2), plain.init_scaler(plain.Context())
    rows = [[1.0], [3.0, 5.0, 6.0]]
    for number, batch in enumerate(rows):
        loss = model(torch.tensor(batch).view(-1, 1)).sum()
        micro = plain.Micro(number, number, 2, number == 1)
        scaler = plain.backward(ctx, loss, scaler, micro, weight=len(batch))
    plain.optimizer_step(ctx, optimizer, scaler)
    assert model.weight.item() == -(1 + 3 + 5 + 6) / 4
