"""DVCLive."""

from __future__ import annotations

from typing import Any, ClassVar

from accelfn.tracking.built_in.base import BuiltInTracker
from accelfn.tracking.pictures import as_array, read_pixels
from accelfn.tracking.values import flatten_names

__all__ = ("DVCLiveTracker",)


class DVCLiveTracker(BuiltInTracker):
    """Logs by DVCLive.

    Args:
        run_name: Not used: DVCLive names its runs itself.
        live: A ``dvclive.Live`` that is there already; None makes one.
        **kwargs: For ``dvclive.Live``.
    """

    name = "dvclive"
    requires_logging_directory = False
    modules: ClassVar[tuple[str, ...]] = ("dvclive",)
    install: ClassVar[str] = "dvclive"

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        """Keep the options; nothing is started before ``start``."""
        super().__init__()
        self.live: Any = live
        self._options = kwargs

    def start(self) -> None:
        """Begin the run."""
        if self.live is None:
            self.live = self.load().Live(**self._options)

    @property
    def tracker(self) -> Any:
        """The ``Live``."""
        return self.live

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the configuration as parameters."""
        self.live.log_params(values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep numbers and texts as metrics, and end the step; ``kwargs`` are for each ``log_metric``."""
        if step is not None:
            self.live.step = step
        for name, value in flatten_names(values):
            if isinstance(value, (int, float, str)):
                self.live.log_metric(name, value, **kwargs)
            else:
                self.leave_out(name, value)
        self.live.next_step()

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep images as PNG files."""
        if step is not None:
            self.live.step = step
        for name, images in values.items():
            all_pixels = read_pixels(images, name)
            for number, pixels in enumerate(all_pixels):
                file = f"{name}.png" if len(all_pixels) == 1 else f"{name}-{number}.png"
                self.live.log_image(file, as_array(pixels), **kwargs)

    def finish(self) -> None:
        """End the run."""
        self.live.end()
