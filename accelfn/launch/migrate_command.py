"""``accelfn migrate``: print what changes in programs that were written for Accelerate."""

import argparse
import sys
import tokenize
from pathlib import Path

from accelfn.errors import ConfigurationError
from accelfn.launch.command_line import FLAG_NOTE, CommandParser
from accelfn.launch.migrate import Migration, plan_migration


def run(options: argparse.Namespace) -> int:
    """Print the diffs of all programs, or what isn't understood in them. Writes no file.

    Returns:
        0 if all programs are understood; 2 if not: then there is no diff at all.
    """
    plans = [plan_migration(_read(path), path, to=options.to) for path in options.scripts]
    refused = [plan for plan in plans if plan.refusals]
    for plan in refused or plans:
        _print_remarks(plan)
    if refused:
        number = sum(len(plan.refusals) for plan in refused)
        shim = " With --to shim the program keeps its Accelerator." if options.to == "functions" else ""
        raise ConfigurationError(
            f"{number} {'construct is' if number == 1 else 'constructs are'} not understood, so there is no "
            f"diff. Change them first.{shim}"
        )
    for plan in plans:
        print(plan.diff, end="")
        if not plan.edits:
            print(f"{plan.name}: nothing to change", file=sys.stderr)
    return 0


def _print_remarks(plan: Migration) -> None:
    for line, construct, text in plan.refusals:
        print(f"{plan.name}:{line}: {construct}: {text}", file=sys.stderr)
    for line, _, text in () if plan.refusals else plan.notes:
        print(f"{plan.name}:{line}: note: {text}", file=sys.stderr)


def _read(path: str) -> str:
    """Read a program with its line breaks, in the encoding that it declares."""
    with Path(path).open("rb") as file:
        try:
            encoding, _ = tokenize.detect_encoding(file.readline)
            file.seek(0)
            return file.read().decode(encoding)
        except (SyntaxError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"{path} isn't a Python program: {error}. Check the path.") from error


def make_parser() -> CommandParser:
    """Build the parser of the command."""
    parser = CommandParser(
        prog="accelfn migrate",
        description="Print, as a diff that `patch -p0` applies, what changes in programs written for Hugging "
        "Face Accelerate. What isn't understood is named with its line, and then there is no diff. Writes "
        "no file.",
        epilog=FLAG_NOTE,
    )
    parser.add_argument("scripts", metavar="SCRIPT", nargs="+", help="program to read")
    parser.add_argument(
        "--to",
        choices=("functions", "shim"),
        default="functions",
        help="functions: rewrite the loop (default); shim: keep it, with accelfn's Accelerator",
    )
    return parser
