"""Activation checkpointing: blocks keep their inputs alone, and compute the rest again in the backward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint  # pyright: ignore[reportUnknownVariableType]

from accelfn.errors import ConfigurationError
from accelfn.parallel.facts import ModelFacts, modules_of, owner_of
from accelfn.parallel.forward import WrappedForward

__all__ = ("RecomputedForward", "plan_recompute", "recompute")

# What models of transformers call the keys and values that a block appends to.
_CACHES = ("past_key_values", "past_key_value", "layer_past")


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
