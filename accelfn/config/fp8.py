"""Which engine computes 8-bit matrix products, and with what recipe."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import NamedTuple, cast

from accelfn.config.enums import FP8Backend
from accelfn.config.handlers import (
    AORecipeKwargs,
    FP8RecipeKwargs,
    KwargsHandler,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
)
from accelfn.errors import ConfigurationError, MissingExtraError

Recipe = AORecipeKwargs | TERecipeKwargs | MSAMPRecipeKwargs


class Fp8Package(NamedTuple):
    """The package of an engine.

    Attributes:
        module: What is imported.
        install: The command that installs it.
        recipe: Its recipe.
    """

    module: str
    install: str
    recipe: type[Recipe]


#: The engines, preferred ones first.
FP8_PACKAGES: Mapping[FP8Backend, Fp8Package] = MappingProxyType(
    {
        FP8Backend.AO: Fp8Package("torchao", "pip install 'accelfn[torchao]'", AORecipeKwargs),
        FP8Backend.TE: Fp8Package(
            "transformer_engine",
            "pip install --no-build-isolation 'transformer-engine[pytorch]'",
            TERecipeKwargs,
        ),
        FP8Backend.MSAMP: Fp8Package(
            "msamp", "pip install git+https://github.com/Azure/MS-AMP", MSAMPRecipeKwargs
        ),
    }
)


class Fp8Choice(NamedTuple):
    """The engine of 8-bit matrix products.

    Attributes:
        backend: The engine.
        why: Why this one.
        recipe: Its recipe.
    """

    backend: FP8Backend
    why: str
    recipe: Recipe


def list_fp8_packages() -> frozenset[str]:
    """Return the modules of :data:`FP8_PACKAGES` that are installed; imports none."""
    modules = [package.module for package in FP8_PACKAGES.values()]
    return frozenset(name for name in modules if importlib.util.find_spec(name) is not None)


def choose_fp8(recipe: Recipe | FP8RecipeKwargs | None, installed: Collection[str]) -> Fp8Choice:
    """Choose the engine of 8-bit matrix products, and its recipe. Pure.

    Args:
        recipe: Of one engine, which is chosen; or one that may name an engine; None for the defaults of the
            first one that is installed.
        installed: From :func:`list_fp8_packages`.

    Raises:
        MissingExtraError: The chosen engine isn't installed, or none is.
        ConfigurationError: The recipe sets an option of another engine.

    >>> choose_fp8(None, {"torchao", "msamp"}).why
    'the first of torchao, transformer_engine and msamp that is installed'
    >>> str(choose_fp8(FP8RecipeKwargs(backend="te"), {"transformer_engine"}).backend)
    'TE'
    """
    named = next((name for name, one in FP8_PACKAGES.items() if isinstance(recipe, one.recipe)), None)
    why = f"chosen by {type(recipe).__name__}"
    if named is None and isinstance(recipe, FP8RecipeKwargs) and recipe.backend is not None:
        named, why = FP8Backend(recipe.backend), f"chosen by backend={str(recipe.backend)!r}"
    if named is None:
        named = next((name for name, one in FP8_PACKAGES.items() if one.module in installed), None)
        *first, last = (one.module for one in FP8_PACKAGES.values())
        why = f"the first of {', '.join(first)} and {last} that is installed"
    if named is None:
        raise MissingExtraError(
            "mixed_precision='fp8' needs torchao, transformer_engine or msamp, and none is installed. "
            f"Install torchao: {FP8_PACKAGES[FP8Backend.AO].install}"
        )
    package = FP8_PACKAGES[named]
    if package.module not in installed:
        raise MissingExtraError(
            f"mixed_precision='fp8', {why}, needs {package.module}, which is not installed. "
            f"Install it: {package.install}"
        )
    if recipe is None:
        return Fp8Choice(named, why, package.recipe())
    return Fp8Choice(named, why, _of_engine(recipe, named) if isinstance(recipe, FP8RecipeKwargs) else recipe)


def _of_engine(recipe: FP8RecipeKwargs, backend: FP8Backend) -> Recipe:
    """Return a recipe's part for one engine; refuse options of the others that aren't at their defaults."""
    kind = FP8_PACKAGES[backend].recipe
    known = {item.name for item in fields(kind)}
    changed = cast("KwargsHandler", recipe).to_kwargs()
    for name, value in changed.items():
        if name not in known and name != "backend":
            owner = next(
                one for one, package in FP8_PACKAGES.items() if name in package.recipe.__dataclass_fields__
            )
            raise ConfigurationError(
                f"FP8RecipeKwargs: {name}={value!r} is an option of {owner}, and the engine is {backend}. "
                f"Leave it out, or set backend={str(owner)!r}."
            )
    return kind(**{name: value for name, value in changed.items() if name in known})
