"""``accelfn runs``: list and show runs of the JSONL tracker, without torch."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


class RunTable(NamedTuple):
    """A logged table."""

    name: str
    step: int | None
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]


@dataclass(slots=True, kw_only=True)
class RunRecord:
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
        texts: The last logged text by name.
        images: Image files by name, relative to the folder.
        tables: Tables in the order in which they were logged.
        num_damaged: Number of unreadable lines, such as one that a killed program left incomplete.
    """

    folder: Path
    project: str = ""
    name: str = ""
    started_s: float = math.nan
    last_s: float = math.nan
    is_finished: bool = False
    num_starts: int = 0
    config: dict[str, Any] = field(default_factory=dict[str, Any])
    curves: dict[str, Curve] = field(default_factory=dict[str, Curve])
    texts: dict[str, str] = field(default_factory=dict[str, str])
    images: dict[str, tuple[str, ...]] = field(default_factory=dict[str, "tuple[str, ...]"])
    tables: tuple[RunTable, ...] = ()
    num_damaged: int = 0

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
    run = RunRecord(folder=file.parent, name=file.parent.name)
    points: dict[str, dict[int, float]] = {}
    last: dict[str, int] = {}  # the last step of each metric
    with file.open(encoding="utf-8", errors="replace", newline="\n") as lines:
        for line in lines:
            _add_line(run, line, points, last)
    for name, by_step in points.items():
        steps = sorted(by_step)
        run.curves[name] = Curve(tuple(steps), tuple(by_step[step] for step in steps))
    return run


def _add_line(run: RunRecord, line: str, points: dict[str, dict[int, float]], last: dict[str, int]) -> None:
    try:
        _add_event(run, json.loads(line), points, last)
    except ConfigurationError:
        raise
    except (AttributeError, KeyError, OverflowError, RecursionError, TypeError, ValueError):
        run.num_damaged += 1  # not JSON, or not an event


def _add_event(
    run: RunRecord, event: dict[str, Any], points: dict[str, dict[int, float]], last: dict[str, int]
) -> None:
    """Add an event to a run; unknown kinds are ignored."""
    kind = event.get("kind")
    run.last_s = float(event.get("time", math.nan))
    if kind == "start":
        if event.get("format", _FORMAT) > _FORMAT:
            raise ConfigurationError(
                f"the run {event.get('run')!r} has format {event['format']}, but this accelfn reads format "
                f"{_FORMAT}. Update accelfn."
            )
        run.started_s = run.last_s if run.num_starts == 0 else run.started_s
        run.num_starts += 1
        run.project, run.name = str(event.get("project", "")), str(event.get("run", ""))
        run.is_finished = False
    elif kind == "config":
        run.config.update(event.get("values") or {})
    elif kind == "log":
        step = None if event.get("step") is None else int(event["step"])
        for name, value in _flat(event.get("values") or {}):
            # JSON has no NaN or infinity, so they are logged as text.
            number = float(value) if value in ("NaN", "Infinity", "-Infinity") else value
            if isinstance(number, (int, float)):
                last[name] = last.get(name, -1) + 1 if step is None else step
                points.setdefault(name, {})[last[name]] = float(number)
            elif value is not None:
                run.texts[name] = str(value)
    elif kind == "images" and event["files"]:
        before = run.images.get(str(event.get("name")), ())
        run.images[str(event.get("name"))] = (*before, *map(str, event["files"]))
    elif kind == "table":
        columns = tuple(map(str, event.get("columns") or ()))
        rows = tuple(tuple(row) for row in event.get("rows") or ())
        run.tables = (*run.tables, RunTable(str(event.get("name")), event.get("step"), columns, rows))
    elif kind == "finish":
        run.is_finished = True


def _flat(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        path = f"{above}/{name}" if above else name
        if isinstance(value, dict):
            yield from _flat(cast("dict[str, Any]", value), path)
        else:
            yield path, value


def number_text(value: float) -> str:
    """Format a number with four digits.

    >>> number_text(0.123456), number_text(12000.0), number_text(1e-9), number_text(3.0)
    ('0.1235', '1.2e+04', '1e-09', '3')
    """
    return f"{value:.4g}"


# --- The command ------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """List or show runs."""
    {"list": _list, "show": _show}[options.action](options)
    return 0


def _list(options: argparse.Namespace) -> None:
    top = options.folder or options.dir
    runs = [run for folder in find_runs(top) if (run := _readable(folder)) is not None]
    runs.sort(key=lambda run: (math.isnan(run.started_s), run.started_s))
    if options.json:
        print(json.dumps([_facts(run) for run in runs], indent=1))
        return
    if not runs:
        print(f"no runs in {top!r}")
        return
    rows: list[tuple[str, ...]] = []
    for run in runs:
        last = [f"{name} {number_text(curve.values[-1])}" for name, curve in run.curves.items()]
        more = f", and {len(last) - _MAX_VALUES} more" if len(last) > _MAX_VALUES else ""
        name, values = run.folder.relative_to(top).as_posix(), ", ".join(last[:_MAX_VALUES]) + more
        rows.append((name, _time(run.started_s), _state(run), str(run.num_steps), values))
    _print_table(("run", "started", "state", "steps", "last values"), rows, right=(3,))


def _readable(folder: Path) -> RunRecord | None:
    try:
        return read_run(folder)
    except (ConfigurationError, OSError) as error:  # list the others
        print(f"accelfn runs list: skipping {folder}: {error}", file=sys.stderr)
        return None


def _show(options: argparse.Namespace) -> None:
    run = read_run(_find(options.run, options.dir))
    if options.json:
        print(json.dumps(_facts(run), indent=1))
        return
    duration_s = run.last_s - run.started_s
    duration = "?" if math.isnan(duration_s) else str(timedelta(seconds=round(duration_s)))
    started = f"{_time(run.started_s)}, {_state(run)}, {duration}"
    facts = [("run", run.name), ("project", run.project), ("folder", str(run.folder)), ("started", started)]
    if run.num_starts > 1:
        facts.append(("", f"resumed {'once' if run.num_starts == 2 else f'{run.num_starts - 1} times'}"))
    if run.num_damaged:
        facts.append(("damaged", f"{run.num_damaged} unreadable line{'s' * (run.num_damaged > 1)}"))
    _print_table((), facts)
    _print_table((), [(name, json.dumps(value)) for name, value in run.config.items()], space=True)
    rows: list[tuple[str, ...]] = []
    for name, curve in run.curves.items():
        numbers = [value for value in curve.values if not math.isnan(value)] or [math.nan]
        shown = (curve.values[0], curve.values[-1], min(numbers), max(numbers))
        rows.append((name, str(len(curve.steps)), *map(number_text, shown)))
    head = ("name", "steps", "first", "last", "min", "max")
    _print_table(head, rows, right=(1, 2, 3, 4, 5), space=True)
    _print_table((), list(run.texts.items()), space=True)
    for name, files in run.images.items():
        print(f"\nimages {_clean(name)}: {len(files)}, last: {_clean(str(run.folder / files[-1]))}")
    for table in run.tables:
        where = "" if table.step is None else f", step {table.step}"
        print(f"\ntable {_clean(table.name)}{where}")
        _print_table(table.columns, [tuple(map(str, row)) for row in table.rows])


def _find(given: str, top: str) -> Path:
    """Find a run by its folder, by its name or a prefix of it, or as ``latest``."""
    path = Path(given)
    if path.name == _FILE or (path / _FILE).is_file():
        return path
    folders = find_runs(top)
    if given == "latest" and folders:
        began = {folder: run.started_s for folder in folders if (run := _readable(folder)) is not None}
        return max(folders, key=lambda folder: (began.get(folder, -math.inf) > 0, began.get(folder, 0.0)))
    names = {folder: folder.relative_to(top).as_posix() for folder in folders}
    exact = [folder for folder in folders if given in (folder.name, names[folder])]
    matches = exact or [
        folder for folder in folders if folder.name.startswith(given) or names[folder].startswith(given)
    ]
    if len(matches) == 1:
        return matches[0]
    if not matches:
        runs = ", ".join(names.values()) or "none"
        raise FileNotFoundError(f"no run {given!r} in {top!r}. Runs there: {runs}.")
    raise ValueError(
        f"{given!r} is ambiguous. Pass one of: {', '.join(names[folder] for folder in matches)}."
    )


def _facts(run: RunRecord) -> dict[str, Any]:
    last = {name: curve.values[-1] for name, curve in run.curves.items()}
    return {
        "run": run.name,
        "project": run.project,
        "folder": str(run.folder),
        "started": None if math.isnan(run.started_s) else run.started_s,
        "state": _state(run),
        "steps": run.num_steps,
        "config": run.config,
        "last": {name: value if math.isfinite(value) else str(value) for name, value in last.items()},
        "texts": run.texts,
        "images": run.images,
        "tables": [table._asdict() for table in run.tables],
        "damaged_lines": run.num_damaged,
    }


def _state(run: RunRecord) -> str:
    return "finished" if run.is_finished else "open"


def _time(seconds: float) -> str:
    return "?" if math.isnan(seconds) else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _clean(text: str) -> str:
    r"""Escape line breaks and control characters of a logged text.

    >>> _clean("red \x1b[31m\n")
    'red \\x1b[31m\\n'
    """
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _print_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = (), *, space: bool = False
) -> None:
    """Print a table whose rows may differ in length. With ``space``, print an empty line before it."""
    if space and not rows:
        return
    width = max(map(len, (head, *rows)))
    even = [[_clean(cell) for cell in (*row, *[""] * (width - len(row)))] for row in (head, *rows)]
    print("\n" * space, end="")
    print_table(even[0] if head else (), even[1:], right=right)


def make_parser() -> CommandParser:
    """Build the parser of the command."""
    parser = CommandParser(
        prog="accelfn runs",
        description="List and show runs of the JSONL tracker.",
        epilog=f"RUN is the folder of a run, its name or a prefix of it, or latest. {FLAG_NOTE}",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|show")
    listing = actions.add_parser("list", help="list the runs of a directory")
    listing.add_argument("folder", metavar="DIR", nargs="?", help="same as --dir")
    showing = actions.add_parser("show", help="show configuration and values of a run")
    showing.add_argument("run", metavar="RUN")
    for action in (listing, showing):
        action.add_argument("--json", action="store_true", help="print JSON")
        action.add_argument("--dir", metavar="DIR", default="runs", help="logging directory (runs)")
    return parser
