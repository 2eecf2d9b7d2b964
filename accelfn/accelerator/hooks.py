"""Hooks of a program that saves or loads: what they are called with, and what they decide."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import nn
from torch.utils.hooks import RemovableHandle

from accelfn.errors import ConfigurationError
from accelfn.training import unwrap_model

__all__ = ("Hooks", "add_hook", "run_load_hooks", "run_save_hooks")

Hooks = OrderedDict[int, Callable[..., None]]


def add_hook(hooks: Hooks, hook: Callable[..., None]) -> RemovableHandle:
    """Add a hook behind the others, and give what removes it."""
    handle = RemovableHandle(hooks)
    hooks[handle.id] = hook
    return handle


def run_save_hooks(hooks: Hooks, models: Mapping[str, nn.Module], folder: Path) -> list[str]:
    """Call ``hook(models, weights, folder)``, and give the names of the models that are left to be saved.

    Raises:
        ConfigurationError: A hook has changed weights.
    """
    if not hooks:
        return list(models)
    states = {
        name: dict(unwrap_model(model, keep_torch_compile=False).state_dict())
        for name, model in models.items()
    }
    before = {name: dict(state) for name, state in states.items()}
    left = list(states.values())
    for hook in tuple(hooks.values()):
        hook(list(models.values()), left, str(folder))
    kept = [name for name, state in states.items() if any(one is state for one in left)]
    are_same = all(
        states[name].keys() == before[name].keys()
        and all(states[name][key] is value for key, value in before[name].items())
        for name in kept
    )
    if not are_same or len(kept) != len(left):
        raise ConfigurationError(
            "save_state: a hook has changed the weights, and what is saved is the model itself. Take the "
            "whole entry out of weights, and write the weights that you want to output_dir."
        )
    return kept


def run_load_hooks(hooks: Hooks, models: Mapping[str, nn.Module], place: Path) -> dict[str, nn.Module]:
    """Call ``hook(models, place)``, and give the models that are left to be loaded."""
    left = list(models.values())
    for hook in tuple(hooks.values()):
        hook(left, str(place))
    return {name: model for name, model in models.items() if any(one is model for one in left)}
