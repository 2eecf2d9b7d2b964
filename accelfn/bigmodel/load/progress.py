"""A bar for what takes long."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from accelfn.errors import MissingExtraError

__all__ = ("showing",)


@contextmanager
def showing(what: str, total: int, progress: bool | None) -> Generator[Callable[[int], None]]:
    """Show how many bytes are done, and give what is to be called with them.

    Args:
        what: Stands before the bar.
        total: Bytes.
        progress: Whether to show a bar. None: if tqdm is installed, and somebody may be looking (standard
            error is a terminal). Without standard error, as under ``pythonw``, there is none.

    Raises:
        MissingExtraError: A bar is wanted, and tqdm isn't installed.
    """
    has_tqdm = importlib.util.find_spec("tqdm") is not None
    if progress and not has_tqdm:
        raise MissingExtraError("progress=True needs tqdm: pip install 'accelfn[bigmodel]'.")
    error: Any = sys.stderr  # None where a process has none
    if error is None or not (error.isatty() and has_tqdm if progress is None else progress):
        yield lambda _: None
        return
    tqdm: Any = importlib.import_module("tqdm").tqdm
    with tqdm(desc=what, total=total, unit="B", unit_scale=True, leave=False) as bar:
        yield bar.update
