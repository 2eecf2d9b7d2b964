"""How a command writes what it has to print: in which form, as tables, and where to."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Sequence
from pathlib import Path
from types import MappingProxyType

from accelfn.errors import ConfigurationError
from accelfn.launch.config.resolve import Resolved, origin_rows

FORMATS = ("table", "json", "svg", "html")

_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_BY_ENDING = MappingProxyType(
    {"": "table", ".txt": "table", ".json": "json", ".svg": "svg", ".html": "html", ".htm": "html"}
)


def choose_format(given: str | None, output: str | None) -> str:
    """Choose the form of what is printed or written: as asked, or by the ending of the file.

    Args:
        given: What ``--format`` says; None if it wasn't given.
        output: What ``--output`` says; None if it is printed.

    Raises:
        ConfigurationError: Nothing is asked for and the ending tells nothing.
    """
    ending = Path(output or "").suffix.lower()
    if given is None and ending not in _BY_ENDING:
        known = ", ".join(one for one in _BY_ENDING if one)
        raise ConfigurationError(
            f"--output {output!r} ends in none of {known}. Give it one of them, or say --format."
        )
    return given or _BY_ENDING[ending]


def refuse_missing_model(model: str, output: str | None, *, is_name: bool = False) -> None:
    """Refuse what is wrong with a model's place or the output's, before torch is loaded to find out.

    Args:
        model: A folder, a file, or ``MODULE:FUNCTION``.
        output: What ``--output`` says; None if it is printed.
        is_name: Whether the model is a name that another library knows.

    Raises:
        ConfigurationError: There is nothing of that name, or no folder for the output.
    """
    if output is not None and not os.path.isdir(os.path.dirname(output) or "."):
        raise ConfigurationError(f"can't write {output!r}: there is no such folder. Check --output.")
    if os.path.exists(model) or is_name or _FACTORY.fullmatch(model):
        return
    if _HUB_NAME.fullmatch(model):
        raise ConfigurationError(
            f"there is no file or folder {model!r} in {os.getcwd()!r}, and nothing is downloaded. If it is a "
            f"model on the Hugging Face Hub, get its configuration first: hf download {model} config.json "
            f"--local-dir {os.path.basename(model)}"
        )
    raise ConfigurationError(
        f"there is no file or folder {model!r}. Pass a folder with a config.json, a safetensors file or "
        "index, or MODULE:FUNCTION, such as train:build_model."
    )


def show_text(text: str, output: str | None) -> None:
    """Print a text, or write it to a file. Effect: one of the two.

    Args:
        text: What to show.
        output: The file; None to print it.

    Raises:
        OSError: As :func:`write_text`.
    """
    whole = text.removesuffix("\n") + "\n"
    if output is None:
        print(whole, end="")
    else:
        write_text(output, whole)


def write_text(path: str | Path, text: str) -> None:
    """Write a file whole, or leave what is there. Effect: writes beside it, and renames.

    A link stays one, and what is no file, such as ``/dev/stdout`` or a pipe, is written to.

    Raises:
        OSError: It can't be written; it names the file.
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


def print_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), title: str = ""
) -> None:
    """Print a table as plain text.

    Args:
        head: Names of the columns; empty for a table without.
        rows: Texts; as many in each as there are columns.
        right: Columns of numbers, from 0.
        title: Printed above it, where there is one.
    """
    if title:
        print(title)
    print(format_table(head, rows, right=right))


def format_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Write a table as plain text, its columns two spaces apart. Pure.

    Args:
        head: As for :func:`print_table`.
        rows: Likewise.
        right: Likewise.

    >>> print(format_table(("name", "step"), [("a", "7"), ("last", "120")], right=(1,)))
    name  step
    a        7
    last   120
    """
    lines = [head, *rows] if head else list(rows)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))] if lines else []
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def print_origins(resolved: Resolved, *, everything: bool = True) -> None:
    """Print each option's value, and where it came from. Secrets are hidden.

    Args:
        resolved: From ``resolve``.
        everything: Defaults too.
    """
    rows = origin_rows(resolved, everything=everything)
    if rows:
        print_table((), rows)
