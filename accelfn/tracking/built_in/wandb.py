"""Weights & Biases."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from accelfn.tracking.built_in.base import ProjectTracker, name_columns
from accelfn.tracking.pictures import read_pixels

__all__ = ("WandBTracker",)


class WandBTracker(ProjectTracker):
    """Logs to Weights & Biases.

    Args:
        run_name: The project.
        **kwargs: For ``wandb.init``.
    """

    name = "wandb"
    modules: ClassVar[tuple[str, ...]] = ("wandb",)
    install: ClassVar[str] = "wandb"

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the configuration."""
        self.run.config.update(values, allow_val_change=True)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep images; ``kwargs`` are for each ``wandb.Image``."""
        for name, images in values.items():
            drawn = [self._package.Image(one.numpy(), **kwargs) for one in read_pixels(images, name)]
            self.run.log({name: drawn}, step=step)

    def log_table(
        self,
        table_name: str,
        columns: Sequence[str] | None = None,
        data: Sequence[Sequence[Any]] | None = None,
        dataframe: Any = None,
        step: int | None = None,
        **kwargs: Any,
    ) -> None:
        """Keep a table, whose columns may hold values of several types; ``kwargs`` are for ``run.log``."""
        cells = {"columns": name_columns(columns, data), "data": data, "allow_mixed_types": True}
        table = self._package.Table(**(cells if dataframe is None else {"dataframe": dataframe}))
        self.run.log({table_name: table}, step=step, **kwargs)
