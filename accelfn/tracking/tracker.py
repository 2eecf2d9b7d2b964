"""What an experiment tracker is: the contract that the built-in ones keep, and those of your own."""

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
    """Base of trackers: where values go that a run logs.

    A tracker of your own has ``name`` and ``requires_logging_directory`` as class attributes, has a property
    ``tracker`` (the object behind it), and does in the methods below what it can::

        class Printer(GeneralTracker):
            name = "printer"
            requires_logging_directory = False

            @property
            def tracker(self):
                return print

            def log(self, values, step=None, **kwargs):
                print(step, values)

    An instance goes into ``log_with`` as it is. A class may too, and is built when trackers are started, as
    ``cls(project_name, **init_kwargs)``, or ``cls(project_name, logging_dir, **init_kwargs)`` if it requires
    a directory. Whatever reaches for a network or a file belongs into ``start``, not into the constructor.

    Attributes:
        name: By which it is asked for, and found again.
        requires_logging_directory: Whether it writes to a directory that must be given.
        main_process_only: Whether it acts on the main process alone, or on every rank. Default True.
        tracker: The object behind it, for what only its package can do.

    Raises:
        NotImplementedError: At construction: attributes are missing; it names them.
    """

    name: str
    requires_logging_directory: bool
    main_process_only: bool = True

    if TYPE_CHECKING:  # at run time its absence is found by check_tracker, and an attribute may stand for it

        @property
        def tracker(self) -> Any: ...  # noqa: D102 -- described above

    def __init__(self, project_name: str = "") -> None:
        """Check that the attributes are there. What a project is, its own constructor knows."""
        check_tracker(self)

    def start(self) -> None:
        """Begin the run. Called once, before anything else, on the ranks on which it acts."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the configuration of the run.

        Args:
            values: Names and plain values: numbers, texts, None, lists and mappings of these.
        """

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep values of a step.

        Args:
            values: Names and values. Tensors have become numbers, or lists of numbers.
            step: Number of the step.
            **kwargs: What the caller passed for this tracker in ``log_kwargs``.
        """

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep images of a step.

        Args:
            values: Names, and a list of images each: arrays or tensors ``(H, W)``, ``(H, W, C)`` or
                ``(C, H, W)``, or a batch of these, or images of Pillow.
            step: Number of the step.
            **kwargs: What the caller passed for this tracker in ``log_kwargs``.

        Raises:
            NotAvailableError: It keeps no images.
        """
        raise NotAvailableError(f"the tracker {self.name!r} keeps no images. Log them with another one.")

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep a table of a step: ``columns`` and rows of ``data``, or a ``dataframe``.

        Raises:
            NotAvailableError: It keeps no tables.
        """
        raise NotAvailableError(f"the tracker {self.name!r} keeps no tables. Log them with another one.")

    def finish(self) -> None:
        """End the run: what was logged is safe when it returns."""


class BlankTracker:
    """Stands for a tracker where it doesn't act: on the other ranks, or when it couldn't be started.

    Whatever is called, set, looked up or entered on it does nothing, and so does what is behind it, so that
    one program text fits all ranks. It is false, empty, and has nothing to iterate over.

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
        """Take the name of the one that it stands for."""
        self.__dict__["name"] = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what Python asks for, such as in copy and pickle
            raise AttributeError(f"BlankTracker has no attribute {name!r}.")
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Self:
        """Do nothing."""
        return self

    def __enter__(self) -> Self:
        """Do nothing."""
        return self

    def __getitem__(self, key: Any) -> Self:
        """Do nothing."""
        return self

    def __truediv__(self, name: Any) -> Self:
        """Do nothing: a path, such as the folder of JSONLTracker, is a stand-in too."""
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        """Do nothing."""

    def __setitem__(self, key: Any, value: Any) -> None:
        """Do nothing."""

    def __exit__(self, *raised: object) -> None:
        """Do nothing; what was raised goes on."""

    def __iter__(self) -> Iterator[Any]:
        """Have nothing to iterate over."""
        return iter(())

    def __len__(self) -> int:
        """Be empty, and false."""
        return 0

    def __repr__(self) -> str:
        return f"BlankTracker({self.__dict__.get('name')!r})"


def check_tracker(tracker: GeneralTracker | type[GeneralTracker]) -> None:
    """Check that a tracker, or a class of them, has the attributes of the contract.

    Raises:
        NotImplementedError: Some are missing; it names them.
    """
    # Statically: a property may only work once the tracker has started.
    missing = [name for name in _REQUIRED if inspect.getattr_static(tracker, name, None) is None]
    if missing:
        cls = tracker if isinstance(tracker, type) else type(tracker)
        raise NotImplementedError(
            f"the tracker {cls.__name__} has no {' and no '.join(missing)}. A tracker has the class "
            "attributes name and requires_logging_directory, and a property tracker: the object behind it."
        )


def warn_caller(message: str) -> None:
    """Warn, and name the nearest line outside of accelfn as the place."""
    depth = 1
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, stacklevel=depth)
