"""The interface of experiment trackers."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from typing_extensions import Self

from accelfn.errors import NotAvailableError

_REQUIRED = ("name", "requires_logging_directory", "tracker")
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class GeneralTracker:
    """Base class of experiment trackers.

    A subclass defines the class attributes ``name`` and ``requires_logging_directory``, the property
    ``tracker``, and the methods that it supports::

        class Printer(GeneralTracker):
            name = "printer"
            requires_logging_directory = False

            @property
            def tracker(self):
                return print

            def log(self, values, step=None, **kwargs):
                print(step, values)

    ``log_with`` accepts instances and classes. A class is instantiated when trackers start, as
    ``cls(project_name, **init_kwargs)``, or as ``cls(project_name, logging_dir, **init_kwargs)`` if it
    requires a directory. Open files and connections in ``start``, not in the constructor.

    Attributes:
        name: Name of the tracker, for ``log_with`` and ``get_tracker``.
        requires_logging_directory: Whether it needs a directory to write to.
        main_process_only: Whether it runs only on the main process (default) or on every rank.
        tracker: The underlying object of the tracker's package.

    Raises:
        NotImplementedError: In the constructor, if attributes are missing.
    """

    name: str
    requires_logging_directory: bool
    main_process_only: bool = True

    if TYPE_CHECKING:  # at run time it may be an attribute, and check_tracker checks it

        @property
        def tracker(self) -> Any: ...  # noqa: D102 -- described above

    def __init__(self, project_name: str = "") -> None:
        """Check that the required attributes exist."""
        check_tracker(self)

    def start(self) -> None:
        """Start the run. Called once, before other methods, on the ranks where the tracker runs."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Log the configuration of the run.

        Args:
            values: Plain values by name: numbers, strings, None, lists and mappings of them.
        """

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log the values of a step.

        Args:
            values: Values by name. Tensors were converted to numbers or lists of numbers.
            step: The step, or None.
            **kwargs: This tracker's ``log_kwargs``.
        """

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images of a step.

        Args:
            values: Lists of images by name: arrays or tensors ``(H, W)``, ``(H, W, C)`` or ``(C, H, W)``,
                batches of these, or Pillow images.
            step: The step, or None.
            **kwargs: This tracker's ``log_kwargs``.

        Raises:
            NotAvailableError: The tracker doesn't support images.
        """
        raise NotAvailableError(f"the tracker {self.name!r} doesn't support images. Use another one.")

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Log a table of a step: ``columns`` and rows of ``data``, or a ``dataframe``.

        Raises:
            NotAvailableError: The tracker doesn't support tables.
        """
        raise NotAvailableError(f"the tracker {self.name!r} doesn't support tables. Use another one.")

    def finish(self) -> None:
        """Finish the run, and flush all values."""


class BlankTracker:
    """A tracker that does nothing, for ranks on which a tracker doesn't run, or if it could not start.

    All attributes, calls, items and context managers of it do nothing too, so that all ranks can run the same
    code. It is false and empty.

    >>> blank = BlankTracker("wandb")
    >>> blank.tracker.log_artifact("model").wait()
    BlankTracker('wandb')
    >>> blank.tracker.summary["best"] = 0.5
    >>> with blank.tracker.phase("validation"):
    ...     [*blank.tracker.files], bool(blank)
    ([], False)
    """

    requires_logging_directory = False
    main_process_only = True

    def __init__(self, name: str) -> None:
        """Store the name of the tracker."""
        self.__dict__["name"] = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # special methods, as in copy and pickle
            raise AttributeError(f"BlankTracker has no attribute {name!r}.")
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Self:
        """Do nothing."""
        return self

    # Also for paths, such as the folder of JSONLTracker.
    __enter__: Any = __call__
    __getitem__: Any = __call__
    __truediv__: Any = __call__

    def __setattr__(self, name: str, value: Any) -> None:
        """Do nothing."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Do nothing."""

    def __exit__(self, *raised: object) -> None:
        """Do nothing; exceptions propagate."""

    def __iter__(self) -> Iterator[Any]:
        """Return an empty iterator."""
        return iter(())

    def __len__(self) -> int:
        """Return 0."""
        return 0

    def __repr__(self) -> str:
        return f"BlankTracker({self.__dict__.get('name')!r})"


def check_tracker(tracker: GeneralTracker | type[GeneralTracker]) -> None:
    """Check that a tracker or tracker class has the required attributes.

    Raises:
        NotImplementedError: Attributes are missing.
    """
    # Statically, because a property may fail before the tracker starts.
    missing = [name for name in _REQUIRED if inspect.getattr_static(tracker, name, None) is None]
    if missing:
        cls = tracker if isinstance(tracker, type) else type(tracker)
        raise NotImplementedError(
            f"the tracker {cls.__name__} lacks {', '.join(missing)}. Define the class attributes name and "
            "requires_logging_directory, and the property tracker."
        )


def warn_caller(message: str) -> None:
    """Warn with the nearest line outside of accelfn as the location."""
    depth = 1
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, stacklevel=depth)
