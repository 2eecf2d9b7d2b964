"""Draw losses of two trainings over each other, one panel for each pair, as an SVG image.

python docs/curves.py [--names ONE OTHER] TO.svg TITLE ONE.csv OTHER.csv [TITLE ONE.csv OTHER.csv ...]

The files are what ``docs/examples/fine_tune_text.py --curve`` and ``docs/examples/fp8.py --curve`` write.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

WIDTH, HEIGHT, EDGE = 360, 220, 44
NAMES = ("plain torch, one process", "accelfn, two processes")
STROKES = (("#f0a35e", 5), ("#14407a", 1.2))  # the wide line lies below


def read_curve(text: str) -> list[float]:
    """Read the losses of a file of steps and losses, with a heading."""
    return [float(line.split(",")[1]) for line in text.split()[1:]]


def largest_difference(first: Sequence[float], second: Sequence[float]) -> float:
    """Give the largest difference of two curves at any step, relative to the first."""
    return max(abs(one - other) / abs(one) for one, other in zip(first, second, strict=True))


def draw(panels: Sequence[tuple[str, Sequence[float], Sequence[float]]], names: Sequence[str] = NAMES) -> str:
    """Draw panels of a title and two curves, side by side."""
    width = len(panels) * (WIDTH + EDGE) + EDGE // 2
    height = HEIGHT + 3 * EDGE
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        '<g font-size="12">',
    ]
    for number, (title, *curves) in enumerate(panels):
        lines += _panel(number * (WIDTH + EDGE) + EDGE, EDGE, title, curves)
    left, bottom = EDGE, HEIGHT + 2 * EDGE + 16
    for name, (color, thickness) in zip(names, STROKES, strict=True):
        stroke = f'stroke="{color}" stroke-width="{thickness}"'
        lines += [
            f'<line x1="{left}" y1="{bottom}" x2="{left + 30}" y2="{bottom}" {stroke}/>',
            f'<text x="{left + 36}" y="{bottom + 4}">{name}</text>',
        ]
        left += 220
    return "\n".join([*lines, "</g>", "</svg>", ""])


def _panel(left: int, top: int, title: str, curves: Sequence[Sequence[float]]) -> list[str]:
    steps = max(map(len, curves)) - 1
    low, high = int(min(map(min, curves))), int(max(map(max, curves))) + 1
    bottom = top + HEIGHT

    def place(step: float, loss: float) -> tuple[float, float]:
        return left + WIDTH * step / max(1, steps), bottom - HEIGHT * (loss - low) / (high - low)

    lines = [f'<text x="{left}" y="{top - 14}" font-size="14">{title}</text>']
    for loss in range(low, high + 1):
        _, y = place(0, loss)
        lines += [
            f'<line x1="{left}" y1="{y:.1f}" x2="{left + WIDTH}" y2="{y:.1f}" stroke="#dddddd"/>',
            f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{loss}</text>',
        ]
    lines += [
        f'<text x="{left}" y="{bottom + 18}">1</text>',
        f'<text x="{left + WIDTH}" y="{bottom + 18}" text-anchor="end">step {steps + 1}</text>',
    ]
    for curve, (color, thickness) in zip(curves, STROKES, strict=True):
        points = " ".join("{:.1f},{:.1f}".format(*place(step, loss)) for step, loss in enumerate(curve))
        lines.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="{thickness}"/>')
    return lines


def main() -> None:
    """Draw what the command line names, and say how far apart the curves are."""
    given = sys.argv[1:]
    names = given[1:3] if given[0] == "--names" else NAMES
    to, *rest = given[3:] if given[0] == "--names" else given
    panels: list[tuple[str, list[float], list[float]]] = []
    for title, *files in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        plain, other = (read_curve(Path(file).read_text()) for file in files)
        print(f"{title}: {len(plain)} steps, largest difference {largest_difference(plain, other):.1e}")
        panels.append((title, plain, other))
    Path(to).write_text(draw(panels, names))


if __name__ == "__main__":
    main()
