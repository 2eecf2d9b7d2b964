"""What the built-in trackers share: how their package is found and loaded."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Sequence
from typing import Any, ClassVar

from accelfn.errors import MissingExtraError
from accelfn.tracking.tracker import GeneralTracker
from accelfn.tracking.warned import warn_caller

__all__ = ("BuiltInTracker", "ProjectTracker", "is_installed", "name_columns")


class BuiltInTracker(GeneralTracker):
    """Base of the built-in trackers: each is a thin adapter to a package, which is imported in ``start``.

    Attributes:
        modules: What is imported, any of them; empty where nothing is needed.
        install: What pip installs.
        default_directory: Where it writes when no directory is given; None if one must be given, or it
            writes nowhere.
    """

    modules: ClassVar[tuple[str, ...]] = ()
    install: ClassVar[str] = ""
    default_directory: ClassVar[str | None] = None

    def __init__(self) -> None:
        """Begin with nothing left out."""
        super().__init__()
        self._left_out: set[str] = set()

    def load(self) -> Any:
        """Import the package.

        Raises:
            MissingExtraError: It isn't installed.
        """
        for name in self.modules:
            if _is_there(name):
                return importlib.import_module(name)
        raise MissingExtraError(
            f"the tracker {self.name!r} needs {' or '.join(self.modules)}, which isn't installed: "
            f"pip install {self.install}"
        )

    def leave_out(self, name: str, value: object) -> None:
        """Report that a value can't be shown, once for each name. None is left out without a word."""
        if value is None or name in self._left_out:
            return
        self._left_out.add(name)
        warn_caller(
            f"{self.name} shows no {type(value).__name__}, so {name!r} is left out there (said once)."
        )


class ProjectTracker(BuiltInTracker):
    """Base of those whose package begins the run of a project by ``init(project=...)``, as wandb does.

    Args:
        run_name: The project.
        **kwargs: For the package's ``init``.
    """

    requires_logging_directory = False

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        """Keep the name; nothing is started before ``start``."""
        super().__init__()
        self.run_name = run_name
        self._options = {"project": run_name, **kwargs}

    def start(self) -> None:
        """Begin the run."""
        self._package = self.load()
        self.run: Any = self._package.init(**self._options)

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.run

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep values: what JSON can hold, and objects of the package; ``kwargs`` are for ``run.log``."""
        try:
            self.run.log(values, step=step, **kwargs)
        except (TypeError, ValueError):
            shown = {name: value for name, value in values.items() if self._is_shown(value)}
            if len(shown) == len(values):  # it isn't the values
                raise
            for name in values.keys() - shown.keys():
                self.leave_out(name, values[name])
            if shown:
                self.run.log(shown, step=step, **kwargs)

    def _is_shown(self, value: Any) -> bool:
        try:
            json.dumps(value)
        except (TypeError, ValueError):
            return type(value).__module__.partition(".")[0] in self.modules
        return True

    def finish(self) -> None:
        """End the run."""
        self.run.finish()


def name_columns(columns: Sequence[str] | None, data: Sequence[Sequence[Any]] | None) -> list[str]:
    """Return names of columns: those that were given, or numbers.

    >>> name_columns(None, [[1, "x"]])
    ['0', '1']
    """
    if columns is not None:
        return list(columns)
    return [str(number) for number in range(max((len(row) for row in data or ()), default=0))]


def is_installed(tracker: type[BuiltInTracker]) -> bool:
    """Return whether a tracker's package is installed, without importing it."""
    return not tracker.modules or any(map(_is_there, tracker.modules))


def _is_there(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module that was put in place by hand
        return True
    # A folder that a run of wandb has left in the working directory passes for a package without code.
    return spec is not None and spec.origin is not None
