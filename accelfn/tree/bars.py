"""Bar charts of sizes, as SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from accelfn.tree.structure import size_text

# In pixels.
_CHAR, _ROW, _BAR, _EDGE, _WIDTH = 8, 26, 18, 12, 460
_INK, _GREY, _GROUND = "#111111", "#666666", "#ffffff"


class Bar(NamedTuple):
    """One bar of several parts.

    Attributes:
        name: First label; "" if it is the same as above.
        kind: Second label.
        sizes: Sizes of the parts, all in one unit.
    """

    name: str
    kind: str
    sizes: Sequence[int]


def draw_bars_svg(
    about: Sequence[str],
    bars: Sequence[Bar],
    parts: Sequence[tuple[str, str]],
    *,
    text: Callable[[int], str] = size_text,
) -> str:
    """Draw bars on one scale, each labelled with its total, and a legend. Pure.

    Args:
        about: Lines above the bars; the first is the title.
        bars: Bars from top to bottom.
        parts: Name and color of each part, in order; a bar may have fewer parts.
        text: Formats the total of a bar.

    Returns:
        An SVG document.
    """
    most = max((sum(bar.sizes) for bar in bars), default=0) or 1
    names = max((len(bar.name) for bar in bars), default=0) * _CHAR
    kinds = max((len(bar.kind) for bar in bars), default=0) * _CHAR
    left = _EDGE + names + _CHAR + kinds + _CHAR
    sizes = max((len(text(sum(bar.sizes))) for bar in bars), default=0) * _CHAR
    legend = sum(len(name) * _CHAR + 40 for name, _ in parts)
    width = max(
        left + _WIDTH + _CHAR + sizes + _EDGE,
        legend + 2 * _EDGE,
        *(len(line) * _CHAR + 2 * _EDGE for line in about),
    )
    lines: list[str] = []
    top = _EDGE
    for line in about:
        lines.append(_text(_EDGE, top, line, _INK))
        top += _ROW
    for bar in bars:
        if bar.name:
            top += _ROW // 4
        lines += [_text(_EDGE, top, bar.name, _INK), _text(_EDGE + names + _CHAR, top, bar.kind, _GREY)]
        at = float(left)
        for size, (_, color) in zip(bar.sizes, parts, strict=False):
            if size:
                length = _WIDTH * size / most
                lines.append(_rect(at, top, length, _BAR, color))
                at += length
        lines.append(_text(round(at) + _CHAR, top, text(sum(bar.sizes)), _INK))
        top += _ROW
    top += _ROW // 2
    at = float(_EDGE)
    for name, color in parts:
        lines += [_rect(at, top, 14, 14, color), _text(round(at) + 20, top - 2, name, _GREY)]
        at += len(name) * _CHAR + 40
    height = top + _ROW + _EDGE
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" font-family="monospace" font-size="13">'
    )
    ground = _rect(0, 0, width, height, _GROUND)
    return "\n".join([head, f"<title>{escape(about[0])}</title>", ground, *lines, "</svg>\n"])


def _rect(left: float, top: float, width: float, height: float, color: str) -> str:
    return f'<rect x="{left:g}" y="{top:g}" width="{width:.1f}" height="{height:g}" fill="{color}"/>'


def _text(left: int, top: int, text: str, color: str) -> str:
    if not text:
        return ""
    # textLength makes the layout independent of the font.
    return (
        f'<text x="{left}" y="{top + 14}" textLength="{len(text) * _CHAR}" '
        f'lengthAdjust="spacingAndGlyphs" fill="{color}">{escape(text)}</text>'
    )
