"""``python -m accelfn.compat script.py arguments``: run a program written for Accelerate on accelfn."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from accelfn.compat.alias import child_variables, install


def build_parser() -> argparse.ArgumentParser:
    """Build the parser of the command.

    >>> build_parser().parse_args(["-m", "train", "--lr", "1"]).arguments
    ['--lr', '1']
    """
    parser = argparse.ArgumentParser(
        prog="python -m accelfn.compat",
        allow_abbrev=False,
        description="Run a program with `import accelerate` giving accelfn, in it and in the processes of "
        "Python that it starts.",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="the program is a module")
    parser.add_argument("script", help="the path of a script, or with -m the name of a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own arguments")
    return parser


def main(argv: Sequence[str]) -> None:
    """Run a command line. Effect: changes ``sys.argv``, ``sys.path`` and the environment, as the program's.

    Raises:
        SystemExit: The program's, or 2 for a wrong command line.
    """
    parser = build_parser()
    command = parser.parse_args(argv)
    path = Path(command.script)
    if not command.is_module and not path.is_file():
        parser.error(f"no script {command.script!r} in {os.getcwd()!r}.")
    install()
    os.environ.update(child_variables(os.environ))
    sys.argv = ["-m" if command.is_module else command.script, *command.arguments]
    if command.is_module:
        # `python -m` calls this too: functions of the program's __main__ can be pickled.
        vars(runpy)["_run_module_as_main"](command.script)
        return
    if not getattr(sys.flags, "safe_path", False):
        # In place of this directory, which `python -m` has put there.
        sys.path[0] = str(path.resolve().parent)
    _run_file(path)


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
