"""SwanLab."""

from __future__ import annotations

from typing import Any, ClassVar

from accelfn.tracking.built_in.base import ProjectTracker
from accelfn.tracking.pictures import as_array, read_pixels
from accelfn.tracking.values import flatten_names

__all__ = ("SwanLabTracker",)


class SwanLabTracker(ProjectTracker):
    """Logs to SwanLab.

    Args:
        run_name: The project.
        **kwargs: For ``swanlab.init``.
    """

    name = "swanlab"
    modules: ClassVar[tuple[str, ...]] = ("swanlab",)
    install: ClassVar[str] = "swanlab"

    def start(self) -> None:
        """Begin the run, and say which framework it is of."""
        super().start()
        self._package.config.update({"FRAMEWORK": "accelfn"})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the configuration."""
        self._package.config.update(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep numbers, and texts as ``swanlab.Text``; ``kwargs`` are for ``run.log``."""
        shown: dict[str, Any] = {}
        for name, value in flatten_names(values):
            if isinstance(value, (int, float)):
                shown[name] = value
            elif isinstance(value, str):
                shown[name] = self._package.Text(value)
            else:
                self.leave_out(name, value)
        if shown:
            self.run.log(shown, step=step, **kwargs)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep images; ``kwargs`` are for each ``swanlab.Image``."""
        for name, images in values.items():
            drawn = [self._package.Image(as_array(one), **kwargs) for one in read_pixels(images, name)]
            self.run.log({name: drawn}, step=step)
