"""``accelfn completion``: print a shell completion script."""

import argparse
import importlib
from typing import Any

from accelfn import __version__
from accelfn.errors import MissingExtraError
from accelfn.launch.command_line import CommandParser
from accelfn.launch.main import COMMANDS, load_command


def run(options: argparse.Namespace) -> int:
    """Print the completion script.

    Raises:
        MissingExtraError: shtab isn't installed.
    """
    try:
        shtab: Any = importlib.import_module("shtab")
    except ImportError:
        raise MissingExtraError(
            "completion needs shtab, which is not installed. Run: pip install 'accelfn[cli]'"
        ) from None
    parser = argparse.ArgumentParser(prog="accelfn")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers()
    for name, (_, about) in COMMANDS.items():
        commands.add_parser(name, help=about)
        commands.choices[name] = load_command(name).make_parser()
    print(shtab.complete(parser, options.shell))
    return 0


def make_parser() -> CommandParser:
    """Build the parser of the command."""
    parser = CommandParser(
        prog="accelfn completion",
        description="Print a script that completes commands and flags of accelfn in a shell.",
        epilog='bash: eval "$(accelfn completion bash)" in ~/.bashrc. zsh: the same, after compinit, in '
        "~/.zshrc. fish: accelfn completion fish > ~/.config/fish/completions/accelfn.fish",
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="shell to complete in")
    return parser
