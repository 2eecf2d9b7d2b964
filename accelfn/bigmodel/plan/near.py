"""Names that aren't there, told with those that may have been meant."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence

__all__ = ("tell_unknown",)

_MOST_NAMES = 5


def tell_unknown(unknown: Sequence[str], known: Collection[str]) -> str:
    """List names for an error, each with at most three known ones that look like it. Pure.

    >>> tell_unknown(["linaer", "x"], ["linear", "bias"])
    "'linaer' (near it: 'linear'), 'x'"
    """
    told: list[str] = []
    for name in unknown[:_MOST_NAMES]:
        near = difflib.get_close_matches(name, known, n=3)
        told.append(f"{name!r}" + (f" (near it: {', '.join(map(repr, near))})" if near else ""))
    more = f" and {len(unknown) - _MOST_NAMES} more" if len(unknown) > _MOST_NAMES else ""
    return f"{', '.join(told)}{more}"
