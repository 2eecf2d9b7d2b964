"""Make the user's torch objects ready for the world: placed, in its precision, replicated, shared out."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar, cast, overload

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from typing_extensions import TypeVarTuple, Unpack

from accelfn.context import Context, Precision
from accelfn.data import PreparedDataLoader, prepare_data_loader
from accelfn.errors import ConfigurationError
from accelfn.parallel import replicate
from accelfn.training.precision import with_precision, without_precision
from accelfn.tree import send_to_device

__all__ = (
    "Mark",
    "mark_of",
    "prepare",
    "prepare_model",
    "prepare_optimizer",
    "prepare_scheduler",
    "unwrap_model",
)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=Optimizer)  # noqa: E741 -- beside M for modules
S = TypeVar("S", bound=LRScheduler)

# Where a prepared object keeps its mark; a plain attribute, in no state dict.
_MARK = "_accelfn_prepared"


class Mark(NamedTuple):
    """By which kind of context an object was prepared. Holds no world, so nothing is kept alive by it."""

    rank: int
    size: int
    device: str
    precision: Precision
    channel: int  # tells worlds of one process apart
    is_wrapped: bool = False  # whether what prepare gave back is another object, around this one

    def fits(self, ctx: Context) -> bool:
        """Whether ``ctx`` would prepare an object in the same way."""
        return self._replace(is_wrapped=False) == mark_of(ctx)

    def __deepcopy__(self, memo: dict[int, Any]) -> Mark:
        """Leave the mark on a copy: it is prepared as the original is."""
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Leave no mark in a pickle: the world that it tells of is not there where it is loaded."""
        return type(None), ()


def mark_of(ctx: Context) -> Mark:
    """Give the mark that ``ctx`` puts on what it prepares."""
    return Mark(ctx.rank, ctx.num_processes, str(ctx.device), ctx.precision, id(ctx.collectives.exchange))


@overload
def prepare(ctx: Context, one: T, /) -> T: ...
@overload
def prepare(ctx: Context, /, *objects: Unpack[Ts]) -> tuple[Unpack[Ts]]: ...
def prepare(ctx: Context, /, *objects: Any) -> Any:
    """Prepare models, optimizers, loaders and schedulers, and give them back in the same order.

    Each object goes to the function of its kind: :func:`prepare_model`, :func:`prepare_optimizer`,
    :func:`prepare_data_loader` (also what ``custom_classes`` of the ``DataLoaderConfiguration`` names),
    :func:`prepare_scheduler`. Anything else is given back as it is.

    Ranks: every rank of ``ctx``.

    Returns:
        The object itself for one, a tuple for several.

    Raises:
        TypeError: No object.

    >>> prepare(Context(), nn.Linear(1, 1), "anything")
    (Linear(in_features=1, out_features=1, bias=True), 'anything')
    """
    if not objects:
        raise TypeError("prepare: got nothing to prepare. Pass a model, an optimizer, a loader, ...")
    prepared = tuple(_prepare_one(ctx, item) for item in objects)
    return prepared[0] if len(prepared) == 1 else prepared


def _prepare_one(ctx: Context, item: Any) -> Any:
    if isinstance(item, nn.Module):
        return prepare_model(ctx, item)
    if isinstance(item, Optimizer):
        return prepare_optimizer(ctx, item)
    if isinstance(item, LRScheduler):
        return prepare_scheduler(ctx, item)
    if isinstance(item, (DataLoader, PreparedDataLoader, *ctx.loading.custom_classes)):
        return prepare_data_loader(ctx, cast("DataLoader[Any]", item))
    return item


def prepare_model(ctx: Context, model: M, *, evaluation_mode: bool = False) -> M:
    """Place a model on this rank's device, let it compute in the context's precision, keep all ranks equal.

    On several processes the result is a ``DistributedDataParallel`` around the model (typed as the model,
    whose attributes are reached through :func:`unwrap_model`); with one, and on ranks that are threads, the
    model itself.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        model: Any module. It is moved, and its ``forward`` runs under autocast from now on.
        evaluation_mode: Don't replicate: nothing will be averaged.

    Returns:
        The model to call; one that this context has prepared already is given back as it is.

    Raises:
        ConfigurationError: Another context has prepared it, or it was prepared and stands inside of the
            result.
    """
    if _is_prepared(ctx, model, "model"):
        return model
    if ctx.device_placement:
        model = model.to(ctx.device)
    with_precision(ctx, model)
    result = model if evaluation_mode else replicate(ctx, model)
    setattr(model, _MARK, mark_of(ctx)._replace(is_wrapped=result is not model))
    if result is not model:
        setattr(result, _MARK, mark_of(ctx))
    return cast("M", result)


def prepare_optimizer(ctx: Context, optimizer: O) -> O:
    """Bring the state of an optimizer to the devices of its parameters.

    Ranks: local.

    Args:
        ctx: The world.
        optimizer: Over the parameters of a model that was prepared before or is prepared later; both keep
            them.

    Returns:
        The optimizer itself.

    Raises:
        ConfigurationError: Another context has prepared it.
    """
    if _is_prepared(ctx, optimizer, "optimizer"):
        return optimizer
    if ctx.device_placement:
        # Step counters stay where the optimizer put them: most want them on the CPU.
        for parameter, state in cast("dict[torch.Tensor, dict[str, Any]]", optimizer.state).items():
            for name, value in state.items():
                if name != "step":
                    state[name] = send_to_device(value, ctx.device if parameter.is_meta else parameter.device)
    setattr(optimizer, _MARK, mark_of(ctx))
    return optimizer


def prepare_scheduler(ctx: Context, scheduler: S) -> S:
    """Give back a learning rate scheduler; step it by :func:`accelfn.scheduler_step`.

    Ranks: local.

    Raises:
        ConfigurationError: Another context has prepared it.
    """
    if not _is_prepared(ctx, scheduler, "scheduler"):
        setattr(scheduler, _MARK, mark_of(ctx))
    return scheduler


def unwrap_model(
    model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
) -> nn.Module:
    """Take off what ``prepare_model`` and ``torch.compile`` put around a model.

    Ranks: local.

    Args:
        model: Prepared or not.
        keep_fp32_wrapper: Leave ``forward`` under autocast. Otherwise the result is a shallow copy in full
            precision; ``model`` itself isn't changed.
        keep_torch_compile: Leave a compiled model compiled.

    >>> model = nn.Linear(1, 1)
    >>> unwrap_model(prepare_model(Context(), model)) is model
    True
    """
    compiled: nn.Module | None = None
    inner = model
    while True:  # either may stand inside of the other
        if isinstance(inner, (DistributedDataParallel, nn.DataParallel)):
            inner = cast("nn.Module", inner.module)
        elif isinstance(getattr(inner, "_orig_mod", None), nn.Module):
            compiled = inner
            inner = cast("nn.Module", inner._orig_mod)
        else:
            break
    plain = inner if keep_fp32_wrapper else without_precision(inner)
    if compiled is None or not keep_torch_compile:
        return plain
    if plain is inner and compiled._orig_mod is inner:
        return compiled if keep_fp32_wrapper else without_precision(compiled)
    return cast("nn.Module", cast("Any", torch).compile(plain))


def _is_prepared(ctx: Context, item: object, kind: str) -> bool:
    mark = cast("Mark | None", getattr(item, "__dict__", {}).get(_MARK))
    if mark is None:
        return False
    if mark.is_wrapped:
        raise ConfigurationError(
            f"the {kind} was prepared already, and what prepare gave back stands around it. Use that one: "
            "calls that go past it leave the ranks with different gradients."
        )
    if not mark.fits(ctx):
        raise ConfigurationError(
            f"the {kind} was prepared by another context (rank {mark.rank} of {mark.size} on {mark.device}, "
            "mixed precision "
            f"{mark.precision.mode!r}), and this one is rank {ctx.rank} of {ctx.num_processes} on "
            f"{ctx.device} with "
            f"{ctx.mixed_precision!r}. Prepare a {kind} once, with one context."
        )
    return True
