"""Experiment trackers as functions: choose them, start them, log to them, end them.

Every rank may call these, and a tracker acts on the main process alone, or on every rank if its
``main_process_only`` is False. Nothing here communicates, so it does no harm if only some ranks call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, Literal, cast

from accelfn.comm import catch, failing_together
from accelfn.context import Context, check_context
from accelfn.context.config.records import settle_log_with
from accelfn.errors import ConfigurationError, MissingExtraError
from accelfn.tracking.adapters import ADAPTERS, BuiltInTracker
from accelfn.tracking.jsonl import JSONLTracker
from accelfn.tracking.tracker import BlankTracker, GeneralTracker, check_tracker, warn_caller
from accelfn.tracking.values import plain_config, read_numbers

OnError = Literal["warn", "raise"]

_BUILT_IN: tuple[type[BuiltInTracker], ...] = (JSONLTracker, *ADAPTERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackerPlan:
    """Which trackers a run gets. Nothing has been started, and no package imported.

    Attributes:
        chosen: Trackers, and classes that are built when they are started, in order; names differ.
        skipped: Notes on those that ``"all"`` leaves out although they are installed.
        logging_dir: Where those write that require a directory.
    """

    chosen: tuple[GeneralTracker | type[GeneralTracker], ...] = ()
    skipped: tuple[str, ...] = ()
    logging_dir: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the chosen ones."""
        return tuple(one.name for one in self.chosen)


# Classes go into log_with themselves: a register that a class is entered in by a call would be a global,
# which two programs in one process would share. So there is nothing like register_tracker_class.
def plan_trackers(
    log_with: Any,
    logging_dir: str | os.PathLike[str] | None = None,
    *,
    installed: Callable[[type[BuiltInTracker]], bool] = lambda one: one.is_installed(),
) -> TrackerPlan:
    """Return which trackers a run gets. Pure, but for a look at which packages are installed.

    Args:
        log_with: A name, a :class:`GeneralTracker` or a class of these, or a list; ``"all"`` stands for each
            built-in one that is installed. What a class or an instance is called wins over a built-in one of
            that name, if that was only meant by ``"all"``.
        logging_dir: Where those write that require a directory.
        installed: Whether the package of a built-in tracker is there.

    Raises:
        ConfigurationError: There is no tracker of a name, two have one name, or one requires a directory and
            none is given. (Under ``"all"`` such a one is skipped.)
        MissingExtraError: The package of one that was named isn't installed.
        TypeError: Something isn't a tracker.
        NotImplementedError: A tracker lacks attributes.

    >>> plan_trackers("all", installed=lambda one: one.name in ("tensorboard", "wandb", "jsonl")).names
    ('jsonl', 'wandb')
    """
    asked = settle_log_with(log_with)
    chosen = [_find(one, installed) for one in asked if one != "all"]
    names = [one.name for one in chosen]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigurationError(
            f"log_with names {', '.join(twice)} twice. Give each tracker a name of its own, by which "
            "get_tracker finds it."
        )
    directory = None if logging_dir is None else os.fspath(logging_dir)
    for one in chosen:
        if not _has_directory(one, directory):
            raise ConfigurationError(
                f"the tracker {one.name!r} writes to a directory, and none is given. Pass logging_dir, or "
                "project_dir for all that the run writes."
            )
    skipped: list[str] = []
    if "all" in asked:
        for one in _BUILT_IN:
            if one.name in names or not installed(one):
                continue
            if _has_directory(one, directory):
                chosen.append(one)
            else:
                skipped.append(
                    f"{one.name} writes to a directory, and no logging_dir or project_dir is given"
                )
    return TrackerPlan(chosen=tuple(chosen), skipped=tuple(skipped), logging_dir=directory)


def _has_directory(one: GeneralTracker | type[GeneralTracker], directory: str | None) -> bool:
    if isinstance(one, GeneralTracker) or not one.requires_logging_directory:  # an instance has its own
        return True
    return directory is not None or getattr(one, "default_directory", None) is not None


def _find(
    asked: Any, installed: Callable[[type[BuiltInTracker]], bool]
) -> GeneralTracker | type[GeneralTracker]:
    if isinstance(asked, str):
        found = next(one for one in _BUILT_IN if one.name == asked)
        if not installed(found):
            raise MissingExtraError(
                f"log_with asks for {asked!r}, which needs {' or '.join(found.modules)}, and that isn't "
                f"installed: pip install {found.install}"
            )
        return found
    cls = asked if isinstance(asked, type) else type(asked)
    if not issubclass(cls, GeneralTracker):
        raise TypeError(
            f"log_with takes names, trackers and classes of these, which extend accelfn.GeneralTracker: got "
            f"{cls.__name__}."
        )
    check_tracker(asked)
    return asked


@dataclass(kw_only=True, eq=False)
class Trackers:
    """Trackers of a run, made by :func:`init_trackers`. The functions below count in it what has failed.

    Attributes:
        ctx: Who this rank is.
        names: Of all that were chosen; the same on every rank.
        active: Those that act on this rank.
        on_error: What happens when a tracker fails: ``"warn"`` warns once for each tracker, and the run goes
            on; ``"raise"`` raises, on every rank.
        failures: How often each tracker has failed, by name.
        is_finished: Whether the run has ended.
    """

    ctx: Context = field(default_factory=Context)
    names: tuple[str, ...] = ()
    active: tuple[GeneralTracker, ...] = ()
    on_error: OnError = "warn"
    failures: dict[str, int] = field(default_factory=dict[str, int])
    is_finished: bool = False


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
        TypeError: A tracker's constructor doesn't take its ``init_kwargs``.
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
    asked = log_with if log_with is not None else ctx.log_with or "jsonl"
    directory = logging_dir if logging_dir is not None else ctx.project.logging_dir
    plan = plan_trackers(asked, directory)
    options = init_kwargs or {}
    _check_names("init_trackers: init_kwargs has arguments for", options, plan.names)
    values = None if config is None else plain_config(config)
    trackers = Trackers(ctx=ctx, names=plan.names, on_error=on_error)
    if ctx.is_main_process:
        for note in plan.skipped:
            warn_caller(f'log_with="all": {note}, so it is left out.')
    for one in plan.chosen:
        if ctx.is_main_process or not one.main_process_only:
            _start(trackers, one, plan, project_name, options.get(one.name, {}))
    if values is not None:
        _each(trackers, "store_init_configuration", lambda one: one.store_init_configuration(dict(values)))
    return trackers


def _number_of(operation: str, step: object) -> int | None:
    """Return a step as an int.

    Raises:
        TypeError: It is no whole number.
    """
    try:
        return None if step is None else index(cast("Any", step))
    except TypeError:
        raise TypeError(f"{operation}: step must be a whole number or None, got {step!r}.") from None


def log(
    trackers: Trackers,
    values: Mapping[str, Any],
    step: int | None = None,
    *,
    log_kwargs: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Log values of a step. Effect: the trackers that act on this rank keep them.

    Tensors become numbers, only on ranks on which a tracker acts: elsewhere this returns at once. They are
    this rank's: reduce over ranks first what is to be a mean over them. What a tracker can't show (None, most
    lists) it leaves out. A value that can't be read, such as a sharded tensor, is skipped with a warning that
    names it.

    Ranks: any; doesn't communicate.

    Args:
        trackers: From :func:`init_trackers`.
        values: Names and values: numbers, tensors of any shape, texts, None, or mappings and lists of these.
        step: Number of the step, an integer of any kind.
        log_kwargs: Further arguments for one tracker's calls, by its name.

    Raises:
        ConfigurationError: The trackers have ended, or ``log_kwargs`` name one that isn't there.
        TypeError: ``step`` is no whole number, or ``values`` is no mapping.
        Exception: With ``on_error="raise"``, what a tracker raised; ``RemoteRankError`` on other ranks.
    """
    options = _options(trackers, "log", log_kwargs)
    if not trackers.active:
        return
    if not isinstance(cast("object", values), Mapping):
        raise TypeError(f"log: values must be a mapping of names to values, got {type(values).__name__}.")
    at = _number_of("log", step)
    numbers: dict[str, Any] = {}

    def read(name: str) -> None:
        numbers.update(read_numbers({name: values[name]}))

    problems = [_attempt(trackers, f"value {name!r}", "log", lambda name=name: read(name)) for name in values]
    _raise_first(trackers, "log", problems)
    _each(trackers, "log", lambda one: one.log(dict(numbers), step=at, **options.get(one.name, {})))


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
    at = _number_of("log_images", step)

    def keep(one: GeneralTracker) -> None:
        one.log_images(dict(values), step=at, **options.get(one.name, {}))

    _each(trackers, "log_images", keep)


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
    at = _number_of("log_table", step)
    rows: list[list[Any]] | None = None if given is None else read_numbers({"rows": given})["rows"]

    def keep(one: GeneralTracker) -> None:
        one.log_table(name, columns, rows, dataframe, at, **options.get(one.name, {}))

    _each(trackers, "log_table", keep)


def finish(trackers: Trackers) -> None:
    """End the trackers. Effect: each keeps what it still holds; twice does no harm.

    Ranks: any; doesn't communicate.

    Raises:
        Exception: With ``on_error="raise"``, what a tracker raised, after all have been ended.
    """
    if trackers.is_finished:
        return
    trackers.is_finished = True
    _each(trackers, "finish", lambda one: one.finish())


def get_tracker(trackers: Trackers, name: str, unwrap: bool = False) -> Any:
    """Return a tracker by its name, for what only its package can do.

    Ranks: any; doesn't communicate.

    Args:
        trackers: From :func:`init_trackers`.
        name: Of the tracker.
        unwrap: Return the object behind it, such as the run.

    Returns:
        The tracker, or what is behind it. Where it doesn't act, or couldn't be started, a stand-in on which
        any call does nothing.

    Raises:
        ConfigurationError: No tracker of this name was chosen.
    """
    _check_names("get_tracker: asked for", (name,), trackers.names)
    found = next((one for one in trackers.active if one.name == name), None)
    if found is None:
        return BlankTracker(name)
    return found.tracker if unwrap else found


def _start(
    trackers: Trackers,
    one: GeneralTracker | type[GeneralTracker],
    plan: TrackerPlan,
    project_name: str,
    options: Mapping[str, Any],
) -> None:
    """Build and start a tracker, and make it an active one."""
    with failing_together(trackers.ctx, "init_trackers"):
        if isinstance(one, GeneralTracker):
            if options:
                raise ConfigurationError(
                    f"init_trackers: init_kwargs has arguments for {one.name!r}, which was passed as an "
                    "instance. Pass its class instead, or the arguments to its constructor."
                )
            tracker = one
        else:
            build: Any = one  # what constructors take, the contract says
            if one.requires_logging_directory:
                directory = plan.logging_dir or getattr(one, "default_directory", None)
                options = {"logging_dir": directory, **options}
            tracker = build(project_name, **options)

    def start() -> None:
        tracker.start()
        trackers.active = (*trackers.active, tracker)

    _raise_first(trackers, "start", [_attempt(trackers, tracker.name, "start", start)])


def _options(
    trackers: Trackers, operation: str, log_kwargs: Mapping[str, Mapping[str, Any]] | None
) -> Mapping[str, Mapping[str, Any]]:
    if trackers.is_finished:
        raise ConfigurationError(
            f"{operation}: these trackers have ended. Log before finish, or start them again."
        )
    _check_names(f"{operation}: log_kwargs has arguments for", log_kwargs or (), trackers.names)
    return log_kwargs or {}


def _check_names(what: str, given: Iterable[str], names: Sequence[str]) -> None:
    """Check that each name is that of a tracker of the run."""
    for name in given:
        if name not in names:
            raise ConfigurationError(
                f"{what} {name!r}, which isn't in this run. Its trackers: {', '.join(names) or 'none'}. Add "
                "it to log_with."
            )


def _each(trackers: Trackers, doing: str, action: Callable[[GeneralTracker], None]) -> None:
    """Do something with each tracker; what the first raised is raised after the last, if that is wanted."""
    problems = [_attempt(trackers, one.name, doing, lambda one=one: action(one)) for one in trackers.active]
    _raise_first(trackers, doing, problems)


def _attempt(trackers: Trackers, name: str, doing: str, action: Callable[[], None]) -> Exception | None:
    """Do something; return what is to be raised, or else count a failure and warn of the first."""
    _, error = catch(action)
    if error is None:
        return None
    trackers.failures[name] = trackers.failures.get(name, 0) + 1
    # What the caller has asked for wrongly would be wrong on every day, unlike a network that is down.
    is_mistake = doing == "start" and isinstance(error, (ConfigurationError, MissingExtraError))
    if trackers.on_error == "raise" or is_mistake:
        return error
    if trackers.failures[name] == 1:
        what, end = f"the tracker {name!r}", "it may lack what is logged"
        if doing == "start":
            end = "it is left out of this run"
        elif name not in trackers.names:
            what, end = f"the {name}", "it is skipped"
        warn_caller(
            f"{what} failed in {doing}: {type(error).__name__}: {str(error).rstrip('.')}. The run goes on, "
            f'and {end} (warned once). With on_error="raise" this would stop the run.'
        )
    return None


def _raise_first(trackers: Trackers, doing: str, problems: Sequence[Exception | None]) -> None:
    for error in problems:
        if error is not None:
            with failing_together(trackers.ctx, f"tracker.{doing}"):
                raise error
