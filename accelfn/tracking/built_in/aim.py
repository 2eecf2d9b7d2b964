"""Aim."""

from __future__ import annotations

import os
from typing import Any, ClassVar, cast

from accelfn.tracking.built_in.base import BuiltInTracker
from accelfn.tracking.pictures import as_pillow, read_pixels

__all__ = ("AimTracker",)


class AimTracker(BuiltInTracker):
    """Logs to Aim, version 3.

    Args:
        run_name: Name of the run.
        logging_dir: Its repository.
        **kwargs: For ``aim.Run``.
    """

    name = "aim"
    requires_logging_directory = True
    modules: ClassVar[tuple[str, ...]] = ("aim",)
    install: ClassVar[str] = "'aim<4'"

    def __init__(
        self, run_name: str, logging_dir: str | os.PathLike[str] | None = ".", **kwargs: Any
    ) -> None:
        """Keep the name; nothing is started before ``start``."""
        super().__init__()
        self.run_name = run_name
        self._options = {"repo": None if logging_dir is None else os.fspath(logging_dir), **kwargs}

    def start(self) -> None:
        """Begin the run."""
        self._package = self.load()
        self.writer: Any = self._package.Run(**self._options)
        self.writer.name = self.run_name

    @property
    def tracker(self) -> Any:
        """The run."""
        return self.writer

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the configuration as ``run["hparams"]``."""
        self.writer["hparams"] = values

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep values; ``kwargs`` are for each ``track``."""
        for name, value in values.items():
            if isinstance(value, (int, float)):
                self.writer.track(value, name=name, step=step, **kwargs)
            elif isinstance(value, str):
                self.writer.track(self._package.Text(value), name=name, step=step, **kwargs)
            else:
                self.leave_out(name, value)

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep images, each with a caption where a value is a pair of the two.

        ``kwargs`` may have two mappings: ``aim_image`` for each ``aim.Image``, and ``track`` for each
        ``track``.
        """
        of_image, of_track = dict(kwargs.get("aim_image") or {}), dict(kwargs.get("track") or {})
        for name, value in values.items():
            images, captioned = value, of_image
            if isinstance(value, tuple):
                pair = cast("tuple[Any, ...]", value)
                if len(pair) == 2 and isinstance(pair[1], str):
                    images, captioned = pair[0], {**of_image, "caption": pair[1]}
            for pixels in read_pixels(images, name):
                picture = self._package.Image(as_pillow(pixels), **captioned)
                self.writer.track(picture, name=name, step=step, **of_track)

    def finish(self) -> None:
        """End the run."""
        self.writer.close()
