"""How commands read their arguments: every mistake is one sentence, with what was probably meant."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, NoReturn, cast

from accelfn.launch.config.fields import suggest
from accelfn.launch.flags import spell

# argparse's words, in ours.
_WORDS = (
    (r"invalid int value: (.+)", r"it must be a whole number, got \1."),
    (r"invalid float value: (.+)", r"it must be a number, got \1."),
    (r"expected (?:at least )?one argument", "it needs a value."),
    (r"the following arguments are required: (.+)", r"\1 must be given"),
)


class CommandParser(argparse.ArgumentParser):
    """A parser that tells a mistake in one sentence, and leaves the usage to ``--help``.

    argparse lets its messages be changed in no other way than by a class.
    """

    def __init__(
        self,
        prog: str | None = None,
        usage: str | None = None,
        description: str | None = None,
        epilog: str | None = "In names of flags - and _ mean the same.",
        formatter_class: type[argparse.HelpFormatter] = argparse.HelpFormatter,
        **options: Any,  # newer versions of argparse hand their own on to the parsers of commands
    ) -> None:
        """Take what argparse takes; flags are never cut short, and - and _ mean the same in them."""
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            epilog=epilog,
            formatter_class=formatter_class,
            allow_abbrev=False,
            **options,
        )

    def error(self, message: str) -> NoReturn:
        """Return what is wrong, and stop.

        Raises:
            SystemExit: 2, always.
        """
        for words, ours in _WORDS:
            message = re.sub(words, ours, message)
        end = "" if message.endswith((".", "?")) else f". {self.prog} --help says what it takes."
        self.exit(2, f"{self.prog}: error: {message}{end}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = [str(one) for one in action.choices]
        close = suggest(str(value), names)
        hint = f" Did you mean {close}?" if close else ""
        raise argparse.ArgumentError(action, f"it must be one of {', '.join(names)}, got {value!r}.{hint}")


def read_arguments(parser: CommandParser, argv: Sequence[str]) -> argparse.Namespace:
    """Read the arguments of a command.

    Args:
        parser: Of the command.
        argv: What stands after its name.

    Raises:
        SystemExit: 0 after ``--help``; 2 after one sentence on what is wrong.
    """
    options, rest = parser.parse_known_args([spell(token) for token in argv])
    if rest:
        commands = next((one.choices for one in parser._actions if one.dest == "action"), None)
        inner = cast("dict[str, CommandParser]", commands or {}).get(
            str(getattr(options, "action", None)), parser
        )
        prog = inner.prog
        flag = rest[0].partition("=")[0]
        if not flag.startswith("-"):
            parser.error(f"unexpected argument {flag!r}. {prog} --help says what it takes.")
        close = suggest(flag, flags_of(inner))
        hint = f"Did you mean {close}?" if close else f"{prog} --help lists the flags."
        parser.error(f"unknown flag {flag}. {hint}")
    return options


def flags_of(parser: argparse.ArgumentParser) -> list[str]:
    """List the spellings of a parser's own flags. Pure."""
    # argparse has no public way to ask.
    return [name for one in parser._actions for name in one.option_strings]
