"""Logging in a world of ranks: each message once, or in order, and whose it is."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any

from accelfn.comm import wait_for_everyone
from accelfn.context import Context
from accelfn.context.config import LogLevel
from accelfn.errors import ConfigurationError
from accelfn.tracking.who import Who, who_is

__all__ = ("RankLogger", "get_logger")

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class RankLogger(_Adapter):
    """A logger that knows its rank; made by :func:`get_logger`.

    All methods of a logger take two keywords more. ``main_process_only=False`` logs on every rank that calls.
    ``in_order=True`` logs on every rank, one after the other: every rank must call it, whatever its level.
    """

    def __init__(self, logger: logging.Logger, who: Who, ctx: Context | None) -> None:
        """Wrap ``logger``."""
        super().__init__(logger, {})
        self._who = who
        self._ctx = ctx
        self._said: set[str] = set()

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a message on the main process, or as ``main_process_only`` and ``in_order`` say.

        Ranks: any; every rank of the context with ``in_order``.

        Args:
            level: Of the message.
            msg: The message.
            *args: What is put into it.
            **kwargs: As ``logging.Logger.log`` takes them, and ``main_process_only``, ``in_order``.

        Raises:
            ConfigurationError: ``in_order`` in a world of several ranks, and the logger has no context.
        """
        main_process_only, in_order = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        # One frame, this one, lies between the logging package and whoever called it.
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        if not in_order or self._who.size == 1:
            if self.isEnabledFor(level) and (in_order or not main_process_only or self._who.is_main):
                message, options = self.process(msg, kwargs)
                self.logger.log(level, message, *args, **options)
            return
        if self._ctx is None:
            raise ConfigurationError(
                f"in_order=True lets {self._who.size} ranks wait for each other, for which a logger needs "
                "their context: get_logger(name, ctx=ctx)."
            )
        for rank in range(self._who.size):
            if rank == self._who.rank and self.isEnabledFor(level):
                message, options = self.process(msg, kwargs)
                self.logger.log(level, message, *args, **options)
            wait_for_everyone(self._ctx)

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[str, MutableMapping[str, Any]]:
        """Put the rank before a message."""
        return f"[RANK {self._who.rank}] {msg}", kwargs

    def warning_once(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a warning, unless this logger has given the same one before.

        Ranks: as :meth:`log`.
        """
        said = repr((msg, args, kwargs))
        if said not in self._said:
            self._said.add(said)
            self.log(logging.WARNING, msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})


def get_logger(name: str, log_level: str | int | None = None, *, ctx: Context | None = None) -> RankLogger:
    """Return a logger whose messages come once, from the main process, with the rank before them.

    It works before there is a context: then the launcher's variables say which rank this is. It is Python's
    own logger of that name, so handlers and formats are set as always; the level of the root logger is left
    alone.

    Ranks: any; doesn't communicate.

    Args:
        name: Of the logger, such as ``__name__``.
        log_level: Level that the logger is set to: a name of ``LogLevel``, in any case, or a number. None:
            what the variable ``ACCELFN_LOG_LEVEL``, or else
            ``ACCELERATE_LOG_LEVEL``, says; without it the level stays what it is.
        ctx: The world; needed for ``in_order=True``.

    Raises:
        ConfigurationError: There is no such level.
        EnvironmentPlanError: Without ``ctx``, the launcher's variables contradict each other.

    >>> import sys
    >>> logger = get_logger("example", "INFO", ctx=Context())
    >>> handler = logging.StreamHandler(sys.stdout)
    >>> logger.logger.addHandler(handler)
    >>> logger.info("loss %.2f", 0.5)
    [RANK 0] loss 0.50
    >>> logger.logger.removeHandler(handler)
    """
    logger = logging.getLogger(name)
    level, source = (log_level, "") if log_level is not None else _from_environment(os.environ)
    if isinstance(level, str):
        if level.upper() not in LogLevel:
            where = f" (from the variable {source})" if source else ""
            raise ConfigurationError(
                f"get_logger: there is no level {level!r}{where}. Use one of {', '.join(LogLevel.values())}."
            )
        level = level.upper()
    if level is not None:
        logger.setLevel(level)
    return RankLogger(logger, who_is(ctx), ctx)


def _from_environment(env: Mapping[str, str]) -> tuple[str | None, str]:
    for name in ("ACCELFN_LOG_LEVEL", "ACCELERATE_LOG_LEVEL"):
        if env.get(name, "").strip():
            return env[name].strip(), name
    return None, ""
