"""How commands read their arguments: every mistake is one sentence, with what was probably meant."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn, cast

from accelfn.launch.config.fields import suggest
from accelfn.launch.flags import spell

__all__ = ("CommandParser", "CommandWords", "FlagWords", "describe_arguments", "read_arguments")

# argparse's words, in ours.
_WORDS = (
    (r"invalid int value: (.+)", r"it must be a whole number, got \1."),
    (r"invalid float value: (.+)", r"it must be a number, got \1."),
    (r"expected (?:at least )?one argument", "it needs a value."),
    (r"the following arguments are required: (.+)", r"\1 must be given"),
)


@dataclass(frozen=True, slots=True)
class FlagWords:
    """A flag, for a shell to complete.

    Attributes:
        names: Its spellings.
        about: Help in a few words.
        needs_value: Whether the next word belongs to it.
        choices: The only values, where there are few; else any, such as a file.
    """

    names: tuple[str, ...]
    about: str
    needs_value: bool
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandWords:
    """What may follow a command.

    Attributes:
        flags: Its own flags.
        words: The only words that may stand there without a flag; where there are none, files may.
        commands: Its own commands, by name.
        about: Help for each of them, by name.
        takes_script: Whether everything after the first word belongs to that word.
    """

    flags: tuple[FlagWords, ...]
    words: tuple[str, ...] = ()
    commands: Mapping[str, CommandWords] = field(default_factory=dict[str, Any])
    about: Mapping[str, str] = field(default_factory=dict[str, str])
    takes_script: bool = False


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
        described = describe_arguments(parser)
        inner = described.commands.get(str(getattr(options, "action", None)))
        prog = parser.prog if inner is None else f"{parser.prog} {options.action}"
        flag = rest[0].partition("=")[0]
        if not flag.startswith("-"):
            parser.error(f"{flag!r} is one word too many. {prog} --help says what it takes.")
        close = suggest(flag, [name for one in (inner or described).flags for name in one.names])
        hint = f"Did you mean {close}?" if close else f"{prog} --help lists the flags."
        parser.error(f"unknown flag {flag}. {hint}")
    return options


def describe_arguments(parser: argparse.ArgumentParser) -> CommandWords:
    """Return which words may follow a command. Pure.

    >>> parser = CommandParser(prog="accelfn show")
    >>> _ = parser.add_argument("--form", choices=("table", "json"), help="how it is told")
    >>> describe_arguments(parser).flags[1].choices
    ('table', 'json')
    """
    flags: list[FlagWords] = []
    words: list[str] = []
    commands: dict[str, CommandWords] = {}
    about: dict[str, str] = {}
    # argparse has no public way to ask.
    actions: list[argparse.Action] = parser._actions
    for one in actions:
        if isinstance(one, argparse._SubParsersAction):  # pyright: ignore[reportPrivateUsage]
            inner: Mapping[str, argparse.ArgumentParser] = cast("Any", one).choices
            commands = {name: describe_arguments(each) for name, each in inner.items()}
            told: Sequence[argparse.Action] = cast("Any", one)._choices_actions
            about = {each.dest: each.help or "" for each in told}
        elif one.option_strings:
            few = tuple(str(each) for each in one.choices or ())
            needs = one.nargs != 0
            flags.append(FlagWords(tuple(one.option_strings), one.help or "", needs_value=needs, choices=few))
        else:
            words += [str(each) for each in one.choices or ()]
    return CommandWords(
        flags=tuple(flags),
        words=tuple(words),
        commands=MappingProxyType(commands),
        about=MappingProxyType(about),
    )
