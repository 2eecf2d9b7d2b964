"""An estimate of memory as a table of text, and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from accelfn.bigmodel.estimate import DtypeEstimate, MemoryEstimate
from accelfn.tree.sizes import size_text

__all__ = ("draw_estimate", "draw_estimate_html", "draw_estimate_svg")

_HEADS = ("dtype", "largest layer", "all weights", "training with Adam")

# Of the drawing, in its own units.
_CHAR, _ROW, _BAR, _EDGE, _WIDTH = 8, 26, 18, 12, 460
_INK, _GREY, _GROUND = "#111111", "#666666", "#ffffff"
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
    about = _about(estimate, title)
    bars = [bar for one in estimate.dtypes for bar in _bars(one)]
    most = max((sum(parts) for _, _, parts in bars), default=0) or 1
    names = max((len(name) for name, _, _ in bars), default=0) * _CHAR
    kinds = max((len(kind) for _, kind, _ in bars), default=0) * _CHAR
    left = _EDGE + names + _CHAR + kinds + _CHAR
    sizes = max((len(size_text(sum(parts))) for _, _, parts in bars), default=0) * _CHAR
    legend = sum(len(name) * _CHAR + 40 for name, _ in _PARTS)
    width = max(
        left + _WIDTH + _CHAR + sizes + _EDGE,
        legend + 2 * _EDGE,
        *(len(line) * _CHAR + 2 * _EDGE for line in about),
    )
    lines: list[str] = []
    top = _EDGE
    for line in about[:-1]:
        lines.append(_text(_EDGE, top, line, _INK))
        top += _ROW
    for name, kind, parts in bars:
        if name:
            top += _ROW // 4
        lines += [_text(_EDGE, top, name, _INK), _text(_EDGE + names + _CHAR, top, kind, _GREY)]
        at = float(left)
        for size, (_, color) in zip(parts, _PARTS, strict=False):
            if size:
                length = _WIDTH * size / most
                lines.append(_rect(at, top, length, _BAR, color))
                at += length
        lines.append(_text(round(at) + _CHAR, top, size_text(sum(parts)), _INK))
        top += _ROW
    top += _ROW // 2
    at = float(_EDGE)
    for name, color in _PARTS:
        lines += [_rect(at, top, 14, 14, color), _text(round(at) + 20, top - 2, name, _GREY)]
        at += len(name) * _CHAR + 40
    height = top + _ROW + _EDGE
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" font-family="monospace" font-size="13">'
    )
    ground = _rect(0, 0, width, height, _GROUND)
    return "\n".join([head, f"<title>{escape(about[0])}</title>", ground, *lines, "</svg>\n"])


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


def _bars(one: DtypeEstimate) -> list[tuple[str, str, Sequence[int]]]:
    """Return name, kind and parts of a dtype's bars."""
    weights = (one.largest_layer, one.total - one.largest_layer)
    found: list[tuple[str, str, Sequence[int]]] = [(one.dtype, "weights", weights)]
    if one.training is not None:
        found.append(("", "training", (*weights, one.training.gradients, one.training.optimizer)))
    return found


def _rect(left: float, top: float, width: float, height: float, color: str) -> str:
    return f'<rect x="{left:g}" y="{top:g}" width="{width:.1f}" height="{height:g}" fill="{color}"/>'


def _text(left: int, top: int, text: str, color: str) -> str:
    if not text:
        return ""
    # textLength: everything is laid out for letters of one width, whatever font there is.
    return (
        f'<text x="{left}" y="{top + 14}" textLength="{len(text) * _CHAR}" '
        f'lengthAdjust="spacingAndGlyphs" fill="{color}">{escape(text)}</text>'
    )
