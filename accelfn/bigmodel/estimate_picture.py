"""An estimate of memory as a table of text, and as a picture."""

from __future__ import annotations

from html import escape

from accelfn.bigmodel.estimate import DtypeEstimate, MemoryEstimate
from accelfn.tree.bars import Bar, draw_bars_svg
from accelfn.tree.sizes import size_text

__all__ = ("draw_estimate", "draw_estimate_html", "draw_estimate_svg")

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
