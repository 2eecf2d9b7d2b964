"""Bar charts of sizes, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from accelfn.svg import CHAR, GREY, rect_svg, text_svg, write_svg
from accelfn.tree.structure import size_text

# In pixels.
_ROW, _BAR, _EDGE, _WIDTH = 26, 18, 12, 460
_BASE = 14  # of a line of text, below its top


class Bar(NamedTuple):
    """One bar of several parts.

    Attributes:
        name: First label; "" if it is the same as above.
        kind: Second label.
        sizes: Bytes of the parts.
    """

    name: str
    kind: str
    sizes: Sequence[int]


def draw_bars_svg(about: Sequence[str], bars: Sequence[Bar], parts: Sequence[tuple[str, str]]) -> str:
    """Draw bars on one scale, each labelled with its total, and a legend. Pure.

    Args:
        about: Lines above the bars; the first is the title.
        bars: Bars from top to bottom.
        parts: Name and color of each part, in order; a bar may have fewer parts.

    Returns:
        An SVG document.
    """
    most = max((sum(bar.sizes) for bar in bars), default=0) or 1
    names = max((len(bar.name) for bar in bars), default=0) * CHAR
    kinds = max((len(bar.kind) for bar in bars), default=0) * CHAR
    left = _EDGE + names + CHAR + kinds + CHAR
    sizes = max((len(size_text(sum(bar.sizes))) for bar in bars), default=0) * CHAR
    legend = sum(len(name) * CHAR + 40 for name, _ in parts)
    width = max(
        left + _WIDTH + CHAR + sizes + _EDGE,
        legend + 2 * _EDGE,
        *(len(line) * CHAR + 2 * _EDGE for line in about),
    )
    lines: list[str] = []
    top = _EDGE
    for line in about:
        lines.append(text_svg(_EDGE, top + _BASE, line))
        top += _ROW
    for bar in bars:
        if bar.name:
            top += _ROW // 4
        lines.append(text_svg(_EDGE, top + _BASE, bar.name))
        lines.append(text_svg(_EDGE + names + CHAR, top + _BASE, bar.kind, GREY))
        at = float(left)
        for size, (_, color) in zip(bar.sizes, parts, strict=False):
            if size:
                length = _WIDTH * size / most
                lines.append(rect_svg(at, top, length, _BAR, color))
                at += length
        lines.append(text_svg(round(at) + CHAR, top + _BASE, size_text(sum(bar.sizes))))
        top += _ROW
    top += _ROW // 2
    at = float(_EDGE)
    for name, color in parts:
        lines += [rect_svg(at, top, 14, 14, color), text_svg(round(at) + 20, top + 12, name, GREY)]
        at += len(name) * CHAR + 40
    return write_svg(width, top + _ROW + _EDGE, about[0], lines)
