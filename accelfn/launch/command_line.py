"""Parse command lines: those of ``accelfn launch`` up to the script, and the arguments of other commands.

An error is one sentence with a suggestion. In flag names, - and _ are equivalent.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn

from accelfn.errors import ConfigurationError
from accelfn.launch.accelerate_names import OTHER_LAUNCHERS, RENAMED
from accelfn.launch.kinds import BOOL, FILE, suggest
from accelfn.launch.options import OPTIONS, Option, Section
from accelfn.launch.sources import Given

#: A sentence for the help of every command.
FLAG_NOTE = "In flag names, - and _ are equivalent."
_COMMAND = Section("The command itself")
#: Flags of ``accelfn launch`` that control the command itself.
ACTIONS: Mapping[str, Option] = MappingProxyType(
    {
        action.name: action
        for action in (
            Option("help", BOOL, False, "show this help and exit", "-h", section=_COMMAND),
            Option("config_file", FILE, None, "config file, not the default one", section=_COMMAND),
            Option("print_config", BOOL, False, "print values and sources, and exit", section=_COMMAND),
            Option("dry_run", BOOL, False, "print command and variables, and exit", section=_COMMAND),
        )
    }
)


def _all_flags() -> dict[str, tuple[Option, str]]:
    """Map each flag to its option and to the text of its value if none follows."""
    flags: dict[str, tuple[Option, str]] = {}
    for option in (*ACTIONS.values(), *OPTIONS.values()):
        flags |= dict.fromkeys(option.flags, (option, "true" if option.kind.is_bool else ""))
        if option.no_flag:
            flags[option.no_flag] = (option, "false")
    return flags


_FLAGS: Mapping[str, tuple[Option, str]] = MappingProxyType(_all_flags())


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A parsed command line of ``accelfn launch``.

    Attributes:
        flags: Values by option name.
        actions: Values of :data:`ACTIONS` by name, without those that were switched off.
        script: The script, or None.
        script_args: Arguments of the script, unchanged.
    """

    flags: Mapping[str, Given]
    actions: Mapping[str, str]
    script: str | None
    script_args: tuple[str, ...]


def parse_flags(argv: Sequence[str]) -> Parsed:
    """Parse the arguments of ``accelfn launch``. Pure; ``resolve`` parses the values.

    The script is the first word that is neither a flag nor a flag's value, or the first word after ``--``.
    Everything after it belongs to the script.

    Args:
        argv: Arguments after ``launch``.

    Raises:
        ConfigurationError: A flag is unknown, repeated, or lacks its value.

    >>> parsed = parse_flags(["--num-processes", "2", "train.py", "--lr", "0.1"])
    >>> parsed.flags["num_processes"].text, parsed.script, parsed.script_args
    ('2', 'train.py', ('--lr', '0.1'))
    """
    rest = list(argv)
    flags: dict[str, Given] = {}
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        flag, equals, text = _split_flag(rest.pop(0))
        option, implied = _find_flag(flag)
        if equals and implied == "false":
            raise ConfigurationError(f"argument {flag}: it takes no value, got {text!r}.")
        if not equals and not implied and not rest:
            raise ConfigurationError(f"argument {flag}: it needs a value.")
        # After a boolean flag, the next word is its value only if it reads as one.
        takes_next = rest and implied != "false" and (not implied or option.kind.can_read(rest[0]))
        if not equals:
            text = rest.pop(0) if takes_next else implied
        _add_flag(flags, option, Given(text, flag))
    if rest[:1] == ["--"]:
        del rest[0]
    actions = {name: flags.pop(name).text for name in ACTIONS if name in flags}
    return Parsed(
        flags=MappingProxyType(flags),
        actions=MappingProxyType({name: text for name, text in actions.items() if text != "false"}),
        script=rest[0] if rest else None,
        script_args=tuple(rest[1:]),
    )


def _split_flag(token: str) -> tuple[str, str, str]:
    """Split a flag from a value in the same word: ``--flag=value`` or ``-n2``."""
    option, implied = _FLAGS.get(token[:2], (None, ""))
    if option is not None and not implied and option.kind.can_read(token[2:]):
        return token[:2], "=", token[2:]
    return token.partition("=")


def _find_flag(given: str) -> tuple[Option, str]:
    flag = normalize_flag(given)
    if flag in _FLAGS:
        return _FLAGS[flag]
    name = flag.lstrip("-")
    if name in OTHER_LAUNCHERS:
        raise ConfigurationError(f"{given} is no flag of accelfn launch: {OTHER_LAUNCHERS[name]}.")
    # difflib finds no match for an abbreviation.
    longer = [one for one in _FLAGS if one.startswith(flag)] if len(flag) > 5 else []
    meant = (
        longer[0] if len(longer) == 1 else f"--{RENAMED[name]}" if name in RENAMED else suggest(flag, _FLAGS)
    )
    hint = f" Did you mean {meant}?" if meant else " accelfn launch --help lists the flags."
    raise ConfigurationError(f"unknown flag {given}.{hint} Flags of the script follow the script.")


def _add_flag(flags: dict[str, Given], option: Option, new: Given) -> None:
    before = flags.get(option.name)
    if before is None:
        flags[option.name] = new
    elif option.kind.repeats:
        flags[option.name] = replace(before, text=f"{before.text}\n{new.text}")
    else:
        spellings = dict.fromkeys((before.spelling, new.spelling))
        fault = "contradict each other" if len(spellings) > 1 else "is given twice"
        raise ConfigurationError(
            f"{' and '.join(spellings)} {fault}: {before.text} and {new.text}. Give one of them."
        )


def normalize_flag(token: str) -> str:
    """Replace dashes in a long flag's name by underscores; values and short flags stay the same. Pure.

    >>> normalize_flag("--num-processes=a-b"), normalize_flag("-m")
    ('--num_processes=a-b', '-m')
    """
    if not token.startswith("--"):
        return token
    name, equals, value = token[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


class CommandParser(argparse.ArgumentParser):
    """A parser that reports an error in one sentence, without the usage."""

    def __init__(self, **options: Any) -> None:
        """Accept argparse's options. Flags can't be abbreviated, and - and _ are equivalent in them."""
        options.setdefault("epilog", FLAG_NOTE)
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Print the error and exit.

        Raises:
            SystemExit: 2, always.
        """
        end = "" if message.endswith((".", "?")) else f". See {self.prog} --help."
        self.exit(2, f"{self.prog}: error: {message}{end}\n")


def read_arguments(parser: CommandParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments of a command.

    Raises:
        SystemExit: 0 after ``--help``, 2 after an error.
    """
    return parser.parse_args([normalize_flag(token) for token in argv])


def positive(text: str) -> int:
    """Read a number from 1, as the ``type`` of an argument."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"it must be an integer of at least 1, got {text!r}.")
    return int(text)


def launch_parser() -> CommandParser:
    """Build a parser with the flags of ``accelfn launch``, for help and completion: parse_flags parses."""
    parser = CommandParser(
        prog="accelfn launch",
        usage="accelfn launch [flags] script [arguments of the script]",
        description=f"Start a training script on one or more processes and machines. {FLAG_NOTE} Boolean "
        "flags also exist as --no_..., which switches them off. A value comes from the flag, else from the "
        "variable ACCELFN_<FLAG>, else from the SLURM step, else from the config file. Arguments after the "
        "script are passed to it.",
        epilog=None,
        add_help=False,
        formatter_class=partial(argparse.HelpFormatter, max_help_position=36, width=110),
    )
    add_launch_flags(parser)
    script: Any = parser.add_argument("script", nargs=argparse.REMAINDER, help="script and its arguments")
    script.complete = {"bash": "_shtab_compgen_files", "zsh": "_files"}
    return parser


def add_launch_flags(parser: CommandParser) -> None:
    """Add the flags of ``accelfn launch`` to a parser."""
    groups: dict[str, Any] = {}
    for option in (*ACTIONS.values(), *OPTIONS.values()):
        title, kind = option.section.title, option.kind
        group = groups[title] = groups.get(title) or parser.add_argument_group(title)
        default = "" if option.default in (None, False) else f" ({kind.write(option.default)})"
        about = f"{option.help}{default}".replace("%", "%%")
        if kind.is_bool:
            group.add_argument(*option.flags, action="store_true", help=about)
            group.add_argument(option.no_flag, action="store_true", help=argparse.SUPPRESS)
        else:
            group.add_argument(*option.flags, choices=kind.choices or None, metavar=kind.metavar, help=about)
