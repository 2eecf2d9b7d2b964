"""The reference: the verbs of a program in plain torch, on one process that has the rows of all ranks.

There is no accelfn in it, and nothing that knows a layout but the number of ranks that read different rows: a
loader fills the last step up as documented, and where a model's output for a row depends on the other rows of
its rank, the rows of each rank are computed on their own.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from accelfn.testing.programs.parts import default_collate


class Context(NamedTuple):
    """One process.

    Attributes:
        ranks: Number of ranks that read different rows.
        window: Batches of a window.
        dtype: Of parameters and inputs.
        bf16: Whether the model computes under autocast.
        rank_by_rank: Whether the rows of each rank are computed on their own.
    """

    ranks: int = 1
    window: int = 1
    dtype: torch.dtype = torch.float32
    bf16: bool = False
    rank_by_rank: bool = False

    @property
    def rank(self) -> int:
        """The only one."""
        return 0

    def axis_size(self, axis: str) -> int:
        """Return 1."""
        return 1

    def coordinate(self, axis: str) -> int:
        """Return 0."""
        return 0


@dataclass(frozen=True)
class Micro:
    """Position of a batch."""

    index: int
    place: int
    window: int
    sync: bool


class Loss(NamedTuple):
    """A sum and its weight, or a mean without one."""

    value: torch.Tensor
    weight: torch.Tensor | float | None = None
    aux: Any = None


class Metrics(NamedTuple):
    """Of a step."""

    loss: torch.Tensor
    grad_norm: torch.Tensor


def prepare(ctx: Context, *objects: Any) -> Any:
    """Return loaders with the batches of all ranks, and models in the context's precision."""
    made = [_prepared(ctx, one) for one in objects]
    return made[0] if len(made) == 1 else made


def _prepared(ctx: Context, one: Any) -> Any:
    if isinstance(one, DataLoader):
        return Batches(ctx, one)
    return _model(ctx, one) if isinstance(one, nn.Module) else one


class Batches:
    """The batches of all ranks, step by step."""

    def __init__(self, ctx: Context, loader: Any) -> None:
        """Read all rows."""
        data, size = loader.dataset, loader.batch_size or 1
        is_stream = isinstance(data, IterableDataset)
        rows: list[Any] = [*(data if is_stream else map(data.__getitem__, loader.sampler))]
        if loader.drop_last:
            rows = rows[: len(rows) // size * size]
        elif ctx.ranks > 1:
            rows += rows[: -len(rows) % size]
        self._batches = [default_collate(rows[start : start + size]) for start in range(0, len(rows), size)]

    def __len__(self) -> int:
        """Return the number of steps."""
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        """Yield copies, which the program may change."""
        return map(_copied, self._batches)


def _copied(tree: Any) -> Any:
    return _each(torch.clone, tree)


def _each(fn: Callable[..., torch.Tensor], *trees: Any) -> Any:
    """Apply a function to the tensors of equal trees."""
    first: Any = trees[0]
    if isinstance(first, torch.Tensor):
        return fn(*trees)
    if isinstance(first, dict):
        names = cast("list[Any]", [*first])
        made = {name: _each(fn, *(tree[name] for tree in trees)) for name in names}
        kind = cast("Any", type(cast("object", first)))
        return made if kind is dict else kind(**made)  # such as outputs of transformers
    if isinstance(first, (tuple, list)):
        kind = cast("Any", type(cast("object", first)))
        parts = [_each(fn, *items) for items in zip(*trees, strict=True)]
        return kind(*parts) if hasattr(kind, "_fields") else kind(parts)
    if is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first)]
        return type(first)(*(_each(fn, *(getattr(tree, name) for tree in trees)) for name in names))
    return first


def _model(ctx: Context, model: nn.Module) -> nn.Module:
    model.to(ctx.dtype)
    forward = model.forward

    def to_dtype(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(ctx.dtype) if tensor.is_floating_point() else tensor

    def to_float(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.float() if tensor.dtype == torch.bfloat16 else tensor

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _each(to_dtype, (args, kwargs))
        with torch.autocast("cpu", torch.bfloat16) if ctx.bf16 else contextlib.nullcontext():
            return _each(to_float, forward(*args, **kwargs))

    def run_rank_by_rank(*args: Any, **kwargs: Any) -> Any:
        buffers = [*model.buffers()]
        before = [buffer.clone() for buffer in buffers]
        after: list[torch.Tensor] = []
        made: list[Any] = []
        for rank in range(ctx.ranks):

            def rows_of(tensor: torch.Tensor, rank: int = rank) -> torch.Tensor:
                return tensor.chunk(ctx.ranks)[rank]

            for buffer, value in zip(buffers, before, strict=True):
                buffer.data = value.clone()
            own_args, own_kwargs = _each(rows_of, (args, kwargs))
            made.append(run(*own_args, **own_kwargs))
            after = after or [buffer.clone() for buffer in buffers]
        for buffer, value in zip(buffers, after, strict=True):  # those of the first rank
            buffer.data = value
        return _each(_joined, *made)

    model.forward = run_rank_by_rank if ctx.rank_by_rank and ctx.ranks > 1 else run
    return model


def _joined(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts)


def microbatches(ctx: Context, loader: Any) -> Iterator[tuple[Any, Micro]]:
    """Yield each batch with its position."""
    for index, batch in enumerate(map(_copied, loader)):
        first = index - index % ctx.window
        window = min(ctx.window, len(loader) - first)
        yield batch, Micro(index, index - first, window, index - first == window - 1)


def accumulate(*_: Any) -> Any:
    """Do nothing: one process has nothing to average."""
    return contextlib.nullcontext()


autocast: Callable[..., Any] = accumulate
no_sync: Callable[..., Any] = accumulate
trigger_sync_in_backward: Callable[..., Any] = accumulate


def register_forward_method(*_: Any) -> None:
    """Do nothing."""


# Programs call these two as accelfn.parallel.register_forward_method and accelfn.training.trigger_...
parallel: ModuleType = sys.modules[__name__]
training: ModuleType = sys.modules[__name__]


def init_scaler(ctx: Context) -> float:
    """Return the weight of a window without losses."""
    return 0.0  # the weight of the open window


def backward(
    ctx: Context, loss: torch.Tensor, scaler: float, micro: Micro, weight: Any = None, **options: Any
) -> float:
    """Differentiate a loss, and return the weight of the window."""
    torch.autograd.backward(loss / micro.window if weight is None else loss, **options)
    return scaler if weight is None else scaler + float(weight)


def forward_backward(ctx: Context, model: Any, loss_fn: Any, batch: Any, scaler: float, micro: Micro) -> Any:
    """Differentiate the loss of a batch."""
    value, weight, _ = _loss(loss_fn(model, batch))
    return backward(ctx, value, scaler, micro, weight), value.detach()


def _loss(loss: Any) -> Any:
    return loss if hasattr(loss, "weight") else Loss(loss)  # a user's own may be accelfn's


def unscale_gradients(ctx: Context, optimizers: Any, scaler: float) -> float:
    """Divide gradients by the weight of the window."""
    for parameter in _parameters(optimizers):
        if scaler and parameter.grad is not None:
            parameter.grad /= scaler
    return 0.0


def clip_grad_norm_(ctx: Context, parameters: Any, max_norm: float, scaler_state: float) -> torch.Tensor:
    """Clip as torch does."""
    return nn.utils.clip_grad_norm_(parameters, max_norm)


def clip_grad_value_(ctx: Context, parameters: Any, value: float, scaler_state: float) -> None:
    """Clip as torch does."""
    several = [parameter for parameter in parameters if parameter.grad is not None]
    if several:  # torch fails without any
        nn.utils.clip_grad_value_(several, value)


def optimizer_step(
    ctx: Context, optimizers: Any, scaler: float, scheduler: Any = None, clear_gradients: bool = True
) -> float:
    """Step as torch does."""
    unscale_gradients(ctx, optimizers, scaler)
    for optimizer in _listed(optimizers):
        optimizer.step()
        if clear_gradients:
            optimizer.zero_grad()
    if scheduler is not None:
        scheduler.step()
    return 0.0


def _listed(optimizers: Any) -> list[Any]:
    return cast("list[Any]", optimizers) if isinstance(optimizers, list) else [optimizers]


def _parameters(optimizers: Any) -> list[torch.Tensor]:
    return [
        parameter
        for optimizer in _listed(optimizers)
        for group in optimizer.param_groups
        for parameter in group["params"]
    ]


def init_train_state(ctx: Context, optimizer: Any) -> None:
    """Return nothing: optimizers have their state."""


def make_train_step(
    ctx: Context, loss_fn: Any, optimizer: Any, *, model: Any, max_norm: float, scheduler: Any = None
) -> Any:
    """Return a function that makes a step of a batch, which is a window."""

    def step(state: None, batch: Any) -> tuple[None, Metrics]:
        value, weight, _ = _loss(loss_fn(model, batch))
        loss = value if weight is None else value / max(weight, 1)  # a sum without weight is zero
        torch.autograd.backward(loss)
        norm = clip_grad_norm_(ctx, _parameters(optimizer), max_norm, 0.0)
        optimizer_step(ctx, optimizer, 0.0, scheduler)
        return state, Metrics(loss.detach(), norm)

    return step
