"""From Accelerate's numbered lists to a tree with names, and back. Pure.

Accelerate knows what it saved by the order in which it was prepared, and torch's optimizers know parameters
by their number. A tree of accelfn has a name for each, so that an order means nothing in it.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from accelfn.checkpoint.accelerate.optimizer_names import ModelNames, name_parameters
from accelfn.checkpoint.accelerate.reading import AccelerateState
from accelfn.context.config import GradScalerKwargs
from accelfn.training import ScalerState, unwrap_model

__all__ = ("Like", "from_accelerate", "to_accelerate")

Like: TypeAlias = "Mapping[str, nn.Module | Optimizer | Sequence[str]]"

# The kinds that a folder may have several of, and whether the first has a number too.
_KINDS = (
    *(("model", "models", False), ("optimizer", "optimizers", False), ("scheduler", "schedulers", False)),
    *(("sampler", "samplers", False), ("loader", "loaders", False), ("custom", "custom", True)),
)
_DEVICE_SEED = re.compile(r"torch_([a-z]+)_manual_seed")
_RANDOM = (("python", "random_state"), ("numpy", "numpy_random_seed"), ("torch", "torch_manual_seed"))
_OPTIONS = ("growth_factor", "backoff_factor", "growth_interval")


def from_accelerate(
    state: AccelerateState, *, names: Mapping[str, str] | None = None, like: Like | None = None
) -> dict[str, Any]:
    """Turn what :func:`read_accelerate` gave into a tree with names.

    - ``model``, ``model_1``, ...: the state dict;
    - ``optimizer``, ...: ``{"state": {parameter: {...}}, "groups": [{"params": [parameters], ...}]}``;
    - ``scheduler``, ...: the state dict;
    - ``sampler``, ``loader``, ...: as Accelerate wrote it;
    - ``custom_0``, ...: the state dict of each registered object;
    - ``scaler``: an :class:`accelfn.training.ScalerState`;
    - ``random``: by rank ``{"python": ..., "numpy": ..., "torch": ..., "cuda": [...]}``, or None;
    - ``step``: the number of steps that Accelerate counted.

    A parameter goes by its name in the model, with the model's name and a slash before it where there are
    several models. Torch's optimizers number their parameters, and the names behind the numbers are found by,
    in this order: names in the file (FSDP and optimizers over named parameters have them), ``like``, and
    shapes, where each fits one weight only.

    The scaler's growth factor, backoff factor and growth interval are options of a run: take them from
    ``state.scaler`` for :class:`accelfn.GradScalerKwargs` if they aren't the defaults.

    Ranks: local. Tensors aren't copied.

    Args:
        state: Of a folder.
        names: What a part is to be called instead: ``{"model": "generator", "model_1": "critic"}``.
        like: What tells the order of parameters, by name in the tree. For a model: the module, or the names
            of its parameters as ``named_parameters`` gives them; the optimizer is then taken to have them in
            that order. For an optimizer, where it has them in another order or in several groups: the
            optimizer (with its model's module), or the names in its order. Nothing in it is changed.

    Raises:
        ValueError: ``names`` or ``like`` names nothing in ``state``, or two parts the same.
        CheckpointError: It isn't certain which parameter an optimizer's state belongs to; the message says
            what to pass.
        CheckpointMismatchError: A state doesn't have the shape of its parameter.
    """
    called = _names(state, names or {})
    tree: dict[str, Any] = {}
    models = [_plain_names(model) for model in state.models]
    model_names = [called[_default("model", number)] for number in range(len(models))]
    tree.update(zip(model_names, models, strict=True))
    known = _known_names(like or {}, model_names, models)
    optimizer_names = [called[_default("optimizer", number)] for number in range(len(state.optimizers))]
    unknown = sorted(set(like or {}) - set(model_names) - set(optimizer_names))
    if unknown:
        raise ValueError(
            f"from_accelerate: like has {unknown[0]!r}, but the folder's models and optimizers are "
            f"{', '.join([*model_names, *optimizer_names]) or 'none'}."
        )
    for number, name in enumerate(optimizer_names):
        sizes = [len(group["params"]) for group in state.optimizers[number]["param_groups"]]
        given = _optimizer_names(name, like or {}, len(models) > 1, sizes)
        ordered = name_parameters(name, number, state.optimizers[number], known, given)
        tree[name] = _named_optimizer(state.optimizers[number], ordered)
    for kind, field, always in _KINDS[2:]:
        for number, value in enumerate(getattr(state, field)):
            tree[called[_default(kind, number, always)]] = value
    if state.scaler:  # empty where the scaler was disabled
        tree["scaler"] = _scaler_state(state.scaler)
    if state.random:
        tree["random"] = [None if one is None else _random_state(one) for one in state.random]
        steps = {one["step"] for one in state.random if one is not None and "step" in one}
        if steps:
            tree["step"] = max(steps)
    return tree


def to_accelerate(
    tree: Mapping[str, Any],
    *,
    names: Mapping[str, str] | None = None,
    scaler: GradScalerKwargs | None = None,
) -> AccelerateState:
    """Turn a tree, as :func:`from_accelerate` gives it, into what :func:`write_accelerate` writes.

    What Accelerate has no place for is left out: the scaler's count of skipped steps.

    Ranks: local. Tensors aren't copied.

    Args:
        tree: Any of the parts that :func:`from_accelerate` lists. An optimizer's parameters are numbered in
            the order of its groups.
        names: As for :func:`from_accelerate`: what the parts are called in ``tree`` instead.
        scaler: The run's options of the loss scaler. None: the defaults.

    Raises:
        ValueError: A part has a name that isn't known, one of several is missing, an optimizer has a state
            for a parameter that is in none of its groups, or the scaler's gradients wait for a step.
    """
    default_of = {name: default for default, name in (names or {}).items()}
    parts = {default_of.get(name, name): value for name, value in tree.items()}
    if len(parts) != len(tree):
        raise ValueError("to_accelerate: names gives two parts of the tree the same place.")
    fields: dict[str, tuple[Any, ...]] = {}
    for kind, field, always in _KINDS:
        values: list[Any] = []
        while (default := _default(kind, len(values), always)) in parts:
            values.append(parts.pop(default))
        fields[field] = tuple(values)
    scaler_state = parts.pop("scaler", None)
    random = parts.pop("random", None)
    step = parts.pop("step", None)
    if parts:
        raise ValueError(
            f"to_accelerate: a folder of Accelerate has no place for {', '.join(map(repr, parts))}. Parts "
            "are model, model_1, ..., optimizer, scheduler, sampler, loader, custom_0, scaler, random and "
            "step, without gaps; pass names={'model': 'what it is called here'} for others."
        )
    if step is not None and not random:
        raise ValueError("to_accelerate: Accelerate keeps the step with the random states: add random.")
    return AccelerateState(
        models=fields["models"],
        optimizers=tuple(_numbered_optimizer(state) for state in fields["optimizers"]),
        schedulers=fields["schedulers"],
        samplers=fields["samplers"],
        loaders=fields["loaders"],
        scaler=None if scaler_state is None else _scaler_dict(scaler_state, scaler or GradScalerKwargs()),
        random=tuple(None if one is None else _random_dict(one, step) for one in random or ()),
        custom=fields["custom"],
    )


def _default(kind: str, number: int, always: bool = False) -> str:
    return f"{kind}_{number}" if number or always else kind


def _names(state: AccelerateState, names: Mapping[str, str]) -> dict[str, str]:
    called = {
        _default(kind, number, always): _default(kind, number, always)
        for kind, field, always in _KINDS
        for number in range(len(getattr(state, field)))
    }
    unknown = sorted(set(names) - set(called))
    if unknown:
        raise ValueError(
            f"from_accelerate: names has {unknown[0]!r}, but the folder holds "
            f"{', '.join(called) or 'nothing'}."
        )
    called.update(names)
    taken = [*called.values(), "scaler", "random", "step"]
    twice = sorted({name for name in taken if taken.count(name) > 1})
    if twice:
        raise ValueError(f"from_accelerate: two parts would be called {twice[0]!r}. Pass other names.")
    return called


def _plain_names(model: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Take out what torch.compile adds to names."""
    plain = {name.replace("_orig_mod.", ""): value for name, value in model.items()}
    return plain if len(plain) == len(model) else dict(model)


def _known_names(
    like: Like, model_names: Sequence[str], models: Sequence[Mapping[str, torch.Tensor]]
) -> tuple[ModelNames, ...]:
    known: list[ModelNames] = []
    for name, model in zip(model_names, models, strict=True):
        prefix = f"{name}/" if len(models) > 1 else ""
        given = like.get(name)
        ordered: list[tuple[str, ...]] = []
        if isinstance(given, nn.Module):
            parameters = list(unwrap_model(given, keep_torch_compile=False).named_parameters())
            ordered = [tuple(one for one, _ in parameters)]
            trained = tuple(one for one, parameter in parameters if parameter.requires_grad)
            if trained != ordered[0]:
                ordered.append(trained)
        elif isinstance(given, Optimizer):
            raise ValueError(f"from_accelerate: like[{name!r}] is an optimizer, but {name} is a model.")
        elif given is not None:
            ordered = [tuple(given)]
        shapes = {prefix + one: tuple(tensor.shape) for one, tensor in model.items()}
        weights = {
            prefix + one: tuple(tensor.shape)
            for one, tensor in model.items()
            if tensor.is_floating_point() or tensor.is_complex()
        }
        known.append(
            ModelNames(
                name, prefix, [tuple(prefix + one for one in names) for names in ordered], shapes, weights
            )
        )
    return tuple(known)


def _optimizer_names(
    name: str, like: Like, several: bool, sizes: Sequence[int]
) -> list[tuple[str, ...]] | None:
    """Return the parameters of each group as ``like`` has them; a plain list is cut into ``sizes``."""
    given = like.get(name)
    if given is None:
        return None
    if isinstance(given, nn.Module):
        raise ValueError(f"from_accelerate: like[{name!r}] is a module, but {name} is an optimizer.")
    if not isinstance(given, Optimizer):
        ends = list(itertools.accumulate(sizes, initial=0))
        if len(given) != ends[-1]:
            return [tuple(given)]  # refused with the numbers
        return [tuple(given[start:end]) for start, end in itertools.pairwise(ends)]
    by_id = {
        id(parameter): f"{model}/{parameter_name}" if several else parameter_name
        for model, module in like.items()
        if isinstance(module, nn.Module)
        for parameter_name, parameter in unwrap_model(module, keep_torch_compile=False).named_parameters()
    }
    groups = given.param_groups
    if any(id(parameter) not in by_id for group in groups for parameter in group["params"]):
        raise ValueError(
            f"from_accelerate: like[{name!r}] has parameters of no module in like. Add the module under its "
            "model's name."
        )
    return [tuple(by_id[id(parameter)] for parameter in group["params"]) for group in groups]


def _named_optimizer(state: Mapping[str, Any], ordered: Mapping[Any, str]) -> dict[str, Any]:
    groups = [
        {
            "params": [ordered[key] for key in group["params"]],
            **{option: value for option, value in group.items() if option not in ("params", "param_names")},
        }
        for group in state["param_groups"]
    ]
    others = {key: value for key, value in state.items() if key not in ("state", "param_groups")}
    named = {"state": {ordered[key]: value for key, value in state["state"].items()}, "groups": groups}
    return {**named, **({"others": others} if others else {})}


def _numbered_optimizer(state: Mapping[str, Any]) -> dict[str, Any]:
    number_of: dict[str, int] = {}
    groups: list[dict[str, Any]] = []
    for group in state["groups"]:
        for name in group["params"]:
            if name in number_of:
                raise ValueError(
                    f"to_accelerate: the parameter {name} stands in an optimizer's groups twice."
                )
            number_of[name] = len(number_of)
        options = {option: value for option, value in group.items() if option != "params"}
        groups.append({**options, "params": [number_of[name] for name in group["params"]]})
    lost = [name for name in state["state"] if name not in number_of]
    if lost:
        raise ValueError(
            f"to_accelerate: an optimizer has a state for {lost[0]}, which is in none of its groups."
        )
    return {
        "state": {
            number: state["state"][name] for name, number in number_of.items() if name in state["state"]
        },
        "param_groups": groups,
        **state.get("others", {}),
    }


def _scaler_state(state: Mapping[str, Any]) -> ScalerState:
    return ScalerState(
        scale=torch.tensor(float(state["scale"]), dtype=torch.float32),
        growth_tracker=torch.tensor(int(state["_growth_tracker"]), dtype=torch.int32),
        found_inf=torch.zeros((), dtype=torch.float32),
        num_skipped=torch.zeros((), dtype=torch.int64),
    )


def _scaler_dict(state: ScalerState, options: GradScalerKwargs) -> dict[str, Any]:
    if state.is_unscaled or state.weight is not None:
        raise ValueError("to_accelerate: the scaler's gradients wait for a step. Save after optimizer_step.")
    chosen = {option: getattr(options, option) for option in _OPTIONS}
    return {"scale": float(state.scale), **chosen, "_growth_tracker": int(state.growth_tracker)}


def _random_state(state: Mapping[str, Any]) -> dict[str, Any]:
    own_of = {theirs: own for own, theirs in _RANDOM}
    named: dict[str, Any] = {}
    for key, value in state.items():
        device = _DEVICE_SEED.fullmatch(key)
        if key != "step":
            named[own_of.get(key) or (device[1] if device else key)] = value
    return named


def _random_dict(state: Mapping[str, Any], step: int | None) -> dict[str, Any]:
    theirs_of = dict(_RANDOM)
    theirs: dict[str, Any] = {} if step is None else {"step": step}
    for key, value in state.items():
        # A device has a bare name; what Accelerate calls otherwise, such as xm_seed, was kept as it is.
        theirs[theirs_of.get(key) or (key if "_" in key else f"torch_{key}_manual_seed")] = value
    return theirs
