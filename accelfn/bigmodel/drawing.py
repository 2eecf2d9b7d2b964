"""Device plans and memory estimates as text, SVG and HTML."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby

from accelfn.bigmodel.device_map import DevicePlan, PlacePlan
from accelfn.bigmodel.estimate import DtypeEstimate, MemoryEstimate
from accelfn.tree.bars import Bar, draw_bars_svg
from accelfn.tree.structure import size_text

_BAR_CHARS = 30

_PLACE_PARTS = (
    ("weights", "#7fb0dc"),
    ("reserved for the largest later layer", "#f3c9a5"),
    ("free", "#eeeeee"),
)


def draw_device_plan(plan: DevicePlan) -> str:
    """Draw a plan as a text table. Pure.

    ``#`` is used memory, ``/`` memory reserved for the largest later layer, and ``.`` free memory.
    The modules of each place are listed below; those marked as a part are split over several places.

    Args:
        plan: From :func:`plan_device_map`.

    Returns:
        Lines without a final newline.

    >>> from torch import nn
    >>> from accelfn.bigmodel.device_map import plan_device_map
    >>> from accelfn.bigmodel.model_info import read_shape
    >>> shape = read_shape(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)))
    >>> print(draw_device_plan(plan_device_map(shape, {0: 210, "cpu": 600})))
    place   used  reserved  budget
    0       64 B     100 B   210 B  ##########///////////////.....
    cpu    172 B       0 B   600 B  #########.....................
    disk     0 B       0 B    none
    <BLANKLINE>
    0      0
    cpu    1..2
    """
    rows = [("place", "used", "reserved", "budget", "")]
    for place in plan.places:
        budget = "none" if place.budget is None else size_text(place.budget)
        rows.append((str(place.place), size_text(place.used), size_text(place.reserved), budget, _bar(place)))
    width = max(len(row[0]) for row in rows)
    modules = [
        f"{place.place!s:<{width}}  {_modules_text(place, plan)}" for place in plan.places if place.leaves
    ]
    sections = [_table(rows), modules, list(_notes(plan))]
    return "\n\n".join("\n".join(section) for section in sections if section)


def draw_device_plan_svg(plan: DevicePlan, title: str = "Device plan") -> str:
    """Draw a plan as an SVG image: used, reserved and free memory of each place. Pure.

    Args:
        plan: From :func:`plan_device_map`.
        title: The title of the image.

    Returns:
        A complete SVG document.
    """
    bars: list[Bar] = []
    for place in plan.places:
        free = max(0, (place.budget or 0) - place.used - place.reserved)
        bars.append(Bar(str(place.place), _usage_text(place), (place.used, place.reserved, free)))
    return draw_bars_svg([title], bars, _PLACE_PARTS)


def draw_device_plan_html(plan: DevicePlan, title: str = "Device plan") -> str:
    """Draw a plan as a self-contained HTML page: the image, and a list of all tensors. Pure.

    Args:
        plan: From :func:`plan_device_map`.
        title: The title of the page.

    Returns:
        A complete HTML document.
    """
    lists: list[str] = []
    for place in plan.places:
        rows = "".join(_html_rows((leaf.name, size_text(leaf.num_bytes)) for leaf in place.leaves))
        count = "1 tensor" if len(place.leaves) == 1 else f"{len(place.leaves)} tensors"
        modules = escape(_modules_text(place, plan))
        lists.append(
            f"<details><summary><b>{place.place}</b>: {count}, {_usage_text(place)}. {modules}</summary>"
            f"<table>{rows}</table></details>"
        )
    notes = "".join(f"<p>{escape(note)}</p>" for note in _notes(plan))
    image = draw_device_plan_svg(plan, title).rstrip()
    return _page(title, f"<h1>{escape(title)}</h1>", image, *lists, notes)


def _page(title: str, *body: str) -> str:
    style = (
        "body{font-family:sans-serif;margin:2em;max-width:80em}svg{max-width:100%;height:auto}"
        "td,th{padding:.2em 1em .2em 0;font-family:monospace;text-align:right}"
        "td:first-child,th:first-child{text-align:left}summary{margin:.5em 0}"
    )
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{style}</style>'
    return "\n".join(
        ["<!doctype html>", f'<html lang="en"><head>{head}</head><body>', *body, "</body></html>\n"]
    )


def _html_rows(rows: Iterable[Iterable[str]], tag: str = "td") -> Iterator[str]:
    for row in rows:
        yield "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in row) + "</tr>"


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align the first four columns of rows, the first one to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if 0 < number < 4 else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _usage_text(place: PlacePlan) -> str:
    budget = "no limit" if place.budget is None else size_text(place.budget)
    return f"{size_text(place.used)} of {budget}"


def _bar(place: PlacePlan) -> str:
    if place.budget is None:
        return ""
    # Rounded up, so that small sizes are visible; free memory is the remainder.
    used = -(-place.used * _BAR_CHARS // place.budget) if place.budget else 0
    reserved = min(_BAR_CHARS - used, -(-place.reserved * _BAR_CHARS // place.budget)) if place.budget else 0
    return "#" * used + "/" * reserved + "." * (_BAR_CHARS - used - reserved)


def _block_of(name: str) -> str:
    """Return the module that represents a tensor: the outermost numbered one, or its own module.

    >>> _block_of("model.layers.3.mlp.0.weight"), _block_of("model.norm.weight"), _block_of("scale")
    ('model.layers.3', 'model.norm', 'scale')
    """
    path = name.split(".")
    position = next((position for position, part in enumerate(path[:-1]) if part.isdecimal()), None)
    return ".".join(path[: position + 1] if position is not None else path[:-1] or path)


def _modules_text(place: PlacePlan, plan: DevicePlan) -> str:
    """List the modules on a place in order; a part if other tensors of one are on another place."""
    elsewhere = {_block_of(leaf.name) for other in plan.places if other is not place for leaf in other.leaves}
    names = [_block_of(leaf.name) for leaf in place.leaves]
    return ", ".join(_ranges(f"{name} (part)" if name in elsewhere else name for name, _ in groupby(names)))


def _ranges(names: Iterable[str]) -> Iterator[str]:
    """Write consecutive items of a list as first..last.

    >>> list(_ranges(["a.0", "a.1", "a.2 (part)"]))
    ['a.0..1', 'a.2 (part)']
    """
    run: list[tuple[str, int]] = []
    for name in (*names, ""):
        path, _, last = name.rpartition(".")
        fits = last.isdecimal()
        if run and not (fits and run[-1] == (path, int(last) - 1)):
            first, end = run[0][1], run[-1][1]
            text = f"{run[0][0]}.{first}" if run[0][0] else str(first)
            yield text if first == end else f"{text}..{end}"
            run = []
        if fits:
            run.append((path, int(last)))
        elif name:
            yield name


def _notes(plan: DevicePlan) -> Iterator[str]:
    yield from (f"tied: {' = '.join(names)}" for names in plan.ties)
    for copy in plan.copies:
        names = ", ".join(f"{name} on {place}" for name, place in zip(copy.names, copy.places, strict=True))
        yield f"copies ({size_text(copy.num_bytes)} each): {names}"
    yield from (f"warning: {text}" for text in plan.warnings)


_HEADS = ("dtype", "largest layer", "all weights", "training with Adam")

_PARTS = (
    ("largest layer", "#14407a"),
    ("other weights", "#7fb0dc"),
    ("gradients", "#f3c9a5"),
    ("Adam states", "#e0945a"),
)


def draw_estimate(estimate: MemoryEstimate, title: str) -> str:
    """Draw an estimate as a text table. Pure.

    Args:
        estimate: From :func:`estimate_memory`.
        title: The name of the model.

    Returns:
        Lines without a final newline.
    """
    return "\n".join([*_summary(estimate, title), "", *_table([_HEADS, *map(_cells, estimate.dtypes)])])


def draw_estimate_svg(estimate: MemoryEstimate, title: str) -> str:
    """Draw an estimate as an SVG image: for each dtype a bar for the weights and one for training. Pure.

    Args:
        estimate: From :func:`estimate_memory`.
        title: The name of the model.

    Returns:
        A complete SVG document.
    """
    bars = [bar for row in estimate.dtypes for bar in _bars(row)]
    return draw_bars_svg(_summary(estimate, title), bars, _PARTS)


def draw_estimate_html(estimate: MemoryEstimate, title: str) -> str:
    """Draw an estimate as a self-contained HTML page with the image and the table. Pure.

    Args:
        estimate: From :func:`estimate_memory`.
        title: The name of the model.

    Returns:
        A complete HTML document.
    """
    rows = [*_html_rows([_HEADS], "th"), *_html_rows(map(_cells, estimate.dtypes))]
    image = draw_estimate_svg(estimate, title)
    return _page(_summary(estimate, title)[0], image, "<table>", *rows, "</table>")


def _cells(row: DtypeEstimate) -> tuple[str, str, str, str]:
    training = "-" if row.training is None else size_text(row.training.peak)
    return row.dtype, size_text(row.largest_layer), size_text(row.total), training


def _summary(estimate: MemoryEstimate, title: str) -> list[str]:
    lines = [f"{title}: {_count_text(estimate.num_parameters)} parameters"]
    names = [name for row in estimate.dtypes[:1] for name in row.largest_names]
    if names:
        more = f" and {len(names) - 1} more of its size" if len(names) > 1 else ""
        lines.append(f"largest layer: {names[0] or 'the whole model'}{more}")
    return lines


def _count_text(number: int) -> str:
    """Format a number of parameters.

    >>> _count_text(950), _count_text(109_482_240), _count_text(7_241_732_096)
    ('950', '109.5 million', '7.2 billion')
    """
    for unit, name in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return str(number)


def _bars(row: DtypeEstimate) -> list[Bar]:
    weights = (row.largest_layer, row.total - row.largest_layer)
    bars = [Bar(row.dtype, "weights", weights)]
    if row.training is not None:
        bars.append(Bar("", "training", (*weights, row.training.gradients, row.training.optimizer)))
    return bars
