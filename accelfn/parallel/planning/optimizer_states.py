"""The memory of an optimizer's states, from a step on parameters without memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.utils import _pytree

from accelfn.errors import ConfigurationError

MakeOptimizer = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
OptimizerKind = str | MakeOptimizer | float
"""The name of an optimizer, a class or function that makes one of parameters, or bytes per parameter."""

OPTIMIZERS: Mapping[str, MakeOptimizer] = MappingProxyType(
    {
        "adamw": torch.optim.AdamW,
        "adam": torch.optim.Adam,
        "adagrad": torch.optim.Adagrad,
        "rmsprop": torch.optim.RMSprop,
        "momentum": partial(torch.optim.SGD, momentum=0.9),
        "sgd": torch.optim.SGD,
    }
)
"""The optimizers with names; "momentum" is SGD with momentum."""


class OptimizerStates(NamedTuple):
    """The states of an optimizer.

    Attributes:
        name: Of the optimizer, for people.
        bytes_of: Returns the bytes of the states of a parameter, by its shape and dtype.
    """

    name: str
    bytes_of: Callable[[tuple[int, ...], torch.dtype], int]


def _measure(name: str, make: MakeOptimizer, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of the states that an optimizer makes of a parameter in its first step."""
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
    parameter.grad = torch.empty_like(parameter)
    optimizer: torch.optim.Optimizer | None = None
    try:
        optimizer = make([parameter])
        cast("Any", optimizer).step()
    except Exception as error:
        # Some read a value in their step, after they have made their states.
        if optimizer is None or not optimizer.state:
            raise ConfigurationError(
                f"a plan with optimizer={name}: it can't step a parameter of shape {shape} without "
                f"memory ({type(error).__name__}: {error}). Pass the bytes of its states per parameter "
                "instead, such as optimizer=8.0 for two of float32."
            ) from error
    leaves: list[Any] = _pytree.tree_leaves(dict(optimizer.state))
    storages: list[Any] = [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def states_of(kind: OptimizerKind, caller: str) -> OptimizerStates:
    """Return the states of an optimizer that a caller names. Pure.

    Args:
        kind: Its name, what makes it, or the bytes of its states per parameter.
        caller: Name of the public function, for errors.

    Raises:
        ConfigurationError: It is unknown or an optimizer of other parameters, or the number is negative.

    >>> states_of(0.5, "a plan").name
    '0.5 bytes per parameter'
    >>> states_of("adamw", "a plan").bytes_of((10, 2), torch.float32)  # two like it, and a count
    164
    """
    if isinstance(kind, (int, float)):
        if not kind >= 0:
            raise ConfigurationError(f"{caller}: bytes per parameter can't be negative, got {kind}.")
        number = float(kind)

        def bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
            return round(number * math.prod(shape))

        return OptimizerStates(f"{number:g} bytes per parameter", bytes_of)
    make: MakeOptimizer
    if not isinstance(kind, str):
        if not callable(cast("object", kind)):
            raise ConfigurationError(
                f"{caller}: optimizer must be a name, a class, or the bytes of its states per parameter, got "
                f"an object of type {type(kind).__name__}. Pass the class, such as torch.optim.SGD."
            )
        inner = kind.func if isinstance(kind, partial) else kind
        name, make = getattr(inner, "__name__", type(inner).__name__), cast("MakeOptimizer", kind)
    elif kind not in OPTIMIZERS:
        close = get_close_matches(kind, OPTIMIZERS, 1)
        raise ConfigurationError(
            f"{caller}: unknown optimizer {kind!r}. "
            f"{f'Did you mean {close[0]!r}? ' if close else ''}Use one of {', '.join(OPTIMIZERS)}; a class; "
            "or the bytes of its states per parameter."
        )
    else:
        name, make = kind, OPTIMIZERS[kind]
    return OptimizerStates(name, cache(partial(_measure, name, make)))
