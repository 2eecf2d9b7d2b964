"""Wrappers of a module's ``forward``.

A prepared module keeps its class, its attributes and the keys of its state dict; its hooks run around the
wrapped ``forward``.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar, cast

from torch import nn
from typing_extensions import Self

M = TypeVar("M", bound=nn.Module)


class WrappedForward:
    """Replaces a module's ``forward``; ``inspect.signature`` sees the wrapped one."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        """Wrap ``forward``."""
        self.__wrapped__ = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped forward."""
        return self.__wrapped__(*args, **kwargs)

    def around(self, forward: Callable[..., Any]) -> Self:
        """Return a copy around another ``forward``."""
        other = copy.copy(self)
        other.__wrapped__ = forward
        return other


def plain_forward(model: nn.Module) -> Callable[..., Any]:
    """Return the ``forward`` of a module without accelfn's wrappers."""
    forward: Any = model.forward
    while isinstance(forward, WrappedForward):
        forward = forward.__wrapped__
    return forward


def _own_class(model: nn.Module) -> type[nn.Module]:
    """Return the class of a module, without the one that ``fully_shard`` adds."""
    kinds = type(model).__mro__
    fsdp = sys.modules.get("torch.distributed.fsdp")  # if it isn't loaded, nothing is sharded
    if fsdp is None or fsdp.FSDPModule not in kinds:
        return kinds[0]
    return kinds[kinds.index(fsdp.FSDPModule) + 1]


def copied_without(model: M, kind: type[WrappedForward], modules: dict[str, Any] | None = None) -> M:
    """Return a shallow copy of a module, without wrappers of a kind around its ``forward``.

    Args:
        model: Shares its parameters, buffers and (unless ``modules`` is given) submodules with the copy.
        kind: The class of wrappers to remove.
        modules: The copy's submodules.
    """
    other = cast("M", object.__new__(_own_class(model)))
    other.__dict__.update(vars(model))
    for name in ("_compiled_call_impl", "_call_impl"):  # which would call the original
        other.__dict__.pop(name, None)
    if modules is not None:
        other.__dict__["_modules"] = modules

    def rebuilt(forward: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(forward, WrappedForward):
            inner = rebuilt(forward.__wrapped__)
            return inner if isinstance(forward, kind) else forward.around(inner)
        if getattr(forward, "__self__", None) is model:
            return MethodType(cast("MethodType", forward).__func__, other)
        return forward

    if "forward" in other.__dict__:
        forward = rebuilt(other.__dict__.pop("forward"))
        if other.forward != forward:  # else the class gives the same
            other.__dict__["forward"] = forward
    return other
