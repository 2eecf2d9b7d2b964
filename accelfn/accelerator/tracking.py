"""The Accelerator's trackers: Accelerate's methods over the functions of ``accelfn.tracking``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import accelfn.tracking as tracking
from accelfn.context import Context

__all__ = ("Tracking",)


class Tracking:
    """Experiment trackers of an Accelerator.

    ``log_with`` says which; nothing is tracked without it. Where a tracker fails, the run goes on with a
    warning.
    """

    context: Context
    _run: tracking.Trackers | None = None
    _has_warned: bool = False

    @property
    def log_with(self) -> tuple[Any, ...]:
        """Trackers that were asked for: names, trackers and classes of these."""
        return self.context.log_with

    @property
    def trackers(self) -> list[tracking.GeneralTracker]:
        """Trackers that act on this rank: none before ``init_trackers``, and none on most other ranks."""
        return [] if self._run is None else list(self._run.active)

    def init_trackers(
        self,
        project_name: str,
        config: object = None,
        init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Start the trackers; see :func:`accelfn.init_trackers`. Those at work are ended first.

        Args:
            project_name: What the run belongs to.
            config: Configuration of the run.
            init_kwargs: Further arguments for the constructors, by the name of the tracker.
        """
        self._end_run()
        self._run = tracking.init_trackers(
            self.context, project_name, log_with=self.log_with, config=config, init_kwargs=init_kwargs
        )

    def log(
        self,
        values: Mapping[str, Any],
        step: int | None = None,
        log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Log values of a step; see :func:`accelfn.log`."""
        if self._run is None:
            self._say_not_started("log")
        else:
            tracking.log(self._run, values, step, log_kwargs=log_kwargs)

    def get_tracker(self, name: str, unwrap: bool = False) -> Any:
        """Return a tracker by its name, or what is behind it; see :func:`accelfn.get_tracker`.

        Without trackers it is a stand-in, on which any call does nothing.
        """
        if self._run is None or not self.log_with:
            self._say_not_started("get_tracker")
            return tracking.BlankTracker(name)
        return tracking.get_tracker(self._run, name, unwrap)

    def _check_trackers(self) -> None:
        """Refuse what can't be started, before there is anything to lose."""
        tracking.plan_trackers(self.log_with, self.context.project.logging_dir)

    def _say_not_started(self, method: str) -> None:
        # Programs may start trackers on the main process alone, and log on all.
        if self.log_with and self.context.is_main_process and not self._has_warned:
            self._has_warned = True
            warnings.warn(
                f"Accelerator.{method}: trackers were asked for by log_with and none is at work, so this "
                "goes nowhere (said once). Call init_trackers first.",
                stacklevel=3,
            )

    def _end_run(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            tracking.finish(run)
