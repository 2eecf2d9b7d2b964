"""Write images as SVG: rectangles and lines of text in letters of one width."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

__all__ = ("CHAR", "GREY", "rect_svg", "text_svg", "write_svg")

CHAR = 8  # pixels of a letter
INK, GREY = "#111111", "#666666"


def write_svg(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """Return an SVG document of ``parts`` on a white ground. Pure.

    >>> write_svg(80, 20, "a & b", [text_svg(0, 14, "a")]).count("<text")
    1
    """
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" role="img" font-family="monospace" font-size="13">'
    )
    ground = rect_svg(0, 0, width, height, "#ffffff")
    return "\n".join([head, f"<title>{escape(title)}</title>", ground, *parts, "</svg>\n"])


def rect_svg(left: float, top: float, width: float, height: float, color: str, *, radius: int = 0) -> str:
    """Return a rectangle. Pure."""
    size = f'width="{round(width, 1):g}" height="{height:g}"' + (f' rx="{radius}"' if radius else "")
    return f'<rect x="{left:g}" y="{top:g}" {size} fill="{color}"/>'


def text_svg(left: float, base: float, text: str, color: str = INK) -> str:
    """Return a line of text whose letters are ``CHAR`` wide, whichever font is used. Pure."""
    if not text:
        return ""
    return (
        f'<text x="{left:g}" y="{base:g}" textLength="{len(text) * CHAR}" '
        f'lengthAdjust="spacingAndGlyphs" fill="{color}">{escape(text)}</text>'
    )
