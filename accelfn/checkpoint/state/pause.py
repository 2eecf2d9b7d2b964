"""Building large documents without the collector looking at every part of them again and again."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

__all__ = ("paused_collection",)


@contextmanager
def paused_collection() -> Generator[None, None, None]:
    """Pause Python's cyclic garbage collector in a ``with`` block or a function.

    A tree of 40,000 leaves makes some million small objects, none of which is garbage; looking through them
    takes the collector longer than all the rest takes. Where several threads pause it, it runs again as soon
    as the first of them is through, which costs time and nothing else.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
