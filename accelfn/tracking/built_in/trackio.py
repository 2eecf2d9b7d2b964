"""Trackio."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from accelfn.tracking.built_in.base import ProjectTracker, name_columns
from accelfn.tracking.pictures import read_pixels

__all__ = ("TrackioTracker",)


class TrackioTracker(ProjectTracker):
    """Logs to Trackio.

    Args:
        run_name: The project.
        **kwargs: For ``trackio.init``.
    """

    name = "trackio"
    modules: ClassVar[tuple[str, ...]] = ("trackio",)
    install: ClassVar[str] = "trackio"

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the configuration."""
        self.run.config.update(values)

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
        """Keep a table; ``kwargs`` are for ``run.log``."""
        cells = {"columns": name_columns(columns, data), "data": data}
        table = self._package.Table(**(cells if dataframe is None else {"dataframe": dataframe}))
        self.run.log({table_name: table}, step=step, **kwargs)
