"""The records of ``kwargs_handlers``, by type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from accelfn.context.config import (
    AORecipeKwargs,
    AutocastKwargs,
    DistributedDataParallelKwargs,
    FP8RecipeKwargs,
    GradScalerKwargs,
    InitProcessGroupKwargs,
    KwargsHandler,
    MSAMPRecipeKwargs,
    ProfileKwargs,
    TERecipeKwargs,
)
from accelfn.errors import ConfigurationError

__all__ = ("Handlers", "sort_handlers")


class Handlers(TypedDict, total=False):
    """The records of ``kwargs_handlers``, each in its place."""

    autocast: AutocastKwargs
    ddp: DistributedDataParallelKwargs
    scaler: GradScalerKwargs
    process_group: InitProcessGroupKwargs
    profile: ProfileKwargs
    fp8_recipe: FP8RecipeKwargs | TERecipeKwargs | AORecipeKwargs | MSAMPRecipeKwargs


def sort_handlers(handlers: Sequence[KwargsHandler] | None) -> Handlers:
    """Put each record of ``kwargs_handlers`` in its place.

    Raises:
        TypeError: Something else is in the list, or a record that has an argument of its own.
        ConfigurationError: Two records for one place.
    """
    places: tuple[tuple[str, tuple[type, ...]], ...] = (
        ("autocast", (AutocastKwargs,)),
        ("ddp", (DistributedDataParallelKwargs,)),
        ("scaler", (GradScalerKwargs,)),
        ("process_group", (InitProcessGroupKwargs,)),
        ("profile", (ProfileKwargs,)),
        ("fp8_recipe", (FP8RecipeKwargs, TERecipeKwargs, AORecipeKwargs, MSAMPRecipeKwargs)),
    )
    if isinstance(handlers, KwargsHandler):
        raise TypeError(f"kwargs_handlers takes a list of records: got a single {type(handlers).__name__}.")
    found: dict[str, KwargsHandler] = {}
    for handler in handlers or ():
        place = next((name for name, kinds in places if isinstance(handler, kinds)), None)
        if place is None:
            known = ", ".join(kind.__name__ for _, kinds in places for kind in kinds)
            raise TypeError(
                f"kwargs_handlers takes records of these types: {known}; got {type(handler).__name__}. "
                "A plugin has an argument of its own."
            )
        if place in found:
            raise ConfigurationError(
                f"kwargs_handlers holds two records for one thing: {type(found[place]).__name__} and "
                f"{type(handler).__name__}. Pass one."
            )
        found[place] = handler
    return Handlers(**found)  # pyright: ignore[reportArgumentType] -- each place was checked against its types
