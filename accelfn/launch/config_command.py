"""``accelfn config``: create, show, update and import config files."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from accelfn.errors import ConfigurationError
from accelfn.launch.ask import ask_values, format_launch
from accelfn.launch.command_line import CommandParser
from accelfn.launch.config import LaunchConfig
from accelfn.launch.config_file import ConfigFile, find_config_file, format_config, read_config
from accelfn.launch.machine import Machine, read_machine
from accelfn.launch.output import print_origins, write_text
from accelfn.launch.sources import resolve


def run(options: argparse.Namespace) -> int:
    """Ask the questions, or run ``default``, ``update``, ``show`` or ``import``.

    Returns:
        The exit status: 0, 1 if the user keeps the existing file, or 130 after Ctrl-C.
    """
    return _ACTIONS[options.action](options, os.environ)


def default_values(machine: Machine, mixed_precision: str) -> dict[str, Any]:
    """Return the values that ``accelfn config default`` writes. Pure.

    >>> default_values(Machine(devices=4), "bf16")
    {'multi_gpu': True, 'mixed_precision': 'bf16', 'num_processes': 4}
    >>> default_values(Machine(), "no")
    {'cpu': True, 'mixed_precision': 'no', 'num_processes': 1}
    """
    devices = machine.devices or 0
    hardware: dict[str, Any] = {"multi_gpu": True} if devices > 1 else {} if devices else {"cpu": True}
    return {**hardware, "mixed_precision": mixed_precision, "num_processes": max(1, devices)}


def accelerate_path(environment: Mapping[str, str], home: str) -> str:
    """Return the path of Accelerate's default config file. Pure.

    >>> accelerate_path({"HF_HOME": "/data/hf"}, "/home/ann")
    '/data/hf/accelerate/default_config.yaml'
    """
    cache = environment.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    base = environment.get("HF_HOME") or os.path.join(cache, "huggingface")
    return os.path.join(base, "accelerate", "default_config.yaml")


def _path(options: argparse.Namespace, environment: Mapping[str, str]) -> str:
    given: str | None = options.config_file
    path, _ = find_config_file(given, environment, sys.platform, os.path.expanduser("~"))
    if os.path.isdir(path):
        raise ConfigurationError(f"the config file {path} is a directory. Pass a file.")
    return path


def _ask(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    path = _path(options, environment)
    try:
        values = ask_values(path, read_machine(environment))
    except (KeyboardInterrupt, EOFError):
        print("\naccelfn config: cancelled; nothing was written.", file=sys.stderr)
        return 130
    if values is None:
        print(f"accelfn config: {path} was not changed.", file=sys.stderr)
        return 1
    status = _save(values, path)
    print(format_launch(values, path if options.config_file else None))
    return status


def _default(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    path = _path(options, environment)
    _refuse_to_overwrite(path, options)
    return _save(default_values(read_machine(environment), options.mixed_precision), path)


def _update(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    path = _path(options, environment)
    return _save(_read(path).values, path)


def _show(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    path = _path(options, environment)
    is_requested = options.config_file is not None or bool(environment.get("ACCELFN_CONFIG"))
    file = _read(path) if is_requested or os.path.exists(path) else None
    resolved = resolve({}, environment, file)
    print(f"file: {path}" if file else f"file: {path} (doesn't exist)")
    print_origins(resolved, everything=options.all)
    return 0


def _read(path: str) -> ConfigFile:
    file = read_config(path)
    for note in file.notes:
        print(f"note: {note}", file=sys.stderr)
    return file


def _import(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    source = options.source or accelerate_path(environment, os.path.expanduser("~"))
    if not os.path.exists(source):
        raise ConfigurationError(
            f"there is no configuration of Accelerate at {source!r}. Pass its path: "
            "accelfn config import FILE"
        )
    file = _read(source)
    if not (file.values or file.notes):
        raise ConfigurationError(f"{source} is empty, so there is nothing to import. Pass a config file.")
    resolve({}, {}, file)  # which names the lines of values that conflict
    path = _path(options, environment)
    _refuse_to_overwrite(path, options)
    return _save(file.values, path)


def _refuse_to_overwrite(path: str, options: argparse.Namespace) -> None:
    if os.path.lexists(path) and not options.overwrite:
        raise ConfigurationError(f"{path} exists. Pass --overwrite, or another --config_file.")


def _save(values: Mapping[str, Any], path: str) -> int:
    text = format_config(LaunchConfig(**values), path, frozenset(values))
    with contextlib.suppress(FileExistsError, NotADirectoryError):  # which write_text finds too
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    write_text(path, text)
    print(f"saved {path}")
    return 0


_ACTIONS: Mapping[str | None, Callable[[argparse.Namespace, Mapping[str, str]], int]] = MappingProxyType(
    {None: _ask, "default": _default, "update": _update, "show": _show, "import": _import}
)


def make_parser() -> CommandParser:
    """Build the parser of the command."""
    parser = CommandParser(
        prog="accelfn config",
        description="Create, show, update and import config files of accelfn launch. Without a command, ask "
        "questions and write a config file.",
    )
    about_file = "config file to use instead of the default"
    parser.add_argument("--config_file", metavar="FILE", help=about_file)
    actions = parser.add_subparsers(dest="action", metavar="command")

    def add(name: str, about: str, *, writes: bool = False) -> argparse.ArgumentParser:
        command = actions.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        # Suppressed, so that a value before the subcommand is kept.
        command.add_argument("--config_file", metavar="FILE", default=argparse.SUPPRESS, help=about_file)
        if writes:
            command.add_argument("--overwrite", action="store_true", help="replace an existing file")
        return command

    default = add("default", "write a default config file for this machine", writes=True)
    precisions = ("no", "fp16", "bf16")
    default.add_argument("--mixed_precision", choices=precisions, default="no", help="mixed precision (no)")
    add("update", "rewrite a config file in the current format")
    show = add("show", "show the values in effect and their sources")
    show.add_argument("--all", action="store_true", help="include defaults")
    imported = add("import", "import a config file of Accelerate", writes=True)
    imported.add_argument("source", metavar="SOURCE", nargs="?", help="file (Accelerate's default file)")
    return parser
