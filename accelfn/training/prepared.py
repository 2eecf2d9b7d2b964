"""Whether an object is prepared, by which context, and whether ``prepare`` returned a wrapper around it."""

from __future__ import annotations

import gc
from typing import Any, NamedTuple, cast

from torch import nn
from torch.optim import Optimizer

from accelfn.context import Context, Precision, WorldIdentity
from accelfn.errors import ConfigurationError
from accelfn.parallel.handle import handles_of, has_engine, uncompiled

# Attribute of a prepared object: its mark. A plain attribute, in no state dict.
MARK = "_accelfn_prepared"


class Mark(NamedTuple):
    """What is known of the context that prepared an object. It holds no context, which would stay open."""

    rank: int
    size: int
    device: str
    precision: Precision
    world: WorldIdentity
    is_exact: bool = False  # whether gradients are summed in exact mode
    is_wrapped: bool = False  # whether prepare returned another object, around this one
    is_unaveraged: bool = False  # whether its gradients aren't averaged

    def fits(self, ctx: Context) -> bool:
        """Return whether ``ctx`` would prepare an object in the same way."""
        return self._replace(is_wrapped=False, is_unaveraged=False) == mark_of(ctx)

    def __deepcopy__(self, memo: dict[int, Any]) -> Mark:
        """Keep the mark on a copy: it is prepared as the original is."""
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle without the mark: a loaded object isn't prepared."""
        return type(None), ()


def mark_of(ctx: Context) -> Mark:
    """Return the mark of objects prepared by ``ctx``."""
    is_exact = ctx.reduction is not None
    return Mark(ctx.rank, ctx.num_processes, str(ctx.device), ctx.precision, ctx.world.identity, is_exact)


def is_averaged(model: nn.Module) -> bool:
    """Return whether a model's gradients are averaged, or it has none; it may be compiled."""
    if has_engine(model):
        return True
    prepared = vars(uncompiled(model)).get(MARK) is not None
    return prepared and not any(parameter.requires_grad for parameter in model.parameters())


def _reductions(mark: Mark, ctx: Context) -> str:
    """Describe the two reductions if they differ."""
    if mark.is_exact == (ctx.reduction is not None):
        return ""
    before, now = ("canonical", "mean") if mark.is_exact else ("mean", "canonical")
    return f', and reduction "{now}" where it was "{before}"'


def _has_wrapper(inner: nn.Module) -> bool:
    """Return whether what ``prepare`` returned around a model is alive."""

    def is_alive() -> bool:
        return any(handle.is_alive for one in inner.parameters() for handle in handles_of(one))

    if is_alive():
        gc.collect()  # a wrapper is in reference cycles
    return is_alive()


def is_prepared(ctx: Context, item: object, kind: str) -> bool:
    """Return whether a model or an optimizer is prepared, by this context or an equal one.

    Ranks: local.

    Raises:
        ConfigurationError: Another context has prepared it, or prepare returned a wrapper around it, which
            is to be used instead.
    """
    # Only a module's own attribute, since wrappers pass on attribute access; optimizer proxies may pass it
    # on.
    own: object = getattr(item, "__dict__", {}).get(MARK)
    mark = cast("Mark | None", getattr(item, MARK, None) if isinstance(item, Optimizer) else own)
    if mark is None:
        return False
    if mark.is_wrapped:
        if isinstance(item, nn.Module) and not _has_wrapper(item):
            vars(item).pop(MARK)  # what prepare returned is gone
            return False
        raise ConfigurationError(
            f"the {kind} was prepared already, and what prepare returned wraps it. Use the wrapper: "
            "calling the inner model skips gradient synchronisation."
        )
    if not mark.fits(ctx):
        raise ConfigurationError(
            f"the {kind} was prepared by another context (rank {mark.rank} of {mark.size} on {mark.device}, "
            "mixed precision "
            f"{mark.precision.mode!r}), and this one is rank {ctx.rank} of {ctx.num_processes} on "
            f"{ctx.device} with "
            f"{ctx.mixed_precision!r}{_reductions(mark, ctx)}. Prepare a {kind} once, with one context."
        )
    return True
