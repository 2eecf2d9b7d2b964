"""8-bit matrix products by torchao."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Collection
from typing import Any

from torch import nn

from accelfn.config import AORecipeKwargs
from accelfn.errors import MissingExtraError


def convert(
    model: nn.Module, linears: Collection[str], recipe: AORecipeKwargs, *, gathers: bool, emulated: bool
) -> None:
    """Convert the linear layers of these names. Writes into the model.

    Ranks: local.

    Raises:
        MissingExtraError: torchao can't be imported.
    """
    float8 = _import()
    base = recipe.config or float8.Float8LinearConfig(pad_inner_dim=recipe.pad_inner_dim, emulate=emulated)
    names = frozenset(linears)

    def is_planned(module: nn.Module, name: str) -> bool:
        return name in names and type(module) is nn.Linear

    float8.convert_to_float8_training(
        model,
        module_filter_fn=is_planned,
        config=dataclasses.replace(base, enable_fsdp_float8_all_gather=gathers),
    )


def compute_scales(model: nn.Module) -> None:
    """Compute the scales of all weights of a model that FSDP gathers in fp8.

    torchao's function, which is meant to run after each optimizer step, runs before each forward pass: so no
    scale is one of older weights, whoever wrote them (any optimizer, a loaded checkpoint, an average).

    Ranks: every rank of the model; one number of each layer is reduced, all together.
    """
    _import().precompute_float8_dynamic_scale_for_fsdp(model)


def _import() -> Any:
    try:
        return importlib.import_module("torchao.float8")
    except ImportError as error:
        raise MissingExtraError(
            "mixed_precision='fp8' needs torchao 0.18 or later, whose torchao.float8 can't be imported here: "
            f"{error}. Install it: pip install 'accelfn[torchao]'"
        ) from error
