"""``accelfn config``: create, show, update and import config files."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType

from accelfn.errors import ConfigurationError
from accelfn.launch.command_line import CommandParser
from accelfn.launch.config.accelerate import import_accelerate
from accelfn.launch.config.ask import ask_values, format_launch
from accelfn.launch.config.files import (
    find_config_file,
    format_config,
    read_config,
    read_text,
    read_tree,
)
from accelfn.launch.config.record import LaunchConfig, list_not_yet
from accelfn.launch.config.resolve import resolve
from accelfn.launch.output import print_origins, write_text
from accelfn.launch.plan.machine import Machine, read_machine


def run(options: argparse.Namespace) -> int:
    """Ask for a configuration, or run ``default``, ``update``, ``show`` or ``import``.

    Effect: may write a file, and talk to the user.

    Returns:
        The exit status: 0; 1 where the user keeps the file that is there; 130 after Ctrl-C.
    """
    return _ACTIONS[options.action](options, os.environ)


def default_values(machine: Machine, mixed_precision: str) -> dict[str, object]:
    """Return what ``accelfn config default`` writes for a machine. Pure.

    >>> default_values(Machine(devices=4), "bf16")
    {'multi_gpu': True, 'mixed_precision': 'bf16', 'num_processes': 4}
    >>> default_values(Machine(), "no")
    {'cpu': True, 'mixed_precision': 'no', 'num_processes': 1}
    """
    devices = machine.devices or 0
    place: dict[str, object] = {"multi_gpu": True} if devices > 1 else {} if devices else {"cpu": True}
    return {**place, "mixed_precision": mixed_precision, "num_processes": max(1, devices)}


def accelerate_path(environment: Mapping[str, str], home: str) -> str:
    """Return where Accelerate keeps its configuration. Pure.

    >>> accelerate_path({"HF_HOME": "/data/hf"}, "/home/ann")
    '/data/hf/accelerate/default_config.yaml'
    """
    cache = environment.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    base = environment.get("HF_HOME") or os.path.join(cache, "huggingface")
    return os.path.join(base, "accelerate", "default_config.yaml")


def _place(options: argparse.Namespace, environment: Mapping[str, str]) -> str:
    given: str | None = options.config_file
    path, _ = find_config_file(given, environment, sys.platform, os.path.expanduser("~"))
    if os.path.isdir(path):
        raise ConfigurationError(
            f"the configuration {path} must be a file, and is a folder. Name a file in it."
        )
    return path


def _ask(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    path = _place(options, environment)
    try:
        values = ask_values(path, read_machine(environment))
    except (KeyboardInterrupt, EOFError):
        print("\naccelfn config: stopped; nothing was written.", file=sys.stderr)
        return 130
    if values is None:
        print(f"accelfn config: {path} was left as it is.", file=sys.stderr)
        return 1
    status = _save(format_config(LaunchConfig(**values), path, frozenset(values)), path)
    print(format_launch(values, path if options.config_file else None))
    return status


def _default(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    path = _place(options, environment)
    _refuse_to_overwrite(path, options)
    values = default_values(read_machine(environment), options.mixed_precision)
    return _save(format_config(LaunchConfig(**values), path, frozenset(values)), path)


def _update(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    path = _place(options, environment)
    file = read_config(path)
    return _save(format_config(LaunchConfig(**file.values), path, frozenset(file.values)), path)


def _show(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    path = _place(options, environment)
    asked = options.config_file is not None or bool(environment.get("ACCELFN_CONFIG"))
    file = read_config(path) if asked or os.path.exists(path) else None
    resolved = resolve({}, environment, file)
    print(f"file: {path}" if file else f"file: {path} (not there)")
    print_origins(resolved, everything=options.all)
    return 0


def _import(options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    source = options.source or accelerate_path(environment, os.path.expanduser("~"))
    if not os.path.exists(source):
        raise ConfigurationError(
            f"there is no configuration of Accelerate at {source!r}. Name it: accelfn config import FILE"
        )
    text = read_text(source)
    # Accelerate writes JSON into files that end in .yaml as well; YAML reads both.
    name = f"{source}.json" if text.lstrip().startswith("{") and not source.endswith(".json") else source
    imported = import_accelerate(read_tree(text, name), source)
    later = [
        f"{option.name}: accelfn doesn't support {what} yet, so this can't be launched."
        for option, what in list_not_yet(imported.config)
    ]
    for note in (*imported.notes, *later):
        print(f"note: {note}", file=sys.stderr)
    path = _place(options, environment)
    _refuse_to_overwrite(path, options)
    return _save(format_config(imported.config, path), path)


def _refuse_to_overwrite(path: str, options: argparse.Namespace) -> None:
    if os.path.lexists(path) and not options.overwrite:
        raise ConfigurationError(
            f"{path} is there already, and was left as it is. Use --overwrite, or another --config_file."
        )


def _save(text: str, path: str) -> int:
    with contextlib.suppress(FileExistsError, NotADirectoryError):  # which write_text finds too
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    write_text(path, text)
    print(f"saved {path}")
    return 0


_ACTIONS: Mapping[str | None, Callable[[argparse.Namespace, Mapping[str, str]], int]] = MappingProxyType(
    {None: _ask, "default": _default, "update": _update, "show": _show, "import": _import}
)


def make_parser() -> CommandParser:
    """Describe the arguments of the command."""
    parser = CommandParser(
        prog="accelfn config",
        description="Create, show, update and import config files of accelfn launch. Without a command: ask "
        "for what to write.",
    )
    parser.add_argument("--config_file", metavar="FILE", help="config file to use instead of the default")
    actions = parser.add_subparsers(dest="action", metavar="command")

    def add(name: str, about: str) -> argparse.ArgumentParser:
        one = actions.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
        # Suppressed, so that one given before the command stays.
        one.add_argument(
            "--config_file",
            metavar="FILE",
            default=argparse.SUPPRESS,
            help="config file to use instead of the default",
        )
        return one

    default = add("default", "write a plain configuration for this machine")
    default.add_argument(
        "--mixed_precision", choices=("no", "fp16", "bf16"), default="no", help="precision (no)"
    )
    default.add_argument("--overwrite", action="store_true", help="replace a file that is there")
    add("update", "write a file again, as this version does")
    show = add("show", "show what counts, and where it comes from")
    show.add_argument("--all", action="store_true", help="defaults too")
    taken = add("import", "import a config file of Accelerate")
    taken.add_argument("source", metavar="SOURCE", nargs="?", help="its file (where Accelerate keeps it)")
    taken.add_argument("--overwrite", action="store_true", help="replace a file that is there")
    return parser
