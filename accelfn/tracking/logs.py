"""What a program prints: logs in a world of ranks, progress bars, tracebacks."""

from __future__ import annotations

import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from typing_extensions import Self

from accelfn.comm import wait_for_everyone
from accelfn.context import Context, detect_environment
from accelfn.context.config import LogLevel
from accelfn.errors import ConfigurationError, MissingExtraError

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class RankLogger(_Adapter):
    """A logger that knows its rank; made by :func:`get_logger`.

    All methods of a logger take two keywords more. ``main_process_only=False`` logs on every rank that calls.
    ``in_order=True`` logs on every rank, one after the other: every rank must call it, whatever its level.
    """

    def __init__(self, logger: logging.Logger, ctx: Context | None) -> None:
        """Wrap ``logger``."""
        super().__init__(logger, {})
        self._rank, self._size = _place(ctx)
        self._ctx = ctx
        self._warned: set[str] = set()

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
        if in_order and self._size > 1 and self._ctx is None:
            raise ConfigurationError(
                f"in_order=True lets {self._size} ranks wait for each other, for which a logger needs their "
                "context: get_logger(name, ctx=ctx)."
            )
        for turn in range(self._size) if in_order else [self._rank]:
            is_mine = turn == self._rank and (in_order or not main_process_only or self._rank == 0)
            if is_mine and self.isEnabledFor(level):
                message, options = self.process(msg, kwargs)
                self.logger.log(level, message, *args, **options)
            if in_order and self._ctx is not None:
                wait_for_everyone(self._ctx)

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[str, MutableMapping[str, Any]]:
        """Put the rank before a message."""
        return f"[RANK {self._rank}] {msg}", kwargs

    def warning_once(self, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a warning, unless this logger has given the same one before.

        Ranks: as :meth:`log`.
        """
        warning = repr((msg, args, kwargs))
        if warning not in self._warned:
            self._warned.add(warning)
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
    level, source = log_level, ""
    for source in ("ACCELERATE_LOG_LEVEL", "ACCELFN_LOG_LEVEL") if log_level is None else ():
        level = os.environ.get(source, "").strip() or level
    if isinstance(level, str):
        level = level.upper()
        if level not in LogLevel:
            where = f" (from the variable {source})" if source else ""
            raise ConfigurationError(
                f"get_logger: there is no level {level!r}{where}. Use one of {', '.join(LogLevel.values())}."
            )
    if level is not None:
        logger.setLevel(level)
    return RankLogger(logger, ctx)


def _place(ctx: Context | None) -> tuple[int, int]:
    """Return rank and size of the world: those of the context, or else what the launcher's variables say."""
    if ctx is not None:
        return ctx.rank, ctx.num_processes
    plan = detect_environment(os.environ)
    return plan.rank, plan.size


class ProgressBar(Protocol[T_co]):
    """What programs use of tqdm's bars: ``update``, ``set_postfix`` and the like, beside the loop."""

    def __iter__(self) -> Iterator[T_co]:
        """Return the items, and show how many there have been."""
        ...

    def __enter__(self) -> Self:
        """Show the bar."""
        ...

    def __exit__(self, *raised: object) -> None:
        """Close the bar."""
        ...

    def __getattr__(self, name: str) -> Any: ...


def tqdm(
    iterable: Iterable[T] | None = None,
    *args: Any,
    ctx: Context | None = None,
    main_process_only: bool = True,
    **options: Any,
) -> ProgressBar[T]:
    """Show a progress bar on the main process, and none elsewhere; the loop is the same on all.

    Ranks: any; doesn't communicate.

    Args:
        iterable: What is gone through; None for a bar that ``update`` moves.
        ctx: The world; None: what the launcher's variables say.
        main_process_only: False shows a bar on every rank.
        *args: For ``tqdm.auto.tqdm``: what stands before the bar, the number of items, and so on.
        **options: For it too; it, which refuses names that it doesn't know. With ``disable=True``
            there is no bar anywhere.

    Raises:
        MissingExtraError: tqdm isn't installed.
        TypeError: ``iterable`` is True or False, as in an older form of Accelerate's.

    >>> [number for number in tqdm(range(3), disable=True)]
    [0, 1, 2]
    """
    if isinstance(cast("object", iterable), bool):
        raise TypeError(
            f"tqdm: the first argument is what is gone through, got {iterable}. Pass "
            f"main_process_only={iterable} by its name."
        )
    try:
        package: Any = importlib.import_module("tqdm.auto")
    except ImportError as error:
        raise MissingExtraError("tqdm needs tqdm: pip install 'accelfn[progress]'.") from error
    if main_process_only and _place(ctx)[0] > 0:
        options["disable"] = True
    return package.tqdm(iterable, *args, **options)


def install_rich_tracebacks(*, show_locals: bool = False) -> Callable[[], None]:
    """Let rich print the exception that ends this program. Effect: sets ``sys.excepthook``.

    Ranks: any; each process for itself.

    Args:
        show_locals: Print local variables too. They may hold secrets.

    Returns:
        A function that undoes it, unless somebody else has set the hook since.

    Raises:
        MissingExtraError: rich isn't installed.
    """
    try:
        package: Any = importlib.import_module("rich.traceback")
    except ImportError as error:
        raise MissingExtraError("install_rich_tracebacks needs rich: pip install 'accelfn[cli]'.") from error
    before = sys.excepthook
    package.install(show_locals=show_locals)
    ours = sys.excepthook

    def undo() -> None:
        if sys.excepthook is ours:
            sys.excepthook = before

    return undo
