"""``accelfn runs``: list, show and draw what the JSONL tracker has written. Loads no torch."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from accelfn.errors import ConfigurationError
from accelfn.launch.arguments import CommandParser, read_arguments
from accelfn.launch.output import print_table
from accelfn.launch.run_curves import draw_runs_svg, draw_runs_text, names_of, number_text
from accelfn.launch.run_files import RunRecord, find_runs, read_run

_MOST_VALUES = 3


def run_runs(argv: Sequence[str]) -> int:
    """List, show or draw runs. Effect: prints, or writes a file where one is named.

    Args:
        argv: Arguments after ``runs``.

    Returns:
        The exit status: 0, or 2 after one sentence on what is wrong.

    Raises:
        SystemExit: 0 after ``--help``; 2 after one sentence on what is wrong.
    """
    options = read_arguments(runs_parser(), argv)
    act = {"list": _list, "show": _show, "plot": _plot}[options.action]
    try:
        act(options)
    except (FileNotFoundError, ValueError, ConfigurationError) as error:
        print(f"accelfn runs {options.action}: error: {error}", file=sys.stderr)
        return 2
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
        more = f", and {len(last) - _MOST_VALUES} more" if len(last) > _MOST_VALUES else ""
        name = run.folder.relative_to(top).as_posix()
        values = ", ".join(last[:_MOST_VALUES]) + more
        rows.append((name, _time(run.started_s), _state(run), str(run.num_steps), values))
    _print_table(("run", "began", "state", "steps", "last values"), rows, right=(3,))


def _readable(folder: Path) -> RunRecord | None:
    try:
        return read_run(folder)
    except (ConfigurationError, OSError) as error:  # one of them doesn't hide the others
        print(f"accelfn runs list: {folder} is left out: {error}", file=sys.stderr)
        return None


def _show(options: argparse.Namespace) -> None:
    run = read_run(_find(options.run, options.dir))
    if options.json:
        print(json.dumps(_facts(run), indent=1))
        return
    facts = [
        ("run", run.name),
        ("project", run.project),
        ("folder", str(run.folder)),
        ("began", f"{_time(run.started_s)}, {_state(run)}, {_duration(run.last_s - run.started_s)}"),
    ]
    if run.num_starts > 1:
        facts.append(("", f"resumed {'once' if run.num_starts == 2 else f'{run.num_starts - 1} times'}"))
    if run.num_damaged:
        facts.append(("damaged", f"{run.num_damaged} lines can't be read"))
    _print_table((), facts)
    if run.config:
        print()
        _print_table((), [(name, json.dumps(value)) for name, value in run.config.items()])
    if run.curves:
        rows: list[tuple[str, ...]] = []
        for name, curve in run.curves.items():
            numbers = [value for value in curve.values if not math.isnan(value)] or [math.nan]
            shown = (curve.values[0], curve.values[-1], min(numbers), max(numbers))
            rows.append((name, str(len(curve.steps)), *map(number_text, shown)))
        print()
        _print_table(("name", "steps", "first", "last", "least", "most"), rows, right=(1, 2, 3, 4, 5))
    if run.texts:
        print()
        _print_table((), list(run.texts.items()))
    for name, files in run.images.items():
        print(f"\nimages {_clean(name)}: {len(files)}, the last is {_clean(str(run.folder / files[-1]))}")
    for table in run.tables:
        where = "" if table.step is None else f", step {table.step}"
        print(f"\ntable {_clean(table.name)}{where}")
        _print_table(table.columns, [tuple(map(str, row)) for row in table.rows])


def _plot(options: argparse.Namespace) -> None:
    runs = [read_run(_find(one, options.dir)) for one in options.runs]
    names = names_of(runs, options.names or ())
    if not names:
        raise ValueError("there is nothing to draw: no numbers have been logged yet.")
    if options.output is None and sys.stdout.isatty():
        is_ascii = "utf" not in (sys.stdout.encoding or "").lower()
        for line in draw_runs_text(runs, names, is_ascii=is_ascii).splitlines():
            print(_clean(line))
        print("--output FILE.svg draws a picture.")
        return
    text = draw_runs_svg(runs, names, log_scale=options.log_scale)
    if options.output is None:
        print(text.rstrip("\n"))
        return
    try:
        Path(options.output).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"can't write {options.output!r}: {error.strerror}. Check --output.") from None


def _find(given: str, top: str) -> Path:
    """Find a run by its folder, by its name or the beginning of that, or as the latest one."""
    path = Path(given)
    if path.name == "events.jsonl" or (path / "events.jsonl").is_file():
        return path
    folders = find_runs(top)
    if given == "latest" and folders:
        return max(folders, key=_began)
    names = {folder: folder.relative_to(top).as_posix() for folder in folders}
    exact = [folder for folder in folders if given in (folder.name, names[folder])]
    found = exact or [one for one in folders if one.name.startswith(given) or names[one].startswith(given)]
    if len(found) == 1:
        return found[0]
    if not found:
        there = ", ".join(names.values()) or "none"
        raise FileNotFoundError(f"there is no run {given!r} in {top!r}. Runs there: {there}.")
    several = ", ".join(names[one] for one in found)
    raise ValueError(f"{given!r} may mean several runs: {several}. Give one of these.")


def _began(folder: Path) -> float:
    run = _readable(folder)
    return -math.inf if run is None or math.isnan(run.started_s) else run.started_s


def _facts(run: RunRecord) -> dict[str, Any]:
    return {
        "run": run.name,
        "project": run.project,
        "folder": str(run.folder),
        "began": None if math.isnan(run.started_s) else run.started_s,
        "state": _state(run),
        "steps": run.num_steps,
        "config": dict(run.config),
        "last": {name: _json(curve.values[-1]) for name, curve in run.curves.items()},
        "texts": dict(run.texts),
        "images": {name: list(files) for name, files in run.images.items()},
        "tables": [table._asdict() for table in run.tables],
        "damaged_lines": run.num_damaged,
    }


def _json(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _state(run: RunRecord) -> str:
    return "finished" if run.is_finished else "open"


def _time(seconds: float) -> str:
    return "?" if math.isnan(seconds) else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _duration(seconds: float) -> str:
    """Write a duration.

    >>> _duration(3.21), _duration(125), _duration(7322)
    ('3.2 s', '2 min 5 s', '2 h 2 min')
    """
    if math.isnan(seconds):
        return "?"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _clean(text: str) -> str:
    r"""Return a text that was logged as one line that does nothing to a terminal.

    >>> _clean("red \x1b[31m\n")
    'red \\x1b[31m\\n'
    """
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    """Print what was logged: rows of any length, and texts with any signs."""
    width = max(map(len, (head, *rows)))
    even = [[_clean(cell) for cell in (*row, *[""] * (width - len(row)))] for row in (head, *rows)]
    print_table(even[0] if head else (), even[1:], right=right)


def runs_parser() -> CommandParser:
    """Describe the arguments of the command."""
    parser = CommandParser(
        prog="accelfn runs",
        description="List, show and draw runs that the JSONL tracker has written.",
        epilog="In names of flags - and _ mean the same. RUN is a run's folder, its name or the beginning of "
        "that, or the word latest.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|show|plot")
    listing = actions.add_parser("list", help="a table of the runs of a folder")
    listing.add_argument("folder", metavar="DIR", nargs="?", help="the same as --dir")
    showing = actions.add_parser("show", help="configuration and values of a run")
    showing.add_argument("run", metavar="RUN")
    plotting = actions.add_parser("plot", help="curves of one run or several")
    plotting.add_argument("runs", metavar="RUN", nargs="+")
    plotting.add_argument(
        "--names", metavar="NAME", nargs="+", help="what to draw, such as loss (all numbers)"
    )
    plotting.add_argument("--output", metavar="FILE", help="write an SVG image to this file")
    plotting.add_argument("--log_scale", action="store_true", help="draw values by their logarithm")
    for one in (listing, showing):
        one.add_argument("--json", action="store_true", help="for programs")
    for one in (listing, showing, plotting):
        one.add_argument("--dir", metavar="DIR", default="runs", help="where to look (runs)")
    return parser
