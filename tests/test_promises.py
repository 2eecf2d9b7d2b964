"""What the design promises of the library as a whole."""

# torch leaves DataLoader, backward and tolist partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

import inspect
import os
import sys
import threading
import typing
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import accelfn as af
from accelfn import Context
from accelfn.testing import run_ranks

Weights = list[torch.Tensor]


def training(
    ctx: Context, steps: int = 6, make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
) -> Iterator[Weights]:
    """Train a small model, one step at a time."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    model, optimizer = af.prepare(ctx, model, make_optimizer(model.parameters(), lr=0.05))
    scaler = af.init_scaler(ctx)
    generator = torch.Generator().manual_seed(ctx.rank)
    batches = [torch.randn(3, 4, generator=generator) for _ in range(steps)]
    for x, micro in af.microbatches(ctx, batches):
        with af.accumulate(ctx, micro, model):
            scaler = af.backward(ctx, (model(x) - x.sum(1, keepdim=True)).square().mean(), scaler, micro)
        if micro.sync:
            scaler = af.optimizer_step(ctx, optimizer, scaler)
        yield [parameter.detach().clone() for parameter in model.parameters()]


def last(trainings: Iterator[Any]) -> Any:
    return deque(trainings, maxlen=1).pop()


def variants(ctx: Context) -> tuple[Context, Context, Context]:
    return ctx, ctx.replace(mixed_precision="bf16"), ctx.replace(gradient_accumulation_steps=4)


def equal(first: Weights, second: Weights) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("world", [1, 2])
def test_contexts_train_alternately_as_if_each_were_alone(world: int) -> None:
    def run(ctx: Context) -> None:
        alone = [last(training(one)) for one in variants(ctx)]
        together = last(zip(*(training(one) for one in variants(ctx)), strict=True))
        assert all(equal(a, b) for a, b in zip(alone, together, strict=True))
        assert not equal(alone[0], alone[1])
        assert not equal(alone[0], alone[2])

    run_ranks(run, world)


def test_eight_ranks_as_threads_use_three_contexts_each_in_two_worlds_at_once() -> None:
    alone = run_ranks(lambda ctx: [last(training(one)) for one in variants(ctx)], 8)

    def work(ctx: Context) -> list[Weights]:
        return last(zip(*(training(one) for one in variants(ctx)), strict=True))

    def other(ctx: Context) -> list[tuple[int, list[int], float]]:
        found: list[tuple[int, list[int], float]] = []
        for number in range(40):
            for one in variants(ctx):
                total = int(af.reduce(one, torch.tensor(ctx.rank + number)))
                ranks = af.gather(one, {"r": torch.tensor([ctx.rank])})["r"].tolist()
                sent = float(af.broadcast(one, torch.tensor(float(ctx.rank)), from_process=number % 8))
                found.append((total, ranks, sent))
        return found

    results: dict[str, list[Any]] = {}
    threads = [
        threading.Thread(target=lambda: results.update(work=run_ranks(work, 8))),
        threading.Thread(target=lambda: results.update(other=run_ranks(other, 8))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for expected, found in zip(alone, results["work"], strict=True):
        assert all(equal(a, b) for a, b in zip(expected, found, strict=True))
    expected_other = [
        (28 + 8 * number, list(range(8)), float(number % 8)) for number in range(40) for _ in range(3)
    ]
    assert results["other"] == [expected_other] * 8


# --- the step path -------------------------------------------------------------------------------


class Waits(TorchDispatchMode):
    """Counts the places where the host would wait for a device: values that Python reads."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.is_nonzero):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def looks_outside(call: Callable[[], object]) -> list[str]:
    """Name what a call asks of the environment and of the disk."""
    found: list[str] = []

    def look(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_name == "__getitem__" and code.co_filename == os_file:
            found.append("environment")
        elif event == "c_call" and argument.__name__ in ("stat", "open", "listdir", "scandir", "access"):
            found.append(argument.__name__)

    os_file = type(os.environ).__getitem__.__code__.co_filename
    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("mode", ["no", "bf16"])
def test_a_step_reads_no_variable_no_file_and_no_value(mode: str, world: int) -> None:
    def run(ctx: Context) -> tuple[list[str], list[str]]:
        steps = training(ctx, make_optimizer=torch.optim.SGD)  # torch's AdamW reads its number of steps
        next(steps)
        next(steps)
        outside = looks_outside(lambda: next(steps))
        with Waits() as waits:
            next(steps)
        return outside, waits.found

    assert run_ranks(run, world, mixed_precision=mode) == [([], [])] * world


def test_what_a_step_reads_would_be_seen() -> None:
    assert looks_outside(lambda: os.environ.get("HOME")) == ["environment"]
    assert looks_outside(lambda: Path(__file__).exists()) == ["stat"]
    with Waits() as waits:
        float(torch.ones(()))
    assert len(waits.found) == 1


# --- size ----------------------------------------------------------------------------------------


# --- what a reader and a type checker meet -------------------------------------------------------


def files_of(call: Callable[[], object]) -> set[str]:
    """Name the files of the package that a call passes."""
    found: set[str] = set()

    def look(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            found.add(frame.f_code.co_filename)

    sys.setprofile(look)
    try:
        call()
    finally:
        sys.setprofile(None)
    root = str(Path(af.__file__).parent)
    return {name for name in found if name.startswith(root)}


def test_a_call_of_the_loop_passes_at_most_ten_files() -> None:
    ctx = Context()
    model = nn.Linear(2, 1)
    model, optimizer = af.prepare(ctx, model, torch.optim.SGD(model.parameters(), lr=0.1))
    tree = {"x": torch.ones(2)}

    def loss() -> torch.Tensor:
        return model(torch.ones(1, 2)).sum()

    scaler = af.backward(ctx, loss(), af.init_scaler(ctx))
    calls: dict[str, Callable[[], object]] = {
        "gather": lambda: af.gather(ctx, tree),
        "reduce": lambda: af.reduce(ctx, tree),
        "broadcast": lambda: af.broadcast(ctx, tree),
        "backward": lambda: af.backward(ctx, loss(), af.init_scaler(ctx)),
        "clip_grad_norm_": lambda: af.clip_grad_norm_(ctx, model.parameters(), 1.0, scaler_state=scaler),
        "optimizer_step": lambda: af.optimizer_step(ctx, optimizer, scaler),
    }
    counts = {name: len(files_of(call)) for name, call in calls.items()}
    assert min(counts.values()) > 2
    assert {name: count for name, count in counts.items() if count > 10} == {}


def test_every_public_function_has_all_its_types() -> None:
    empty = inspect.Signature.empty
    functions = [name for name in af.__all__ if inspect.isfunction(getattr(af, name))]
    for name in functions:
        signature = inspect.signature(getattr(af, name))
        assert signature.return_annotation is not empty, name
        assert [one for one in signature.parameters.values() if one.annotation is empty] == [], name


@pytest.mark.parametrize("name", ["gather", "reduce", "broadcast", "prepare_model", "send_to_device"])
def test_what_goes_in_comes_out_with_its_type(name: str) -> None:
    hints = typing.get_type_hints(getattr(af, name))
    given_type = hints["return"]
    assert isinstance(given_type, typing.TypeVar)
    assert [one for key, one in hints.items() if key != "return" and one is given_type]
