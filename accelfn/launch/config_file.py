"""Config files: find, parse and write them."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from types import MappingProxyType
from typing import Any, NamedTuple, cast

from accelfn.errors import ConfigurationError, MissingExtraError
from accelfn.launch.accelerate_names import FILE_SECTIONS, RENAMED
from accelfn.launch.config import LaunchConfig, changed_values
from accelfn.launch.kinds import suggest
from accelfn.launch.options import OPTIONS, SECTIONS, Option, read_entry

#: The version of the file format.
CONFIG_VERSION = 1

# Top-level keys that only config files of Accelerate have.
_ACCELERATE_KEYS = ("distributed_type", *FILE_SECTIONS)
# YAML's null.
NULLS = ("", "~", "null", "Null", "NULL")


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
    """Read a config file.

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
    """Parse a config file. Pure.

    Args:
        text: JSON if ``path`` ends in ``.json``, else YAML.
        path: Its path, for messages.

    Raises:
        ConfigurationError: As :func:`read_config`.
        MissingExtraError: As :func:`read_config`.
    """
    document = read_document(text, path)
    if is_of_accelerate(document.tree):
        raise ConfigurationError(
            f"{path} is a config file of Accelerate. Import it with: accelfn config import {path}"
        )
    version = document.tree.pop("config_version", "1")
    if version != str(CONFIG_VERSION):
        raise ConfigurationError(
            f"{path}: config_version must be {CONFIG_VERSION} in this accelfn, got {version!r}. Update "
            "accelfn, or write a new file with accelfn config."
        )
    by_path = {option.path: option for option in OPTIONS.values()}
    values: dict[str, Any] = {}
    lines: dict[str, str] = {}
    for keys, value in document.entries(SECTIONS):
        key = ".".join(keys)
        if key not in by_path:
            raise ConfigurationError(
                f"{document.where(keys)}: unknown key {key!r}.{_hint(key, by_path, path)}"
            )
        if value in NULLS or value == []:
            continue
        try:
            name, values[name] = read_entry(by_path[key], join_items(by_path[key], value))
        except ValueError as error:
            raise ConfigurationError(f"{document.where(keys)}: {key}: {error}") from None
        lines[name] = document.lines.get(keys, "")
    return ConfigFile(path=path, values=MappingProxyType(values), lines=MappingProxyType(lines))


def is_of_accelerate(tree: Mapping[str, Any]) -> bool:
    """Return whether this is a config file of Accelerate. Pure."""
    return "config_version" not in tree and not tree.keys().isdisjoint(_ACCELERATE_KEYS)


def join_items(option: Option, value: object) -> str:
    """Return a value of a config file as the text of a flag.

    Raises:
        ValueError: The value is a section or a list of lists.
    """
    items = cast("list[object]", value) if isinstance(value, list) else [value]
    if not all(isinstance(item, str) for item in items):
        what = "a section" if isinstance(value, dict) else "a list of lists"
        raise ValueError(f"it must be {option.kind.accepts}, got {what}.")
    return option.kind.separator.join(map(str, items))


def _hint(key: str, by_path: Mapping[str, Option], path: str) -> str:
    if key in _ACCELERATE_KEYS:
        return f" It is a key of Accelerate. Import its config file with: accelfn config import {path}"
    names = {name: path for path, option in by_path.items() for name in (option.key, option.name, path)}
    # Suggest a key of the same section first: `versoin` under fsdp is fsdp.version.
    close = RENAMED.get(key) or suggest(key, by_path) or suggest(key.rpartition(".")[2], names)
    section, dot, inner = names.get(close or "", "").rpartition(".")
    if not inner:
        return ""
    return f" Did you mean {inner} in the section {section}?" if dot else f" Did you mean {inner}?"


class Document(NamedTuple):
    """The content of a YAML or JSON file."""

    path: str
    tree: dict[str, Any]
    lines: Mapping[tuple[str, ...], str]  # of each key, such as "line 3"; empty for JSON

    def where(self, keys: tuple[str, ...]) -> str:
        """Return the place of a key, for messages."""
        return ", ".join(filter(None, (self.path, self.lines.get(keys))))

    def entries(self, sections: Collection[str]) -> Iterator[tuple[tuple[str, ...], object]]:
        """Yield keys and values, of a section those in it.

        Raises:
            ConfigurationError: The value of a section isn't a mapping.
        """
        for key, value in self.tree.items():
            if key not in sections:
                yield (key,), value
            elif isinstance(value, dict):
                for inner, entry in cast("dict[str, object]", value).items():
                    yield (key, str(inner)), entry
            elif value not in NULLS:
                raise ConfigurationError(f"{self.where((key,))}: {key} must be a section.")


def read_tree(text: str, path: str, *, typed: bool = False) -> dict[str, Any]:
    """Parse YAML or JSON into mappings, lists and scalars; as :func:`read_document`. Pure."""
    return read_document(text, path, typed=typed).tree


def read_document(text: str, path: str, *, typed: bool = False) -> Document:
    """Parse YAML or JSON into mappings, lists and scalars. Pure.

    Args:
        text: JSON if ``path`` ends in ``.json``, else YAML.
        path: Its path, for messages.
        typed: Convert scalars as YAML does. Otherwise they stay texts, so that ``no`` is a word and null "".

    Raises:
        ConfigurationError: It is invalid, isn't a mapping, or repeats a key.
        MissingExtraError: It is YAML, and PyYAML isn't installed.
    """
    lines: dict[tuple[str, ...], str] = {}
    try:
        if path.endswith(".json"):
            tree = _read_json(text, path, typed)
        else:
            tree, lines = _read_yaml(text, path, typed)
    except RecursionError:
        raise ConfigurationError(
            f"{path} is nested too deeply. A config file has sections with keys."
        ) from None
    if not isinstance(tree, dict):
        raise ConfigurationError(f"{path} must be a mapping of keys to values.")
    named = {str(key): value for key, value in cast("dict[Any, Any]", tree).items()}
    return Document(path, named, lines)


def _read_json(text: str, path: str, typed: bool) -> object:
    def as_text(value: object) -> object:
        if isinstance(value, dict):
            return {key: as_text(item) for key, item in cast("dict[str, object]", value).items()}
        if isinstance(value, list):
            return [as_text(item) for item in cast("list[object]", value)]
        return "" if value is None else value if isinstance(value, str) else json.dumps(value)

    try:
        tree = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"{path} is not valid JSON: {error}.") from error
    return tree if typed else as_text(tree)


def _read_yaml(text: str, path: str, typed: bool) -> tuple[object, dict[tuple[str, ...], str]]:
    yaml = load_yaml(path)
    kind: Any = yaml.SafeLoader if typed else yaml.BaseLoader
    try:
        for event in yaml.parse(text, kind):
            if isinstance(event, yaml.AliasEvent):
                line = event.start_mark.line + 1
                raise ConfigurationError(f"{path}, line {line}: aliases (*name) aren't supported.")
        loader = kind(text)
        root = loader.get_single_node()
        return {} if root is None else loader.construct_document(root), _find_lines(root, path)
    except ConfigurationError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        mark: Any = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigurationError(f"{path}{where}: not valid YAML: {problem}.") from error


def _find_lines(node: Any, path: str, above: tuple[str, ...] = ()) -> dict[tuple[str, ...], str]:
    """Return the line of each key below a node of YAML, and refuse repeated keys, which YAML accepts."""
    lines: dict[tuple[str, ...], str] = {}
    inner: Any = None if node is None else node.value
    for item in cast("list[Any]", inner) if isinstance(inner, list) else ():
        if not isinstance(item, tuple):
            lines |= _find_lines(item, path, (*above, ""))
            continue
        key, value = cast("tuple[Any, Any]", item)
        keys, line = (*above, str(key.value)), f"line {key.start_mark.line + 1}"
        if keys in lines:
            raise ConfigurationError(f"{path}, {line}: repeated key {key.value!r}. Remove one.")
        lines |= {keys: line, **_find_lines(value, path, keys)}
    return lines


def load_yaml(path: str) -> Any:
    """Import PyYAML to read or write ``path``.

    Raises:
        MissingExtraError: PyYAML isn't installed.
    """
    try:
        return importlib.import_module("yaml")
    except ImportError:
        raise MissingExtraError(
            f"{path} is YAML, and PyYAML is not installed. Run: pip install 'accelfn[cli]', or use a .json "
            "file."
        ) from None


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


def format_tree(tree: Mapping[str, Any], path: str) -> str:
    """Format a mapping as JSON if ``path`` ends in ``.json``, else as YAML. Pure.

    Raises:
        MissingExtraError: The format is YAML, and PyYAML isn't installed.
    """
    if path.endswith(".json"):
        return json.dumps(tree, indent=2) + "\n"
    return str(load_yaml(path).safe_dump(dict(tree), sort_keys=False, allow_unicode=True))
