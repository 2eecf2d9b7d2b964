"""ClearML."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, ClassVar

from accelfn.tracking.built_in.base import BuiltInTracker
from accelfn.tracking.pictures import read_pixels
from accelfn.tracking.values import flatten_names

__all__ = ("ClearMLTracker",)

_SERIES = ("eval", "test", "train")


class ClearMLTracker(BuiltInTracker):
    """Logs to ClearML.

    A task that is at work already is used, and left open at the end. The variables ``CLEARML_PROJECT`` and
    ``CLEARML_TASK`` name a new one.

    Args:
        run_name: The project and the task, where no variable names them.
        **kwargs: For ``Task.init``.
    """

    name = "clearml"
    requires_logging_directory = False
    modules: ClassVar[tuple[str, ...]] = ("clearml",)
    install: ClassVar[str] = "clearml"

    def __init__(self, run_name: str | None = None, **kwargs: Any) -> None:
        """Keep the name; nothing is started before ``start``."""
        super().__init__()
        self.run_name = run_name
        self._options = kwargs
        self._is_ours = False

    def start(self) -> None:
        """Take the task that is at work, or begin one."""
        package = self.load()
        current = package.Task.current_task()
        self._is_ours = current is None
        if current is None:
            named = {
                "project_name": os.environ.get("CLEARML_PROJECT") or self.run_name,
                "task_name": os.environ.get("CLEARML_TASK") or self.run_name,
            }
            current = package.Task.init(**{**named, **self._options})
        self.task: Any = current

    @property
    def tracker(self) -> Any:
        """The task."""
        return self.task

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the configuration."""
        self.task.connect_configuration(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep numbers: without a step as single values, else as scalars.

        ``eval_loss`` is the series ``eval`` of the chart ``loss``; the same of ``test_`` and ``train_``, and
        a name with none of them is of the series ``train``. ``kwargs`` are for each call.
        """
        logger = self.task.get_logger()
        for name, value in flatten_names(values):
            if not isinstance(value, (int, float)):
                self.leave_out(name, value)
            elif step is None:
                logger.report_single_value(name=name, value=value, **kwargs)
            else:
                title, series = _split(name)
                logger.report_scalar(title=title, series=series, value=value, iteration=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep images; ``kwargs`` are for each ``report_image``."""
        logger = self.task.get_logger()
        for name, images in values.items():
            title, series = _split(name)
            all_pixels = read_pixels(images, name)
            for number, pixels in enumerate(all_pixels):
                part = series if len(all_pixels) == 1 else f"{series} {number}"
                logger.report_image(title=title, series=part, iteration=step, image=pixels.numpy(), **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep a table; ``kwargs`` are for ``report_table``."""
        rows = [list(row) for row in data or ()]
        table = dataframe if dataframe is not None else [list(columns), *rows] if columns else rows
        title, series = _split(table_name)
        self.task.get_logger().report_table(
            title=title, series=series, table_plot=table, iteration=step, **kwargs
        )

    def finish(self) -> None:
        """Close the task, unless somebody else has begun it."""
        if self._is_ours:
            self.task.close()


def _split(name: str) -> tuple[str, str]:
    """Return chart and series of a name.

    >>> _split("eval_loss"), _split("loss")
    (('loss', 'eval'), ('loss', 'train'))
    """
    for series in _SERIES:
        if name.startswith(f"{series}_") and name != f"{series}_":
            return name[len(series) + 1 :], series
    return name, "train"
