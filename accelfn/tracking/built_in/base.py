"""What the built-in trackers share: how their package is found and loaded."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, ClassVar

from accelfn.errors import MissingExtraError
from accelfn.tracking.tracker import GeneralTracker
from accelfn.tracking.warned import warn_caller

__all__ = ("BuiltInTracker", "is_installed")


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
        """Say that a value can't be shown, once for each name. None is left out without a word."""
        if value is None or name in self._left_out:
            return
        self._left_out.add(name)
        warn_caller(
            f"{self.name} shows no {type(value).__name__}, so {name!r} is left out there (said once)."
        )


def is_installed(tracker: type[BuiltInTracker]) -> bool:
    """Say whether a tracker's package is installed, without importing it."""
    return not tracker.modules or any(map(_is_there, tracker.modules))


def _is_there(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # a module that was put in place by hand
        return True
    # A folder that a run of wandb has left in the working directory passes for a package without code.
    return spec is not None and spec.origin is not None
