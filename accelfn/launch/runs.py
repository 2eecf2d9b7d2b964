"""``accelfn runs``: list and show runs of the JSONL tracker, without torch."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

from accelfn.errors import ConfigurationError
from accelfn.launch.command_line import FLAG_NOTE, CommandParser
from accelfn.launch.output import print_table

_FORMAT = 1
_FILE = "events.jsonl"
_MAX_VALUES = 3


class Curve(NamedTuple):
    """Values of a metric by step.

    Attributes:
        steps: The steps in ascending order. A value without a step gets the next one.
        values: The last logged value of each step.
    """

    steps: tuple[int, ...]
    values: tuple[float, ...]


class RunRecord(NamedTuple):
    """The content of a run's file.

    Attributes:
        folder: Folder of the run.
        project: Name of the project.
        name: Name of the run.
        started_s: Time of the first start, in seconds since 1970.
        last_s: Time of the last line.
        is_finished: Whether the run finished. Otherwise it is running or was killed.
        num_starts: Number of starts; more than 1 if the run was resumed.
        config: The configuration.
        curves: Metrics by name; nested names are joined by ``/``.
        events: All lines as JSON has them: texts, images and tables too.
        num_damaged: Number of unreadable lines, such as one that a killed program left incomplete.
    """

    folder: Path
    project: str
    name: str
    started_s: float
    last_s: float
    is_finished: bool
    num_starts: int
    config: Mapping[str, Any]
    curves: Mapping[str, Curve]
    events: tuple[Mapping[str, Any], ...]
    num_damaged: int

    @property
    def num_steps(self) -> int:
        """Number of steps of the longest curve."""
        return max((len(curve.steps) for curve in self.curves.values()), default=0)


def find_runs(folder: str | Path) -> list[Path]:
    """Return the folders of all runs below a folder, sorted.

    Raises:
        FileNotFoundError: The folder doesn't exist.
    """
    top = Path(folder)
    if not top.is_dir():
        raise FileNotFoundError(f"no directory {str(folder)!r}. Pass the logging_dir of the runs.")
    return sorted(file.parent for file in top.rglob(_FILE))


def read_run(folder: str | Path) -> RunRecord:
    """Read a run of the JSONL tracker, even while it is running.

    If a step was logged twice, for example after a resumption, the last value counts.

    Args:
        folder: Folder of the run, or its ``events.jsonl``.

    Raises:
        FileNotFoundError: The run doesn't exist.
        ConfigurationError: A newer version of accelfn wrote the run.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "events.jsonl").write_text('{"kind": "log", "step": 0, "values": {"loss": 0.5}}')
    ...     read_run(folder).curves["loss"]
    Curve(steps=(0,), values=(0.5,))
    """
    path = Path(folder)
    file = path if path.name == _FILE else path / _FILE
    if not file.is_file():
        raise FileNotFoundError(f"no run in {str(folder)!r}: {_FILE} is missing. Check the path.")
    with file.open(encoding="utf-8", errors="replace", newline="\n") as lines:
        read = [_read_event(line) for line in lines]
    events = tuple(event for event in read if event is not None)
    starts = [event for event in events if event["kind"] == "start"]
    newer = next((start for start in starts if start.get("format", _FORMAT) > _FORMAT), None)
    if newer is not None:
        raise ConfigurationError(
            f"the run {newer.get('run')!r} has format {newer['format']}, but this accelfn reads format "
            f"{_FORMAT}. Update accelfn."
        )
    ends = [event["kind"] for event in events if event["kind"] in ("start", "finish")]
    last: Mapping[str, Any] = starts[-1] if starts else {}
    configs = [event["values"].items() for event in events if event["kind"] == "config"]
    return RunRecord(
        folder=file.parent,
        project=str(last.get("project", "")),
        name=str(last.get("run", file.parent.name)),
        started_s=_seconds(starts[0]) if starts else math.nan,
        last_s=_seconds(events[-1]) if events else math.nan,
        is_finished=ends[-1:] == ["finish"],
        num_starts=len(starts),
        config={name: value for items in configs for name, value in items},
        curves=_read_curves(event for event in events if event["kind"] == "log"),
        events=events,
        num_damaged=read.count(None),
    )


def _read_event(line: str) -> Mapping[str, Any] | None:
    """Return an event; None if the line isn't one."""
    try:
        event: Any = json.loads(line)
        has_values = event["kind"] not in ("log", "config") or isinstance(event["values"], dict)
        return event if has_values and event.get("step", 0) in (None, int(event.get("step") or 0)) else None
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError):
        return None


def _seconds(event: Mapping[str, Any]) -> float:
    return float(event.get("time", math.nan))


def _read_curves(events: Iterable[Mapping[str, Any]]) -> dict[str, Curve]:
    points: dict[str, dict[int, float]] = {}
    last: dict[str, int] = {}  # the last step of each metric
    for event in events:
        for name, value in _flat(event["values"]):
            # JSON has no NaN or infinity, so they are logged as text.
            number = float(value) if value in ("NaN", "Infinity", "-Infinity") else value
            if isinstance(number, (int, float)):
                step = event.get("step")
                last[name] = last.get(name, -1) + 1 if step is None else int(step)
                points.setdefault(name, {})[last[name]] = float(number)
    by_name = {name: sorted(by_step.items()) for name, by_step in points.items()}
    return {name: Curve(*map(tuple, zip(*pairs, strict=True))) for name, pairs in by_name.items()}


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        path = f"{above}/{name}" if above else name
        if isinstance(value, dict):
            yield from _flat(cast("dict[str, Any]", value), path)
        else:
            yield path, value


# --- The command ------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """List or show runs."""
    {"list": _list, "show": _show}[options.action](options)
    return 0


def _list(options: argparse.Namespace) -> None:
    top = options.folder or options.dir
    runs = [run for folder in find_runs(top) if (run := _readable(folder)) is not None]
    runs.sort(key=lambda run: (math.isnan(run.started_s), run.started_s))
    if not runs:
        print(f"no runs in {top!r}")
        return
    rows: list[tuple[str, ...]] = []
    for run in runs:
        last = [f"{name} {curve.values[-1]:.4g}" for name, curve in run.curves.items()]
        more = f", and {len(last) - _MAX_VALUES} more" if len(last) > _MAX_VALUES else ""
        name, values = run.folder.relative_to(top).as_posix(), ", ".join(last[:_MAX_VALUES]) + more
        rows.append((name, _time(run.started_s), _state(run), str(run.num_steps), values))
    _print(rows, ("run", "started", "state", "steps", "last values"), right=(3,))


def _readable(folder: Path) -> RunRecord | None:
    try:
        return read_run(folder)
    except (ConfigurationError, OSError) as error:  # list the others
        print(f"accelfn runs list: skipping {folder}: {error}", file=sys.stderr)
        return None


def _show(options: argparse.Namespace) -> None:
    run = read_run(_find(options.run, options.dir))
    seconds = run.last_s - run.started_s
    duration = "?" if math.isnan(seconds) else str(timedelta(seconds=round(seconds)))
    started = f"{_time(run.started_s)}, {_state(run)}, {duration}"
    resumed = f", resumed {run.num_starts - 1} times" if run.num_starts > 1 else ""
    facts = [
        ("run", run.name),
        ("project", run.project),
        ("folder", str(run.folder)),
        ("started", started + resumed),
    ]
    facts += [("damaged", f"{run.num_damaged} unreadable lines")] if run.num_damaged else []
    _print(facts)
    _print([(name, json.dumps(value)) for name, value in run.config.items()])
    rows: list[tuple[str, ...]] = []
    for name, (steps, values) in run.curves.items():
        numbers = [value for value in values if not math.isnan(value)] or [math.nan]
        shown = (values[0], values[-1], min(numbers), max(numbers))
        rows.append((name, str(len(steps)), *(f"{value:.4g}" for value in shown)))
    _print(rows, ("name", "steps", "first", "last", "min", "max"), right=(1, 2, 3, 4, 5))


def _find(given: str, top: str) -> Path:
    """Find a run by its folder, by its name, or as ``latest``."""
    if (Path(given) / _FILE).is_file():
        return Path(given)
    folders = find_runs(top)
    if given == "latest" and folders:
        return max(folders, key=lambda folder: (folder / _FILE).stat().st_mtime)
    found = [folder for folder in folders if folder.name == given]
    if len(found) != 1:
        problem = "is ambiguous" if found else f"is not in {top!r}"
        names = ", ".join(map(str, found or folders)) or "none"
        raise ValueError(f"the run {given!r} {problem}. Pass one of: {names}.")
    return found[0]


def _state(run: RunRecord) -> str:
    return "finished" if run.is_finished else "open"


def _time(seconds: float) -> str:
    return "?" if math.isnan(seconds) else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _print(rows: Sequence[Sequence[str]], head: Sequence[str] = (), right: Sequence[int] = ()) -> None:
    """Print a table of logged texts, which can't move the cursor."""
    clean = [
        ["".join(char if char.isprintable() else repr(char)[1:-1] for char in cell) for cell in row]
        for row in rows
    ]
    if clean:
        print_table(head, clean, right=right)


def make_parser() -> CommandParser:
    """Build the parser of the command."""
    parser = CommandParser(
        prog="accelfn runs",
        description="List and show runs of the JSONL tracker.",
        epilog=f"RUN is the folder of a run, its name, or latest. {FLAG_NOTE}",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|show")
    listing = actions.add_parser("list", help="list the runs of a directory")
    listing.add_argument("folder", metavar="DIR", nargs="?", help="same as --dir")
    showing = actions.add_parser("show", help="show configuration and values of a run")
    showing.add_argument("run", metavar="RUN")
    for action in (listing, showing):
        action.add_argument("--dir", metavar="DIR", default="runs", help="logging directory (runs)")
    return parser
