"""The options of an Accelerator, under the names by which programs ask for them."""

from __future__ import annotations

from typing import Any

from accelfn.compat import records
from accelfn.compat.constants import FP8BackendType
from accelfn.compat.records import MutableRecord, freeze
from accelfn.context import Context
from accelfn.context.config import LoggerType
from accelfn.parallel.fp8 import fp8_backend_of

_FP8 = (records.FP8RecipeKwargs, records.TERecipeKwargs, records.AORecipeKwargs, records.MSAMPRecipeKwargs)


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
        instance.use(value)


class Handlers:
    """The attributes of an Accelerator that show its handlers and options.

    Attributes:
        handlers: What the program passed as ``kwargs_handlers``.
        context: The context, which has their options.
    """

    context: Context
    handlers: list[Any]
    autocast_handler: Handler = Handler(records.AutocastKwargs)
    ddp_handler: Handler = Handler(records.DistributedDataParallelKwargs)
    scaler_handler: Handler = Handler(records.GradScalerKwargs)
    init_handler: Handler = Handler(records.InitProcessGroupKwargs)
    profile_handler: Handler = Handler(records.ProfileKwargs)
    fp8_recipe_handler: Handler = Handler(records.FP8RecipeKwargs)
    te_recipe_handler: Handler = Handler(records.TERecipeKwargs)
    ao_recipe_handler: Handler = Handler(records.AORecipeKwargs)
    msamp_recipe_handler: Handler = Handler(records.MSAMPRecipeKwargs)

    def use(self, handler: Any) -> None:
        """Take the options of a handler, unless they are those of the process group."""
        kinds = (records.InitProcessGroupKwargs, records.InitProcessGroupKwargs.record)
        if handler is not None and not isinstance(handler, kinds):
            self.context = self.context.replace(kwargs_handlers=[freeze(handler)])

    @property
    def has_fp8_handler(self) -> bool:
        """Whether the program passed options of 8-bit training."""
        kinds = tuple(one for kind in _FP8 for one in (kind, kind.record))
        return any(isinstance(one, kinds) for one in self.handlers)

    @property
    def fp8_enabled(self) -> bool:
        """Whether matrix products are computed in 8 bits."""
        return self.context.mixed_precision == "fp8"

    @property
    def fp8_backend(self) -> FP8BackendType:
        """The engine of 8-bit products."""
        backend = fp8_backend_of(self.context)
        return FP8BackendType.NO if backend is None else FP8BackendType(backend.value)

    @property
    def delayed_fp8_autocast(self) -> bool:
        """False: autocast for 8 bits doesn't wait for a wrapper."""
        return False

    @property
    def rng_types(self) -> list[str]:
        """Random states that a loader synchronises at the start of an epoch."""
        return [*self.context.rng_types]

    @property
    def log_with(self) -> list[Any]:
        """The trackers: names of built-in ones, others themselves."""
        return [LoggerType(one) if one in LoggerType else one for one in self.context.log_with]
