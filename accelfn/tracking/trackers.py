"""Experiment trackers as functions: start them, log to them, end them.

Every rank may call these, and a tracker acts on the main process alone, or on every rank if its
``main_process_only`` is False. Nothing here communicates, so it does no harm if only some ranks call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

from accelfn.comm import catch, failing_together
from accelfn.context import Context, check_context
from accelfn.errors import ConfigurationError, MissingExtraError
from accelfn.tracking.choose import TrackerPlan, plan_trackers
from accelfn.tracking.tracker import BlankTracker, GeneralTracker
from accelfn.tracking.values import plain_config, read_numbers, read_step
from accelfn.tracking.warned import warn_caller

__all__ = (
    "OnError",
    "TrackerHistory",
    "Trackers",
    "finish",
    "get_tracker",
    "init_trackers",
    "log",
    "log_images",
    "log_table",
)

OnError = Literal["warn", "raise"]


class TrackerHistory:
    """What has become of the trackers of a run: the one thing of them that changes.

    Attributes:
        failures: How often each tracker has failed, by name.
        is_finished: Whether the run has ended.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self.failures: dict[str, int] = {}
        self.is_finished = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Trackers:
    """Trackers of a run, made by :func:`init_trackers`.

    Attributes:
        ctx: Who this rank is.
        names: Of all that were chosen; the same on every rank.
        active: Those that act on this rank.
        on_error: What happens when a tracker fails: ``"warn"`` says so once for each tracker, and the run
            goes on; ``"raise"`` raises, on every rank.
        history: What has become of them.
    """

    ctx: Context = field(default_factory=Context)
    names: tuple[str, ...] = ()
    active: tuple[GeneralTracker, ...] = ()
    on_error: OnError = "warn"
    history: TrackerHistory = field(default_factory=TrackerHistory, compare=False, repr=False)


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
    """Start experiment trackers. Effect: they open files and connections, on the ranks where they act.

    What is wrong with the arguments is an error on every rank that calls. A tracker that can't be started,
    for want of a network or a key, is left out with a warning, unless ``on_error="raise"``.

    Ranks: any; doesn't communicate.

    Args:
        ctx: The world, and the context's ``log_with`` and directories.
        project_name: What the runs belong to; each tracker has its own word for it.
        log_with: Which trackers, as :func:`plan_trackers` takes it; None: those of the context, and where
            that names none, ``"jsonl"``.
        config: Configuration of the run, for all of them: a mapping, a dataclass or an
            ``argparse.Namespace``.
        init_kwargs: Further arguments for the constructors, by the name of the tracker.
        logging_dir: Where those write that need a directory; None: the context's.
        on_error: What happens when a tracker fails, now and later.

    Returns:
        The trackers, for :func:`log` and the others.

    Raises:
        ConfigurationError: As :func:`plan_trackers`; ``init_kwargs`` name a tracker that isn't chosen, or a
            tracker refuses them.
        MissingExtraError: The package of a tracker that was named isn't installed.
        TypeError: An argument is of another kind, or a tracker's constructor doesn't take its
            ``init_kwargs``.
        Exception: With ``on_error="raise"``, what a tracker raised; ``RemoteRankError`` on other ranks.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     trackers = init_trackers(Context(), "digits", config={"lr": 0.1}, logging_dir=folder)
    ...     log(trackers, {"loss": 0.5}, step=1)
    ...     finish(trackers)
    ...     trackers.names
    ('jsonl',)
    """
    check_context("init_trackers", ctx)
    if on_error not in ("warn", "raise"):
        raise ValueError(f'init_trackers: on_error must be "warn" or "raise", got {on_error!r}.')
    _check_arguments(project_name, init_kwargs, logging_dir)
    asked = log_with if log_with is not None else ctx.log_with or "jsonl"
    directory = logging_dir if logging_dir is not None else ctx.project.logging_dir
    plan = plan_trackers(asked, directory)
    options = init_kwargs or {}
    unknown = [name for name in options if name not in plan.names]
    if unknown:
        chosen = ", ".join(plan.names) or "none"
        raise ConfigurationError(
            f"init_trackers: init_kwargs has arguments for {', '.join(unknown)}, and chosen are: {chosen}. "
            "Leave them out, or add the tracker to log_with."
        )
    values = None if config is None else plain_config(config)
    trackers = Trackers(ctx=ctx, names=plan.names, on_error=on_error)
    if ctx.is_main_process:
        for note in plan.skipped:
            warn_caller(f'log_with="all": {note}, so it is left out.')
    active = _started(trackers, plan, project_name, options)
    trackers = Trackers(
        ctx=ctx, names=plan.names, active=tuple(active), on_error=on_error, history=trackers.history
    )
    if values is not None:
        _each(trackers, "store_init_configuration", lambda one: one.store_init_configuration(dict(values)))
    return trackers


def log(
    trackers: Trackers,
    values: Mapping[str, Any],
    step: int | None = None,
    *,
    log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Log values of a step. Effect: the trackers that act on this rank keep them.

    Tensors become numbers, with one copy to the host for all of them, and only on ranks on which a tracker
    acts: elsewhere this returns at once. They are this rank's: reduce over ranks first what is to be a mean
    over them. What a tracker can't show (None, most lists) it leaves out.

    Ranks: any; doesn't communicate.

    Args:
        trackers: From :func:`init_trackers`.
        values: Names and values: numbers, tensors of any shape, texts, None, or mappings and lists of these.
        step: Number of the step, an integer of any kind.
        log_kwargs: Further arguments for one tracker's calls, by its name.

    Raises:
        ConfigurationError: The trackers have ended, or ``log_kwargs`` name one that isn't there.
        TypeError: ``values`` is no mapping, or ``step`` is no whole number.
        Exception: With ``on_error="raise"``, what a tracker raised; ``RemoteRankError`` on other ranks.
    """
    options = _options(trackers, "log", log_kwargs)
    _check_mapping(values, "log", "values")
    if not trackers.active:
        return
    at = read_step(step, "log")
    numbers: list[dict[str, Any]] = []
    _guarded(trackers, "values", "log", lambda: numbers.append(read_numbers(values)))
    if numbers:
        _each(trackers, "log", lambda one: one.log(dict(numbers[0]), step=at, **options.get(one.name, {})))


def log_images(
    trackers: Trackers,
    values: Mapping[str, Any],
    step: int | None = None,
    *,
    log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Log images of a step. Effect: the trackers that act on this rank keep them.

    A tracker that keeps no images is named in a warning, once.

    Ranks: any; doesn't communicate.

    Args:
        trackers: From :func:`init_trackers`.
        values: Names, and images: an array or tensor ``(H, W)``, ``(H, W, C)`` or ``(C, H, W)`` with 1, 3 or
            4 channels (floats in 0..1, integers in 0..255), a batch of four dimensions, an image of Pillow,
            or a list. Where the first and the last dimension could be channels, the last one is.
        step: Number of the step.
        log_kwargs: Further arguments for one tracker's calls, by its name.

    Raises:
        ConfigurationError: As :func:`log`.
        Exception: As :func:`log`.
    """
    options = _options(trackers, "log_images", log_kwargs)
    _check_mapping(values, "log_images", "values")
    if not trackers.active:
        return
    at = read_step(step, "log_images")
    _each(
        trackers,
        "log_images",
        lambda one: one.log_images(dict(values), step=at, **options.get(one.name, {})),
    )


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
    """Log a table. Effect: the trackers that act on this rank keep it.

    A tracker that keeps no tables is named in a warning, once.

    Ranks: any; doesn't communicate.

    Args:
        trackers: From :func:`init_trackers`.
        name: Of the table.
        columns: Names of the columns.
        data: Rows; tensors in them become numbers.
        dataframe: A dataframe of pandas, in place of columns and rows.
        step: Number of the step.
        log_kwargs: Further arguments for one tracker's calls, by its name.

    Raises:
        ValueError: Neither rows nor a dataframe, or both, or a row that doesn't fit the columns.
        ConfigurationError: As :func:`log`.
        Exception: As :func:`log`.
    """
    if (data is None) == (dataframe is None):
        raise ValueError(f"log_table: {name!r} needs rows or a dataframe, one of the two.")
    given = None if data is None else [list(row) for row in data]  # an iterator is read once
    for number, row in enumerate(given or ()):
        if columns is not None and len(row) != len(columns):
            raise ValueError(
                f"log_table: each row of {name!r} needs {len(columns)} cells, one for each column: row "
                f"{number} has {len(row)}."
            )
    options = _options(trackers, "log_table", log_kwargs)
    if not trackers.active:
        return
    at = read_step(step, "log_table")
    rows: list[list[Any]] | None = None
    if given is not None:
        cells: dict[str, Any] = read_numbers({"rows": given})
        rows = cells["rows"]

    def keep(one: GeneralTracker) -> None:
        one.log_table(name, columns, rows, dataframe, at, **options.get(one.name, {}))

    _each(trackers, "log_table", keep)


def finish(trackers: Trackers) -> None:
    """End the trackers. Effect: each keeps what it still holds; twice does no harm.

    Ranks: any; doesn't communicate.

    Raises:
        Exception: With ``on_error="raise"``, what a tracker raised, after all have been ended.
    """
    if trackers.history.is_finished:
        return
    trackers.history.is_finished = True
    _each(trackers, "finish", lambda one: one.finish())


def get_tracker(trackers: Trackers, name: str, unwrap: bool = False) -> Any:
    """Return a tracker by its name, for what only its package can do.

    Ranks: any; doesn't communicate.

    Args:
        trackers: From :func:`init_trackers`.
        name: Of the tracker.
        unwrap: Give the object behind it, such as the run.

    Returns:
        The tracker, or what is behind it. Where it doesn't act, or couldn't be started, a stand-in on which
        any call does nothing.

    Raises:
        ConfigurationError: No tracker of this name was chosen.
    """
    if name not in trackers.names:
        known = ", ".join(trackers.names) or "none"
        raise ConfigurationError(
            f"get_tracker: there is no tracker {name!r} in this run. Those of it: {known}. Add it to "
            "log_with."
        )
    found = next((one for one in trackers.active if one.name == name), None)
    if found is None:
        return BlankTracker(name)
    return found.tracker if unwrap else found


def _check_arguments(project_name: object, init_kwargs: object, logging_dir: object) -> None:
    if not isinstance(project_name, str) or not project_name:
        raise TypeError(f"init_trackers: project_name must be a text: got {project_name!r}.")
    if logging_dir is not None and not isinstance(logging_dir, (str, os.PathLike)):
        raise TypeError(f"init_trackers: logging_dir must be a path: got {logging_dir!r}.")
    if init_kwargs is None:
        return
    _check_mapping(init_kwargs, "init_trackers", "init_kwargs")
    for name, options in cast("Mapping[str, object]", init_kwargs).items():
        _check_mapping(options, "init_trackers", f"init_kwargs[{name!r}]")


def _check_mapping(value: object, operation: str, argument: str) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(
            f"{operation}: {argument} must be a mapping of names: got {type(value).__name__} {value!r}."
        )


def _started(
    trackers: Trackers,
    plan: TrackerPlan,
    project_name: str,
    options: Mapping[str, Mapping[str, Any]],
) -> list[GeneralTracker]:
    active: list[GeneralTracker] = []
    for one in plan.chosen:
        if one.main_process_only and not trackers.ctx.is_main_process:
            continue

        with failing_together(trackers.ctx, "init_trackers"):
            tracker = _built(one, plan, project_name, options.get(one.name, {}))

        def start(tracker: GeneralTracker = tracker) -> None:
            tracker.start()
            active.append(tracker)

        _guarded(trackers, one.name, "start", start)
    return active


def _built(
    one: GeneralTracker | type[GeneralTracker],
    plan: TrackerPlan,
    project_name: str,
    options: Mapping[str, Any],
) -> GeneralTracker:
    if isinstance(one, GeneralTracker):
        if options:
            raise ConfigurationError(
                f"init_trackers: init_kwargs has arguments for {one.name!r}, which was passed as it is. Pass "
                "its class instead, or give them to its constructor."
            )
        return one
    build: Any = one  # what constructors take, the contract says
    if not one.requires_logging_directory:
        return build(project_name, **options)
    directory = plan.logging_dir if plan.logging_dir is not None else getattr(one, "default_directory", None)
    return build(project_name, **{"logging_dir": directory, **options})


def _options(
    trackers: Trackers, operation: str, log_kwargs: Mapping[str, Mapping[str, Any]] | None
) -> Mapping[str, Mapping[str, Any]]:
    if trackers.history.is_finished:
        raise ConfigurationError(
            f"{operation}: these trackers have ended. Log before finish, or start them again."
        )
    for name in log_kwargs or ():
        if name not in trackers.names:
            known = ", ".join(trackers.names) or "none"
            raise ConfigurationError(
                f"{operation}: log_kwargs has arguments for {name!r}, which isn't in this run. Those of it: "
                f"{known}."
            )
    return log_kwargs or {}


def _each(trackers: Trackers, doing: str, action: Callable[[GeneralTracker], None]) -> None:
    """Do something with each tracker; what the first raised is raised after the last, if that is wanted."""
    problems: list[Exception] = []
    for one in trackers.active:
        _, error = catch(lambda one=one: action(one))
        if error is not None:
            problems.append(error)
            _failed(trackers, one.name, doing, error)
    if problems and trackers.on_error == "raise":
        with failing_together(trackers.ctx, f"tracker.{doing}"):
            raise problems[0]


def _guarded(trackers: Trackers, name: str, doing: str, action: Callable[[], None]) -> None:
    _, error = catch(action)
    if error is None:
        return
    _failed(trackers, name, doing, error)
    if _is_raised(trackers, doing, error):
        with failing_together(trackers.ctx, f"tracker.{doing}"):
            raise error


def _failed(trackers: Trackers, name: str, doing: str, error: Exception) -> None:
    """Count a failure, and say it if it is the first of this tracker."""
    failures = trackers.history.failures
    failures[name] = failures.get(name, 0) + 1
    if failures[name] > 1 or _is_raised(trackers, doing, error):
        return
    what = "is left out of this run" if doing == "start" else "may lack what is logged"
    warn_caller(
        f"the tracker {name!r} failed in {doing}: {type(error).__name__}: {str(error).rstrip('.')}. "
        "The run goes on, and the "
        f'tracker {what} (said once). With on_error="raise" this would stop the run.'
    )


def _is_raised(trackers: Trackers, doing: str, error: Exception) -> bool:
    # What the caller has asked for wrongly would be wrong on every day, unlike a network that is down.
    is_mistake = doing == "start" and isinstance(error, (ConfigurationError, MissingExtraError))
    return trackers.on_error == "raise" or is_mistake
