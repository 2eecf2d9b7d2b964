"""Loggers of programs that pass no context."""

from __future__ import annotations

from typing import Any

from accelfn.compat.current import current
from accelfn.tracking import RankLogger
from accelfn.tracking import get_logger as get_logger_of


class CurrentRankLogger(RankLogger):
    """A logger of the current context, if there is one when it logs."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a message on the main process, or on the ranks that the keywords select."""
        if current().is_started:
            self._ctx = current().context
        super().log(level, msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})


def get_logger(name: str, log_level: str | int | None = None) -> RankLogger:
    """Return a logger that logs on the main process only; see :func:`accelfn.get_logger`."""
    return CurrentRankLogger(get_logger_of(name, log_level).logger, None)
