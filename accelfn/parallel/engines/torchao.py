"""8-bit matrix products by torchao."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any, cast

import torch
from torch import nn

from accelfn.context.config import AORecipeKwargs
from accelfn.errors import MissingExtraError
from accelfn.parallel.fp8 import Fp8Plan
from accelfn.tree import is_dtensor


def has_ao_layers(model: nn.Module) -> bool:
    """Return whether a module of a model is one of torchao's 8-bit layers."""
    return any(type(module).__name__ == "Float8Linear" for module in model.modules())


def convert(model: nn.Module, plan: Fp8Plan) -> None:
    """Convert the planned layers. Writes into the model.

    Ranks: local.

    Raises:
        MissingExtraError: torchao can't be imported.
    """
    float8 = _import()
    recipe = cast("AORecipeKwargs", plan.choice.recipe)
    base = recipe.config or float8.Float8LinearConfig(
        pad_inner_dim=recipe.pad_inner_dim, emulate=plan.emulated
    )
    names = frozenset(plan.converted)

    def is_planned(module: nn.Module, name: str) -> bool:
        return name in names and type(module) is nn.Linear

    float8.convert_to_float8_training(
        model,
        module_filter_fn=is_planned,
        config=dataclasses.replace(base, enable_fsdp_float8_all_gather=plan.gathers),
    )


class Scales:
    """The scales of weights that FSDP gathers in fp8, computed together whenever weights have changed.

    torchao's function is meant to run after each optimizer step; here a forward pass calls it if a weight was
    written since, whoever wrote it: any optimizer, a loaded checkpoint, an average of weights. So no scale is
    one of older weights.
    """

    def __init__(self, model: nn.Module) -> None:
        """Take the sharded layers of ``model``."""
        self._layers = [module for module in model.modules() if _is_gathered(module)]
        self._seen: object = None

    def are_old(self) -> bool:
        """Return whether a weight was written since the scales were computed."""
        return bool(self._layers) and self._seen != self._versions()

    def refresh(self) -> None:
        """Compute the scales if weights were written.

        Ranks: every rank of the model; one number of each layer is reduced, all at once.
        """
        if self.are_old():
            _import().precompute_float8_dynamic_scale_for_fsdp(nn.ModuleList(self._layers))
            self._seen = self._versions()

    def _versions(self) -> list[tuple[int, int]]:
        locals_ = [cast("Any", module.weight)._local_tensor for module in self._layers]
        return [(id(one), one._tensor._version) for one in locals_]


def _is_gathered(module: nn.Module) -> bool:
    weight: Any = getattr(module, "weight", None)
    return is_dtensor(weight) and hasattr(weight._local_tensor, "fsdp_pre_all_gather")


def _import() -> Any:
    try:
        return importlib.import_module("torchao.float8")
    except ImportError as error:
        raise MissingExtraError(
            "mixed_precision='fp8' needs torchao 0.18 or later, whose torchao.float8 can't be imported here: "
            f"{error}. Install it: pip install 'accelfn[torchao]'"
        ) from error
