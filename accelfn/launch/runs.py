"""``accelfn runs``: list, show and plot runs of the JSONL tracker, without torch."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from html import escape
from pathlib import Path
from typing import Any, NamedTuple, cast

from accelfn.errors import ConfigurationError
from accelfn.launch.command_line import FLAG_NOTE, CommandParser
from accelfn.launch.output import print_table, show_text
from accelfn.svg import GREY, INK, write_svg

_FORMAT = 1
_FILE = "events.jsonl"
_MAX_VALUES = 3
_MAX = 1e300  # differences of larger values overflow
# Layout of the image.
_WIDTH, _HEIGHT, _LEFT, _TOP, _BELOW, _RIGHT, _ROW = 360, 200, 70, 34, 30, 20, 20
_COLORS = ("#14407a", "#d9730d", "#2e8540", "#a23b72", "#7a6a00", "#5b5b5b", "#0b8a8f", "#b3261e")
_LINE = "#e2e2e2"


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

    @property
    def title(self) -> str:
        """Project and name."""
        return f"{self.project}/{self.name}" if self.project else self.name


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


# --- Images ---------------------------------------------------------------------------------------


def draw_runs_svg(runs: Sequence[RunRecord], names: Sequence[str], *, log_scale: bool = False) -> str:
    """Plot metrics of runs as an SVG document, with a panel for each metric. Pure.

    Args:
        runs: Runs, one line each.
        names: Names of the metrics.
        log_scale: Use a logarithmic scale, and omit values that aren't positive.

    >>> run = RunRecord(folder=Path(), curves={"loss": Curve((0, 1), (2.0, 1.0))})
    >>> draw_runs_svg([run], ["loss"]).count("<polyline")
    1
    """
    across, down = _LEFT + _WIDTH + _RIGHT, _TOP + _HEIGHT + _BELOW
    columns = min(2, max(1, len(names)))
    width, plots = columns * across, -(-len(names) // columns) * down
    height = plots + _ROW * (len(runs) + 1)
    parts: list[str] = []
    for number, name in enumerate(names):
        left, top = number % columns * across + _LEFT, number // columns * down + _TOP
        curves = [run.curves.get(name, Curve((), ())) for run in runs]
        parts += [f'<g transform="translate({left} {top})">', *_panel(name, curves, log_scale), "</g>"]
    for number, run in enumerate(runs):
        top = plots + _ROW * number + _ROW // 2
        parts.append(f'<path d="M{_LEFT} {top}h30" {_stroke(number)} stroke-width="2"/>')
        parts.append(_text(_LEFT + 38, top + 4, run.title, INK))
    return write_svg(width, height, ", ".join(names), parts, font="sans-serif", font_size=12)


def _panel(name: str, curves: Sequence[Curve], log_scale: bool) -> list[str]:
    parts = [list(_split_curve(curve, log_scale)) for curve in curves]
    flat = [point for one in parts for part in one for point in part]
    lines = [_text(0, -12, name, INK, size=14)]
    if not flat:
        return [*lines, _text(0, _HEIGHT // 2, "no values", GREY)]
    first, last = min(step for step, _ in flat), max(step for step, _ in flat)
    ticks = _ticks(min(value for _, value in flat), max(value for _, value in flat))

    def place(step: float, value: float) -> str:
        x = _WIDTH * (step - first) / (last - first) if last > first else _WIDTH / 2
        return f"{x:.1f},{_HEIGHT * (ticks[-1] - value) / (ticks[-1] - ticks[0]):.1f}"

    for tick in ticks:
        y = _HEIGHT * (ticks[-1] - tick) / (ticks[-1] - ticks[0])
        lines.append(f'<path d="M0 {y:.1f}h{_WIDTH}" stroke="{_LINE}"/>')
        # 10**tick may overflow.
        label = number_text(tick) if not log_scale else number_text(10**tick) if tick < 300 else f"1e{tick:g}"
        lines.append(_text(-6, y + 4, label, GREY, anchor="end"))
    lines.append(_text(0, _HEIGHT + 16, f"{first}", GREY))
    lines.append(_text(_WIDTH, _HEIGHT + 16, f"step {last}", GREY, anchor="end"))
    for number, one in enumerate(parts):
        for part in one:
            points = [place(*point) for point in part]
            if len(points) == 1:
                x, y = points[0].split(",")
                lines.append(f'<circle cx="{x}" cy="{y}" r="2.5" fill="{_color(number)}"/>')
            else:
                line = " ".join(points)
                lines.append(f'<polyline points="{line}" fill="none" {_stroke(number)} stroke-width="1.5"/>')
    return lines


def _split_curve(curve: Curve, log_scale: bool) -> Iterator[list[tuple[int, float]]]:
    """Yield the parts of a curve between values that can't be drawn."""
    part: list[tuple[int, float]] = []
    for step, value in zip((*curve.steps, 0), (*curve.values, math.nan), strict=True):
        if abs(value) < _MAX and not (log_scale and value <= 0):  # false for NaN too
            part.append((step, math.log10(value) if log_scale else value))
        elif part:
            yield _thin(part)
            part = []


def _thin(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Keep the minimum and maximum of each pixel column."""
    size = len(points) // _WIDTH
    if size < 4:
        return points
    kept = {points[0], points[-1]}
    for begin in range(0, len(points), size):
        column = points[begin : begin + size]
        kept |= {min(column, key=lambda point: point[1]), max(column, key=lambda point: point[1])}
    return sorted(kept)


def _ticks(low: float, high: float) -> list[float]:
    """Return round tick values that cover ``low`` to ``high``.

    >>> _ticks(0.13, 2.2)
    [0.0, 1.0, 2.0, 3.0]
    >>> _ticks(5.0, 5.0)
    [4.0, 5.0, 6.0]
    """
    most = max(abs(low), abs(high))
    if high - low < max(most * 1e-9, 1e-300):  # ticks would be indistinguishable
        spread = max(most / 5, high - low) or 1.0
        return [low - spread, low, low + spread]
    rough = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(rough))
    # The default is for a logarithm that was rounded down.
    step = next((power * part for part in (1, 2, 5, 10) if power * part >= rough), power * 20)
    return [number * step for number in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _color(number: int) -> str:
    return _COLORS[number % len(_COLORS)]


def _stroke(number: int) -> str:
    """Return color and dashes of a line. Dashes distinguish lines with the same color."""
    dashes = number // len(_COLORS)
    return f'stroke="{_color(number)}"' + (f' stroke-dasharray="{2 + 3 * dashes} 3"' if dashes else "")


def _text(x: float, y: float, text: str, color: str, *, anchor: str = "start", size: int = 12) -> str:
    attributes = f'fill="{color}" text-anchor="{anchor}" font-size="{size}"'
    return f'<text x="{x:g}" y="{y:.1f}" {attributes}>{escape(text)}</text>'


def number_text(value: float) -> str:
    """Format a number with four digits.

    >>> number_text(0.123456), number_text(12000.0), number_text(1e-9), number_text(3.0)
    ('0.1235', '1.2e+04', '1e-09', '3')
    """
    return f"{value:.4g}"


# --- The command ------------------------------------------------------------------------------------


def run(options: argparse.Namespace) -> int:
    """List, show or plot runs."""
    {"list": _list, "show": _show, "plot": _plot}[options.action](options)
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


def _plot(options: argparse.Namespace) -> None:
    runs = [read_run(_find(one, options.dir)) for one in options.runs]
    known = list(dict.fromkeys(name for run in runs for name in run.curves))
    missing = [name for name in options.names or () if name not in known]
    if missing:
        raise ValueError(
            f"no run has the metrics {', '.join(map(repr, missing))}. Available: "
            f"{', '.join(known) or 'none'}."
        )
    names = options.names or known
    if not names:
        raise ValueError("nothing to plot: no metrics were logged.")
    if options.output is None and sys.stdout.isatty():
        raise ValueError("can't plot on a terminal. Pass --output FILE.svg, or use accelfn runs show.")
    show_text(draw_runs_svg(runs, names, log_scale=options.log_scale), options.output)


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
        description="List, show and plot runs of the JSONL tracker.",
        epilog=f"RUN is the folder of a run, its name or a prefix of it, or latest. {FLAG_NOTE}",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="list|show|plot")
    listing = actions.add_parser("list", help="list the runs of a directory")
    listing.add_argument("folder", metavar="DIR", nargs="?", help="same as --dir")
    showing = actions.add_parser("show", help="show configuration and values of a run")
    showing.add_argument("run", metavar="RUN")
    plotting = actions.add_parser("plot", help="plot metrics of one or more runs")
    plotting.add_argument("runs", metavar="RUN", nargs="+")
    plotting.add_argument("--names", metavar="NAME", nargs="+", help="metrics to plot, such as loss (all)")
    plotting.add_argument("--output", metavar="FILE", help="write the SVG image to this file")
    plotting.add_argument("--log_scale", action="store_true", help="use a logarithmic scale")
    for action in (listing, showing):
        action.add_argument("--json", action="store_true", help="print JSON")
    for action in (listing, showing, plotting):
        action.add_argument("--dir", metavar="DIR", default="runs", help="logging directory (runs)")
    return parser
