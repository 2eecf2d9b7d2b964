"""8-bit matrix products by NVIDIA's transformer-engine, by its documentation of version 2."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from accelfn.config import TERecipeKwargs
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.parallel.forward import WrappedForward


def convert(model: nn.Module, linears: Iterable[str], norms: Iterable[str]) -> None:
    """Replace layers of these names by transformer-engine's, with the same parameters. Writes into the model.

    Ranks: local.

    Raises:
        NotAvailableError: transformer-engine can't be imported, as on a machine without CUDA.
    """
    te = _import("transformer_engine.pytorch")
    for name in linears:
        old: Any = model.get_submodule(name)
        options = {"params_dtype": old.weight.dtype, "device": old.weight.device}
        _replace(model, name, te.Linear(old.in_features, old.out_features, old.bias is not None, **options))
    for name in norms:
        old = model.get_submodule(name)
        options = {"params_dtype": old.weight.dtype, "device": old.weight.device}
        _replace(model, name, te.LayerNorm(old.normalized_shape[0], eps=old.eps, **options))


def _replace(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    old = model.get_submodule(name)
    for place, parameter in old.named_parameters(recurse=False):
        setattr(new, place, parameter)  # optimizers and ties keep theirs
    setattr(model.get_submodule(parent), leaf, new.train(old.training))


def with_fp8_autocast(model: nn.Module, recipe: TERecipeKwargs) -> None:
    """Make a model's forward compute in fp8 when it trains, and in evaluation if the recipe says so.

    Writes into the model. It must be applied around everything compiled: transformer-engine keeps what it
    has seen of the values, from step to step, when the outermost block ends.

    Raises:
        NotAvailableError: transformer-engine can't be imported.
        ConfigurationError: This version doesn't take the recipe's options.
    """
    te = _import("transformer_engine.pytorch")
    model.forward = Fp8Forward(
        model.forward, te.fp8_autocast, build_recipe(recipe), recipe.use_autocast_during_eval
    )


class Fp8Forward(WrappedForward):
    """A model's ``forward`` under transformer-engine's ``fp8_autocast``."""

    def __init__(
        self,
        forward: Callable[..., Any],
        fp8_autocast: Callable[..., AbstractContextManager[Any]],
        recipe: Any,
        in_evaluation: bool,
    ) -> None:
        """Wrap ``forward``; ``recipe`` is transformer-engine's."""
        super().__init__(forward)
        self._fp8_autocast = fp8_autocast
        self._recipe = recipe
        self._in_evaluation = in_evaluation

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call ``forward`` in fp8, in a model that trains."""
        with self._fp8_autocast(enabled=self._in_evaluation or self._trains(), fp8_recipe=self._recipe):
            return self.__wrapped__(*args, **kwargs)

    def _trains(self) -> bool:
        forward: Any = self.__wrapped__
        while isinstance(forward, WrappedForward):
            forward = forward.__wrapped__
        model = getattr(forward, "__self__", None)
        return model.training if isinstance(model, nn.Module) else torch.is_grad_enabled()


def build_recipe(recipe: TERecipeKwargs) -> Any:
    """Return transformer-engine's recipe.

    All options are passed, also those at Accelerate's default: transformer-engine's own default of
    ``amax_compute_algo`` is another one.

    Raises:
        NotAvailableError: transformer-engine can't be imported.
        ConfigurationError: This version doesn't take an option that isn't at its default.
    """
    recipes = _import("transformer_engine.common.recipe")
    number_format = getattr(recipes.Format, str(recipe.fp8_format))
    if recipe.use_mxfp8_block_scaling:
        return recipes.MXFP8BlockScaling(margin=recipe.margin, fp8_format=number_format)
    options: dict[str, Any] = {
        "margin": recipe.margin,
        "fp8_format": number_format,
        "amax_history_len": recipe.amax_history_len,
        "amax_compute_algo": str(recipe.amax_compute_algo),
    }
    # Some versions don't have these two.
    changed = recipe.to_kwargs()
    rare = {name: changed[name] for name in ("interval", "override_linear_precision") if name in changed}
    try:
        return recipes.DelayedScaling(**options, **rare)
    except TypeError as error:
        if not rare:
            raise
        raise ConfigurationError(
            f"TERecipeKwargs: the installed transformer-engine doesn't take {', '.join(rare)}: {error}. "
            "Leave it out."
        ) from error


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # its libraries can't be loaded without CUDA
        raise NotAvailableError(
            f"mixed_precision='fp8' with transformer-engine: {name} can't be imported here: {error}. It "
            "needs CUDA, and its part for PyTorch: pip install --no-build-isolation "
            "'transformer-engine[pytorch]'. Elsewhere use torchao, with AORecipeKwargs."
        ) from error
