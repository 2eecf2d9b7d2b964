"""``python -m accelfn.compat script.py arguments``: run a program written for Accelerate on accelfn."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

from accelfn.compat.alias import child_variables, install

_USAGE = """\
usage: python -m accelfn.compat script.py [arguments]
       python -m accelfn.compat -m module [arguments]

Run a program with `import accelerate` giving accelfn, in it and in the Python processes that it starts."""


_Hook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


class Command(NamedTuple):
    """What to run.

    Attributes:
        script: Path of a script, or name of a module.
        arguments: Its arguments.
        is_module: Whether it is a module.
    """

    script: str
    arguments: tuple[str, ...]
    is_module: bool


def parse(argv: Sequence[str]) -> Command | str:
    """Return what a command line runs, or what is wrong with it; empty to show the usage. Pure.

    >>> parse(["-m", "train", "--lr", "1"]).arguments
    ('--lr', '1')
    """
    rest, is_module = list(argv), False
    if rest and rest[0].startswith("-"):
        flag = rest.pop(0)
        if flag in ("-h", "--help"):
            return ""
        if flag != "-m":
            return f"unknown option {flag}"
        is_module = True
    if not rest:
        return "no script given"
    return Command(rest[0], tuple(rest[1:]), is_module)


def main(argv: Sequence[str]) -> None:
    """Run a command line. Effect: changes ``sys.argv``, ``sys.path`` and the environment, as the program's.

    Raises:
        SystemExit: The program's, or 2 for a wrong command line.
    """
    command = parse(argv)
    if isinstance(command, str):
        print(_USAGE if not command else f"{_USAGE}\n\naccelfn.compat: {command}.", file=sys.stderr)
        raise SystemExit(2 if command else 0)
    install()
    sys.excepthook = _begin_at_script(sys.excepthook)
    os.environ.update(child_variables(os.environ))
    safe = bool(getattr(sys.flags, "safe_path", False))
    if command.is_module:
        sys.argv = ["-m", *command.arguments]
        # `python -m` calls this too: functions of the program's __main__ can be pickled.
        vars(runpy)["_run_module_as_main"](command.script)
        return
    path = Path(command.script)
    if not path.is_file():
        print(f"accelfn.compat: no script {command.script!r} in {os.getcwd()!r}.", file=sys.stderr)
        raise SystemExit(2)
    sys.argv = [command.script, *command.arguments]
    if not safe:
        # In place of this directory, which `python -m` has put there.
        sys.path[0] = str(path.resolve().parent)
    _run_file(path)


def _begin_at_script(hook: _Hook) -> _Hook:
    """Return a hook for uncaught exceptions whose tracebacks begin at the program, as without this module."""
    own = main.__code__.co_filename

    def print_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        frames = [trace]
        while (last := frames[-1]) is not None:
            frames.append(last.tb_next)
        ours = [one.tb_next for one in frames if one is not None and one.tb_frame.f_code.co_filename == own]
        begin = ours[-1] if ours else trace
        hook(kind, error.with_traceback(begin), begin)

    return print_exception


def _run_file(path: Path) -> None:
    """Run a script as ``__main__``, in a module of its own that stays."""
    from importlib.machinery import SourceFileLoader
    from types import ModuleType

    loader = SourceFileLoader("__main__", str(path.absolute()))
    fresh = ModuleType("__main__")
    vars(fresh).update(__file__=loader.path, __cached__=None, __loader__=loader, __builtins__=__builtins__)
    sys.modules["__main__"] = fresh
    code = compile(path.read_bytes(), loader.path, "exec", dont_inherit=True)
    exec(code, vars(fresh))


if __name__ == "__main__":
    main(sys.argv[1:])
