"""Activation checkpointing: which modules are recomputed in the backward pass, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from accelfn.config import DynamoBackend
from accelfn.context import Context
from accelfn.errors import ConfigurationError
from accelfn.parallel.buffers import KeptBuffers
from accelfn.parallel.facts import ModelFacts, modules_of, owner_of
from accelfn.parallel.forward import WrappedForward
from accelfn.parallel.strategies.fsdp_plan import units_at
from accelfn.parallel.strategies.strategy import Application, Planning

# Names of transformers' caches, to which a block appends keys and values.
_CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")


def refuse_own_recomputation(model: nn.Module) -> None:
    """Refuse a model that recomputes activations by itself.

    Raises:
        ConfigurationError: Its own ``gradient_checkpointing`` is on.
    """
    for name, module in modules_of(model).items():
        if getattr(module, "gradient_checkpointing", False) is True:
            raise ConfigurationError(
                f"fsdp_plugin: activation_checkpointing is set, and {name or 'the model'} has its own "
                "gradient_checkpointing on: blocks would be computed three times. Turn one of them off."
            )


def plan_recompute(facts: ModelFacts, units: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the modules whose activations are recomputed in the backward pass. Pure.

    Args:
        facts: Of the model.
        units: The units that FSDP gathers, or would gather on several ranks. Of nested units the outermost
            is recomputed.

    Raises:
        ConfigurationError: The model itself is the only unit: recomputing it at once would save nothing.
    """
    chosen = set(units) - {""}
    if not chosen:
        raise ConfigurationError(
            f"fsdp_plugin: activation_checkpointing recomputes units one by one, and {facts.kinds['']} is a "
            "single unit. Pass transformer_cls_names_to_wrap or another auto_wrap_policy, or leave "
            "activation_checkpointing out; for this model alone with a context of its own: prepare_model("
            "ctx.replace(fsdp_plugin=dataclasses.replace(plugin, activation_checkpointing=False)), model)."
        )
    return tuple(
        name for name in facts.kinds if name in chosen and owner_of(name.rpartition(".")[0], chosen) is None
    )


class RecomputedForward(WrappedForward):
    """A module's ``forward``, recomputed in the backward pass from its inputs.

    It replaces ``forward`` and not the call, so that the module's hooks run once: FSDP has gathered the
    parameters when the backward pass recomputes it. Buffers are changed by the first time alone.
    """

    def __init__(
        self, forward: Callable[..., Any], module: nn.Module, offload_from: torch.device | None = None
    ) -> None:
        """Wrap the ``forward`` of a module, whose inputs are kept in host memory if a device is given."""
        super().__init__(forward)
        self._module = module
        self._offload_from = offload_from

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped forward; the backward pass calls it again, with the same random numbers."""
        if not torch.is_grad_enabled():
            return self.__wrapped__(*args, **kwargs)
        for name in _CACHES:
            if kwargs.get(name) is not None:
                kwargs[name] = _empty(name, kwargs[name])
        if torch.compiler.is_compiling():  # the compiler doesn't repeat changes of buffers
            # By this name torch.compile knows it.
            return cast("Any", checkpoint(self.__wrapped__, *args, use_reentrant=False, **kwargs))
        buffers = KeptBuffers(one for one in self._module.modules() if one.training)
        kwargs["context_fn"] = lambda: (nullcontext(), buffers)
        keeping = nullcontext()
        if self._offload_from is not None:
            keeping = save_on_cpu(pin_memory=self._offload_from.type == "cuda")
        with keeping:
            output = cast("Any", checkpoint(self.__wrapped__, *args, use_reentrant=False, **kwargs))
        buffers.drop_unchanged()
        return output


def _empty(name: str, cache: Any) -> None:
    """Replace an empty cache by None: the recomputation would append to it a second time.

    Raises:
        ConfigurationError: It isn't empty, and without it the block would compute something else.
    """
    count = getattr(cache, "get_seq_length", None)
    if count is None or count() != 0:
        raise ConfigurationError(
            f"activation_checkpointing: a block got {name} with keys and values in it, to which recomputing "
            "the block in the backward pass would append again. Compute without gradients (torch.no_grad), "
            "or without activation_checkpointing."
        )


def recompute(ctx: Context, model: nn.Module, names: Iterable[str]) -> None:
    """Recompute modules of a model in the backward pass. Writes into the modules; names don't change.

    Ranks: local.

    Args:
        ctx: Whose plugin says where their inputs are kept.
        model: Neither compiled by accelfn nor sharded yet.
        names: Names of the modules, from :func:`plan_recompute`.
    """
    plugin = ctx.strategy.fsdp
    offloads = plugin is not None and plugin.activation_checkpointing_offload
    for name in names:
        module = model.get_submodule(name)
        module.forward = RecomputedForward(module.forward, module, ctx.device if offloads else None)


def plan(at: Planning) -> None:
    """Refuse what recomputation can't be combined with."""
    plugin, backend = at.ctx.strategy.fsdp, at.ctx.strategy.dynamo.backend
    if plugin is None or not plugin.activation_checkpointing or at.model is None:
        return
    refuse_own_recomputation(at.model)
    if plugin.activation_checkpointing_offload and backend != DynamoBackend.NO:
        raise ConfigurationError(
            "fsdp_plugin: activation_checkpointing_offload moves tensors between operations that "
            f"dynamo_backend={str(backend)!r} compiles into one. Leave one out."
        )


def of_rank(whole: None, at: Planning) -> tuple[str, ...]:
    """Return the names of the modules of a rank's stages that are recomputed."""
    del whole
    plugin = at.ctx.strategy.fsdp
    if plugin is None or not plugin.activation_checkpointing:
        return ()
    return plan_recompute(at.facts, units_at(at))


def apply(plan: tuple[str, ...], at: Application) -> None:
    """Recompute modules in the backward pass."""
    recompute(at.ctx, at.model, plan)
