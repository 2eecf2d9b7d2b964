"""Start experiment trackers, log to them, and finish them.

Any rank may call these functions, which don't communicate. A tracker runs on the main process, or on every
rank if its ``main_process_only`` is False.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import index
from typing import Any, Literal, cast

from accelfn.comm import catch, failing_together
from accelfn.config.records import settle_log_with
from accelfn.context import Context, takes_context
from accelfn.errors import ConfigurationError, MissingExtraError
from accelfn.tracking.adapters import ADAPTERS, BuiltInTracker
from accelfn.tracking.jsonl import JSONLTracker
from accelfn.tracking.tracker import BlankTracker, GeneralTracker, check_tracker, warn_caller
from accelfn.tracking.values import plain_config, read_numbers

OnError = Literal["warn", "raise"]

_BUILT_IN: tuple[type[BuiltInTracker], ...] = (JSONLTracker, *ADAPTERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerPlan:
    """The trackers of a run, before they start.

    Attributes:
        chosen: Trackers and tracker classes in order, with different names.
        skipped: Reasons for which ``"all"`` skips installed trackers.
        logging_dir: Directory for trackers that require one.
    """

    chosen: tuple[GeneralTracker | type[GeneralTracker], ...] = ()
    skipped: tuple[str, ...] = ()
    logging_dir: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the trackers."""
        return tuple(tracker.name for tracker in self.chosen)


# There is no register_tracker_class: a registry would be global state. Pass classes in log_with.
def plan_trackers(
    log_with: Any,
    logging_dir: str | os.PathLike[str] | None = None,
    *,
    installed: Callable[[type[BuiltInTracker]], bool] = lambda cls: cls.is_installed(),
) -> TrackerPlan:
    """Select the trackers of a run. Checks which packages are installed, without importing them.

    Args:
        log_with: A name, a :class:`GeneralTracker` instance or class, or a list of them. ``"all"`` selects
            all installed built-in trackers, except those with the name of a listed instance or class.
        logging_dir: Directory for trackers that require one.
        installed: Returns whether the package of a built-in tracker is installed.

    Raises:
        ConfigurationError: A name is unknown or repeated, or a tracker that isn't selected by ``"all"`` lacks
            a directory.
        MissingExtraError: The package of a named tracker isn't installed.
        TypeError: A value isn't a tracker.
        NotImplementedError: A tracker lacks attributes.

    >>> plan_trackers("all", installed=lambda cls: cls.name in ("tensorboard", "wandb", "jsonl")).names
    ('jsonl', 'wandb')
    """
    requested = settle_log_with(log_with)
    chosen = [_find(item, installed) for item in requested if item != "all"]
    names = [tracker.name for tracker in chosen]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ConfigurationError(
            f"log_with contains several trackers with the name {', '.join(repeated)}. Use different names."
        )
    directory = None if logging_dir is None else os.fspath(logging_dir)
    for tracker in chosen:
        if not _has_directory(tracker, directory):
            raise ConfigurationError(
                f"the tracker {tracker.name!r} needs a directory. Pass logging_dir or project_dir."
            )
    skipped: list[str] = []
    if "all" in requested:
        for cls in _BUILT_IN:
            if cls.name in names or not installed(cls):
                continue
            if _has_directory(cls, directory):
                chosen.append(cls)
            else:
                skipped.append(f"{cls.name} needs a logging_dir or project_dir")
    return TrackerPlan(chosen=tuple(chosen), skipped=tuple(skipped), logging_dir=directory)


def _has_directory(tracker: GeneralTracker | type[GeneralTracker], directory: str | None) -> bool:
    if isinstance(tracker, GeneralTracker) or not tracker.requires_logging_directory:
        return True  # an instance has its directory already
    return directory is not None or getattr(tracker, "default_directory", None) is not None


def _find(
    item: Any, installed: Callable[[type[BuiltInTracker]], bool]
) -> GeneralTracker | type[GeneralTracker]:
    if isinstance(item, str):
        built_in = next(tracker for tracker in _BUILT_IN if tracker.name == item)
        if not installed(built_in):
            raise built_in.missing()
        return built_in
    cls = item if isinstance(item, type) else type(item)
    if not issubclass(cls, GeneralTracker):
        raise TypeError(
            "log_with accepts names, and instances and subclasses of accelfn.tracking.GeneralTracker, got "
            f"{cls.__name__}."
        )
    check_tracker(item)
    return item


@dataclass(kw_only=True, eq=False)
class Trackers:
    """The trackers of a run, created by :func:`init_trackers`. Only ``failures`` and ``is_finished`` change.

    Attributes:
        ctx: The context.
        names: Names of all trackers, the same on every rank.
        active: Trackers that run on this rank.
        on_error: If a tracker fails, ``"warn"`` warns once per tracker and continues; ``"raise"`` raises on
            every rank.
        failures: Number of failures of each tracker, by name.
        is_finished: Whether :func:`finish` was called.
    """

    ctx: Context = field(default_factory=Context)
    names: tuple[str, ...] = ()
    active: tuple[GeneralTracker, ...] = ()
    on_error: OnError = "warn"
    failures: dict[str, int] = field(default_factory=dict[str, int])
    is_finished: bool = False


@takes_context
def init_trackers(
    ctx: Context,
    project_name: str,
    *,
    log_with: Any = None,
    config: object = None,
    init_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
    logging_dir: str | os.PathLike[str] | None = None,
    on_error: OnError = "warn",
) -> Trackers:
    """Start experiment trackers. Effect: opens files and connections on the ranks where trackers run.

    Invalid arguments are an error on every rank. A tracker that can't start, for example without a network,
    is skipped with a warning, unless ``on_error="raise"``.

    Ranks: any; doesn't communicate.

    Args:
        ctx: The context, with ``log_with`` and directories.
        project_name: Name of the project.
        log_with: As in :func:`plan_trackers`; None for that of the context, or else ``"jsonl"``.
        config: Configuration of the run: a mapping, a dataclass or an ``argparse.Namespace``.
        init_kwargs: Further arguments of the constructors, by tracker name.
        logging_dir: Directory for trackers that require one; None for that of the context.
        on_error: What to do if a tracker fails, now and later.

    Returns:
        The trackers, for :func:`log` and other functions.

    Raises:
        ConfigurationError: As :func:`plan_trackers`; or ``init_kwargs`` contains an unknown tracker, or
            arguments that a tracker doesn't accept.
        MissingExtraError: The package of a named tracker isn't installed.
        TypeError: A tracker's constructor doesn't accept its ``init_kwargs``.
        Exception: With ``on_error="raise"``, the exception of a tracker; ``RemoteRankError`` on other ranks.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     trackers = init_trackers(Context(), "digits", config={"lr": 0.1}, logging_dir=folder)
    ...     log(trackers, {"loss": 0.5}, step=1)
    ...     finish(trackers)
    ...     trackers.names
    ('jsonl',)
    """
    if on_error not in ("warn", "raise"):
        raise ValueError(f'init_trackers: on_error must be "warn" or "raise", got {on_error!r}.')
    requested = log_with if log_with is not None else ctx.log_with or "jsonl"
    directory = logging_dir if logging_dir is not None else ctx.project.logging_dir
    plan = plan_trackers(requested, directory)
    options = init_kwargs or {}
    _check_names("init_trackers: init_kwargs:", options, plan.names)
    values = None if config is None else plain_config(config)
    if ctx.is_main_process:
        for note in plan.skipped:
            warn_caller(f'log_with="all": {note}; skipping it.')
    mine = [chosen for chosen in plan.chosen if ctx.is_main_process or not chosen.main_process_only]
    with failing_together(ctx, "init_trackers"):
        made = [_make(chosen, plan, project_name, options.get(chosen.name, {})) for chosen in mine]
    starting = Trackers(ctx=ctx, names=plan.names, active=(*made,), on_error=on_error)
    started = _each(starting, "start", lambda each: each.start())
    trackers = replace(starting, active=started)
    if values is not None:
        _each(trackers, "store_init_configuration", lambda each: each.store_init_configuration(dict(values)))
    return trackers


def log(
    trackers: Trackers,
    values: Mapping[str, Any],
    step: int | None = None,
    *,
    log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Log values of a step with the trackers of this rank.

    Converts tensors to numbers, only on ranks where a tracker runs. Values are those of this rank; reduce
    them first to log means over ranks. Trackers skip values that they don't support, such as None and most
    lists. A value that can't be converted, such as a sharded tensor, is skipped with a warning.

    Ranks: any; doesn't communicate.

    Args:
        trackers: From :func:`init_trackers`.
        values: Values by name: numbers, tensors, strings, None, or mappings and lists of them.
        step: The step, or None.
        log_kwargs: Further arguments of the trackers' calls, by tracker name.

    Raises:
        ConfigurationError: The trackers are finished, or ``log_kwargs`` contains an unknown tracker.
        TypeError: ``step`` isn't an integer, or ``values`` isn't a mapping.
        Exception: With ``on_error="raise"``, the exception of a tracker; ``RemoteRankError`` on other ranks.
    """
    number, options = _begin(trackers, "log", step, log_kwargs)
    if not trackers.active:
        return
    if not isinstance(cast("object", values), Mapping):
        raise TypeError(f"log: values must be a mapping of names to values, got {type(values).__name__}.")
    numbers: dict[str, Any] = {}

    def read(name: str) -> None:
        numbers.update(read_numbers({name: values[name]}))

    _attempt(trackers, "log", {f"value {name!r}": partial(read, name) for name in values})
    _each(trackers, "log", lambda each: each.log(dict(numbers), step=number, **options.get(each.name, {})))


def log_images(
    trackers: Trackers,
    values: Mapping[str, Any],
    step: int | None = None,
    *,
    log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Log images of a step with the trackers of this rank.

    Warns once about each tracker that doesn't support images.

    Ranks: any; doesn't communicate.

    Args:
        trackers: From :func:`init_trackers`.
        values: Images by name: an array or tensor ``(H, W)``, ``(H, W, C)`` or ``(C, H, W)`` with 1, 3 or 4
            channels (floats in 0..1, integers in 0..255), a four-dimensional batch, a Pillow image, or a
            list. If both the first and the last dimension may be channels, the last one is.
        step: The step, or None.
        log_kwargs: Further arguments of the trackers' calls, by tracker name.

    Raises:
        ConfigurationError: As :func:`log`.
        Exception: As :func:`log`.
    """
    number, options = _begin(trackers, "log_images", step, log_kwargs)

    def log_one(tracker: GeneralTracker) -> None:
        tracker.log_images(dict(values), step=number, **options.get(tracker.name, {}))

    _each(trackers, "log_images", log_one)


def log_table(
    trackers: Trackers,
    name: str,
    columns: Sequence[str] | None = None,
    data: Sequence[Sequence[Any]] | None = None,
    *,
    dataframe: Any = None,
    step: int | None = None,
    log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Log a table with the trackers of this rank.

    Warns once about each tracker that doesn't support tables.

    Ranks: any; doesn't communicate.

    Args:
        trackers: From :func:`init_trackers`.
        name: Name of the table.
        columns: Column names.
        data: Rows, whose tensors are converted to numbers.
        dataframe: A pandas dataframe, instead of columns and rows.
        step: The step, or None.
        log_kwargs: Further arguments of the trackers' calls, by tracker name.

    Raises:
        ValueError: Neither or both of rows and dataframe are given, or a row doesn't match the columns.
        ConfigurationError: As :func:`log`.
        Exception: As :func:`log`.
    """
    if (data is None) == (dataframe is None):
        raise ValueError(f"log_table: {name!r} needs either data or a dataframe.")
    given = None if data is None else [list(row) for row in data]  # data may be an iterator
    for number, row in enumerate(given or ()):
        if columns is not None and len(row) != len(columns):
            raise ValueError(
                f"log_table: each row of {name!r} must have {len(columns)} cells, but row {number} has "
                f"{len(row)}."
            )
    number, options = _begin(trackers, "log_table", step, log_kwargs)
    if not trackers.active:
        return
    rows: list[list[Any]] | None = None if given is None else read_numbers({"rows": given})["rows"]

    def log_one(tracker: GeneralTracker) -> None:
        tracker.log_table(name, columns, rows, dataframe, number, **options.get(tracker.name, {}))

    _each(trackers, "log_table", log_one)


def finish(trackers: Trackers) -> None:
    """Finish the trackers, and flush their values. A second call does nothing.

    Ranks: any; doesn't communicate.

    Raises:
        Exception: With ``on_error="raise"``, the exception of a tracker, after all have been finished.
    """
    if trackers.is_finished:
        return
    trackers.is_finished = True
    _each(trackers, "finish", lambda each: each.finish())


def get_tracker(trackers: Trackers, name: str, unwrap: bool = False) -> Any:
    """Return a tracker by name, to use its package directly.

    Ranks: any; doesn't communicate.

    Args:
        trackers: From :func:`init_trackers`.
        name: Name of the tracker.
        unwrap: Return the underlying object, such as the run.

    Returns:
        The tracker or its underlying object. A :class:`BlankTracker` on ranks where the tracker doesn't run,
        or if it could not start.

    Raises:
        ConfigurationError: The run has no tracker of this name.
    """
    _check_names("get_tracker:", (name,), trackers.names)
    tracker = next((tracker for tracker in trackers.active if tracker.name == name), None)
    if tracker is None:
        return BlankTracker(name)
    return tracker.tracker if unwrap else tracker


def _make(
    chosen: GeneralTracker | type[GeneralTracker],
    plan: TrackerPlan,
    project_name: str,
    options: Mapping[str, Any],
) -> GeneralTracker:
    """Return a tracker; a class is called with its arguments."""
    if isinstance(chosen, GeneralTracker):
        if options:
            raise ConfigurationError(
                f"init_trackers: init_kwargs has arguments for {chosen.name!r}, which is an instance. Pass "
                "its class instead, or the arguments to its constructor."
            )
        return chosen
    create: Any = chosen
    if chosen.requires_logging_directory:
        directory = plan.logging_dir or getattr(chosen, "default_directory", None)
        options = {"logging_dir": directory, **options}
    return create(project_name, **options)


def _begin(
    trackers: Trackers, operation: str, step: object, log_kwargs: Mapping[str, Mapping[str, Any]] | None
) -> tuple[int | None, Mapping[str, Mapping[str, Any]]]:
    """Return the step as a number, and the arguments by tracker; refuse what can't be logged."""
    if trackers.is_finished:
        raise ConfigurationError(
            f"{operation}: the trackers are finished. Log before finish, or start new ones."
        )
    _check_names(f"{operation}: log_kwargs:", log_kwargs or (), trackers.names)
    try:
        number = None if step is None else index(cast("Any", step))
    except TypeError:
        raise TypeError(f"{operation}: step must be an integer or None, got {step!r}.") from None
    return number, log_kwargs or {}


def _check_names(where: str, given: Iterable[str], names: Sequence[str]) -> None:
    """Check that the run has trackers with these names."""
    for name in given:
        if name not in names:
            raise ConfigurationError(
                f"{where} this run has no tracker {name!r}, only {', '.join(names) or 'none'}. Add it to "
                "log_with."
            )


def _each(
    trackers: Trackers, doing: str, action: Callable[[GeneralTracker], None]
) -> tuple[GeneralTracker, ...]:
    """Call ``action`` with each active tracker, as :func:`_attempt`. Return those that didn't fail."""
    failed = _attempt(trackers, doing, {each.name: partial(action, each) for each in trackers.active})
    return tuple(each for each in trackers.active if each.name not in failed)


def _attempt(trackers: Trackers, doing: str, actions: Mapping[str, Callable[[], None]]) -> list[str]:
    """Call actions of trackers, or of values, by name. Return the names of those that failed.

    A failure is counted, and the first of each is warned of; with ``on_error="raise"`` the first of all is
    raised, when all actions have been called.
    """
    failed: list[str] = []
    problems: list[Exception] = []
    for name, action in actions.items():
        _, error = catch(action)
        if error is None:
            continue
        failed.append(name)
        trackers.failures[name] = trackers.failures.get(name, 0) + 1
        # Errors of the caller, unlike those of the network.
        is_mistake = doing == "start" and isinstance(error, (ConfigurationError, MissingExtraError))
        if trackers.on_error == "raise" or is_mistake:
            problems.append(error)
        elif trackers.failures[name] == 1:
            what, effect = f"the tracker {name!r}", "values may be missing in it"
            if doing == "start":
                effect = "the run continues without it"
            elif name not in trackers.names:
                what, effect = f"the {name}", "it is skipped"
            warn_caller(
                f"{what} failed in {doing}: {type(error).__name__}: {str(error).rstrip('.')}; {effect} "
                '(warned once). Pass on_error="raise" to stop the run instead.'
            )
    if problems:
        with failing_together(trackers.ctx, f"tracker.{doing}"):
            raise problems[0]
    return failed
