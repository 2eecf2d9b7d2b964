"""What a launch names and this machine must have: script and files. Looked for without running any of it."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from accelfn.errors import ConfigurationError
from accelfn.launch.config.options import FILE, OPTIONS, Option
from accelfn.launch.config.record import LaunchConfig, is_active
from accelfn.launch.config.resolve import Resolved
from accelfn.launch.plan.record import Script


def refuse_missing(script: Script, resolved: Resolved) -> None:
    """Return what isn't there, before torch is loaded once per process to find out. Effect: reads the disk.

    Files of sections that are switched off don't count.

    Args:
        script: What is to run.
        resolved: Names further files, and where it has their names from.

    Raises:
        ConfigurationError: The script, the module or a file isn't there or can't be read.
    """
    config = resolved.config
    if config.tpu and config.tpu_cluster:
        return  # all of it is on other machines
    if config.compute_environment == "LOCAL_MACHINE":
        _refuse_absent_program(script.name, config)
    for name, option in OPTIONS.items():
        path: object = getattr(config, name)
        if option.kind is not FILE or not isinstance(path, str) or not is_active(config, option):
            continue
        if name == "deepspeed_config_file" and (path == "none" or path.lstrip().startswith(("{", "ey"))):
            continue  # the JSON itself, or its base64, which a plugin takes too
        _refuse_absent_file(option, path, resolved)
        if name.endswith("hostfile"):
            _refuse_no_hosts(option, path)
    if config.log_dir is not None:
        _refuse_folder_of_logs(config.log_dir)


def _refuse_absent_program(name: str, config: LaunchConfig) -> None:
    if config.module:
        _refuse_absent_module(name)
    elif config.no_python:
        if shutil.which(name) is None and os.path.isfile(name):
            raise ConfigurationError(
                f"the program {name!r} can't be executed. Give it the permission: chmod +x"
            )
        if shutil.which(name) is None:
            raise ConfigurationError(f"there is no program {name!r} to run. Check the path or PATH.")
    else:
        _refuse_absent_script(name)


def _refuse_absent_script(name: str) -> None:
    if not os.path.isfile(name):
        raise ConfigurationError(
            f"there is no script {name!r} in {os.getcwd()!r}. Check the path; for a module use -m, for "
            "another program --no_python."
        )
    if not os.access(name, os.R_OK):
        raise ConfigurationError(f"the script {name!r} can't be read. Check its permissions.")


def _refuse_absent_module(name: str) -> None:
    # Only the first part: to find the others Python would have to import it.
    first = name.partition(".")[0]
    here = first and PathFinder.find_spec(first, [os.getcwd()])  # where python -m looks first
    try:
        found = here or find_spec(first)
    except (ImportError, ValueError):
        found = None
    if name.endswith(".py"):
        raise ConfigurationError(
            f"there is no module {name!r} to run. For a file leave -m out; for a module pass its dotted name."
        )
    if found is None or not first:
        raise ConfigurationError(
            f"there is no module {first!r} to run: looked in {os.getcwd()} and {len(sys.path)} more folders. "
            "Check the name, the current folder and PYTHONPATH."
        )


def _refuse_absent_file(option: Option, path: str, resolved: Resolved) -> None:
    origin = resolved.origins[option.name]
    where = "" if origin.source == "flag" else f" (from {origin})"
    there = Path(path).expanduser()
    if not there.is_file():
        what = "it must be a file, and is a folder:" if there.is_dir() else "there is no file"
        raise ConfigurationError(f"{option.flags[0]}: {what} {path!r}{where}. Check the path.")
    if not os.access(there, os.R_OK):
        raise ConfigurationError(f"{option.flags[0]}: {path!r}{where} can't be read. Check its permissions.")


def _refuse_no_hosts(option: Option, path: str) -> None:
    lines = Path(path).expanduser().read_text(encoding="utf-8", errors="replace").splitlines()
    if not any(line.partition("#")[0].strip() for line in lines):
        raise ConfigurationError(
            f"{option.flags[0]}: {path!r} names no host. Write one on each line, such as: node1 slots=8"
        )


def _refuse_folder_of_logs(given: str) -> None:
    """Refuse a path at which no folder can be made."""
    path = Path(given).absolute()
    there = next(one for one in (path, *path.parents) if one.exists())
    if not there.is_dir():
        raise ConfigurationError(f"--log_dir {given} must be a folder, and {there} is a file. Name another.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigurationError(
            f"--log_dir {given} can't be made: {there} can't be written to. Name another."
        )
