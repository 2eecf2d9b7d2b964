"""Which trackers a run gets: a pure plan of what was asked for, and what is there."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from accelfn.context.config.trackers import settle_log_with
from accelfn.errors import ConfigurationError, MissingExtraError
from accelfn.tracking.built_in import (
    AimTracker,
    BuiltInTracker,
    ClearMLTracker,
    CometMLTracker,
    DVCLiveTracker,
    JSONLTracker,
    MLflowTracker,
    SwanLabTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandBTracker,
    is_installed,
)
from accelfn.tracking.tracker import GeneralTracker, check_tracker

__all__ = ("TrackerPlan", "plan_trackers")

_BUILT_IN: tuple[type[BuiltInTracker], ...] = (
    JSONLTracker,
    AimTracker,
    TensorBoardTracker,
    WandBTracker,
    TrackioTracker,
    CometMLTracker,
    MLflowTracker,
    ClearMLTracker,
    DVCLiveTracker,
    SwanLabTracker,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerPlan:
    """Which trackers a run gets. Nothing has been started, and no package imported.

    Attributes:
        chosen: Trackers, and classes that are built when they are started, in order; names differ.
        skipped: Notes on those that ``"all"`` leaves out although they are installed.
        logging_dir: Where those write that require a directory.
    """

    chosen: tuple[GeneralTracker | type[GeneralTracker], ...] = ()
    skipped: tuple[str, ...] = ()
    logging_dir: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the chosen ones."""
        return tuple(one.name for one in self.chosen)


# Classes go into log_with themselves: a register that a class is entered in by a call would be a global,
# which two programs in one process would share. So there is nothing like register_tracker_class.
def plan_trackers(
    log_with: Any,
    logging_dir: str | os.PathLike[str] | None = None,
    *,
    installed: Callable[[type[BuiltInTracker]], bool] = is_installed,
) -> TrackerPlan:
    """Return which trackers a run gets. Pure, but for a look at which packages are installed.

    Args:
        log_with: A name, a :class:`GeneralTracker` or a class of these, or a list; ``"all"`` stands for each
            built-in one that is installed. What a class or an instance is called wins over a built-in one of
            that name, if that was only meant by ``"all"``.
        logging_dir: Where those write that require a directory.
        installed: Says whether the package of a built-in tracker is there.

    Raises:
        ConfigurationError: There is no tracker of a name, two have one name, or one requires a directory and
            none is given. (Under ``"all"`` such a one is skipped.)
        MissingExtraError: The package of one that was named isn't installed.
        TypeError: Something isn't a tracker.
        NotImplementedError: A tracker lacks attributes.

    >>> plan_trackers("all", installed=lambda one: one.name in ("tensorboard", "wandb", "jsonl")).names
    ('jsonl', 'wandb')
    """
    asked = settle_log_with(log_with)
    chosen = [_find(one, installed) for one in asked if one != "all"]
    names = [one.name for one in chosen]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError(
            f"log_with names {', '.join(twice)} twice. Give each tracker a name of its own, by which "
            "get_tracker finds it."
        )
    directory = None if logging_dir is None else os.fspath(logging_dir)
    for one in chosen:
        if not _has_directory(one, directory):
            raise ConfigurationError(
                f"the tracker {one.name!r} writes to a directory, and none is given. Pass logging_dir, or "
                "project_dir for all that the run writes."
            )
    skipped: list[str] = []
    if "all" in asked:
        for one in _BUILT_IN:
            if one.name in names or not installed(one):
                continue
            if _has_directory(one, directory):
                chosen.append(one)
            else:
                skipped.append(
                    f"{one.name} writes to a directory, and no logging_dir or project_dir is given"
                )
    return TrackerPlan(chosen=tuple(chosen), skipped=tuple(skipped), logging_dir=directory)


def _has_directory(one: GeneralTracker | type[GeneralTracker], directory: str | None) -> bool:
    if isinstance(one, GeneralTracker) or not one.requires_logging_directory:  # an instance has its own
        return True
    return directory is not None or getattr(one, "default_directory", None) is not None


def _find(
    asked: Any, installed: Callable[[type[BuiltInTracker]], bool]
) -> GeneralTracker | type[GeneralTracker]:
    if isinstance(asked, str):
        found = next(one for one in _BUILT_IN if one.name == asked)
        if not installed(found):
            raise MissingExtraError(
                f"log_with asks for {asked!r}, which needs {' or '.join(found.modules)}, and that isn't "
                f"installed: pip install {found.install}"
            )
        return found
    if not isinstance(asked, GeneralTracker) and not (
        isinstance(asked, type) and issubclass(asked, GeneralTracker)
    ):
        kind = f"the class {asked.__name__}" if isinstance(asked, type) else type(asked).__name__
        raise TypeError(
            f"log_with takes names, trackers and classes of these, which extend accelfn.GeneralTracker: got "
            f"{kind}."
        )
    check_tracker(asked)
    if not asked.name:
        raise ConfigurationError("log_with: a tracker's name can't be empty.")
    return asked
