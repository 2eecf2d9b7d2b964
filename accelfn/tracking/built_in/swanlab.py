"""SwanLab."""

from __future__ import annotations

from typing import Any, ClassVar

from accelfn.tracking.built_in.base import BuiltInTracker
from accelfn.tracking.pictures import read_pixels
from accelfn.tracking.values import flatten_names

__all__ = ("SwanLabTracker",)


class SwanLabTracker(BuiltInTracker):
    """Logs to SwanLab.

    Args:
        run_name: The project.
        **kwargs: For ``swanlab.init``.
    """

    name = "swanlab"
    requires_logging_directory = False
    modules: ClassVar[tuple[str, ...]] = ("swanlab",)
    install: ClassVar[str] = "swanlab"

    def __init__(self, run_name: str, **kwargs: Any) -> None:
        """Keep the name; nothing is started before ``start``."""
        super().__init__()
        self.run_name = run_name
        self._options = {"project": run_name, **kwargs}

    def start(self) -> None:
        """Begin the run, and say which framework it is of."""
        self._package = self.load()
        self.run: Any = self._package.init(**self._options)
        self._package.config.update({"FRAMEWORK": "accelfn"})

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.run

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
            drawn = [self._package.Image(_array(one), **kwargs) for one in read_pixels(images, name)]
            self.run.log({name: drawn}, step=step)

    def finish(self) -> None:
        """End the run."""
        self.run.finish()


def _array(pixels: Any) -> Any:
    array = pixels.numpy()
    return array[:, :, 0] if array.shape[2] == 1 else array
