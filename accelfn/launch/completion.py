"""``accelfn completion``: scripts by which a shell completes commands, flags and their values.

What is completed is read off the parsers themselves, and for ``accelfn launch`` off the table of fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from accelfn.launch.arguments import (
    CommandParser,
    CommandWords,
    FlagWords,
    describe_arguments,
    read_arguments,
)
from accelfn.launch.config.fields import FIELDS
from accelfn.launch.flags import ACTIONS
from accelfn.launch.self_test import self_test_parser

__all__ = (
    "SHELLS",
    "completion_parser",
    "launch_words",
    "run_completion",
    "self_test_words",
    "write_completion",
)

SHELLS: tuple[str, ...] = ("bash", "zsh", "fish")


def run_completion(argv: Sequence[str], words: CommandWords) -> int:
    """Print the script for one shell.

    Args:
        argv: Arguments after ``completion``.
        words: What may follow ``accelfn``.

    Returns:
        The exit status.

    Raises:
        SystemExit: 0 after ``--help``; 2 after one sentence on what is wrong.
    """
    print(write_completion(read_arguments(completion_parser(), argv).shell, words))
    return 0


def completion_parser() -> CommandParser:
    """Describe the arguments of the command."""
    parser = CommandParser(
        prog="accelfn completion",
        description="Print a script by which a shell completes the accelfn command.",
        epilog='bash: eval "$(accelfn completion bash)" in ~/.bashrc. zsh: the same, after compinit, in '
        "~/.zshrc. fish: accelfn completion fish > ~/.config/fish/completions/accelfn.fish",
    )
    parser.add_argument("shell", choices=SHELLS, help="for which shell")
    return parser


def launch_words() -> CommandWords:
    """Return which words may follow ``accelfn launch``. Pure."""
    flags = [
        FlagWords((f"--{one.name}", *one.aliases), one.about, needs_value=bool(one.metavar))
        for one in ACTIONS
    ]
    for field in FIELDS:
        # A yes or no may stand alone, and what follows it may be the script.
        values = ("true", "false") if field.kind.is_bool else field.kind.choices
        needs = bool(field.kind.metavar) and not field.kind.is_bool
        flags.append(FlagWords(field.flags, field.about, needs_value=needs, choices=values))
        if field.no_flag:
            flags.append(FlagWords((field.no_flag,), f"not: {field.about}", needs_value=False))
    return CommandWords(flags=tuple(flags), takes_script=True)


def self_test_words() -> CommandWords:
    """Return which words may follow ``accelfn test``: its own flags and those of ``accelfn launch``. Pure."""
    own = describe_arguments(self_test_parser()).flags
    taken = {name for flag in own for name in flag.names}
    rest = tuple(flag for flag in launch_words().flags if not taken & {*flag.names})
    return CommandWords(flags=(*own, *rest))


def write_completion(shell: str, words: CommandWords) -> str:
    """Write the script for a shell. Pure.

    Where any file may stand, and behind a script's name, the shell completes files as it always does.

    Args:
        shell: ``"bash"``, ``"zsh"`` or ``"fish"``.
        words: What may follow ``accelfn``.
    """
    if shell == "fish":
        return _write_fish(words)
    script = _write_bash(words)
    # zsh reads what is written for bash, if it is told to.
    return f"autoload -U +X bashcompinit && bashcompinit\n{script}" if shell == "zsh" else script


def _walk(words: CommandWords, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], CommandWords]]:
    yield path, words
    for name, inner in words.commands.items():
        yield from _walk(inner, (*path, name))


# Finds the command that the cursor is in, and what may stand there. Where files may, it offers nothing: then
# the shell itself completes them, which alone knows how their names are quoted.
_BASH = r"""_accelfn() {
  local word="${COMP_WORDS[COMP_CWORD]}" at="" flag="" before="" one="" known="" start="" passed=0 i
  COMPREPLY=()
  # The shell may cut --flag=value at the equals sign, or not.
  case "$word" in
    =) word="" before="${COMP_WORDS[COMP_CWORD-1]}" ;;
    --*=*) before="${word%%=*}" start="$before=" word="${word#*=}" ;;
    *) if [ "$COMP_CWORD" -gt 2 ] && [ "${COMP_WORDS[COMP_CWORD-1]}" = "=" ]; then
         before="${COMP_WORDS[COMP_CWORD-2]}"
       fi ;;
  esac
  i=1
  while [ "$i" -lt "$COMP_CWORD" ]; do
    one="${COMP_WORDS[i]}"
    i=$((i + 1))
    case "$one" in
      =) i=$((i + 1)) ;;
      -*) _accelfn_spell "$one"
          if _accelfn_needs "$at" "$flag" && [ "${COMP_WORDS[i]}" != "=" ]; then
            if [ "$i" -eq "$COMP_CWORD" ]; then before="$flag"; fi
            i=$((i + 1))
          fi ;;
      *) if _accelfn_has "$at" "$one"; then at="$at $one"
         elif _accelfn_takes_script "$at"; then return
         else passed=$((passed + 1)); fi ;;
    esac
  done
  if [ -n "$before" ]; then
    _accelfn_spell "$before"
    _accelfn_values "$at" "$flag"
  else
    case "$word" in
      -*) _accelfn_flags "$at"
          case "${word#--}" in *-*) known="${known//_/-}" ;; esac ;;
      *) if [ "$passed" -eq 0 ]; then _accelfn_words "$at"; fi ;;
    esac
  fi
  if [ -z "$known" ]; then return; fi
  if type compopt > /dev/null 2>&1; then compopt +o default; fi
  while IFS= read -r one; do
    case "$one" in "$word"*) COMPREPLY+=("$start$one") ;; esac
  done <<< "$known"
}
_accelfn_spell() {
  flag="$1"
  case "$flag" in --*) flag="${flag#--}"; flag="--${flag//-/_}" ;; esac
}"""


def _write_bash(words: CommandWords) -> str:
    walked = [(" ".join(("", *path)), one) for path, one in _walk(words)]
    needs = [
        f"{at}|{name}" for at, one in walked for flag in one.flags if flag.needs_value for name in flag.names
    ]
    has = [f"{at}|{name}" for at, one in walked for name in one.commands]
    scripts = [f"{at}|" for at, one in walked if one.takes_script]
    values = {
        f"{at}|{name}": flag.choices
        for at, one in walked
        for flag in one.flags
        for name in flag.names
        if flag.choices
    }
    flags = {at: tuple(name for flag in one.flags for name in flag.names) for at, one in walked}
    plain = {at: (*one.commands, *one.words) for at, one in walked if one.commands or one.words}
    return "\n".join(
        (
            _BASH,
            _ask("_accelfn_needs", "$1|$2", needs),
            _ask("_accelfn_has", "$1|$2", has),
            _ask("_accelfn_takes_script", "$1|", scripts),
            _tell("_accelfn_values", "$1|$2", values),
            _tell("_accelfn_flags", "$1", flags),
            _tell("_accelfn_words", "$1", plain),
            "complete -o default -F _accelfn accelfn",
        )
    )


def _ask(name: str, subject: str, cases: Sequence[str]) -> str:
    """Write a function that says whether its arguments are among the cases."""
    joined = "|".join(_quote(one) for one in cases)
    return f'{name}() {{\n  case "{subject}" in {joined}) return 0 ;; esac\n  return 1\n}}'


def _tell(name: str, subject: str, cases: Mapping[str, Sequence[str]]) -> str:
    """Write a function that puts the words of its case into ``known``, one a line."""
    # Many flags have the same values.
    by_words: dict[tuple[str, ...], list[str]] = {}
    for case, words in cases.items():
        by_words.setdefault(tuple(words), []).append(case)
    lines = [
        f"    {'|'.join(_quote(one) for one in same)}) known={_quote(chr(10).join(map(_escape, words)))} ;;"
        for words, same in by_words.items()
    ]
    return "\n".join((f'{name}() {{\n  case "{subject}" in', *lines, "  esac\n}"))


def _escape(word: str) -> str:
    """Write a word as it is typed, so that one with blanks stays one."""
    return "".join(one if one.isalnum() or one in "_-.,:/+=@%" else f"\\{one}" for one in word)


def _quote(text: str) -> str:
    """Put a text into quotes for a shell of sh's family."""
    escaped = text.replace("'", "'\\''")
    return f"'{escaped}'"


def _write_fish(words: CommandWords) -> str:
    lines: list[str] = []
    for path, one in _walk(words):
        seen = "; and ".join(f"__fish_seen_subcommand_from {name}" for name in path)
        if one.commands:
            none_yet = f"not __fish_seen_subcommand_from {' '.join(one.commands)}"
            when = _fish_quote(f"{seen}; and {none_yet}" if seen else none_yet)
            lines += [
                f"complete -c accelfn -n {when} -f -a {name} -d {_fish_quote(one.about.get(name, ''))}"
                for name in one.commands
            ]
        when = _fish_quote(seen or "__fish_use_subcommand")
        if one.words:
            lines.append(f"complete -c accelfn -n {when} -f -a {_fish_quote(' '.join(one.words))}")
        for flag in one.flags:
            names = " ".join(
                f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}" for name in flag.names
            )
            value = " -r" if flag.needs_value else ""
            if flag.choices and flag.needs_value:
                # Blanks part the choices; those within one are escaped, once more for the quotes.
                value = f" -x -a {_fish_quote(' '.join(map(_escape, flag.choices)))}"
            lines.append(f"complete -c accelfn -n {when} {names}{value} -d {_fish_quote(flag.about)}")
    return "\n".join(lines)


def _fish_quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
