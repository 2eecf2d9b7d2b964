"""Experiment trackers by name, and those that a program registers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar, cast

import accelfn.tracking as tracking
from accelfn.compat.current import current
from accelfn.errors import ConfigurationError
from accelfn.tracking import GeneralTracker

F = TypeVar("F", bound=Callable[..., Any])

LOGGER_TYPE_TO_CLASS: Mapping[str, type[GeneralTracker]] = MappingProxyType(
    {
        cls.name: cls
        for cls in (
            *(tracking.AimTracker, tracking.CometMLTracker, tracking.MLflowTracker),
            *(tracking.TensorBoardTracker, tracking.WandBTracker, tracking.ClearMLTracker),
            *(tracking.DVCLiveTracker, tracking.SwanLabTracker, tracking.TrackioTracker),
        )
    }
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


def registered(log_with: Any) -> Any:
    """Return ``log_with`` with the classes that the program has registered, in place of their names."""
    if isinstance(log_with, (list, tuple)):
        return [registered(item) for item in cast("Iterable[Any]", log_with)]
    return current().trackers.get(str(log_with), log_with) if isinstance(log_with, str) else log_with


def get_available_trackers() -> list[str]:
    """Return the names of the built-in trackers whose packages are installed."""
    return [*tracking.plan_trackers("all", ".").names]


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
