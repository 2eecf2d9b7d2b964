"""What stands in for a module's ``forward`` on the instance, and how it is taken off again.

A prepared module keeps its class, its attributes and the keys of its state dict; only what its call does
differs. Its hooks run around it as ever.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]
from typing_extensions import Self

from accelfn.context import Precision
from accelfn.context.config import AutocastKwargs, TorchDynamoPlugin
from accelfn.errors import ConfigurationError
from accelfn.parallel.facts import ModelFacts, modules_of, owner_of, repeated_blocks
from accelfn.tree import convert_to_fp32

M = TypeVar("M", bound=nn.Module)


class WrappedForward:
    """Stands in for a module's ``forward``. ``inspect.signature`` sees the one that it wraps."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        """Wrap ``forward``."""
        self.__wrapped__ = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what is wrapped."""
        return self.__wrapped__(*args, **kwargs)

    def around(self, forward: Callable[..., Any]) -> Self:
        """Return the same around another ``forward``."""
        other = copy.copy(self)
        other.__wrapped__ = forward
        return other


def plain_forward(model: nn.Module) -> Callable[..., Any]:
    """Return the ``forward`` of a module without anything of accelfn's around it."""
    forward: Any = model.forward
    while isinstance(forward, WrappedForward):
        forward = forward.__wrapped__
    return forward


def _own_class(model: nn.Module) -> type[nn.Module]:
    """Return the class of a module, without what ``fully_shard`` puts in front of it."""
    kinds = type(model).__mro__
    fsdp = sys.modules.get("torch.distributed.fsdp")  # where nobody has loaded it, nothing is sharded
    if fsdp is None or fsdp.FSDPModule not in kinds:
        return kinds[0]
    return kinds[kinds.index(fsdp.FSDPModule) + 1]


def copied_without(model: M, kind: type[WrappedForward], modules: dict[str, Any] | None = None) -> M:
    """Return a shallow copy of a module, whose ``forward`` is its own and not wrapped in ``kind``.

    Args:
        model: Shares its parameters, buffers and (unless ``modules`` is given) submodules with the copy.
        kind: What to leave out.
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


def autocast_in(
    precision: Precision, device_type: str, handler: AutocastKwargs | None = None
) -> AbstractContextManager[Any]:
    """Return a block that computes in a precision, with other options where there is a handler."""
    if precision.mode == "no":
        return nullcontext()
    options = precision.autocast if handler is None else handler
    return torch.autocast(
        device_type,
        dtype=torch.float16 if precision.mode == "fp16" else torch.bfloat16,
        enabled=options.enabled,
        cache_enabled=options.cache_enabled,
    )


class MixedPrecisionForward(WrappedForward):
    """A module's ``forward`` under autocast, with float32 results.

    It stands in for the method on the instance, so that the module keeps its class and the keys of its state
    dict.
    """

    def __init__(self, forward: Callable[..., Any], precision: Precision, device_type: str) -> None:
        """Keep what to call, and how."""
        super().__init__(forward)
        self._precision = precision
        self._device_type = device_type

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``forward`` in mixed precision."""
        with autocast_in(self._precision, self._device_type):
            result = self.__wrapped__(*args, **kwargs)
        return convert_to_fp32(result)


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


# What models of transformers call the keys and values that a block appends to.
_CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")


def plan_recompute(
    facts: ModelFacts, units: Iterable[str], model: nn.Module | None = None
) -> tuple[str, ...]:
    """Return the names of the modules whose activations are computed again in the backward. Pure.

    Args:
        facts: Of the model.
        units: Those that FSDP gathers one by one, or would on several ranks. Of units inside of each other
            the outer one is recomputed, as a whole.
        model: That of the facts; None where there are facts alone.

    Raises:
        ConfigurationError: The model itself is the only unit: recomputed at once, all of its activations
            would be held in the backward, and nothing be saved. Or it recomputes already, by its own
            ``gradient_checkpointing``.
    """
    for name, module in () if model is None else modules_of(model).items():
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ConfigurationError(
                f"fsdp_plugin: activation_checkpointing is asked for, and {name or 'the model'} has "
                "gradient_checkpointing on: blocks would be computed three times. Leave one of the two out."
            )
    chosen = set(units) - {""}
    if not chosen:
        raise ConfigurationError(
            f"fsdp_plugin: activation_checkpointing computes units again one by one, and {facts.kinds['']} "
            "is a single one. Pass transformer_cls_names_to_wrap or another auto_wrap_policy, or leave "
            "activation_checkpointing out."
        )
    return tuple(
        name for name in facts.kinds if name in chosen and owner_of(name.rpartition(".")[0], chosen) is None
    )


class RecomputedForward(WrappedForward):
    """A module's ``forward``, of which the backward keeps the inputs alone.

    It stands in for ``forward`` and not for the call, so that the module's hooks run once: FSDP has gathered
    the parameters when the backward computes it again.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what is wrapped; it is called again in the backward, with the same random numbers."""
        if not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        for name in _CACHES:
            if kwargs.get(name) is not None:
                kwargs[name] = _empty(name, kwargs[name])
        # By its own name, by which torch.compile knows it.
        return cast("Any", checkpoint(self.__wrapped__, *args, use_reentrant=False, **kwargs))


def _empty(name: str, cache: Any) -> None:
    """Return None in the place of a cache, to which the backward would append a second time.

    Raises:
        ConfigurationError: It isn't empty: without it the block would compute something else.
    """
    count = getattr(cache, "get_seq_length", None)
    if count is None or count() != 0:
        raise ConfigurationError(
            f"activation_checkpointing: a block got {name} with keys and values in it, to which the backward "
            "pass, which computes the block again, would append a second time. Compute without gradients "
            "(torch.no_grad), or without activation_checkpointing."
        )


def recompute(model: nn.Module, names: Iterable[str]) -> None:
    """Let modules of a model compute again in the backward. Writes into the modules; all names stay.

    Ranks: local.

    Args:
        model: Neither compiled by accelfn nor sharded yet.
        names: Of the modules, from :func:`plan_recompute`.
    """
    for name in names:
        module = model.get_submodule(name)
        module.forward = RecomputedForward(module.forward)
