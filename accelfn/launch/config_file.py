"""Config files: find, read and write them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from typing import Any, cast

from accelfn.errors import ConfigurationError
from accelfn.launch.accelerate_file import is_of_accelerate, settle, translate
from accelfn.launch.accelerate_names import FILE_SECTIONS, RENAMED
from accelfn.launch.config import LaunchConfig, changed_values
from accelfn.launch.documents import NULLS, Document, format_tree, read_document
from accelfn.launch.kinds import suggest
from accelfn.launch.options import OPTIONS, SECTIONS, Option, read_entry

#: The version of the file format.
CONFIG_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """The content of a config file.

    Attributes:
        path: Its path.
        values: The values in it, by option name.
        lines: The line of each value, such as ``line 3``, if known.
        notes: What was left out of a file of Accelerate, as sentences.
    """

    path: str
    values: Mapping[str, Any]
    lines: Mapping[str, str]
    notes: tuple[str, ...] = ()


def default_path(environment: Mapping[str, str], platform: str, home: str) -> PurePath:
    """Return the path of the default config file. Pure.

    Args:
        environment: Variables; ``XDG_CONFIG_HOME`` and ``APPDATA`` are read.
        platform: As ``sys.platform``.
        home: The user's home directory.

    >>> str(default_path({}, "linux", "/home/ann"))
    '/home/ann/.config/accelfn/config.yaml'
    """
    if platform == "win32":
        roaming = environment.get("APPDATA")
        base = PureWindowsPath(roaming) if roaming else PureWindowsPath(home, "AppData", "Roaming")
    elif platform == "darwin":
        base = PurePosixPath(home, "Library", "Application Support")
    else:
        given = environment.get("XDG_CONFIG_HOME")
        # The XDG specification ignores relative paths.
        base = PurePosixPath(given) if given and given.startswith("/") else PurePosixPath(home, ".config")
    return base / "accelfn" / "config.yaml"


def find_config_file(
    given: str | None, environment: Mapping[str, str], platform: str, home: str
) -> tuple[str, bool]:
    """Return the config file in effect: that of the flag, else of ``ACCELFN_CONFIG``, else the default.

    Args:
        given: Value of ``--config_file``.
        environment: Variables.
        platform: As ``sys.platform``.
        home: The user's home directory.

    Returns:
        Its path, and whether it was requested, so that it must exist.

    Raises:
        ConfigurationError: The flag is empty.

    >>> find_config_file(None, {"ACCELFN_CONFIG": "my.yaml"}, "linux", "/home/ann")
    ('my.yaml', True)
    """
    if given is not None and not given.strip():
        raise ConfigurationError(f"--config_file needs a file name, got {given!r}.")
    requested = given or environment.get("ACCELFN_CONFIG", "").strip()
    if requested:
        return os.path.expanduser(requested), True
    return str(default_path(environment, platform, home)), False


def read_config(path: str) -> ConfigFile:
    """Read a config file of accelfn or of Accelerate.

    Raises:
        ConfigurationError: It can't be read, isn't YAML or JSON, or has an invalid key or value.
        MissingExtraError: It is YAML, and PyYAML isn't installed.
    """
    return parse_config(read_text(path), path)


def read_text(path: str) -> str:
    """Read the text of a config file.

    Raises:
        ConfigurationError: It doesn't exist or can't be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigurationError(
            f"no config file {path!r}. Check the path, or create one with accelfn config."
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it isn't UTF-8"
        raise ConfigurationError(f"can't read the config file {path!r}: {reason}.") from error


def parse_config(text: str, path: str) -> ConfigFile:
    """Parse a config file of accelfn or of Accelerate. Pure.

    Args:
        text: JSON if ``path`` ends in ``.json``, else YAML.
        path: Its path, for messages.

    Raises:
        ConfigurationError: As :func:`read_config`.
        MissingExtraError: As :func:`read_config`.
    """
    document = read_document(text, path)
    is_imported = is_of_accelerate(document.tree)
    notes = [f"{path} is a config file of Accelerate, and was imported."] if is_imported else []
    values: dict[str, Any] = {}
    lines: dict[str, str] = {}
    for keys, option, value in translate(document, notes) if is_imported else _own_entries(document):
        if value in NULLS or value == []:
            continue
        try:
            name, values[name] = read_entry(option, _join_items(option, value))
        except ValueError as error:
            raise ConfigurationError(f"{document.where(keys)}: {'.'.join(keys)}: {error}") from None
        lines[name] = document.lines.get(keys, "")
    if is_imported:
        settle(values, notes)
    return ConfigFile(path=path, values=values, lines=lines, notes=tuple(notes))


def _own_entries(document: Document) -> Iterator[tuple[tuple[str, ...], Option, object]]:
    """Yield the keys, option and value of each entry of a file of accelfn."""
    version = document.tree.pop("config_version", "1")
    if version != str(CONFIG_VERSION):
        raise ConfigurationError(
            f"{document.path}: config_version must be {CONFIG_VERSION} in this accelfn, got {version!r}. "
            "Update accelfn, or write a new file with accelfn config."
        )
    by_path = {option.path: option for option in OPTIONS.values()}
    for keys, value in document.entries(SECTIONS):
        key = ".".join(keys)
        if key not in by_path:
            raise ConfigurationError(f"{document.where(keys)}: unknown key {key!r}.{_hint(key, by_path)}")
        yield keys, by_path[key], value


def _hint(key: str, by_path: Mapping[str, Option]) -> str:
    if key in FILE_SECTIONS or key == "distributed_type":
        return " It is a key of Accelerate, whose files have no config_version. Remove one of them."
    names = {name: path for path, option in by_path.items() for name in (option.key, option.name, path)}
    # Suggest a key of the same section first: `versoin` under fsdp is fsdp.version.
    close = RENAMED.get(key) or suggest(key, by_path) or suggest(key.rpartition(".")[2], names)
    section, dot, inner = names.get(close or "", "").rpartition(".")
    if not inner:
        return ""
    return f" Did you mean {inner} in the section {section}?" if dot else f" Did you mean {inner}?"


def _join_items(option: Option, value: object) -> str:
    """Return a value of a config file as the text of a flag."""
    items = cast("list[object]", value) if isinstance(value, list) else [value]
    if not all(isinstance(item, str) for item in items):
        what = "a section" if isinstance(value, dict) else "a list of lists"
        raise ValueError(f"it must be {option.kind.accepts}, got {what}.")
    return option.kind.separator.join(map(str, items))


def format_config(config: LaunchConfig, path: str, names: frozenset[str] | None = None) -> str:
    """Format a configuration as a config file. Pure.

    Args:
        config: The configuration.
        path: JSON if it ends in ``.json``, else YAML.
        names: Options to write; None for those that differ from their defaults.

    Raises:
        MissingExtraError: The format is YAML, and PyYAML isn't installed.

    >>> print(format_config(LaunchConfig(num_processes=2, use_fsdp=True), "a.yaml"), end="")
    config_version: 1
    num_processes: 2
    use_fsdp: true
    """
    tree: dict[str, Any] = {"config_version": CONFIG_VERSION}
    for name in changed_values(config) if names is None else [name for name in OPTIONS if name in names]:
        option, value = OPTIONS[name], getattr(config, name)
        if value is None:
            continue
        section = tree.setdefault(option.section.name, {}) if option.section.name else tree
        section[option.key] = [*value] if isinstance(value, tuple) else value
    return format_tree(tree, path)
