"""What a launch names and this machine must have: script and files. Looked for without running any of it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from accelfn.errors import ConfigurationError
from accelfn.launch.config.fields import FIELDS, Field, is_active, value_of
from accelfn.launch.config.kinds import FILE
from accelfn.launch.config.record import LaunchConfig
from accelfn.launch.config.sources import Resolved
from accelfn.launch.plan.record import Script

__all__ = ("find_missing_module", "refuse_missing")


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
    if config.tpu and config.tpu_options.use_cluster:
        return  # all of it lies on other machines
    if config.compute_environment == "LOCAL_MACHINE":
        _refuse_absent_program(script.name, config)
    for field in FIELDS:
        path: object = value_of(config, field)
        if field.kind is FILE and is_active(config, field) and isinstance(path, str):
            if field.name == "deepspeed_config_file":
                _refuse_deepspeed_config(field, path, resolved)
                continue
            _refuse_absent_file(field, path, resolved)
            if field.name.endswith("hostfile"):
                _refuse_no_hosts(field, path)
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
    path = Path(name)
    if not path.is_file():
        word = name.lower() in ("true", "false", "yes", "no")
        hint = (
            f"a flag without a value stands before it: write --flag={name}, or --no_flag"
            if word
            else "Check the path; for a module use -m, for another program --no_python"
        )
        raise ConfigurationError(f"there is no script {name!r} in {os.getcwd()!r}. {hint}.")
    if not os.access(path, os.R_OK):
        raise ConfigurationError(f"the script {name!r} can't be read. Check its permissions.")


def _refuse_absent_module(name: str) -> None:
    path = list(sys.path)
    if not getattr(sys.flags, "safe_path", False):
        path.insert(0, os.getcwd())  # as python -m does
    missing = find_missing_module(name, path)
    if missing is None:
        return
    package = missing.removesuffix(".__main__")
    if package == name and package != missing:
        raise ConfigurationError(
            f"the package {name!r} can't be run: it has no __main__. Name a module in it."
        )
    looked = list(dict.fromkeys(os.path.abspath(part) for part in path if part))
    shown = ", ".join(looked[:4]) + (f" and {len(looked) - 4} more folders" if len(looked) > 4 else "")
    hint = "Check the name, the current folder and PYTHONPATH"
    if name.endswith(".py"):
        hint = "For a file leave -m out; for a module give its dotted name"
    raise ConfigurationError(f"there is no module {missing!r} to run: looked in {shown}. {hint}.")


def find_missing_module(name: str, path: Sequence[str]) -> str | None:
    """Name the first part of a dotted name that ``python -m`` wouldn't find. Effect: reads the disk.

    No package is imported for it, as ``importlib.util.find_spec`` would do. A package that may find its own
    parts in another way (it speaks of ``__path__`` or ``sys.modules``) counts as having them.

    Args:
        name: Of the module or package.
        path: Folders in which to look.

    Returns:
        The name of what is missing, or None.

    >>> find_missing_module("json.tool", sys.path), find_missing_module("json.tools", sys.path)
    (None, 'json.tools')
    """
    parts = name.split(".")
    if not all(parts):
        return name
    spec: ModuleSpec | None = None
    for number in range(1, len(parts) + 1):
        whole = ".".join(parts[:number])
        parent, spec = spec, _find(whole, path if spec is None else spec.submodule_search_locations)
        if spec is None:
            return None if parent is not None and _finds_by_itself(parent) else whole
    if spec is not None and spec.submodule_search_locations is not None:
        main = f"{name}.__main__"  # what is run of a package
        if _find(main, spec.submodule_search_locations) is None and not _finds_by_itself(spec):
            return main
    return None


def _find(name: str, path: Sequence[str] | None) -> ModuleSpec | None:
    if path is None:  # a module, which has no parts
        return None
    for finder in sys.meta_path:  # packages that are installed to be edited have finders of their own
        look = getattr(finder, "find_spec", None)
        if look is None:
            continue
        try:
            spec = look(name, path if finder is PathFinder or "." in name else None)
        except Exception:  # noqa: BLE001 -- of a namespace inside of another one, or of someone else's finder
            return ModuleSpec(name, None, origin="unknown")
        if spec is not None:
            return spec
    return None


def _finds_by_itself(spec: ModuleSpec) -> bool:
    """Whether a package may make more importable than lies in its folder, or can't be read."""
    if spec.origin is None:  # a namespace: only its folders count
        return False
    try:
        source = Path(spec.origin).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return True
    return "__path__" in source or "sys.modules" in source or "meta_path" in source


def _refuse_absent_file(field: Field, path: str, resolved: Resolved) -> None:
    origin = resolved.origins[field.name]
    where = "" if origin.source == "flag" else f" (from {origin})"
    there = Path(path).expanduser()
    if not there.is_file():
        what = "it must be a file, and is a folder:" if there.is_dir() else "there is no file"
        raise ConfigurationError(f"{field.flags[0]}: {what} {path!r}{where}. Check the path.")
    if not os.access(there, os.R_OK):
        raise ConfigurationError(f"{field.flags[0]}: {path!r}{where} can't be read. Check its permissions.")


def _refuse_no_hosts(field: Field, path: str) -> None:
    lines = Path(path).expanduser().read_text(encoding="utf-8", errors="replace").splitlines()
    if not any(line.partition("#")[0].strip() for line in lines):
        raise ConfigurationError(
            f"{field.flags[0]}: {path!r} names no host. Write one on each line, such as: node1 slots=8"
        )


def _refuse_deepspeed_config(field: Field, given: str, resolved: Resolved) -> None:
    if given == "none" or (not os.path.exists(given) and _is_object(_decode(given))):
        return  # the JSON itself, which a plugin takes too
    _refuse_absent_file(field, given, resolved)
    try:
        found = json.loads(Path(given).expanduser().read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{field.flags[0]} {given} is no JSON: {error}. Mend the file.") from None
    if not isinstance(found, dict):
        raise ConfigurationError(
            f"{field.flags[0]} {given} must hold an object, {{...}}, and holds {type(found).__name__}."
        )


def _decode(given: str) -> str:
    if given.lstrip().startswith("{"):
        return given
    try:
        return base64.urlsafe_b64decode(given).decode("utf-8")
    except ValueError:
        return ""


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


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
