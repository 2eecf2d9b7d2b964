"""Where a public call goes: through how many files of the package, and how often it comes back to one."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.testing import run_ranks

PACKAGE = str(Path(af.__file__).parent)
PARTS = ("context", "comm", "tree", "data", "testing", "parallel", "training", "accelerator")


def walk(call: Callable[[], object]) -> Counter[str]:
    """Return the files of these parts that a call enters, and how often from another file."""
    entered: Counter[str] = Counter()

    def file_of(frame: FrameType | None) -> str | None:
        while frame is not None and not frame.f_code.co_filename.startswith(PACKAGE):
            frame = frame.f_back  # torch's and Python's own frames between
        return None if frame is None else frame.f_code.co_filename

    def see(frame: FrameType, event: str, argument: object) -> None:
        del argument
        path = frame.f_code.co_filename
        if event != "call" or not path.startswith(PACKAGE) or frame.f_code.co_name == "<module>":
            return
        name = path.removeprefix(PACKAGE + "/")
        if name.partition("/")[0] in PARTS and file_of(frame.f_back) != path:
            entered[name] += 1

    before = sys.getprofile()
    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(before)
    return entered


def mse(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).square().mean()


def preparing(ctx: af.Context) -> Counter[str]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return walk(lambda: af.prepare_model(ctx, model))


def stepping(ctx: af.Context) -> Counter[str]:
    model = af.prepare_model(ctx, nn.Linear(4, 4))
    optimizer = af.training.prepare_optimizer(ctx, torch.optim.SGD(model.parameters(), lr=0.1))
    scaler = af.init_scaler(ctx)

    def step() -> None:
        nonlocal scaler
        loss = mse(model, torch.ones(2, 4))
        scaler = af.backward(ctx, loss, scaler)
        scaler = af.optimizer_step(ctx, optimizer, scaler)

    step()
    return walk(step)


def pipelining(ctx: af.Context) -> Counter[str]:
    model = af.prepare_model(ctx, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    ((batch, micro),) = af.microbatches(ctx, [torch.ones(4, 4)])

    def step() -> None:
        af.forward_backward(ctx, model, mse, batch, af.init_scaler(ctx), micro)

    step()
    return walk(step)


@pytest.mark.parametrize(
    ("name", "function", "options", "most"),
    [
        (
            "prepare_model",
            preparing,
            {"fsdp_plugin": af.FullyShardedDataParallelPlugin(fsdp_version=2)},
            42,  # a file for each strategy and each kind of option is among them
        ),
        ("backward and optimizer_step", stepping, {}, 19),
        ("forward_backward", pipelining, {"parallelism_config": af.ParallelismConfig(pp_size=2)}, 23),
    ],
)
def test_a_call_goes_through_few_files(
    name: str, function: Callable[[af.Context], Counter[str]], options: dict[str, Any], most: int
) -> None:
    for entered in run_ranks(function, 2, on="processes", **options):
        print(f"{name}: {len(entered)} files, {sum(entered.values())} entries")
        print("\n".join(f"{count:5} {path}" for path, count in sorted(entered.items())))
        assert len(entered) <= most
