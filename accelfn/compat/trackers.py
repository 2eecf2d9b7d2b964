"""Experiment trackers by name, those that a program registers, and loggers without a context."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, cast

import accelfn.tracking as tracking
from accelfn.compat.current import current
from accelfn.errors import ConfigurationError
from accelfn.tracking import BuiltInTracker, GeneralTracker, RankLogger
from accelfn.tracking.adapters import ADAPTERS

F = TypeVar("F", bound=Callable[..., Any])

LOGGER_TYPE_TO_CLASS: Mapping[str, type[BuiltInTracker]] = MappingProxyType(
    {cls.name: cls for cls in ADAPTERS}
)


def register_tracker_class(tracker_class: type[GeneralTracker]) -> None:
    """Let ``log_with`` of Accelerators made later name a tracker's class.

    Raises:
        ConfigurationError: A built-in tracker has the name.
        TypeError: It isn't a tracker's class with a name.
    """
    given: Any = tracker_class
    if not isinstance(given, type) or not issubclass(given, GeneralTracker):
        raise TypeError(f"register_tracker_class takes a subclass of GeneralTracker, got {tracker_class!r}.")
    name: object = getattr(tracker_class, "name", None)
    if not isinstance(name, str) or not name:
        raise TypeError(f"register_tracker_class: {tracker_class.__name__} needs a name.")
    if name in LOGGER_TYPE_TO_CLASS or name == "all":
        raise ConfigurationError(
            f"register_tracker_class: {name!r} is a built-in tracker. Choose another name."
        )
    current().trackers[name] = tracker_class


def registered(log_with: Any) -> list[Any]:
    """Return the trackers that ``log_with`` asks for as a list.

    Names of classes that the program has registered become the classes; ``"all"`` becomes the installed
    trackers that Accelerate knows, except those with the name of a listed instance.
    """
    given = [*cast("Iterable[Any]", log_with)] if isinstance(log_with, (list, tuple)) else [log_with]
    is_all = [isinstance(item, str) and item.lower() == "all" for item in given]
    asked = [item for item, all_ in zip(given, is_all, strict=True) if not (all_ or item is None)]
    if any(is_all):
        taken = [getattr(item, "name", None) for item in asked if not isinstance(item, str)]
        asked += [name for name in get_available_trackers() if name not in taken]
    return [current().trackers.get(str(item), item) if isinstance(item, str) else item for item in asked]


def get_available_trackers() -> list[str]:
    """Return the names of the built-in trackers whose packages are installed."""
    return [name for name, cls in LOGGER_TYPE_TO_CLASS.items() if cls.is_installed()]


def filter_trackers(log_with: Any, logging_dir: Any = None) -> list[Any]:
    """Return the trackers of a run; see :func:`accelfn.tracking.plan_trackers`."""
    return [*tracking.plan_trackers(registered(log_with), logging_dir).chosen]


def on_main_process(function: F) -> F:
    """Let a method of a tracker run on the main process only, unless its ``main_process_only`` is False."""

    @functools.wraps(function)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "main_process_only", False) and not current().start().is_main_process:
            return None
        return function(self, *args, **kwargs)

    return cast("F", run)


class CurrentRankLogger(RankLogger):
    """A logger of the current context, if there is one when it logs."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a message on the main process, or on the ranks that the keywords select."""
        if current().is_started:
            self._ctx = current().context
        super().log(level, msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})


def get_logger(name: str, log_level: str | int | None = None) -> RankLogger:
    """Return a logger that logs on the main process only; see :func:`accelfn.get_logger`."""
    return CurrentRankLogger(tracking.get_logger(name, log_level).logger, None)
