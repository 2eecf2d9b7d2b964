"""The current context of this process: the only process-wide state of accelfn.

Programs written for Accelerate pass no context: ``PartialState()``, ``gather(tensor)`` and a logger mean
"the" world of the process. Only the modules of :mod:`accelfn.compat` use this one.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, cast

from accelfn.config import read_settings
from accelfn.config.handlers import sort_handlers
from accelfn.context import Context, ContextOptions, close_context, init_context
from accelfn.context.options import drop_none, merge_settings
from accelfn.errors import ConfigurationError
from accelfn.tracking import GeneralTracker

# Options that arrange the ranks: a context with them can't be a variant of another one.
_MESH = ("fsdp_plugin", "megatron_lm_plugin", "parallelism_config", "group")


class CurrentAccelerator(Protocol):
    """What the state classes ask of an Accelerator: the shim's names, and what the program passed."""

    sync_gradients: bool

    @property
    def context(self) -> Context:
        """The frozen Context."""
        ...

    @property
    def given(self) -> Mapping[str, Any]:
        """What the program passed, by the name of the argument."""
        ...

    @property
    def torch_device_mesh(self) -> Any:
        """Torch's mesh; None without one."""
        ...

    def select_deepspeed_plugin(self, name: str) -> None:
        """Make a plugin the active one."""
        ...


class Loop(Protocol):
    """What the state classes ask of a loader in a loop."""

    end_of_dataloader: bool
    remainder: int


class Options(NamedTuple):
    """What stays of an Accelerator that the program doesn't keep.

    Attributes:
        context: Its context.
        given: What the program passed, by the name of the argument.
    """

    context: Context
    given: Mapping[str, Any]


class Current:
    """The world of this process, and its Accelerators.

    Attributes:
        world: The context that joined the ranks; None before the first use, and after :meth:`close`.
        is_reset: Whether the program has reset the state classes: then they are empty, but the world stays
            connected for the next one.
        options: Of the Accelerator that was made last; None before the first one, and after a reset.
        debug: Whether every operation is checked, if the program has set it after the start.
        loops: The prepared loaders in loops, outermost first.
        trackers: Classes of trackers that the program has registered, by name.
        notes: Names of the notes that were printed, so that each is printed once.
    """

    def __init__(self) -> None:
        """Start without a world."""
        self.world: Context | None = None
        self.is_reset: bool = False
        self.loops: list[Loop] = []
        self.trackers: dict[str, type[GeneralTracker]] = {}
        self.notes: frozenset[str] = frozenset()
        self.options: Options | None = None
        self.debug: bool | None = None
        self._accelerators: tuple[weakref.ref[CurrentAccelerator], ...] = ()

    @property
    def accelerator(self) -> CurrentAccelerator | None:
        """The Accelerator that was made last, of those that are alive."""
        alive = (accelerator() for accelerator in reversed(self._accelerators))
        return next((accelerator for accelerator in alive if accelerator is not None), None)

    def adopt(self, accelerator: CurrentAccelerator) -> None:
        """Make an Accelerator the current one."""
        alive = (one for one in self._accelerators if one() is not None)
        self._accelerators = (*alive, weakref.ref(accelerator))
        self.options = Options(accelerator.context, accelerator.given)

    def forget(self) -> None:
        """Have no Accelerator."""
        self._accelerators, self.options = (), None

    @property
    def is_started(self) -> bool:
        """Whether there is a world, and the program hasn't reset its state."""
        return self.world is not None and not self.is_reset

    @property
    def context(self) -> Context:
        """The current context: of the Accelerator that was made last, else the world's, which it starts."""
        accelerator = self.accelerator
        if accelerator is not None:
            ctx = accelerator.context
        else:
            ctx = self.start() if self.options is None else self.options.context
        return ctx if self.debug in (None, ctx.debug) else ctx.replace(debug=self.debug)

    def start(self, options: ContextOptions | None = None) -> Context:
        """Join the ranks, unless this process has done so, and return the world's context.

        Args:
            options: ``cpu`` and the handlers of the process group; used by the first call.

        Raises:
            ConfigurationError: The world is on an accelerator, and ``cpu=True`` was passed.
            Exception: As :func:`accelfn.init_context`.
        """
        options = drop_none(options or {})
        if self.world is not None and self.is_reset and _moves(self.world, options):
            self.close()  # the program starts again, on another device
        if self.world is None:
            self.world = init_context(**options)
        elif _moves(self.world, options):
            raise ConfigurationError(
                f"the world of this process is on {self.world.device}, but cpu=True was passed. Pass it to "
                "the first PartialState or Accelerator of the program."
            )
        self.is_reset = False
        return self.world

    def begin(self, options: ContextOptions) -> Context:
        """Return the context of a new Accelerator, which shares the process group.

        The environment is read again: its variables are defaults of the options.

        Raises:
            Exception: As :func:`accelfn.init_context`.
        """
        options = drop_none(options)
        handlers = sort_handlers(options.get("kwargs_handlers"))
        joining: dict[str, Any] = {"cpu": options.get("cpu")}
        if "process_group" in handlers:
            joining["kwargs_handlers"] = [handlers["process_group"]]
        world = self.start(cast("ContextOptions", joining))
        merged = merge_settings(options, read_settings(dict(os.environ)))
        if any(name in merged for name in _MESH):
            return init_context(**options)
        merged.pop("cpu", None)
        merged["kwargs_handlers"] = [
            handler
            for handler in merged.get("kwargs_handlers") or ()
            if handler is not handlers.get("process_group")
        ]
        return world.replace(**merged)

    def reset(self) -> None:
        """Forget the Accelerator, and empty the state classes until the next use."""
        self.forget()
        self.is_reset = True

    def close(self) -> None:
        """Leave the world: destroy the process group, if it was made here."""
        self.forget()
        world, self.world = self.world, None
        if world is not None:
            close_context(world)


def _moves(world: Context, options: ContextOptions) -> bool:
    """Return whether options ask for the CPU in a world on an accelerator."""
    return bool(options.get("cpu")) and world.device.type != "cpu"


_CURRENT = Current()


def current() -> Current:
    """Return the world of this process, and its current Accelerator."""
    return _CURRENT
