"""Curves of runs as a picture: a panel for each name, a line for each run. Pure, and without any package.

The other pictures of accelfn stand beside what they draw, behind torch, which this command does without.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from accelfn.launch.run_files import Curve, RunRecord

# Of the drawing, in its own units.
_WIDTH, _HEIGHT, _LEFT, _TOP, _BELOW, _RIGHT = 360, 200, 70, 34, 30, 20
_COLUMNS, _ROW, _CHAR = 2, 20, 8
_COLORS = ("#14407a", "#d9730d", "#2e8540", "#a23b72", "#7a6a00", "#5b5b5b", "#0b8a8f", "#b3261e")
_INK, _GREY, _LINE, _GROUND = "#111111", "#666666", "#e2e2e2", "#ffffff"
_TICKS = 4
_MOST = 1e300  # beyond it differences overflow


def names_of(runs: Sequence[RunRecord], wanted: Sequence[str] = ()) -> list[str]:
    """Return the names of curves that runs have, in the order in which they were first logged.

    Args:
        runs: To look in.
        wanted: Only these, in this order.

    Raises:
        ValueError: No run has a curve of a wanted name.
    """
    there = list(dict.fromkeys(name for run in runs for name in run.curves))
    missing = [name for name in wanted if name not in there]
    if missing:
        raise ValueError(
            f"no run has numbers called {', '.join(map(repr, missing))}. There are: "
            f"{', '.join(there) or 'none'}."
        )
    return list(wanted) or there


def draw_runs_svg(runs: Sequence[RunRecord], names: Sequence[str], *, log_scale: bool = False) -> str:
    """Draw curves of runs over each other, a panel for each name, as an SVG image. Pure.

    Args:
        runs: Each is a line of its own colour.
        names: Of the curves.
        log_scale: Whether values are drawn by their logarithm; what isn't positive is left out then.

    Returns:
        A whole SVG document.

    >>> from pathlib import Path
    >>> curves = {"loss": Curve((0, 1), (2.0, 1.0))}
    >>> run = RunRecord(folder=Path(), config={}, curves=curves, texts={}, images={})
    >>> draw_runs_svg([run], ["loss"]).count("<polyline")
    1
    """
    across, down = _LEFT + _WIDTH + _RIGHT, _TOP + _HEIGHT + _BELOW
    columns = min(_COLUMNS, max(1, len(names)))
    legend = _ROW * len(runs) + _ROW
    width, height = columns * across, -(-len(names) // columns) * down + legend
    parts: list[str] = []
    for number, name in enumerate(names):
        curves = [run.curves.get(name, Curve((), ())) for run in runs]
        left = number % columns * across + _LEFT
        parts += _panel(left, number // columns * down + _TOP, name, curves, log_scale)
    for number, run in enumerate(runs):
        top = height - legend + _ROW * number + _ROW // 2
        parts.append(
            f'<line x1="{_LEFT}" y1="{top}" x2="{_LEFT + 30}" y2="{top}" {_stroke(number)} stroke-width="2"/>'
        )
        parts.append(_text(_LEFT + 38, top + 4, _title(run), _INK))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" font-family="sans-serif" font-size="12">'
    )
    title = f"<title>{escape(', '.join(names))}</title>"
    ground = f'<rect width="{width}" height="{height}" fill="{_GROUND}"/>'
    return "\n".join([head, title, ground, *parts, "</svg>\n"])


def draw_runs_text(runs: Sequence[RunRecord], names: Sequence[str], *, is_ascii: bool = False) -> str:
    """Draw curves of runs for a terminal: a line for each, with its first and last value. Pure.

    Args:
        runs: As for :func:`draw_runs_svg`.
        names: The same.
        is_ascii: Whether to do without block characters.

    >>> from pathlib import Path
    >>> curves = {"loss": Curve((0, 1, 2), (2.0, 1.0, 0.5))}
    >>> run = RunRecord(folder=Path(), name="one", config={}, curves=curves, texts={}, images={})
    >>> print(draw_runs_text([run], ["loss"]))
    loss
      one  2 █▃▁ 0.5  (3 steps)
    """
    levels = "_.-~=+*#" if is_ascii else "▁▂▃▄▅▆▇█"
    lines: list[str] = []
    width = max((len(_title(run)) for run in runs), default=0)
    for name in names:
        there = [(run, run.curves[name]) for run in runs if name in run.curves]
        values = [value for _, curve in there for value in curve.values if abs(value) < _MOST]
        low, high = min(values, default=0.0), max(values, default=0.0)
        lines.append(name)
        for run, curve in there:
            line = "".join(
                levels[round((value - low) / ((high - low) or 1.0) * (len(levels) - 1))]
                if abs(value) < _MOST
                else " "
                for value in _sampled(curve.values)
            )
            first, last = number_text(curve.values[0]), number_text(curve.values[-1])
            lines.append(f"  {_title(run):<{width}}  {first} {line} {last}  ({len(curve.steps)} steps)")
    return "\n".join(lines)


def _sampled(values: Sequence[float]) -> Sequence[float]:
    """Take at most so many values, evenly, as fit into a line of a terminal; the last one stays."""
    most = 60
    if len(values) <= most:
        return values
    return [values[number * (len(values) - 1) // (most - 1)] for number in range(most)]


def number_text(value: float) -> str:
    """Write a number briefly.

    >>> number_text(0.123456), number_text(12000.0), number_text(1e-9), number_text(3.0)
    ('0.1235', '1.2e+04', '1e-09', '3')
    """
    return f"{value:.4g}"


def _panel(left: int, top: int, name: str, curves: Sequence[Curve], log_scale: bool) -> list[str]:
    points = [list(_finite(curve, log_scale)) for curve in curves]
    flat = [point for one in points for point in one if point is not None]
    lines = [_text(left, top - 12, name, _INK, size=14)]
    if not flat:
        return [*lines, _text(left, top + _HEIGHT // 2, "nothing to draw", _GREY)]
    first, last = min(step for step, _ in flat), max(step for step, _ in flat)
    ticks = _ticks(min(value for _, value in flat), max(value for _, value in flat))
    low, high = ticks[0], ticks[-1]

    def place(step: float, value: float) -> tuple[float, float]:
        across = (step - first) / (last - first) if last > first else 0.5
        return left + _WIDTH * across, top + _HEIGHT * (high - value) / (high - low)

    for tick in ticks:
        _, y = place(first, tick)
        lines.append(f'<line x1="{left}" y1="{y:.1f}" x2="{left + _WIDTH}" y2="{y:.1f}" stroke="{_LINE}"/>')
        # 10**tick is no float any more where ticks reach beyond the values.
        label = number_text(tick) if not log_scale else number_text(10**tick) if tick < 300 else f"1e{tick:g}"
        lines.append(_text(left - 6, y + 4, label, _GREY, anchor="end"))
    bottom = top + _HEIGHT + 16
    lines.append(_text(left, bottom, f"{first}", _GREY))
    if last > first:
        lines.append(_text(left + _WIDTH, bottom, f"step {last}", _GREY, anchor="end"))
    for number, one in enumerate(points):
        for part in _parts(_thinned(one)):
            drawn = [place(*point) for point in part]
            if len(drawn) == 1:
                x, y = drawn[0]
                lines.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{_color(number)}"/>')
            else:
                text = " ".join(f"{x:.1f},{y:.1f}" for x, y in drawn)
                lines.append(f'<polyline points="{text}" fill="none" {_stroke(number)} stroke-width="1.5"/>')
    return lines


_Point = tuple[int, float]


def _finite(curve: Curve, log_scale: bool) -> Iterator[_Point | None]:
    """Yield the points of a curve, and None where there is none to draw."""
    for step, value in zip(curve.steps, curve.values, strict=True):
        if not abs(value) < _MOST or (log_scale and value <= 0):  # NaN isn't less either
            yield None
        else:
            yield step, math.log10(value) if log_scale else value


def _thinned(points: Sequence[_Point | None]) -> Sequence[_Point | None]:
    """Leave out what can't be seen: of many points, the lowest and the highest of each stretch stay."""
    stretch = len(points) // _WIDTH
    if stretch < 4:
        return points
    kept: list[_Point | None] = []
    for begin in range(0, len(points), stretch):
        some = points[begin : begin + stretch]
        there = [point for point in some if point is not None]
        if there:
            ends = {min(there, key=lambda point: point[1]), max(there, key=lambda point: point[1])}
            kept += sorted({*ends, *(there[-1:] if begin + stretch >= len(points) else ())})
        if len(there) < len(some):
            kept.append(None)
    return kept


def _parts(points: Sequence[_Point | None]) -> Iterator[list[_Point]]:
    part: list[_Point] = []
    for point in (*points, None):
        if point is not None:
            part.append(point)
        elif part:
            yield part
            part = []


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers that reach from ``low`` to ``high``.

    >>> _ticks(0.13, 2.2)
    [0.0, 1.0, 2.0, 3.0]
    >>> _ticks(5.0, 5.0)
    [4.0, 5.0, 6.0]
    """
    most = max(abs(low), abs(high))
    if high - low < max(most * 1e-9, 1e-300):  # no number lies between that could be told apart
        spread = max(most / 5, high - low) or 1.0
        return [low - spread, low, low + spread]
    rough = (high - low) / _TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    # The last one is for a logarithm that was rounded down to the power below.
    step = next((power * part for part in (1, 2, 5, 10) if power * part >= rough), power * 20)
    begin, end = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(begin, end + 1)]


def _title(run: RunRecord) -> str:
    return f"{run.project}/{run.name}" if run.project else run.name


def _color(number: int) -> str:
    return _COLORS[number % len(_COLORS)]


def _stroke(number: int) -> str:
    """Return colour and dashes of a line: where colours begin again, dashes tell lines apart."""
    dashes = number // len(_COLORS)
    return f'stroke="{_color(number)}"' + (f' stroke-dasharray="{2 + 3 * dashes} 3"' if dashes else "")


def _text(x: float, y: float, text: str, color: str, *, anchor: str = "start", size: int = 12) -> str:
    return (
        f'<text x="{x:g}" y="{y:.1f}" fill="{color}" text-anchor="{anchor}" font-size="{size}">'
        f"{escape(text)}</text>"
    )
