"""How command lines are read: ``accelfn launch`` up to its script, and the arguments of the other commands.

Every mistake is one sentence, with what was probably meant. In names of flags - and _ mean the same.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NoReturn

from accelfn.errors import ConfigurationError
from accelfn.launch.config.options import BOOL, FILE, OPTIONS, RENAMED, Option, Section, suggest
from accelfn.launch.config.resolve import Given

_COMMAND = Section("The command itself")
#: Flags of ``accelfn launch`` that are about the command and not about the launch.
ACTIONS: Mapping[str, Option] = MappingProxyType(
    {
        one.name: replace(one, section=_COMMAND)
        for one in (
            Option("help", BOOL, False, "show this and stop", alias="-h"),
            Option("config_file", FILE, None, "config file to use instead of the default"),
            Option("print_config", BOOL, False, "print every value and where it came from, and stop"),
            Option("dry_run", BOOL, False, "print the exact command and its variables, and stop"),
            Option("sbatch", FILE, None, "write a script for SLURM's sbatch that does this, and stop"),
        )
    }
)
# What torchrun and mpirun call otherwise.
_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "-np": "--num_processes, which counts all machines",
        "--nproc_per_node": "--num_processes, which counts all machines",
        "--nnodes": "--num_machines",
        "--node_rank": "--machine_rank",
        "--master_addr": "--main_process_ip",
        "--master_port": "--main_process_port",
    }
)
# argparse's messages, as sentences.
_MESSAGES = (
    (r"invalid int value: (.+)", r"it must be a whole number, got \1."),
    (r"invalid float value: (.+)", r"it must be a number, got \1."),
    (r"expected (?:at least )?one argument", "it needs a value."),
    (r"the following arguments are required: (.+)", r"\1 must be given"),
)


def _all_flags() -> dict[str, tuple[Option, str]]:
    """Map each spelling to its option, and to the text that it stands for without a value."""
    found: dict[str, tuple[Option, str]] = {}
    for option in (*ACTIONS.values(), *OPTIONS.values()):
        found |= dict.fromkeys(option.flags, (option, "true" if option.kind.is_bool else ""))
        if option.no_flag:
            found[option.no_flag] = (option, "false")
    return found


_FLAGS: Mapping[str, tuple[Option, str]] = MappingProxyType(_all_flags())


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A command line of ``accelfn launch``.

    Attributes:
        flags: What was given, by the options' names.
        actions: What was given of :data:`ACTIONS`, by name; those that were switched off are left out.
        script: The script, or None.
        script_args: What follows it, unchanged.
    """

    flags: Mapping[str, Given]
    actions: Mapping[str, str]
    script: str | None
    script_args: tuple[str, ...]


def parse_flags(argv: Sequence[str]) -> Parsed:
    """Read the arguments of ``accelfn launch``. Pure; values are read later, by ``resolve``.

    The first word that is neither a flag nor a flag's value is the script, and everything after it belongs to
    the script; so does everything after ``--``.

    Args:
        argv: Arguments after ``launch``.

    Raises:
        ConfigurationError: A flag is not known, is given twice, or lacks its value.

    >>> parsed = parse_flags(["--num-processes", "2", "train.py", "--lr", "0.1"])
    >>> parsed.flags["num_processes"].text, parsed.script, parsed.script_args
    ('2', 'train.py', ('--lr', '0.1'))
    """
    rest = list(argv)
    given: dict[str, Given] = {}
    while rest and rest[0].startswith("-") and rest[0] not in ("-", "--"):
        written, equals, text = _split_flag(rest.pop(0))
        option, alone = _find(written)
        if equals and alone == "false":
            raise ConfigurationError(f"argument {written}: it takes no value, got {text!r}.")
        # A yes or no can do without a value, so the script may follow.
        if not equals and not alone and not rest:
            raise ConfigurationError(f"argument {written}: it needs a value.")
        takes_next = rest and alone != "false" and (not alone or option.kind.can_read(rest[0]))
        if not equals:
            text = rest.pop(0) if takes_next else alone
        _add(given, option, Given(text, written))
    if rest[:1] == ["--"]:
        del rest[0]
    actions = {name: given.pop(name).text for name in ACTIONS if name in given}
    return Parsed(
        flags=MappingProxyType(given),
        actions=MappingProxyType({name: text for name, text in actions.items() if text != "false"}),
        script=rest[0] if rest else None,
        script_args=tuple(rest[1:]),
    )


def _split_flag(token: str) -> tuple[str, str, str]:
    """Part a flag from the value in the same word: ``--flag=value``, or ``-n2``."""
    option, alone = _FLAGS.get(token[:2], (None, ""))
    if option is not None and not alone and option.kind.can_read(token[2:]):
        return token[:2], "=", token[2:]
    return token.partition("=")


def _find(written: str) -> tuple[Option, str]:
    flag = spell(written)
    if flag in _FLAGS:
        return _FLAGS[flag]
    renamed = f"--{RENAMED.get(flag.removeprefix('--'), '')}"
    meant = _ELSEWHERE.get(flag) or (renamed if renamed in _FLAGS else suggest(flag, _FLAGS))
    # A flag that is cut short is not near enough for difflib.
    longer = [name for name in _FLAGS if name.startswith(flag)] if len(flag) > 5 else []
    meant = longer[0] if len(longer) == 1 else meant
    hint = f" Did you mean {meant}?" if meant else " accelfn launch --help lists the flags."
    raise ConfigurationError(f"unknown flag {written}.{hint} Flags of the script follow the script.")


def _add(given: dict[str, Given], option: Option, new: Given) -> None:
    before = given.get(option.name)
    if before is None:
        given[option.name] = new
    elif option.kind.repeats:
        given[option.name] = replace(before, text=f"{before.text}\n{new.text}")
    else:
        spellings = dict.fromkeys((before.spelling, new.spelling))
        fault = "contradict each other" if len(spellings) > 1 else "is given twice"
        raise ConfigurationError(
            f"{' and '.join(spellings)} {fault}: {before.text} and {new.text}. Give one of them."
        )


def spell(token: str) -> str:
    """Spell a long flag's name with underscores; leave its value and short flags alone. Pure.

    >>> spell("--num-processes=a-b"), spell("-m")
    ('--num_processes=a-b', '-m')
    """
    if not token.startswith("--"):
        return token
    name, equals, value = token[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"


class CommandParser(argparse.ArgumentParser):
    """A parser that tells a mistake in one sentence, and leaves the usage to ``--help``.

    argparse lets its messages be changed in no other way than by a class.
    """

    def __init__(self, **options: Any) -> None:
        """Take what argparse takes; flags are never cut short, and - and _ mean the same in them."""
        options.setdefault("epilog", "In names of flags - and _ mean the same.")
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Print what is wrong, and stop.

        Raises:
            SystemExit: 2, always.
        """
        for words, ours in _MESSAGES:
            message = re.sub(words, ours, message)
        end = "" if message.endswith((".", "?")) else f". {self.prog} --help says what it takes."
        self.exit(2, f"{self.prog}: error: {message}{end}\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        names = [str(one) for one in action.choices]
        close = suggest(str(value), names)
        if any("," in name for name in names):
            names = [repr(name) for name in names]
        hint = f" Did you mean {close}?" if close else ""
        raise argparse.ArgumentError(action, f"it must be one of {', '.join(names)}, got {value!r}.{hint}")


def read_arguments(parser: CommandParser, argv: Sequence[str]) -> argparse.Namespace:
    """Read the arguments of a command.

    Args:
        parser: Of the command.
        argv: What follows its name.

    Raises:
        SystemExit: 0 after ``--help``; 2 after one sentence on what is wrong.
    """
    options, rest = parser.parse_known_args([spell(token) for token in argv])
    if rest:
        commands: Any = next((one.choices for one in parser._actions if one.dest == "action"), None) or {}
        inner: CommandParser = commands.get(getattr(options, "action", None), parser)
        flag = rest[0].partition("=")[0]
        if not flag.startswith("-"):
            parser.error(f"unexpected argument {flag!r}. {inner.prog} --help says what it takes.")
        close = suggest(flag, flags_of(inner))
        hint = f"Did you mean {close}?" if close else f"{inner.prog} --help lists the flags."
        parser.error(f"unknown flag {flag}. {hint}")
    return options


def flags_of(parser: argparse.ArgumentParser) -> list[str]:
    """List the spellings of a parser's own flags. Pure."""
    # argparse has no public way to ask.
    return [name for one in parser._actions for name in one.option_strings]


class _WideFormatter(argparse.HelpFormatter):
    """Leaves the long names of flags room."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, max_help_position=36, width=110)


def launch_parser() -> CommandParser:
    """Describe the arguments of ``accelfn launch``, for its help and for completion."""
    parser = CommandParser(
        prog="accelfn launch",
        usage="accelfn launch [flags] script [arguments of the script]",
        description="Start a training script on one or more processes and machines. In names of flags - and "
        "_ mean the same. A flag without a value also exists as --no_..., which switches off. A value comes "
        "from the flag, else from the variable ACCELFN_<FLAG>, else from SLURM's step, else from the config "
        "file. What follows the script belongs to it.",
        epilog=None,
        add_help=False,
        formatter_class=_WideFormatter,
    )
    add_launch_flags(parser)
    script: Any = parser.add_argument("script", nargs=argparse.REMAINDER, help="script, and its arguments")
    script.complete = {"bash": "_shtab_compgen_files", "zsh": "_files"}
    return parser


def add_launch_flags(parser: CommandParser) -> None:
    """Add the flags of ``accelfn launch`` that a parser doesn't have yet."""
    taken = set(flags_of(parser))
    groups: dict[str, Any] = {}
    for option in (*ACTIONS.values(), *OPTIONS.values()):
        if not taken.isdisjoint(option.flags):
            continue
        group = groups.setdefault(option.heading, None) or parser.add_argument_group(option.heading)
        groups[option.heading] = group
        default = "" if option.default in (None, False) else f" ({option.kind.write(option.default)})"
        about = f"{option.help}{default}".replace("%", "%%")
        if option.kind.is_bool:
            group.add_argument(*option.flags, action="store_true", help=about)
            group.add_argument(option.no_flag, action="store_true", help=argparse.SUPPRESS)
        else:
            choices = option.kind.choices or None
            metavar = option.kind.metavar
            group.add_argument(*option.flags, choices=choices, metavar=metavar, help=about)
