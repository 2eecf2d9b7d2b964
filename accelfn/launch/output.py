"""In which form a command writes what it has to say."""

from __future__ import annotations

import argparse
from pathlib import Path
from types import MappingProxyType

__all__ = ("FORMATS", "choose_format")

FORMATS = ("table", "json", "svg", "html")

_BY_ENDING = MappingProxyType(
    {"": "table", ".txt": "table", ".json": "json", ".svg": "svg", ".html": "html", ".htm": "html"}
)


def choose_format(parser: argparse.ArgumentParser, given: str | None, output: str | None) -> str:
    """Choose the form of what is printed or written: as asked, or by the ending of the file.

    Args:
        parser: That has read the arguments.
        given: What ``--format`` says; None if it wasn't given.
        output: What ``--output`` says; None if it is printed.

    Raises:
        SystemExit: 2 after one sentence, where nothing is asked for and the ending tells nothing.
    """
    ending = Path(output or "").suffix.lower()
    if given is None and ending not in _BY_ENDING:
        known = ", ".join(one for one in _BY_ENDING if one)
        parser.error(f"--output {output!r} ends in none of {known}. Give it one of them, or say --format.")
    return given or _BY_ENDING[ending]
