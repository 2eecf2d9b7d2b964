"""Find the names behind the numbers by which torch's optimizers know their parameters. Pure.

A number is a place in the optimizer's own order, which its state dict doesn't tell: the model's state dict
has buffers in it, safetensors sorts names, weights may be tied or frozen, and groups may take the parameters
in any order. So a guess is only taken where there is no other, and the shapes of the state check it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from accelfn.errors import CheckpointError, CheckpointMismatchError, Misfit

__all__ = ("ModelNames", "name_parameters")

# Entries of torch's optimizers that have the shape of their parameter.
_LIKE_PARAMETER = (
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "grad_avg", "acc_delta"),
    *("sum", "exp_inf", "ax", "prev", "mu_buffer"),
)


class ModelNames(NamedTuple):
    """What is known of the parameters of one model. All names have the prefix.

    Attributes:
        name: Of the model in the tree.
        prefix: Before the names of its parameters; "" where it is the only model.
        ordered: Orders in which an optimizer may have got its parameters: all, or those that train.
        shapes: Of all tensors in its state dict.
        weights: Of those that can be trained at all.
    """

    name: str
    prefix: str
    ordered: Sequence[tuple[str, ...]]
    shapes: Mapping[str, tuple[int, ...]]
    weights: Mapping[str, tuple[int, ...]]


def name_parameters(
    optimizer: str,
    number: int,
    state: Mapping[str, Any],
    models: Sequence[ModelNames],
    given: Sequence[tuple[str, ...]] | None,
) -> dict[Any, str]:
    """Return the name of each parameter that an optimizer's state dict refers to.

    Args:
        optimizer: Its name in the tree, for errors.
        number: Its place among the optimizers.
        state: Its state dict.
        models: What is known of the models.
        given: Names in its order, by group, from the user.

    Raises:
        CheckpointError: It isn't certain.
        CheckpointMismatchError: A state doesn't have the shape of its parameter.
    """
    groups = cast("list[dict[str, Any]]", state["param_groups"])
    keys = [key for group in groups for key in group["params"]]
    shapes = {key: _shape(entries) for key, entries in state["state"].items()}
    stray = [key for key in shapes if key not in keys]
    if stray or len(set(keys)) != len(keys):
        raise CheckpointError(
            f"from_accelerate: {optimizer} contradicts itself: "
            + (f"it has a state for {stray[0]!r}, which is in no group." if stray else "a parameter twice.")
        )
    if given is not None:
        names = _as_given(optimizer, groups, given)
    elif all(isinstance(key, str) for key in keys):
        names = _in_models(optimizer, number, keys, models)
    elif all("param_names" in group for group in groups):
        listed = [name for group in groups for name in group["param_names"]]
        names = _in_models(optimizer, number, listed, models)
    else:
        names = _found(optimizer, groups, [shapes.get(key) for key in keys], models)
    if len(names) != len(keys) or len(set(names)) != len(names):
        raise CheckpointError(
            f"from_accelerate: {optimizer} has {len(keys)} parameters, but {len(set(names))} different names "
            "were given for them. Pass the names of exactly its parameters, in its order."
        )
    stored = {name: shape for model in models for name, shape in model.shapes.items()}
    rows = [
        Misfit(f"{optimizer}.{name}", str(shapes[key]), str(stored[name]))
        for key, name in zip(keys, names, strict=True)
        if shapes.get(key) is not None and name in stored and shapes[key] != stored[name]
    ]
    if rows:
        raise CheckpointMismatchError(
            f"from_accelerate: states of {optimizer} don't have the shapes of their parameters. Check the "
            "order in which it takes them.",
            rows,
        )
    return dict(zip(keys, names, strict=True))


def _shape(entries: Any) -> tuple[int, ...] | None:
    """Return the shape of the parameter that a state belongs to, where the state tells it."""
    held = cast("dict[str, Any]", entries) if isinstance(entries, dict) else {}
    for key in _LIKE_PARAMETER:
        value = held.get(key)
        if isinstance(value, torch.Tensor):
            return tuple(value.shape)
    return None


def _as_given(
    optimizer: str, groups: Sequence[Mapping[str, Any]], given: Sequence[tuple[str, ...]]
) -> list[str]:
    sizes = [len(group["params"]) for group in groups]
    own = [len(names) for names in given]
    if own != sizes:
        raise CheckpointError(
            f"from_accelerate: {optimizer} has groups of {sizes} parameters, and like[{optimizer!r}] has "
            f"{own}. Build it as it was when it was saved."
        )
    return [name for names in given for name in names]


def _in_models(optimizer: str, number: int, names: Sequence[str], models: Sequence[ModelNames]) -> list[str]:
    """Find the one model that has all names."""
    having = [model for model in models if all(model.prefix + name in model.shapes for name in names)]
    if len(having) > 1 and len(models) > number and models[number] in having:
        having = [models[number]]  # FSDP saves the optimizer with a number together with that model
    if len(having) == 1:
        return [having[0].prefix + name for name in names]
    if not having and len(models) == 1:
        return list(names)  # a tied name, which the weights don't have
    raise CheckpointError(
        f"from_accelerate: it isn't certain which model the names in {optimizer} are of. "
        f"{_remedy(optimizer, models)}"
    )


def _found(
    optimizer: str,
    groups: Sequence[Mapping[str, Any]],
    shapes: Sequence[tuple[int, ...] | None],
    models: Sequence[ModelNames],
) -> list[str]:
    stored = {name: shape for model in models for name, shape in model.shapes.items()}
    fitting = {
        names
        for names in _candidates(groups, models)
        if len(names) == len(shapes)
        and all(
            shape is None or stored.get(name, shape) == shape
            for name, shape in zip(names, shapes, strict=True)
        )
    }
    if len(fitting) == 1:
        return list(next(iter(fitting)))
    if not fitting and not any(model.ordered for model in models):
        by_shape = _by_shape(shapes, models)
        if by_shape is not None:
            return by_shape
    raise CheckpointError(
        f"from_accelerate: it isn't certain which of its {len(shapes)} parameters in {len(groups)} groups "
        f"are which: {optimizer} only has their numbers. {_remedy(optimizer, models)}"
    )


def _candidates(groups: Sequence[Mapping[str, Any]], models: Sequence[ModelNames]) -> list[tuple[str, ...]]:
    """List the orders that may be meant: those of one model, or of all models one after the other."""
    single = [names for model in models for names in model.ordered] if len(groups) == 1 else []
    if len(models) < 2 or any(not model.ordered for model in models) or len(groups) not in (1, len(models)):
        return single
    chains: list[tuple[tuple[str, ...], ...]] = [()]
    for model in models:
        chains = [(*chain, names) for chain in chains for names in model.ordered]
    sizes = [len(group["params"]) for group in groups]
    return [
        *single,
        *(
            tuple(name for names in chain for name in names)
            for chain in chains
            if len(groups) == 1 or [len(names) for names in chain] == sizes
        ),
    ]


def _by_shape(shapes: Sequence[tuple[int, ...] | None], models: Sequence[ModelNames]) -> list[str] | None:
    """Return the names if each shape is that of one weight alone."""
    holders: dict[tuple[int, ...], list[str]] = {}
    for model in models:
        for name, shape in model.weights.items():
            holders.setdefault(shape, []).append(name)
    names = [holders.get(shape, []) if shape is not None else [] for shape in shapes]
    if any(len(one) != 1 for one in names) or len({one[0] for one in names}) != len(names):
        return None
    return [one[0] for one in names]


def _remedy(optimizer: str, models: Sequence[ModelNames]) -> str:
    modules = ", ".join(f"{model.name!r}: module" for model in models) or "'model': module"
    return (
        f"Pass like={{{modules}}} with the modules, or, where the optimizer takes their parameters in "
        f"another order or in several groups, like={{{modules}, {optimizer!r}: optimizer}} with the "
        f"optimizer as well, or like={{{optimizer!r}: [names in its order]}}."
    )
