"""The libraries whose ranks disagree in :mod:`tests.bench.campaign`.

Each contender joins the world of two that the environment describes, and leaves it when nothing was raised.
"""

import functools
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist

import accelfn as af
from tests.bench.timing import plain

__all__ = ("CONTENDERS", "SIZE", "Calls", "Contender")

SIZE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """What a contender offers. Values in a row of batches are asked for one by one."""

    gather: Callable[[Any], Any]
    reduce: Callable[[Any, str], Any]
    wait: Callable[[], object]
    gather_each: Callable[[list[torch.Tensor]], Iterator[torch.Tensor]]
    train_on_each: Callable[[list[torch.Tensor]], Iterator[torch.Tensor]]  # gives the weight's gradient
    other_reduction: str = "mean"  # than "sum"


Contender = Callable[[float], AbstractContextManager[Calls]]  # of a timeout in seconds


def one_weight() -> torch.nn.Module:
    return torch.nn.Linear(1, 1, bias=False)


def loss_of(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch.view(-1, 1)).mean()


def gradient_of(model: torch.nn.Module) -> torch.Tensor:
    (weight,) = model.parameters()
    gradient = weight.grad
    assert gradient is not None
    weight.grad = None
    return gradient.view(1)


def on_each_tensor(call: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """Do what a program with plain torch does: walk the tree in its own order."""
    if isinstance(tree, dict):
        return {key: on_each_tensor(call, part) for key, part in cast("dict[str, Any]", tree).items()}
    if isinstance(tree, (list, tuple)):
        return [on_each_tensor(call, part) for part in cast("Sequence[Any]", tree)]
    return call(tree)


@contextmanager
def plain_torch(timeout_s: float) -> Generator[Calls, None, None]:
    plain.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(tensor) for _ in range(SIZE)]
        plain.all_gather(parts, tensor)
        return torch.cat(parts)

    def reduce(tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        output = tensor.clone()
        plain.all_reduce(output, dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM)
        return output

    def train_on_each(batches: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        model = torch.nn.parallel.DistributedDataParallel(one_weight())
        for batch in batches:
            loss_of(model, batch).backward()  # pyright: ignore[reportUnknownMemberType]
            yield gradient_of(model)

    yield Calls(
        gather=functools.partial(on_each_tensor, gather),
        reduce=reduce,
        wait=lambda: plain.barrier(),
        gather_each=lambda batches: map(gather, batches),
        train_on_each=train_on_each,
        other_reduction="max",  # gloo has no mean
    )
    plain.destroy_process_group()


@contextmanager
def accelerate(timeout_s: float, debug: bool = False) -> Generator[Calls, None, None]:
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    os.environ["ACCELERATE_USE_CPU"] = "true"
    os.environ["ACCELERATE_DEBUG_MODE"] = "1" if debug else "0"
    options = InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=timeout_s))
    accelerator = Accelerator(cpu=True, kwargs_handlers=[options])
    assert accelerator.num_processes == SIZE

    def train_on_each(batches: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        model = accelerator.prepare(one_weight())
        for batch in batches:
            accelerator.backward(loss_of(model, batch))
            yield gradient_of(model)

    yield Calls(
        gather=accelerator.gather,
        reduce=accelerator.reduce,
        wait=accelerator.wait_for_everyone,
        gather_each=lambda batches: map(accelerator.gather, batches),
        train_on_each=train_on_each,
    )
    accelerator.end_training()


@contextmanager
def accelfn(timeout_s: float) -> Generator[Calls, None, None]:
    # The long timeout is for the first forward pass, which could be compiling.
    limit = timedelta(seconds=timeout_s)
    with af.init_context(cpu=True, guard=af.Guard(timeout=limit, long_timeout=limit)) as ctx:
        yield accelfn_calls(ctx)


def accelfn_calls(ctx: af.Context) -> Calls:
    def gather_each(batches: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        for batch, _ in af.microbatches(ctx, batches):
            yield af.gather(ctx, batch)

    def train_on_each(batches: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        model, scaler = af.prepare(ctx, one_weight()), af.init_scaler(ctx)
        for batch, micro in af.microbatches(ctx, batches):
            with af.accumulate(ctx, micro, model):
                scaler = af.backward(ctx, loss_of(model, batch), scaler, micro)
            yield gradient_of(model)

    return Calls(
        # Without a line between: the guard tells calls apart by the line that they are on.
        gather=functools.partial(af.gather, ctx),
        reduce=functools.partial(af.reduce, ctx),
        wait=functools.partial(af.wait_for_everyone, ctx),
        gather_each=gather_each,
        train_on_each=train_on_each,
    )


CONTENDERS: tuple[tuple[str, Contender], ...] = (
    ("plain torch", plain_torch),
    ("accelerate", accelerate),
    ("accelerate, debug", functools.partial(accelerate, debug=True)),
    ("accelfn", accelfn),
)
