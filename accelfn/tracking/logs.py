"""Rank-aware logging and progress bars."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Iterable, MutableMapping
from typing import TYPE_CHECKING, Any, cast

from accelfn.comm import wait_for_everyone
from accelfn.config import LogLevel
from accelfn.context import Context, detect_environment
from accelfn.errors import ConfigurationError, MissingExtraError

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class RankLogger(_Adapter):
    """A logger that knows its rank; created by :func:`get_logger`.

    All logging methods have two additional keywords. ``main_process_only=False`` logs on every rank that
    calls. ``in_order=True`` logs on all ranks in order; every rank must call it, whatever its level.
    """

    def __init__(self, logger: logging.Logger, ctx: Context | None) -> None:
        """Wrap ``logger``."""
        super().__init__(logger, {})
        self._rank, self._size = _rank_and_size(ctx)
        self._ctx = ctx
        self._warned: set[str] = set()

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a message on the main process, or on the ranks that the keywords select.

        Ranks: any; every rank of the context with ``in_order``.

        Args:
            level: Level of the message.
            msg: The message.
            *args: Its arguments.
            **kwargs: Keywords of ``logging.Logger.log``, and ``main_process_only`` and ``in_order``.

        Raises:
            ConfigurationError: ``in_order`` is set, there are several ranks, and the logger has no context.
        """
        main_process_only, in_order = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        # Skip this frame when logging looks for the caller.
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        if in_order and self._size > 1 and self._ctx is None:
            raise ConfigurationError(
                f"in_order=True needs a context to synchronize {self._size} ranks. Use get_logger(name, "
                "ctx=ctx)."
            )
        for turn in range(self._size) if in_order else [self._rank]:
            is_mine = turn == self._rank and (in_order or not main_process_only or self._rank == 0)
            if is_mine and self.isEnabledFor(level):
                message, options = self.process(msg, kwargs)
                self.logger.log(level, message, *args, **options)
            if in_order and self._ctx is not None:
                wait_for_everyone(self._ctx)

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[str, MutableMapping[str, Any]]:
        """Prepend the rank to a message."""
        return f"[RANK {self._rank}] {msg}", kwargs

    def warning_once(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a warning, unless this logger has logged the same one before.

        Ranks: as :meth:`log`.
        """
        warning = repr((msg, args, kwargs))
        if warning not in self._warned:
            self._warned.add(warning)
            self.log(logging.WARNING, msg, *args, **{**kwargs, "stacklevel": kwargs.get("stacklevel", 1) + 1})


def get_logger(name: str, log_level: str | int | None = None, *, ctx: Context | None = None) -> RankLogger:
    """Return a logger that logs on the main process only, with the rank in each message.

    Without a context, the rank is that of the launcher's variables. The logger wraps Python's logger of that
    name, whose handlers and formats apply. The root logger doesn't change.

    Ranks: any; doesn't communicate.

    Args:
        name: Name of the logger, such as ``__name__``.
        log_level: Level to set: a name of ``LogLevel``, ignoring case, or a number. None for the variable
            ``ACCELFN_LOG_LEVEL`` or ``ACCELERATE_LOG_LEVEL``, without which the level doesn't change.
        ctx: The context; needed for ``in_order=True``.

    Raises:
        ConfigurationError: The level is unknown.
        EnvironmentPlanError: Without ``ctx``, the launcher's variables conflict.

    >>> import sys
    >>> logger = get_logger("example", "INFO", ctx=Context())
    >>> handler = logging.StreamHandler(sys.stdout)
    >>> logger.logger.addHandler(handler)
    >>> logger.info("loss %.2f", 0.5)
    [RANK 0] loss 0.50
    >>> logger.logger.removeHandler(handler)
    """
    logger = logging.getLogger(name)
    level, source = log_level, ""
    for source in ("ACCELERATE_LOG_LEVEL", "ACCELFN_LOG_LEVEL") if log_level is None else ():
        level = os.environ.get(source, "").strip() or level
    if isinstance(level, str):
        level = level.upper()
        if level not in LogLevel:
            where = f" (from the variable {source})" if source else ""
            raise ConfigurationError(
                f"get_logger: unknown level {level!r}{where}. Use one of {', '.join(LogLevel.values())}."
            )
    if level is not None:
        logger.setLevel(level)
    return RankLogger(logger, ctx)


def _rank_and_size(ctx: Context | None) -> tuple[int, int]:
    """Return rank and world size of the context, or else of the launcher's variables."""
    if ctx is not None:
        return ctx.rank, ctx.num_processes
    plan = detect_environment(os.environ)
    return plan.rank, plan.size


def tqdm(
    iterable: Iterable[Any] | None = None,
    *args: Any,
    ctx: Context | None = None,
    main_process_only: bool = True,
    **options: Any,
) -> Any:
    """Iterate with a progress bar on the main process, and without one elsewhere.

    Ranks: any; doesn't communicate.

    Args:
        iterable: The items; None for a bar that ``update`` advances.
        ctx: The context; None for the rank of the launcher's variables.
        main_process_only: False to show a bar on every rank.
        *args: Further arguments of ``tqdm.auto.tqdm``.
        **options: Keyword arguments of ``tqdm.auto.tqdm``.

    Returns:
        The bar of tqdm: iterable, and with methods such as ``update`` and ``set_postfix``.

    Raises:
        MissingExtraError: tqdm isn't installed.
        TypeError: ``iterable`` is a bool, as in older versions of Accelerate.
    """
    if isinstance(cast("object", iterable), bool):
        raise TypeError(
            f"tqdm: the first argument is the iterable, got {iterable}. Pass main_process_only={iterable} by "
            "name."
        )
    try:
        package: Any = importlib.import_module("tqdm.auto")
    except ImportError as error:
        raise MissingExtraError("tqdm is not installed. Run: pip install 'accelfn[progress]'.") from error
    if main_process_only and _rank_and_size(ctx)[0] > 0:
        options["disable"] = True
    return package.tqdm(iterable, *args, **options)
