"""Saving: replicas that drifted apart are refused, unless they are meant to."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.context import Context
from accelfn.errors import ReplicaDriftError
from accelfn.testing import run_ranks

WAYS = pytest.mark.parametrize("on", ["memory", "processes"])


def prepared(ctx: Context) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)  # pyright: ignore[reportUnknownMemberType]
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model, optimizer = af.prepare(ctx, model, torch.optim.AdamW(model.parameters(), lr=0.1))
    model(torch.ones(4, 2) * (1 + ctx.rank)).sum().backward()
    optimizer.step()  # pyright: ignore[reportUnknownMemberType]
    optimizer.zero_grad()
    return model, optimizer


@WAYS
@pytest.mark.parametrize("asynchronous", [False, True])
def test_replicas_that_drifted_are_refused_on_all_ranks(tmp_path: Path, on: Any, asynchronous: bool) -> None:
    def run(ctx: Context) -> list[tuple[int, str]]:
        model, optimizer = prepared(ctx)
        tree = {"model": model, "others": [(optimizer,)], "own": torch.tensor(ctx.rank)}
        # What differs by right, such as the statistics of batches, is no drift.
        handle = af.save_state(ctx, tmp_path / "at", tree, asynchronous)
        getattr(handle, "result", lambda: None)()
        parameters = dict(af.training.unwrap_model(model).named_parameters())
        if ctx.rank == 1:
            parameters["2.bias"].data.add_(1)
            optimizer.state[parameters["0.weight"]]["exp_avg"].add_(1)
        with pytest.raises(ReplicaDriftError) as caught:
            af.save_state(ctx, tmp_path / "new", tree, asynchronous)
        assert "save_state: 2 leaves differ between ranks" in str(caught.value)
        with pytest.raises(ReplicaDriftError):  # the model inside of what was prepared is the same one
            af.save_state(ctx, tmp_path / "new", {"model": af.training.unwrap_model(model)}, asynchronous)
        return [(row.rank, row.path) for row in caught.value.rows]

    rows = run_ranks(run, 2, on=on)
    assert rows[0] == rows[1]
    assert {rank for rank, _ in rows[0]} == {1}
    assert {path for _, path in rows[0]} == {"model/2.bias", "others/0/0/state/model/0.weight/exp_avg"}
    assert os.listdir(tmp_path) == ["at"]


@WAYS
def test_replicas_that_are_meant_to_differ_are_saved_and_come_back(tmp_path: Path, on: Any) -> None:
    def run(ctx: Context) -> float:
        model, _ = prepared(ctx)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(ctx.rank)
        af.save_state(ctx, tmp_path / "at", {"model": model}, allow_drift=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(9)
        af.load_state(ctx, tmp_path / "at", {"model": model})
        return sum(parameter.sum().item() / parameter.numel() for parameter in model.parameters()) / 6

    assert run_ranks(run, 2, on=on) == [0.0, 1.0]


def test_models_that_nobody_replicates_may_differ_and_the_guard_can_be_told(tmp_path: Path) -> None:
    def run(ctx: Context) -> None:
        torch.manual_seed(ctx.rank)  # pyright: ignore[reportUnknownMemberType]
        af.save_state(ctx, tmp_path / "own", {"model": nn.Linear(2, 1)})

    run_ranks(run, 2)

    def drifted(ctx: Context) -> None:
        model, _ = prepared(ctx)
        next(model.parameters()).data.add_(ctx.rank)
        af.save_state(ctx, tmp_path / "told", {"model": model})

    run_ranks(drifted, 2, guard=af.Guard(check_replicas_before_saving=False))
