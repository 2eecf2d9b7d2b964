"""Comet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

from accelfn.tracking.built_in.base import BuiltInTracker
from accelfn.tracking.pictures import as_pillow, read_pixels

__all__ = ("CometMLTracker",)


class CometMLTracker(BuiltInTracker):
    """Logs to Comet.

    Args:
        run_name: The project.
        **kwargs: For ``comet_ml.start``, or before version 3.41 for ``comet_ml.Experiment``.
    """

    name = "comet_ml"
    requires_logging_directory = False
    modules: ClassVar[tuple[str, ...]] = ("comet_ml",)
    install: ClassVar[str] = "comet_ml"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        """Keep the name; nothing is started before ``start``."""
        super().__init__()
        self.run_name = run_name
        self._options = {"project_name": run_name, **kwargs}

    def start(self) -> None:
        """Begin the experiment."""
        package = self.load()
        begin = package.start if hasattr(package, "start") else package.Experiment
        self.writer: Any = begin(**self._options)

    @property
    def tracker(self) -> Any:
        """The experiment."""
        return self.writer

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the configuration as parameters."""
        self.writer.log_parameters(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep numbers as metrics, texts as other values, mappings as groups of metrics.

        ``kwargs`` are for each of these.
        """
        if step is not None:
            self.writer.set_step(step)
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self.writer.log_metric(name, value, step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.log_other(name, value, **kwargs)
            elif isinstance(value, Mapping):
                self.writer.log_metrics(
                    dict(cast("Mapping[str, Any]", value)), prefix=name, step=step, **kwargs
                )
            else:
                self.leave_out(name, value)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep images; ``kwargs`` are for each ``log_image``."""
        for name, images in values.items():
            for pixels in read_pixels(images, name):
                self.writer.log_image(as_pillow(pixels), name=name, step=step, **kwargs)

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep a table as a file."""
        file = table_name if table_name.endswith((".csv", ".tsv", ".json", ".md")) else f"{table_name}.csv"
        if dataframe is not None:
            self.writer.log_table(file, tabular_data=dataframe, **kwargs)
        else:
            rows = [list(row) for row in data or ()]
            self.writer.log_table(file, tabular_data=rows, headers=list(columns or ()) or False, **kwargs)

    def finish(self) -> None:
        """End the experiment."""
        self.writer.end()
