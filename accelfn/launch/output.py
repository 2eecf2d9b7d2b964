"""Output of commands: formats, tables and files."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

from accelfn.errors import ConfigurationError
from accelfn.launch.sources import Resolved, origin_rows

FORMATS = ("table", "json", "svg", "html")

_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_BY_ENDING = MappingProxyType(
    {"": "table", ".txt": "table", ".json": "json", ".svg": "svg", ".html": "html", ".htm": "html"}
)


def choose_format(given: str | None, output: str | None) -> str:
    """Return the output format: ``--format``, or else that of the file extension.

    Args:
        given: Value of ``--format``, or None.
        output: Value of ``--output``; None to print.

    Raises:
        ConfigurationError: No format is given, and the file extension is unknown.
    """
    ending = Path(output or "").suffix.lower()
    if given is None and ending not in _BY_ENDING:
        known = ", ".join(filter(None, _BY_ENDING))
        raise ConfigurationError(
            f"unknown file extension in --output {output!r}. Use one of {known}, or pass --format."
        )
    return given or _BY_ENDING[ending]


def refuse_missing_model(model: str, output: str | None, *, is_name: bool = False) -> None:
    """Check that a model and the directory of the output exist, before torch is imported.

    Args:
        model: A directory, a file, or ``MODULE:FUNCTION``.
        output: Value of ``--output``; None to print.
        is_name: Whether the model is a name that another library resolves.

    Raises:
        ConfigurationError: The model or the directory doesn't exist.
    """
    if output is not None and not os.path.isdir(os.path.dirname(output) or "."):
        raise ConfigurationError(f"can't write {output!r}: the directory doesn't exist. Check --output.")
    if os.path.exists(model) or is_name or _FACTORY.fullmatch(model):
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


def show_text(text: str, output: str | None) -> None:
    """Print a text, or write it to the file ``output`` if that isn't None.

    Raises:
        OSError: As :func:`write_text`.
    """
    text = text.removesuffix("\n") + "\n"
    if output is None:
        print(text, end="")
    else:
        write_text(output, text)


def write_text(path: str | Path, text: str) -> None:
    """Write a file atomically: write a temporary file next to it, and rename that.

    A symbolic link is followed; a pipe or a device such as ``/dev/stdout`` is written to directly.

    Raises:
        OSError: The file can't be written.
    """
    is_file = os.path.isfile(path) or not os.path.exists(path)
    target = os.path.realpath(path) if is_file else os.fspath(path)
    part = Path(f"{target}.{os.getpid()}.part" if is_file else target)
    try:
        part.write_text(text, encoding="utf-8")
        if is_file:
            os.replace(part, target)
    except OSError as error:
        with contextlib.suppress(OSError):
            if is_file:
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
