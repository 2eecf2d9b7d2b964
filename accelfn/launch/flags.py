"""The command line of ``accelfn launch``: cut before the script, and read by the table of fields."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from accelfn.errors import ConfigurationError
from accelfn.launch.config.fields import FIELDS, RENAMED, Field, suggest
from accelfn.launch.config.sources import Given


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """A flag of ``accelfn launch`` that is about the command and not about the launch.

    Attributes:
        name: Long name without dashes.
        about: Help in a few words.
        metavar: Stands for its value; empty if it takes none.
        aliases: Further spellings.
    """

    name: str
    about: str
    metavar: str = ""
    aliases: tuple[str, ...] = ()


ACTIONS: tuple[Action, ...] = (
    Action(name="help", about="show this and stop", aliases=("-h",)),
    Action(name="config_file", metavar="FILE", about="config file to use instead of the default"),
    Action(name="print_config", about="print every value and where it came from, and stop"),
    Action(name="dry_run", about="print the exact command and its variables, and stop"),
    Action(name="sbatch", metavar="FILE", about="write a script for SLURM's sbatch that does this, and stop"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A command line of ``accelfn launch``, cut and read.

    Attributes:
        flags: What was given, by the fields' names.
        actions: What was given of :data:`ACTIONS`, by name; the text of those that take none is empty.
        script: The script, or None.
        script_args: What stands after it, unchanged.
        tokens: What stands before it, unchanged.
    """

    flags: Mapping[str, Given]
    actions: Mapping[str, str]
    script: str | None
    script_args: tuple[str, ...]
    tokens: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Spelling:
    """One spelling of a flag: what it sets, and what it means without a value."""

    name: str
    field: Field | None
    takes_value: bool
    bare: str | None


def _spellings() -> Mapping[str, _Spelling]:
    found: dict[str, _Spelling] = {}
    for action in ACTIONS:
        for flag in (f"--{action.name}", *action.aliases):
            found[flag] = _Spelling(action.name, None, bool(action.metavar), None if action.metavar else "")
    for field in FIELDS:
        for flag in field.flags:
            found[flag] = _Spelling(
                field.name, field, bool(field.kind.metavar), "true" if field.kind.is_bool else None
            )
        if field.no_flag:
            found[field.no_flag] = _Spelling(field.name, field, False, "false")
    return MappingProxyType(found)


_SPELLINGS = _spellings()
# What torchrun and mpirun call otherwise.
_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "-np": "--num_processes",
        "--nproc_per_node": "--num_processes",
        "--nnodes": "--num_machines",
        "--node_rank": "--machine_rank",
        "--master_port": "--main_process_port",
    }
)


def parse_flags(argv: Sequence[str]) -> Parsed:
    """Read the arguments of ``accelfn launch``. Pure; values are read later, by ``resolve``.

    In names of flags ``-`` and ``_`` mean the same. The first word that is neither a flag nor a flag's value
    is the script, and everything after it belongs to the script; so does everything after ``--``.

    Args:
        argv: Arguments after ``launch``.

    Raises:
        ConfigurationError: A flag is not known, is given twice, or lacks its value.

    >>> parsed = parse_flags(["--num-processes", "2", "train.py", "--lr", "0.1"])
    >>> parsed.flags["num_processes"].text, parsed.script, parsed.script_args
    ('2', 'train.py', ('--lr', '0.1'))
    """
    tokens = tuple(argv)
    flags: dict[str, Given] = {}
    actions: dict[str, str] = {}
    position = 0
    while position < len(tokens) and tokens[position].startswith("-") and tokens[position] != "-":
        token = tokens[position]
        if token == "--":
            break
        written, equals, value = _cut_value(token)
        position += 1
        spelling = _find(written, value if equals else tokens[position : position + 1])
        if equals:
            if spelling.bare == "" or (spelling.bare == "false" and not spelling.takes_value):
                raise ConfigurationError(f"argument {written}: it takes no value, got {value!r}.")
            text = value
        elif spelling.takes_value and position < len(tokens) and _is_value(spelling, tokens[position]):
            text = tokens[position]
            position += 1
        elif spelling.bare is not None:
            text = spelling.bare
        else:
            raise ConfigurationError(f"argument {written}: it needs a value.")
        _add(flags, actions, spelling, written, text)
    rest = tokens[position + 1 :] if tokens[position : position + 1] == ("--",) else tokens[position:]
    return Parsed(
        flags=MappingProxyType(flags),
        actions=MappingProxyType(actions),
        script=rest[0] if rest else None,
        script_args=rest[1:],
        tokens=tokens[:position],
    )


def _cut_value(token: str) -> tuple[str, str, str]:
    """Part a flag from the value in the same word: ``--flag=value``, or ``-n2``."""
    short = _SPELLINGS.get(token[:2])
    if short is None or short.field is None or not short.takes_value or not _is_read(short.field, token[2:]):
        return token.partition("=")
    return token[:2], "=", token[2:]


def _find(written: str, value: str | Sequence[str]) -> _Spelling:
    flag = spell(written)
    found = _SPELLINGS.get(flag)
    if found is None:
        if flag in _ELSEWHERE:
            number = "".join(value)
            ours = f"{_ELSEWHERE[flag]} {number if number.isdecimal() else 'N'}"
            every = ", on all machines together" if "processes" in ours else ""
            raise ConfigurationError(f"unknown flag {written}. Write {ours}{every}.")
        ours = f"--{RENAMED.get(flag.removeprefix('--'), '')}"
        close = ours if ours in _SPELLINGS else suggest(flag, _SPELLINGS)
        # A flag that is cut short is not near enough for difflib.
        longer = [name for name in _SPELLINGS if name.startswith(flag)] if len(flag) > 5 else []
        meant = longer[0] if len(longer) == 1 else close
        hint = f" Did you mean {meant}?" if meant else " accelfn launch --help lists the flags."
        raise ConfigurationError(f"unknown flag {flag}.{hint} Flags of the script stand after the script.")
    return found


def _is_value(spelling: _Spelling, token: str) -> bool:
    """Whether the next word belongs to a flag; a yes or no can do without, so the script may follow."""
    return spelling.bare is None or spelling.field is None or _is_read(spelling.field, token)


def _is_read(field: Field, text: str) -> bool:
    try:
        field.kind.read(text)
    except ValueError:
        return False
    return True


def _add(
    flags: dict[str, Given], actions: dict[str, str], spelling: _Spelling, written: str, text: str
) -> None:
    if spelling.field is None:
        if spelling.name in actions:
            raise ConfigurationError(f"{written} is given twice. Give it once.")
        actions[spelling.name] = text
        return
    before = flags.get(spelling.name)
    if before is None:
        flags[spelling.name] = Given(text, written)
    elif spelling.field.kind.repeats:
        flags[spelling.name] = replace(before, text=f"{before.text}\n{text}")
    else:
        both = written if before.spelling == written else f"{before.spelling} and {written}"
        raise ConfigurationError(
            f"{both} {'is given twice' if both == written else 'contradict each other'}: "
            f"{before.text} and {text}. Give one of them."
        )


def flag_rows() -> Iterator[tuple[str, str, str, str]]:
    """Yield every flag as heading, spellings, help and default; the help and the reference show the same."""
    for action in ACTIONS:
        names = ", ".join((*action.aliases, f"--{action.name}"))
        yield "General", f"{names} {action.metavar}".rstrip(), action.about, ""
    for field in FIELDS:
        short = [flag for flag in field.flags if not flag.startswith("--")]
        names = ", ".join((*short, field.flags[0]))
        default = "" if field.default is None else field.kind.write(field.default)
        about = field.about + (f": {field.kind.accepts}" if field.kind.metavar == "NAME" else "")
        yield field.group, f"{names} {field.kind.metavar}".rstrip(), about, default


def format_help() -> str:
    """Write the help of ``accelfn launch``."""
    lines = [
        "usage: accelfn launch [flags] script [arguments of the script]",
        "",
        "Start a training script on one or more processes and machines.",
        "",
        "In names of flags - and _ mean the same. Those without a value, and those with BOOL, also exist as",
        "--no_..., which switches off. A value comes from the flag, else from the variable ACCELFN_<FLAG>,",
        "else from SLURM's step, else from the configuration file. What follows the script belongs to it.",
    ]
    heading = ""
    by_heading: dict[str, list[tuple[str, str]]] = {}
    for group, names, about, default in flag_rows():
        by_heading.setdefault(group, []).append((names, f"{about} ({default})" if default else about))
    for heading, rows in by_heading.items():
        lines += ["", f"{heading}:"]
        for names, about in rows:
            head = f"  {names}"
            if len(head) > 34:
                lines.append(head)
                head = ""
            lines += textwrap.wrap(
                about, width=110, initial_indent=f"{head:<36}", subsequent_indent=" " * 36
            ) or [head]
    return "\n".join(lines)


def spell(token: str) -> str:
    """Spell a long flag's name with underscores; leave its value and short flags alone. Pure.

    >>> spell("--num-processes=a-b"), spell("-m")
    ('--num_processes=a-b', '-m')
    """
    if not token.startswith("--"):
        return token
    name, equals, value = token[2:].partition("=")
    return f"--{name.replace('-', '_')}{equals}{value}"
