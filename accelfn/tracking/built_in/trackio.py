"""Trackio."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from accelfn.tracking.built_in.base import BuiltInTracker
from accelfn.tracking.pictures import read_pixels

__all__ = ("TrackioTracker",)


class TrackioTracker(BuiltInTracker):
    """Logs to Trackio.

    Args:
        run_name: The project.
        **kwargs: For ``trackio.init``.
    """

    name = "trackio"
    requires_logging_directory = False
    modules: ClassVar[tuple[str, ...]] = ("trackio",)
    install: ClassVar[str] = "trackio"

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

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the configuration."""
        self.run.config.update(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep values; ``kwargs`` are for ``run.log``."""
        self.run.log(values, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep images; ``kwargs`` are for each ``trackio.Image``."""
        for name, images in values.items():
            drawn = [self._package.Image(one.numpy(), **kwargs) for one in read_pixels(images, name)]
            if len(drawn) == 1:
                self.run.log({name: drawn[0]}, step=step)
            else:
                self.run.log({f"{name}/{number}": one for number, one in enumerate(drawn)}, step=step)

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep a table."""
        lists = {"columns": None if columns is None else list(columns), "data": data}
        table = self._package.Table(**(lists if dataframe is None else {"dataframe": dataframe}))
        self.run.log({table_name: table}, step=step, **kwargs)

    def finish(self) -> None:
        """End the run."""
        self.run.finish()
