"""Output of commands: formats, tables and files."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path

from accelfn.errors import ConfigurationError
from accelfn.launch.sources import Resolved, origin_rows

_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def refuse_missing_model(model: str) -> None:
    """Check that a model exists, before torch is imported.

    Args:
        model: A directory, a file, or ``MODULE:FUNCTION``.

    Raises:
        ConfigurationError: It doesn't exist.
    """
    if os.path.exists(model) or _FACTORY.fullmatch(model):
        return
    if _HUB_NAME.fullmatch(model):
        raise ConfigurationError(
            f"no file or directory {model!r} in {os.getcwd()!r}, and models aren't downloaded. For a model "
            f"on the Hugging Face Hub, get its config first: hf download {model} config.json "
            f"--local-dir {os.path.basename(model)}"
        )
    raise ConfigurationError(
        f"no file or directory {model!r}. Pass a directory with a config.json, a safetensors file or index, "
        "or MODULE:FUNCTION, such as train:build_model."
    )


def write_text(path: str | Path, text: str) -> None:
    """Write a file atomically: write a temporary file next to it, and rename that. A link is followed.

    Raises:
        OSError: The file can't be written.
    """
    target = os.path.realpath(path)
    part = Path(f"{target}.{os.getpid()}.part")
    try:
        if os.path.exists(target) and not os.path.isfile(target):
            raise FileExistsError(errno.EEXIST, "it isn't a file")
        part.write_text(text, encoding="utf-8")
        os.replace(part, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise OSError(error.errno, f"can't be written: {error.strerror}", str(path)) from None


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> None:
    """Print a table as plain text.

    Args:
        head: Column names; empty for a table without a header.
        rows: Cells of each row.
        right: Indices of right-aligned columns.

    >>> print_table(("name", "step"), [("a", "7"), ("last", "120")], right=(1,))
    name  step
    a        7
    last   120
    """
    lines = [head, *rows] if head else rows
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = zip(line, widths, range(len(widths)), strict=True)
        row = (cell.rjust(width) if number in right else cell.ljust(width) for cell, width, number in cells)
        print("  ".join(row).rstrip())


def print_origins(resolved: Resolved, *, everything: bool = True) -> None:
    """Print the value of each option and its source, of defaults only with ``everything``."""
    print_table((), origin_rows(resolved, everything=everything))
