"""Compile what a model computes, by torch.compile, without another name for anything in it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
from torch import nn

from accelfn.context.config import TorchDynamoPlugin
from accelfn.parallel.facts import repeated_blocks
from accelfn.parallel.forward import WrappedForward, copied_without

__all__ = ("CompiledForward", "compile_", "is_compiled", "plan_regions", "without_compile")

M = TypeVar("M", bound=nn.Module)


class CompiledForward(WrappedForward):
    """A module's ``forward``, compiled.

    What stands around it (hooks, autocast, DistributedDataParallel, the agreement of ranks) runs as ordinary
    Python and breaks no graph.
    """

    def __init__(self, forward: Callable[..., Any], options: TorchDynamoPlugin) -> None:
        """Compile ``forward``, when it is called."""
        super().__init__(forward)
        self._options = options
        self._compile()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what was compiled."""
        return self._compiled(*args, **kwargs)

    def around(self, forward: Callable[..., Any]) -> CompiledForward:
        """Compile another ``forward`` in the same way."""
        return CompiledForward(forward, self._options)

    def _compile(self) -> None:
        compiler = cast("Any", torch).compile
        self._compiled: Callable[..., Any] = compiler(self.__wrapped__, **self._options.to_kwargs())

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle without what was compiled."""
        return {"__wrapped__": self.__wrapped__, "_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Compile anew, when it is called."""
        self.__dict__.update(state)
        self._compile()


def plan_regions(model: nn.Module) -> tuple[str, ...]:
    """Return which modules of a model are compiled one by one: blocks that repeat, and so compile once. Pure.

    Repeated blocks are the items of a ``ModuleList`` that are all of one class. Where there are none it is
    the model itself, by the name "".

    >>> plan_regions(nn.Sequential(nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)]), nn.ReLU()))
    ('0.0', '0.1')
    >>> plan_regions(nn.ReLU())
    ('',)
    """
    return repeated_blocks(model) or ("",)


def is_compiled(model: nn.Module) -> bool:
    """Return whether a module or one inside of it is compiled, by accelfn or by the user."""
    return any(
        isinstance(vars(module).get("forward"), CompiledForward)
        or isinstance(getattr(vars(module).get("forward"), "__wrapped__", None), CompiledForward)
        or _is_compiled_by_user(module)
        for module in model.modules()
    )


def _is_compiled_by_user(module: nn.Module) -> bool:
    return vars(module).get("_compiled_call_impl") is not None or _original(module) is not module


def _original(module: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile(module)``."""
    inner = vars(module).get("_modules", {}).get("_orig_mod")
    return inner if isinstance(inner, nn.Module) else module


def compile_(model: M, options: TorchDynamoPlugin, names: Iterable[str]) -> M:
    """Let modules of a model compute by what torch.compile makes of them. Writes into the modules.

    A model that is compiled already, or has a compiled module inside, stays as it is.

    Ranks: local.

    Args:
        model: Not prepared yet.
        options: How to compile.
        names: Of the modules, "" for the model itself; none compiles nothing.
    """
    wanted = tuple(names)
    if not wanted or is_compiled(model):
        return model
    for name in wanted:
        module = model.get_submodule(name)
        module.forward = CompiledForward(module.forward, options)
    return model


def without_compile(model: M) -> M:
    """Return a module that shares everything with ``model`` and has nothing compiled in it."""
    original = _original(model)
    if original is not model:
        return cast("M", without_compile(original))
    before = cast("dict[str, nn.Module | None]", vars(model)["_modules"])
    modules = {name: None if one is None else without_compile(one) for name, one in before.items()}
    forward = vars(model).get("forward")
    own = isinstance(forward, CompiledForward) or isinstance(
        getattr(forward, "__wrapped__", None), CompiledForward
    )
    if not own and not _is_compiled_by_user(model) and all(modules[name] is before[name] for name in before):
        return model
    return copied_without(model, CompiledForward, modules)
