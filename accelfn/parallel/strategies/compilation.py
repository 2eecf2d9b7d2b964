"""torch.compile: which modules of a model are compiled, each as its ``forward``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn

from accelfn.config import DynamoBackend, TorchDynamoPlugin
from accelfn.parallel.facts import ModelFacts, repeated_blocks
from accelfn.parallel.forward import WrappedForward, copied_without
from accelfn.parallel.handle import uncompiled
from accelfn.parallel.strategies.fsdp_plan import units_at
from accelfn.parallel.strategies.pipeline_plan import PipelinePlan
from accelfn.parallel.strategies.strategy import Application, Planning

M = TypeVar("M", bound=nn.Module)
F = TypeVar("F", bound=Callable[..., Any])


class CompiledForward(WrappedForward):
    """A module's ``forward``, compiled.

    Everything around it (hooks, autocast, DistributedDataParallel, the agreement of ranks) runs as ordinary
    Python and breaks no graph.
    """

    def __init__(self, forward: Callable[..., Any], options: TorchDynamoPlugin) -> None:
        """Compile ``forward`` at its first call."""
        super().__init__(forward)
        self._options = options
        self._compile()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled forward."""
        return self._compiled(*args, **kwargs)

    def around(self, forward: Callable[..., Any]) -> CompiledForward:
        """Compile another ``forward`` in the same way."""
        return CompiledForward(forward, self._options)

    def _compile(self) -> None:
        compiler = cast("Any", torch).compile
        self._compiled: Callable[..., Any] = compiler(self.__wrapped__, **self._options.to_kwargs())

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle without the compiled code."""
        return {"__wrapped__": self.__wrapped__, "_options": self._options}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Compile again at the first call."""
        self.__dict__.update(state)
        self._compile()


def plan_regions(model: nn.Module) -> tuple[str, ...]:
    """Return the modules of a model to compile one by one: repeated blocks, which compile once. Pure.

    Repeated blocks are the items of a ``ModuleList`` that are all of one class. Without any it is the model
    itself, by the name "".

    >>> plan_regions(nn.Sequential(nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1)]), nn.ReLU()))
    ('0.0', '0.1')
    >>> plan_regions(nn.ReLU())
    ('',)
    """
    return repeated_blocks(model) or ("",)


def is_compiled(model: nn.Module) -> bool:
    """Return whether a module or one inside it is compiled, by accelfn or by the user."""
    return any(_has_compiled_forward(module) or _is_compiled_by_user(module) for module in model.modules())


def _has_compiled_forward(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    return isinstance(forward, CompiledForward) or isinstance(
        getattr(forward, "__wrapped__", None), CompiledForward
    )


def _is_compiled_by_user(module: nn.Module) -> bool:
    return vars(module).get("_compiled_call_impl") is not None or uncompiled(module) is not module


def compile_(model: M, options: TorchDynamoPlugin, names: Iterable[str]) -> M:
    """Compile modules of a model with torch.compile. Writes into the modules.

    A model that is compiled already, or has a compiled module inside, isn't changed.

    Ranks: local.

    Args:
        model: Not prepared yet.
        options: Options of the compiler.
        names: Names of the modules to compile, "" for the model itself.
    """
    chosen = tuple(names)
    if not chosen or is_compiled(model):
        return model
    for name in chosen:
        module = model.get_submodule(name)
        module.forward = CompiledForward(module.forward, options)
    return model


def not_compiled(function: F) -> F:
    """Exclude a function that communicates from ``torch.compile``."""
    return cast("F", cast("Any", torch.compiler).disable(function))


def without_compile(model: M) -> M:
    """Return a module that shares everything with ``model`` and has nothing compiled in it."""
    original = uncompiled(model)
    if original is not model:
        return cast("M", without_compile(original))
    before = cast("dict[str, nn.Module | None]", vars(model)["_modules"])
    modules = {name: None if one is None else without_compile(one) for name, one in before.items()}
    is_own = _has_compiled_forward(model) or _is_compiled_by_user(model)
    if not is_own and all(modules[name] is before[name] for name in before):
        return model
    return copied_without(model, CompiledForward, modules)


def modules_to_compile(
    options: TorchDynamoPlugin,
    facts: ModelFacts,
    model: nn.Module | None = None,
    units: Sequence[str] = (),
    pipeline: PipelinePlan | None = None,
) -> tuple[str, ...]:
    """Return the names of the modules that are compiled, "" for the model itself.

    Args:
        options: Of the compiler.
        facts: Of the model, or of a rank's stages.
        model: The model, if there is one that isn't split into stages.
        units: Of FSDP, if it shards the model.
        pipeline: How the model is split into stages.
    """
    if options.backend == DynamoBackend.NO:
        return ()
    if len(units) > 1:  # FSDP gathers between units, which no graph can contain
        return tuple(reversed(units[:-1]))
    if pipeline is not None:  # the model's forward ends early on most stages
        return tuple(name for stage in pipeline.stages for name in stage.blocks if name in facts.kinds)
    if not options.use_regional_compilation:
        return ("",)
    return (facts.blocks or ("",)) if model is None else plan_regions(model)


def of_rank(whole: None, at: Planning) -> tuple[str, ...]:
    """Return the names of the modules of a rank's stages that are compiled."""
    del whole
    options, pipeline = at.ctx.strategy.dynamo, at.plans["pipeline"]
    if options.backend == DynamoBackend.NO:
        return ()
    units = units_at(at) if at.engine == "shard" else ()
    return modules_to_compile(options, at.facts, None if pipeline else at.model, units, pipeline)


def apply(plan: tuple[str, ...], at: Application) -> None:
    """Compile modules of the model."""
    compile_(at.model, at.ctx.strategy.dynamo, plan)
