"""``accelfn completion``: scripts by which a shell completes commands, flags and their values."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from accelfn.launch.config.fields import FIELDS
from accelfn.launch.flags import ACTIONS

__all__ = ("SHELLS", "run_completion", "write_completion")

SHELLS: tuple[str, ...] = ("bash", "zsh", "fish")


def run_completion(argv: Sequence[str], commands: Sequence[str]) -> int:
    """Print the script for one shell.

    Args:
        argv: Arguments after ``completion``.
        commands: Names of all commands.

    Returns:
        The exit status.

    Raises:
        SystemExit: 0 after ``--help``; 2 after one sentence on what is wrong.
    """
    parser = argparse.ArgumentParser(
        prog="accelfn completion",
        description="Print a script by which a shell completes the accelfn command.",
        epilog='bash: eval "$(accelfn completion bash)" in ~/.bashrc. zsh: the same, after compinit, in '
        "~/.zshrc. fish: accelfn completion fish > ~/.config/fish/completions/accelfn.fish",
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=SHELLS, help="for which shell")
    print(write_completion(parser.parse_args(argv).shell, commands))
    return 0


def write_completion(shell: str, commands: Sequence[str]) -> str:
    """Write the script for a shell. Pure.

    Flags of ``accelfn launch`` and their choices come from the table of fields; elsewhere, and behind a
    script's name, files are completed.

    Args:
        shell: ``"bash"``, ``"zsh"`` or ``"fish"``.
        commands: Names of all commands.
    """
    if shell == "fish":
        return _write_fish(commands)
    script = _write_bash(commands)
    # zsh reads what is written for bash, if it is told to.
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if shell == "zsh" else script


def _flags() -> list[str]:
    names = [f"--{action.name}" for action in ACTIONS]
    for field in FIELDS:
        names += [field.flags[0], *((field.no_flag,) if field.no_flag else ())]
    return names


def _write_bash(commands: Sequence[str]) -> str:
    cases = [
        f"    {field.flags[0]}) words={' '.join(field.kind.choices)!r} ;;"
        for field in FIELDS
        if field.kind.choices
    ]
    return "\n".join(
        (
            "_accelfn() {",
            '  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" words=""',
            "  COMPREPLY=()",
            '  if [ "$COMP_CWORD" -eq 1 ]; then',
            f"    words={' '.join(commands)!r}",
            '  elif [ "${COMP_WORDS[1]}" = launch ]; then',
            '    case "$before" in',
            *cases,
            f'    *) case "$word" in -*) words={" ".join(_flags())!r} ;; esac ;;',
            "    esac",
            "  fi",
            '  if [ -n "$words" ]; then COMPREPLY=($(compgen -W "$words" -- "$word"))',
            '  else COMPREPLY=($(compgen -f -- "$word")); fi',
            "}",
            "complete -o filenames -F _accelfn accelfn",
        )
    )


def _write_fish(commands: Sequence[str]) -> str:
    first = "complete -c accelfn -n __fish_use_subcommand -f -a"
    launch = "complete -c accelfn -n '__fish_seen_subcommand_from launch'"
    lines = [f"{first} {name}" for name in commands]
    for action in ACTIONS:
        value = " -r" if action.metavar else ""
        lines.append(f"{launch} -l {action.name}{value} -d {_quote(action.about)}")
    for field in FIELDS:
        value = f" -x -a {_quote(' '.join(field.kind.choices))}" if field.kind.choices else ""
        if not value and field.kind.metavar and not field.kind.is_bool:
            value = " -r"
        lines.append(f"{launch} -l {field.name}{value} -d {_quote(field.about)}")
        if field.no_flag:
            lines.append(f"{launch} -l {field.no_flag[2:]} -d {_quote(f'not: {field.about}')}")
    return "\n".join(lines)


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
