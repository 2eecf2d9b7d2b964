"""Hooks of the program on gradients that ranks share or average, which are refused."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from torch import nn

from accelfn.errors import ConfigurationError
from accelfn.parallel.pointers import AFTER, BEFORE


def _has_hook(parameter: torch.Tensor, kind: str) -> bool:
    """Return whether a parameter has a hook of the program."""
    hooks = cast("dict[int, Any]", getattr(parameter, kind) or {})
    functions = [hook.func if isinstance(hook, partial) else hook for hook in hooks.values()]
    return not all(str(getattr(one, "__module__", "")).startswith("accelfn.") for one in functions)


def refuse_hook_of_shard(operation: str, name: str, parameter: torch.Tensor, *kinds: str) -> None:
    """Refuse a hook before the gradient of a parameter that ranks share, or are going to.

    Args:
        operation: Name of the operation in errors.
        name: Of the parameter.
        parameter: The parameter, or a shard of it.
        kinds: Of other hooks to refuse.

    Raises:
        ConfigurationError: It has one.
    """
    if any(_has_hook(parameter, kind) for kind in (BEFORE, *kinds)):
        raise ConfigurationError(
            f"{operation}: {name} has a hook on its gradient, which ranks compute in parts, and not all of "
            "it by autograd: the hook would see a part, or not run. Change the gradient after backward "
            "instead (after unscale_gradients, before the step), or keep the full model on every rank."
        )


def refuse_hooks(model: nn.Module) -> None:
    """Refuse hooks on the gradients of a model that ranks are going to share.

    Raises:
        ConfigurationError: A parameter has one.
    """
    for name, parameter in model.named_parameters():
        refuse_hook_of_shard("prepare_model", name, parameter, AFTER)


def refuse_hook_of_replica(operation: str, parameter: torch.Tensor) -> None:
    """Refuse a hook after the gradient of a replicated parameter, which isn't averaged then.

    Raises:
        ConfigurationError: It has one.
    """
    if _has_hook(parameter, AFTER):
        raise ConfigurationError(
            f"{operation}: a parameter of shape {tuple(parameter.shape)} has a hook after the accumulation "
            "of its gradient (register_post_accumulate_grad_hook), where the gradient is this rank's own: a "
            "step there would let the models of the ranks drift apart. Do after backward what the hook does; "
            "or shard the model with an fsdp_plugin, and register it after prepare: FSDP averages before."
        )
