"""How a command writes what it has to say: in which form, as tables, and what if nobody takes it."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import importlib.util
import os
import re
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TextIO, cast

from accelfn.launch.config.sources import Resolved, origin_rows

__all__ = (
    "CLOSED_PIPE",
    "FORMATS",
    "OutputError",
    "choose_format",
    "format_table",
    "guarded_output",
    "is_closed_pipe",
    "is_terminal",
    "open_missing_streams",
    "print_drawn",
    "print_origins",
    "print_table",
    "refuse_missing_model",
    "refuse_unknown_dtype",
)

FORMATS = ("table", "json", "svg", "html")
#: Exit status after the reader of a pipe has gone: what a shell reports of ``cat`` and ``git`` there
#: (128 + SIGPIPE), so that scripts which allow for the one allow for the other.
CLOSED_PIPE = 141

_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
# Of this torch and of later ones: the model tells what of it is a dtype of weights.
_DTYPE = re.compile(
    r"(torch\.)?(bf(loat)?16|fp(8|16|32|64)|float((4|6|8|16|32|64)(_\w+)?)?|double|half|c(double|float|half)"
    r"|complex(32|64|128)|u?int([1-8]|16|32|64)?|qu?int\d+(x\d+)?|bits?\w*|bool|long|short)"
)
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


def refuse_missing_model(
    parser: argparse.ArgumentParser, model: str, output: str | None, *, is_name: bool = False
) -> None:
    """Return what is wrong with a model's place or the output's, before torch is loaded to find out.

    Args:
        parser: That has read the arguments.
        model: A folder, a file, or ``MODULE:FUNCTION``.
        output: What ``--output`` says; None if it is printed.
        is_name: Whether the model is a name that another library knows.

    Raises:
        SystemExit: 2 after one sentence, where there is nothing of that name, or no folder for the output.
    """
    if output is not None and not os.path.isdir(os.path.dirname(output) or "."):
        parser.error(f"can't write {output!r}: there is no such folder. Check --output.")
    if os.path.exists(model) or is_name or _FACTORY.fullmatch(model):
        return
    if _HUB_NAME.fullmatch(model):
        parser.error(
            f"there is no file or folder {model!r} in {os.getcwd()!r}, and nothing is downloaded. If it is a "
            f"model on the Hugging Face Hub, get its configuration first: hf download {model} config.json "
            f"--local-dir {os.path.basename(model)}"
        )
    parser.error(
        f"there is no file or folder {model!r}. Pass a folder with a config.json, a safetensors file or "
        "index, or MODULE:FUNCTION, such as train:build_model."
    )


def refuse_unknown_dtype(parser: argparse.ArgumentParser, flag: str, name: str) -> None:
    """Report that a name is that of no dtype, before torch is loaded to find out.

    Raises:
        SystemExit: 2 after one sentence, where no torch has such a dtype.
    """
    if not _DTYPE.fullmatch(name):
        parser.error(f"{flag}: {name!r} is no dtype. Use such as float32, bfloat16, float8, int8 or int4.")


def is_terminal() -> bool:
    """Whether what is printed goes to a terminal, and rich is there to draw on it."""
    return sys.stdout.isatty() and importlib.util.find_spec("rich") is not None


def print_table(
    head: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), title: str = ""
) -> None:
    """Print a table: drawn by rich on a terminal, plain text elsewhere.

    Args:
        head: Names of the columns; empty for a table without.
        rows: Texts; as many in each as there are columns.
        right: Columns of numbers, from 0.
        title: Printed above it, where there is one.
    """
    if not is_terminal():
        if title:
            print(title)
        print(format_table(head, rows, right=right))
        return
    # Only here: loading rich takes longer than all the rest of most commands.
    box: Any = importlib.import_module("rich.box")
    text: Any = importlib.import_module("rich.text").Text  # so that no bracket is taken for a style
    table: Any = importlib.import_module("rich.table").Table(
        title=text(title) if title else None,
        title_justify="left",
        show_header=bool(head),
        box=box.SIMPLE_HEAD if head else None,
        header_style="bold",
    )
    for column in range(max(map(len, (head, *rows)))):
        table.add_column(
            text(head[column]) if head else None,
            justify="right" if column in right else "left",
            style="cyan" if column == 0 else None,
            overflow="fold",
        )
    for row in rows:
        table.add_row(*map(text, row))
    importlib.import_module("rich.console").Console(file=sys.stdout).print(table)


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
    """Print each field's value, and where it came from. Secrets are hidden.

    Args:
        resolved: From ``resolve``.
        everything: Defaults too.
    """
    rows = origin_rows(resolved, everything=everything)
    if rows:
        print_table(("field", "value", "from") if is_terminal() else (), rows)


def print_drawn(text: str) -> None:
    """Print a text with tables in it: as it is, or with the tables drawn by rich on a terminal.

    Args:
        text: Columns of its tables are two spaces apart; the first table has a line of names, others don't.
    """
    if not is_terminal():
        print(text.removesuffix("\n"))
        return
    lines = text.splitlines()
    tables = 0
    place = 0
    while place < len(lines):
        columns = _columns(lines[place:])
        if columns.num_lines < 2:
            print(lines[place])
            place += 1
            continue
        cells = [
            tuple(line[start:end].strip() for start, end in columns.spans)
            for line in lines[place : place + columns.num_lines]
        ]
        head, rows = ((), cells) if tables else (cells[0], cells[1:])
        print_table(head, rows, right=columns.right)
        place += columns.num_lines
        tables += 1


class _Columns(NamedTuple):
    """Where the columns of a table stand that a text begins with."""

    num_lines: int
    spans: tuple[tuple[int, int], ...]
    right: tuple[int, ...]


def _columns(lines: Sequence[str]) -> _Columns:
    found = _Columns(0, (), ())
    for num_lines in range(1, len(lines) + 1):
        if not lines[num_lines - 1].strip():
            break
        block = lines[:num_lines]
        width = max(map(len, block))
        filled = "".join(
            " " if all(line[place : place + 1] in ("", " ") for line in block) else "x"
            for place in range(width)
        )
        spans = tuple(match.span() for match in re.finditer(r"x+(?: x+)*", filled))
        # A line that closes gaps is of no table.
        if len(spans) < 2 or len(spans) < len(found.spans) - (num_lines == 2):
            break
        right = tuple(
            column
            for column, (start, end) in enumerate(spans)
            if all(line[end - 1 : end].strip() for line in block)
            and not all(line[start : start + 1].strip() for line in block)
        )
        found = _Columns(num_lines, spans, right)
    return found


class OutputError(Exception):
    """What a command prints can't be written. Not an OSError, which commands take for one of their files'.

    Attributes:
        reason: What the system says.
    """

    def __init__(self, reason: OSError) -> None:
        """Keep the reason."""
        super().__init__(f"what it prints can't be written: {reason.strerror}.")
        self.reason = reason


class _Guarded:
    """Standard output whose failures are told from those of other files. All else is the real one's."""

    def __init__(self, real: TextIO) -> None:
        self._real = real

    def write(self, text: str) -> int:
        with _told():
            return self._real.write(text)

    def flush(self) -> None:
        with _told():
            self._real.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@contextlib.contextmanager
def _told() -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(error) from None


@contextlib.contextmanager
def guarded_output(real: TextIO) -> Generator[None]:
    """Run a command whose output may find no taker. Effect: puts another ``sys.stdout`` in its place.

    Everything is written when the block ends; what fails then fails here and not at the interpreter's end.

    Args:
        real: Standard output.

    Raises:
        OutputError: Something could not be written. The rest is thrown away.
    """
    try:
        with contextlib.redirect_stdout(cast("TextIO", _Guarded(real))):
            try:
                yield
            finally:
                sys.stdout.flush()
    except OutputError:
        # Else Python tries once more when it ends, and complains.
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, real.fileno())
            os.close(nowhere)
        raise


def open_missing_streams() -> None:
    """Open the null device in place of standard streams that are closed. Effect: sets them in ``sys``.

    Else the next file that is opened would be standard output for every program that is started.
    """
    for descriptor, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        nowhere = os.open(os.devnull, os.O_RDWR)
        try:
            os.fstat(descriptor)
        except OSError:
            os.dup2(nowhere, descriptor)
        if nowhere == descriptor:
            os.set_inheritable(nowhere, True)
        setattr(sys, name, os.fdopen(nowhere, mode, encoding="utf-8", closefd=False))


def is_closed_pipe(error: OutputError) -> bool:
    """Whether whoever read the output has read enough."""
    # Windows says EINVAL of a pipe whose reader has gone.
    return error.reason.errno in (errno.EPIPE, errno.EINVAL)
