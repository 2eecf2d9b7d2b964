"""Plans and estimates as text, SVG and HTML."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from typing import NamedTuple

from accelfn.bigmodel.device_map import DevicePlan, PlacePlan
from accelfn.bigmodel.estimate import DtypeEstimate, MemoryEstimate
from accelfn.tree.bars import Bar, draw_bars_svg
from accelfn.tree.structure import size_text

_BAR_CHARS = 30

_PLACE_PARTS = (
    ("weights", "#7fb0dc"),
    ("kept free for the largest layer that comes later", "#f3c9a5"),
    ("free", "#eeeeee"),
)


class _Block(NamedTuple):
    """Tensors of one module that follow each other."""

    name: str
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
    lines = _table(rows)
    width = max(len(row[0]) for row in rows)
    blocks = [(one.place, _blocks(one, plan)) for one in plan.places]
    held = [f"{place!s:<{width}}  {', '.join(_runs(inside))}" for place, inside in blocks if inside]
    notes = list(_notes(plan))
    return "\n".join([*lines, *([""] if held else []), *held, *([""] if notes else []), *notes])


def draw_device_plan_svg(plan: DevicePlan, title: str = "Device plan") -> str:
    """Draw a plan as an SVG image: what weights take of each place, what is kept free, and the rest. Pure.

    Args:
        plan: From :func:`plan_device_map`.
        title: Stands above it.

    Returns:
        A whole SVG document.
    """
    bars: list[Bar] = []
    for one in plan.places:
        free = max(0, (one.budget or 0) - one.used - one.reserved)
        bars.append(Bar(str(one.place), _fact(one), (one.used, one.reserved, free)))
    return draw_bars_svg([title], bars, _PLACE_PARTS)


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
            draw_device_plan_svg(plan, title).rstrip(),
            *lists,
            notes,
            "</body></html>\n",
        ]
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Write rows with their first four columns aligned: the first one to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if 0 < number < 4 else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


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
        if not found or found[-1].name != name:
            found.append(_Block(name, name in elsewhere))
    return found


def _runs(blocks: Iterable[_Block]) -> Iterator[str]:
    """Write blocks out, and those of a list that follow each other as first..last.

    >>> list(_runs([_Block("a.0", False), _Block("a.1", False), _Block("a.2", True)]))
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
    return "\n".join([*_about(estimate, title), *_table(rows)])


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
