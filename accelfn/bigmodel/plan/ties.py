"""Tensors that a model has under several names."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from accelfn.bigmodel.plan.shape import ModelShape, read_shape

__all__ = (
    "check_tied_parameters_in_config",
    "check_tied_parameters_on_same_device",
    "find_tied_parameters",
    "retie_parameters",
    "tied_parameters_of",
)


def find_tied_parameters(model: nn.Module) -> list[list[str]]:
    """Find the parameters that a model has under several names, also on the meta device.

    A module that is registered twice makes one group of each of its parameters. Buffers don't count, and
    neither do views.

    Ranks: local.

    Args:
        model: Any module.

    Returns:
        Groups in the order of the model; names in the order of letters.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    >>> model[1].weight = model[0].weight
    >>> find_tied_parameters(model)
    [['0.weight', '1.weight']]
    """
    return tied_parameters_of(read_shape(model))


def tied_parameters_of(shape: ModelShape) -> list[list[str]]:
    """Do what :func:`find_tied_parameters` does for a shape. Pure."""
    groups: dict[int, list[str]] = {}
    for leaf in shape.root.leaves():
        if leaf.tie is not None and leaf.kind == "parameter":
            groups.setdefault(leaf.tie, []).append(leaf.name)
    return [sorted(names) for names in groups.values() if len(names) > 1]


def retie_parameters(model: nn.Module, tied_params: Iterable[Iterable[str]]) -> None:
    """Make the names of each group one tensor again, after they were replaced one by one.

    Ranks: local. Effect: changes the model.

    Args:
        model: Whose parameters they are.
        tied_params: Groups of names, as :func:`find_tied_parameters` gives them. The first of a group that
            isn't on the meta device becomes the value of all; if all are, nothing is changed.

    Raises:
        ValueError: The model has no tensor of that name.
    """
    groups = [[_holder(model, name) for name in names] for names in tied_params]
    for holders in groups:
        values: list[Any] = [getattr(module, key) for module, key in holders]
        kept = next((value for value in values if not value.is_meta), None)
        if kept is None:
            continue
        for (module, key), value in zip(holders, values, strict=True):
            if value is not kept:
                setattr(module, key, kept)


def _holder(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that has a tensor, and what it calls it."""
    path, _, key = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        module = None
    if module is None or not isinstance(getattr(module, key, None), torch.Tensor):
        raise ValueError(f"the model has no tensor {name!r}, which is said to be tied.")
    return module, key


def check_tied_parameters_in_config(model: nn.Module) -> bool:
    """Return whether a model of transformers is configured to tie parameters.

    Args:
        model: Any module; False for those of other libraries.
    """
    if not any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__):
        return False
    config: Any = getattr(model, "config", None)
    text: Any = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    found: Any = model
    ties_words = bool(getattr(text, "tie_word_embeddings", False)) and bool(found.get_output_embeddings())
    ties_halves = bool(getattr(config, "is_encoder_decoder", False)) and bool(
        getattr(config, "tie_encoder_decoder", False)
    )
    return ties_words or ties_halves or any(hasattr(module, "_tie_weights") for module in model.modules())


def check_tied_parameters_on_same_device(
    tied_params: Iterable[Sequence[str]], device_map: Mapping[str, object]
) -> None:
    """Warn of parameters that are tied and that a map puts on several places: they become copies.

    Args:
        tied_params: Groups of names.
        device_map: From names of modules or tensors to places; ``""`` is the whole model.

    Raises:
        ValueError: The map has no place for one of them.
    """
    for names in tied_params:
        places = {name: _lookup(device_map, name) for name in names}
        if len({str(place) for place in places.values()}) > 1:
            said = ", ".join(f"{name} on {place!r}" for name, place in places.items())
            warnings.warn(
                "tied parameters are on several places, and become copies that no longer change together: "
                f"{said}.",
                stacklevel=2,
            )


def _lookup(device_map: Mapping[str, object], name: str) -> object:
    path = name
    while path not in device_map:
        if not path:
            raise ValueError(
                f"device_map has no entry for {name}, neither of its own nor of a module around it."
            )
        path = path.rpartition(".")[0]
    return device_map[path]
