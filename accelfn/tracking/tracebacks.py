"""Tracebacks that are easier to read, for programs that ask for them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from accelfn.errors import MissingExtraError

__all__ = ("install_rich_tracebacks",)


def install_rich_tracebacks(*, show_locals: bool = False) -> Callable[[], None]:
    """Let rich print the exception that ends this program. Effect: sets ``sys.excepthook``.

    Ranks: any; each process for itself.

    Args:
        show_locals: Print local variables too. They may hold secrets.

    Returns:
        A function that undoes it, unless somebody else has set the hook since.

    Raises:
        MissingExtraError: rich isn't installed.
    """
    try:
        package: Any = importlib.import_module("rich.traceback")
    except ImportError as error:
        raise MissingExtraError("install_rich_tracebacks needs rich: pip install 'accelfn[cli]'.") from error
    before = sys.excepthook
    package.install(show_locals=show_locals)
    ours = sys.excepthook

    def undo() -> None:
        if sys.excepthook is ours:
            sys.excepthook = before

    return undo
