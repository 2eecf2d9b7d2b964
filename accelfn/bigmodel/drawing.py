"""Plans and estimates as text, SVG and HTML."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from html import escape
from typing import NamedTuple

from accelfn.bigmodel.device_map import DevicePlan, PlacePlan
from accelfn.bigmodel.estimate import DtypeEstimate, MemoryEstimate
from accelfn.tree.bars import Bar, draw_bars_svg
from accelfn.tree.structure import size_text

_BAR_CHARS = 30

# Of the drawing, in its own units.
_CHAR, _ROW, _EDGE, _BETWEEN, _BAR = 8, 34, 10, 8, 640
_COLORS = ("#cfe3f7", "#f7e3b5", "#d3ecd0", "#ecd3e6", "#f3c9a5", "#cdd3ee")
_INK, _GREY, _GROUND = "#111111", "#666666", "#ffffff"


class _Block(NamedTuple):
    """Tensors of one module that lie side by side."""

    name: str
    num_bytes: int
    is_part: bool  # the others of the module are in another place


def draw_device_plan(plan: DevicePlan) -> str:
    """Draw a plan as a table of text. Pure.

    ``#`` is what lies in a place, ``/`` what is kept free for the largest layer that comes later, and ``.``
    the rest of its budget. Below it stands what lies where; of what is marked as a part, the rest is
    elsewhere.

    Args:
        plan: From :func:`plan_device_map`.

    Returns:
        Lines without a newline at the end.

    >>> from torch import nn
    >>> from accelfn.bigmodel.device_map import plan_device_map
    >>> from accelfn.bigmodel.model_info import read_shape
    >>> shape = read_shape(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)))
    >>> print(draw_device_plan(plan_device_map(shape, {0: 210, "cpu": 600})))
    place   used  kept free  budget
    0       64 B      100 B   210 B  ##########///////////////.....
    cpu    172 B        0 B   600 B  #########.....................
    disk     0 B        0 B    none
    <BLANKLINE>
    0      0
    cpu    1..2
    """
    rows = [("place", "used", "kept free", "budget", "")]
    for one in plan.places:
        budget = "none" if one.budget is None else size_text(one.budget)
        rows.append((str(one.place), size_text(one.used), size_text(one.reserved), budget, _bar(one)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.rjust(width) if 0 < number < 4 else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    blocks = [(one.place, _blocks(one, plan)) for one in plan.places]
    held = [f"{place!s:<{widths[0]}}  {', '.join(_runs(inside))}" for place, inside in blocks if inside]
    notes = list(_notes(plan))
    return "\n".join([*lines, *([""] if held else []), *held, *([""] if notes else []), *notes])


def draw_device_plan_svg(plan: DevicePlan) -> str:
    """Draw a plan as an SVG image. Pure.

    Each place is a bar, as long as its budget. Parts of one colour are one block of the model; what is
    hatched is kept free for the largest layer that comes later. Sizes of blocks appear under the pointer.

    Args:
        plan: From :func:`plan_device_map`.

    Returns:
        A whole SVG document.

    >>> from torch import nn
    >>> from accelfn.bigmodel.device_map import plan_device_map
    >>> from accelfn.bigmodel.model_info import read_shape
    >>> shape = read_shape(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)))
    >>> draw_device_plan_svg(plan_device_map(shape, {0: 210, "cpu": 600})).count("<title>")  # of 3, and all
    4
    """
    facts = [_fact(one) for one in plan.places]
    left = 2 * _EDGE + max(len(str(one.place)) for one in plan.places) * _CHAR
    right = left + _BAR + _EDGE
    width = right + max(map(len, facts)) * _CHAR + _EDGE
    legend = any(one.reserved for one in plan.places)
    height = 2 * _EDGE + _ROW * (len(plan.places) + legend)
    longest = max(1, *(max(one.used, one.budget or 0) for one in plan.places))
    color_of: dict[str, str] = {}
    parts = [_rect(0, 0, width, height, f'fill="{_GROUND}"')]
    for row, (one, fact) in enumerate(zip(plan.places, facts, strict=True)):
        top = _EDGE + row * _ROW
        parts.append(_text(_EDGE, top, str(one.place), _GREY))
        start = 0
        for block in _blocks(one, plan):
            color = color_of.setdefault(block.name, _COLORS[len(color_of) % len(_COLORS)])
            parts.append(_draw_block(left, top, start, block, color, longest))
            start += block.num_bytes
        if one.reserved:
            kept = _width(one.reserved, longest)
            parts.append(
                _rect(left + _width(start, longest), top, kept, _ROW - _BETWEEN, 'fill="url(#kept)"')
            )
        if one.budget is not None:
            line = f'fill="none" stroke="{_INK}"'
            parts.append(_rect(left, top, _width(one.budget, longest), _ROW - _BETWEEN, line))
        parts.append(_text(right, top, fact, _GREY))
    if legend:
        top = _EDGE + len(plan.places) * _ROW
        parts.append(_rect(left, top, 40, _ROW - _BETWEEN, 'fill="url(#kept)"'))
        parts.append(_text(left + 50, top, "kept free for the largest layer that comes later", _GREY))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" font-family="monospace" font-size="13">'
    )
    pattern = (
        '<defs><pattern id="kept" width="8" height="8" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><path d="M0 0V8" stroke="{_GREY}" stroke-width="2"/></pattern></defs>'
    )
    title = "; ".join(f"{one.place}: {fact}" for one, fact in zip(plan.places, facts, strict=True))
    return "\n".join([head, f"<title>{title}</title>", pattern, *parts, "</svg>\n"])


def draw_device_plan_html(plan: DevicePlan, title: str = "Device plan") -> str:
    """Draw a plan as a page of HTML that needs nothing else: the image, and a list of all tensors. Pure.

    Args:
        plan: From :func:`plan_device_map`.
        title: Of the page.

    Returns:
        A whole document.
    """
    lists: list[str] = []
    for one in plan.places:
        rows = "".join(
            f"<tr><td>{escape(leaf.name)}</td><td>{size_text(leaf.num_bytes)}</td></tr>"
            for leaf in one.leaves
        )
        count = "1 tensor" if len(one.leaves) == 1 else f"{len(one.leaves)} tensors"
        blocks = escape(", ".join(_runs(_blocks(one, plan))))
        lists.append(
            f"<details><summary><b>{one.place}</b>: {count}, {_fact(one)}. {blocks}</summary>"
            f"<table>{rows}</table></details>"
        )
    notes = "".join(f"<p>{escape(note)}</p>" for note in _notes(plan))
    style = (
        "body{font-family:sans-serif;margin:2em;max-width:80em}svg{max-width:100%;height:auto}"
        "td{padding:0 1em 0 0;font-family:monospace}td+td{text-align:right}summary{margin:.5em 0}"
    )
    return "\n".join(
        [
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>',
            f"<style>{style}</style></head><body><h1>{escape(title)}</h1>",
            draw_device_plan_svg(plan).rstrip(),
            *lists,
            notes,
            "</body></html>\n",
        ]
    )


def _fact(one: PlacePlan) -> str:
    budget = "no limit" if one.budget is None else size_text(one.budget)
    return f"{size_text(one.used)} of {budget}"


def _bar(one: PlacePlan) -> str:
    if one.budget is None:
        return ""
    # Rounded up, so that what is there is seen; what is free is what remains.
    used = -(-one.used * _BAR_CHARS // one.budget) if one.budget else 0
    kept = min(_BAR_CHARS - used, -(-one.reserved * _BAR_CHARS // one.budget)) if one.budget else 0
    return "#" * used + "/" * kept + "." * (_BAR_CHARS - used - kept)


def _block_of(name: str) -> str:
    """Return the module by which a tensor is shown: one of a numbered list if it is in one, or its own.

    >>> _block_of("model.layers.3.mlp.0.weight"), _block_of("model.norm.weight"), _block_of("scale")
    ('model.layers.3', 'model.norm', 'scale')
    """
    path = name.split(".")
    number = next((place for place, part in enumerate(path[:-1]) if part.isdecimal()), None)
    return ".".join(path[: number + 1] if number is not None else path[:-1] or path)


def _blocks(one: PlacePlan, plan: DevicePlan) -> list[_Block]:
    """Return the blocks in a place, in order."""
    elsewhere = {_block_of(leaf.name) for other in plan.places if other is not one for leaf in other.leaves}
    found: list[_Block] = []
    for leaf in one.leaves:
        name = _block_of(leaf.name)
        if found and found[-1].name == name:
            found[-1] = found[-1]._replace(num_bytes=found[-1].num_bytes + leaf.num_bytes)
        else:
            found.append(_Block(name, leaf.num_bytes, name in elsewhere))
    return found


def _runs(blocks: Iterable[_Block]) -> Iterator[str]:
    """Write blocks out, and those of a list that follow each other as first..last.

    >>> list(_runs([_Block("a.0", 1, False), _Block("a.1", 1, False), _Block("a.2", 1, True)]))
    ['a.0..1', 'a.2 (part)']
    """
    run: list[tuple[str, int]] = []
    for block in (*blocks, None):
        path, _, last = ("", "", "") if block is None else block.name.rpartition(".")
        fits = block is not None and last.isdecimal() and not block.is_part
        if run and not (fits and run[-1] == (path, int(last) - 1)):
            first, end = run[0][1], run[-1][1]
            text = f"{run[0][0]}.{first}" if run[0][0] else str(first)
            yield text if first == end else f"{text}..{end}"
            run = []
        if fits:
            run.append((path, int(last)))
        elif block is not None:
            yield f"{block.name} (part)" if block.is_part else block.name


def _notes(plan: DevicePlan) -> Iterator[str]:
    yield from (f"one tensor: {' = '.join(names)}" for names in plan.ties)
    for copy in plan.copies:
        names = ", ".join(f"{name} on {place}" for name, place in zip(copy.names, copy.places, strict=True))
        yield f"copies of {size_text(copy.num_bytes)} each: {names}"
    yield from (f"warning: {text}" for text in plan.warnings)


def _draw_block(left: int, top: int, start: int, block: _Block, color: str, longest: int) -> str:
    begin, end = left + _width(start, longest), left + _width(start + block.num_bytes, longest)
    name = f"{block.name} (part)" if block.is_part else block.name
    look = f'fill="{color}" stroke="{_GROUND}"'
    drawn = f"<g><title>{escape(name)}: {size_text(block.num_bytes)}</title>"
    drawn += _rect(begin, top, end - begin, _ROW - _BETWEEN, look)
    short = block.name.rpartition(".")[2]
    if len(short) * _CHAR + _CHAR <= end - begin:
        drawn += _text(begin + _CHAR / 2, top, short, _INK)
    return f"{drawn}</g>"


def _width(num_bytes: int, longest: int) -> float:
    return round(num_bytes * _BAR / longest, 2)


def _rect(left: float, top: float, width: float, height: float, look: str) -> str:
    return f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" {look}/>'


def _text(left: float, top: float, text: str, color: str) -> str:
    # textLength: the picture is laid out for letters of one width, whatever font there is.
    return (
        f'<text x="{left:g}" y="{top + 17:g}" textLength="{len(text) * _CHAR}" '
        f'lengthAdjust="spacingAndGlyphs" fill="{color}">{escape(text)}</text>'
    )


_HEADS = ("dtype", "largest layer", "all weights", "training with Adam")

_STYLE = (
    "body { font-family: sans-serif; margin: 2em } td, th { padding: 0.2em 1em; text-align: right } "
    "td:first-child, th:first-child { text-align: left }"
)
_PARTS = (
    ("largest layer", "#14407a"),
    ("other weights", "#7fb0dc"),
    ("gradients", "#f3c9a5"),
    ("states of Adam", "#e0945a"),
)


def draw_estimate(estimate: MemoryEstimate, title: str) -> str:
    """Draw an estimate as a table of text. Pure.

    Args:
        estimate: From :func:`estimate_memory`.
        title: What the model is called.

    Returns:
        Lines without a newline at the end.
    """
    rows = [_HEADS, *(_cells(one) for one in estimate.dtypes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) if not number else cell.rjust(width) for number, (cell, width) in cells)
        for cells in (enumerate(zip(row, widths, strict=True)) for row in rows)
    ]
    return "\n".join([*_about(estimate, title), *lines])


def draw_estimate_svg(estimate: MemoryEstimate, title: str) -> str:
    """Draw an estimate as bars: for each dtype what the weights take, and what training takes. Pure.

    Args:
        estimate: From :func:`estimate_memory`.
        title: What the model is called.

    Returns:
        A whole SVG document.
    """
    bars = [bar for one in estimate.dtypes for bar in _bars(one)]
    return draw_bars_svg([line for line in _about(estimate, title) if line], bars, _PARTS)


def draw_estimate_html(estimate: MemoryEstimate, title: str) -> str:
    """Draw an estimate as a page with the picture and the table. Pure.

    Args:
        estimate: From :func:`estimate_memory`.
        title: What the model is called.

    Returns:
        A whole HTML document that needs nothing else.
    """
    about = [escape(line) for line in _about(estimate, title) if line]
    head = "".join(f"<th>{escape(cell)}</th>" for cell in _HEADS)
    rows = [
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in _cells(one)) + "</tr>"
        for one in estimate.dtypes
    ]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f"<title>{about[0]}</title>",
            f"<style>{_STYLE}</style>",
            "</head>\n<body>",
            draw_estimate_svg(estimate, title),
            f"<table>\n<tr>{head}</tr>",
            *rows,
            "</table>\n</body>\n</html>\n",
        ]
    )


def _cells(one: DtypeEstimate) -> tuple[str, str, str, str]:
    training = "-" if one.training is None else size_text(one.training.peak)
    return one.dtype, size_text(one.largest_layer), size_text(one.total), training


def _about(estimate: MemoryEstimate, title: str) -> list[str]:
    lines = [f"{title}: {_count_text(estimate.num_parameters)} parameters"]
    names = [name for one in estimate.dtypes[:1] for name in one.largest_names]
    if names:
        more = f" and {len(names) - 1} more of its size" if len(names) > 1 else ""
        lines.append(f"largest layer: {names[0] or 'the whole model'}{more}")
    return [*lines, ""]


def _count_text(number: int) -> str:
    """Write a number of parameters.

    >>> _count_text(950), _count_text(109_482_240), _count_text(7_241_732_096)
    ('950', '109.5 million', '7.2 billion')
    """
    for unit, name in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if number >= unit:
            return f"{number / unit:.1f} {name}"
    return str(number)


def _bars(one: DtypeEstimate) -> list[Bar]:
    weights = (one.largest_layer, one.total - one.largest_layer)
    found = [Bar(one.dtype, "weights", weights)]
    if one.training is not None:
        found.append(Bar("", "training", (*weights, one.training.gradients, one.training.optimizer)))
    return found
