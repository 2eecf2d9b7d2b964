"""The options of an Accelerator, under the names by which programs ask for them."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, cast

from accelfn.compat import records
from accelfn.compat.constants import FP8BackendType
from accelfn.compat.records import MutableRecord, freeze
from accelfn.compat.trackers import registered
from accelfn.context import Context
from accelfn.parallel.strategies.fp8 import fp8_backend_of


class Option:
    """What the program passed as an argument; it may change it, or set it, for what follows."""

    def __init__(self, name: str) -> None:
        """Find it by the name of the argument."""
        self._name = name

    def __get__(self, instance: Handlers | None, owner: type) -> Any:
        return self if instance is None else instance.given[self._name]

    def __set__(self, instance: Handlers, value: Any) -> None:
        instance.context = instance.context.replace(**_options({self._name: value}))  # raises if it can't be
        instance.given[self._name] = value


class Handler:
    """The program's record of one kind; None without one. Can be set, for what is prepared later."""

    def __init__(self, kind: type[MutableRecord]) -> None:
        """Find records of a kind, and accelfn's own of that kind."""
        self._kinds: tuple[type[Any], ...] = (kind, kind.record)

    def __get__(self, instance: Handlers | None, owner: type) -> Any:
        if instance is None:
            return self
        return next((one for one in instance.handlers if isinstance(one, self._kinds)), None)

    def __set__(self, instance: Handlers, value: Any) -> None:
        others = [one for one in instance.handlers if not isinstance(one, self._kinds)]
        instance.handlers = others if value is None else [*others, value]


class Handlers:
    """The attributes of an Accelerator that show its handlers and options.

    Attributes:
        given: What the program passed, by the name of the argument. Its records may be changed at any time.
        delayed_fp8_autocast: False: autocast for 8 bits doesn't wait for a wrapper.
    """

    delayed_fp8_autocast = False

    given: dict[str, Any]
    _taken: dict[str, Any]  # a copy of what is in the context
    _context: Context
    handlers: Option = Option("kwargs_handlers")
    dataloader_config: Option = Option("dataloader_config")
    project_configuration: Option = Option("project_config")
    rng_types: Option = Option("rng_types")
    log_with: Option = Option("log_with")
    autocast_handler: Handler = Handler(records.AutocastKwargs)
    ddp_handler: Handler = Handler(records.DistributedDataParallelKwargs)
    scaler_handler: Handler = Handler(records.GradScalerKwargs)
    init_handler: Handler = Handler(records.InitProcessGroupKwargs)
    profile_handler: Handler = Handler(records.ProfileKwargs)
    fp8_recipe_handler: Handler = Handler(records.FP8RecipeKwargs)
    te_recipe_handler: Handler = Handler(records.TERecipeKwargs)
    ao_recipe_handler: Handler = Handler(records.AORecipeKwargs)
    msamp_recipe_handler: Handler = Handler(records.MSAMPRecipeKwargs)

    @property
    def context(self) -> Context:
        """The frozen Context, with what the program's records hold now."""
        given = self.given
        changed = {name: given[name] for name, taken in self._taken.items() if given[name] != taken}
        if changed:
            self._context = self._context.replace(**_options(changed))
            self._taken |= copied(changed)
        return self._context

    @context.setter
    def context(self, context: Context) -> None:
        self._context = context

    @property
    def even_batches(self) -> bool:
        """Whether all ranks get equally many batches. Can be set, for loaders prepared later."""
        return self.context.loading.even_batches

    @even_batches.setter
    def even_batches(self, even: bool) -> None:
        self.dataloader_config.even_batches = even

    @property
    def _next_number(self) -> int:
        return self.context.project.iteration

    @_next_number.setter
    def _next_number(self, number: int) -> None:
        # A checkpoint that is loaded doesn't lower what the program has set.
        self.project_configuration.iteration = max(number, self._next_number)

    @property
    def has_fp8_handler(self) -> bool:
        """Whether the program passed options of 8-bit training."""
        recipes = (self.fp8_recipe_handler, self.te_recipe_handler, self.ao_recipe_handler)
        return any(one is not None for one in (*recipes, self.msamp_recipe_handler))

    @property
    def fp8_enabled(self) -> bool:
        """Whether matrix products are computed in 8 bits."""
        return self.context.mixed_precision == "fp8"

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The engine of 8-bit products."""
        backend = fp8_backend_of(self.context)
        return FP8BackendType.NO if backend is None else FP8BackendType(backend.value)


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a context that exists: without those of the process group."""
    options = {name: freeze(value) for name, value in given.items()}
    if "log_with" in options:
        options["log_with"] = registered(options["log_with"])
    handlers = options.get("kwargs_handlers") or ()
    kind = records.InitProcessGroupKwargs.record
    return {**options, "kwargs_handlers": [one for one in handlers if not isinstance(one, kind)]}


def copied(value: Any) -> Any:
    """Copy records, lists, sets and dicts, also inside of each other, but nothing else in them."""
    if isinstance(value, MutableRecord):
        twin = copy.copy(value)
        vars(twin).update(copied(vars(value)))
        return twin
    if isinstance(value, dict):
        return {name: copied(one) for name, one in cast("dict[str, Any]", value).items()}
    if isinstance(value, (list, set)):
        items = cast("list[Any] | set[Any]", value)
        return type(items)(map(copied, items))
    return value
