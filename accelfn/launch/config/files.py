"""Config files: find, parse and write them."""

from __future__ import annotations

import importlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from types import MappingProxyType
from typing import Any, cast

from accelfn.errors import ConfigurationError, MissingExtraError
from accelfn.launch.config.options import OPTIONS, RENAMED, SECTIONS, Option, read_entry, suggest
from accelfn.launch.config.record import LaunchConfig, changed_values

#: The version of the file format.
CONFIG_VERSION = 1

# Top-level keys that only config files of Accelerate have.
_ACCELERATE_KEYS = (
    *("distributed_type", "deepspeed_config", "fsdp_config", "megatron_lm_config", "mpirun_config"),
)
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
    values: Mapping[str, object]
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
    tree = read_tree(text, path)
    if is_of_accelerate(tree):
        raise ConfigurationError(
            f"{path} is a config file of Accelerate. Import it with: accelfn config import {path}"
        )
    _check_version(tree.pop("config_version", "1"), path)
    by_path = {option.path: option for option in OPTIONS.values()}
    values: dict[str, object] = {}
    lines: dict[str, str] = {}
    for keys, value in _flatten(tree, path):
        line = find_line(text, keys)
        where = f"{path}, {line}" if line else path
        key = ".".join(keys)
        option = by_path.get(key)
        if option is None:
            raise ConfigurationError(f"{where}: unknown key {key!r}.{_hint(key, by_path, path)}")
        if value in NULLS or value == []:
            continue
        try:
            name, values[name] = read_entry(option, join_items(option, value))
        except ValueError as error:
            raise ConfigurationError(f"{where}: {key}: {error}") from None
        lines[name] = line
    return ConfigFile(path=path, values=MappingProxyType(values), lines=MappingProxyType(lines))


def is_of_accelerate(tree: Mapping[str, Any]) -> bool:
    """Return whether this is a config file of Accelerate. Pure."""
    return "config_version" not in tree and any(key in tree for key in _ACCELERATE_KEYS)


def find_line(text: str, keys: tuple[str, ...]) -> str:
    r"""Find the line of a key in a config file; "" if no line begins with it. Pure.

    >>> find_line("cpu: no\nfsdp:\n  version: 2", ("fsdp", "version"))
    'line 3'
    """
    start = 0
    for key in keys:
        match = re.compile(rf"^[\s{{\"']*{re.escape(key)}[\"']?\s*:", re.MULTILINE).search(text, start)
        if match is None:
            return ""
        start = match.end()
    return f"line {text.count(chr(10), 0, start) + 1}"


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


def _check_version(version: object, path: str) -> None:
    if not (isinstance(version, str) and version.isdecimal() and int(version) > 0):
        raise ConfigurationError(f"{path}: config_version must be {CONFIG_VERSION}.")
    if int(version) > CONFIG_VERSION:
        raise ConfigurationError(
            f"{path}: config_version {version} is newer than version {CONFIG_VERSION} of this accelfn. "
            "Update accelfn, or write a new file with accelfn config."
        )


def _flatten(tree: Mapping[str, Any], path: str) -> list[tuple[tuple[str, ...], object]]:
    entries: list[tuple[tuple[str, ...], object]] = []
    for key, value in tree.items():
        if key not in SECTIONS:
            entries.append(((key,), value))
        elif isinstance(value, dict):
            entries += [((key, inner), entry) for inner, entry in cast("dict[str, object]", value).items()]
        elif value not in NULLS:
            raise ConfigurationError(f"{path}: {key} must be a section.")
    return entries


def _hint(key: str, by_path: Mapping[str, Option], path: str) -> str:
    if key in _ACCELERATE_KEYS:
        return f" It is a key of Accelerate. Import its config file with: accelfn config import {path}"
    names = {option.key: option.path for option in by_path.values()}
    names |= {option.name: option.path for option in by_path.values()} | {key: key for key in by_path}
    # Suggest a key of the same section first: `versoin` under fsdp is fsdp.version.
    close = RENAMED.get(key) or suggest(key, by_path) or suggest(key.rpartition(".")[2], names)
    section, dot, inner = names.get(close or "", "").rpartition(".")
    if not inner:
        return ""
    return f" Did you mean {inner} in the section {section}?" if dot else f" Did you mean {inner}?"


def read_tree(text: str, path: str, *, typed: bool = False) -> dict[str, Any]:
    """Parse YAML or JSON into mappings, lists and scalars. Pure.

    Args:
        text: JSON if ``path`` ends in ``.json``, else YAML.
        path: Its path, for messages.
        typed: Convert scalars as YAML does. Otherwise they stay texts, so that ``no`` is a word and null "".

    Raises:
        ConfigurationError: It is invalid, isn't a mapping, or repeats a key.
        MissingExtraError: It is YAML, and PyYAML isn't installed.
    """
    try:
        tree = _read_json(text, path, typed) if path.endswith(".json") else _read_yaml(text, path, typed)
    except RecursionError:
        raise ConfigurationError(
            f"{path} is nested too deeply. A config file has sections with keys."
        ) from None
    if not isinstance(tree, dict):
        raise ConfigurationError(f"{path} must be a mapping of keys to values.")
    return {str(key): value for key, value in cast("dict[Any, Any]", tree).items()}


def _read_json(text: str, path: str, typed: bool) -> object:
    def as_text(value: object) -> object:
        if isinstance(value, dict):
            return {key: as_text(item) for key, item in cast("dict[str, object]", value).items()}
        if isinstance(value, list):
            return [as_text(item) for item in cast("list[object]", value)]
        return "" if value is None else value if isinstance(value, str) else json.dumps(value)

    try:
        tree = json.loads(text)
        return tree if typed else as_text(tree)
    except ValueError as error:
        raise ConfigurationError(f"{path} is not valid JSON: {error}.") from error


def _read_yaml(text: str, path: str, typed: bool) -> object:
    yaml = load_yaml(path)
    base: Any = yaml.SafeLoader if typed else yaml.BaseLoader

    class Loader(base):
        """Refuses repeated keys, which YAML accepts silently, and aliases."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                line = self.peek_event().start_mark.line + 1
                raise ConfigurationError(f"{path}, line {line}: aliases (*name) aren't supported.")
            return base.compose_node(self, parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            seen: set[str] = set()
            for key, _ in node.value:
                if str(key.value) in seen:
                    line = key.start_mark.line + 1
                    raise ConfigurationError(f"{path}, line {line}: repeated key {key.value!r}. Remove one.")
                seen.add(str(key.value))
            return base.construct_mapping(self, node, deep=deep)

    try:
        tree: object = yaml.load(text, Loader)
    except ConfigurationError:
        raise
    except (yaml.YAMLError, ValueError) as error:
        mark: Any = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigurationError(f"{path}{where}: not valid YAML: {problem}.") from error
    return {} if tree is None or tree == "" else tree


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
        section[option.key] = [*value] if option.kind.has_items else value
    return format_tree(tree, path)


def format_tree(tree: Mapping[str, Any], path: str) -> str:
    """Format a mapping as JSON if ``path`` ends in ``.json``, else as YAML. Pure.

    Raises:
        MissingExtraError: The format is YAML, and PyYAML isn't installed.
    """
    if path.endswith(".json"):
        return json.dumps(tree, indent=2) + "\n"
    return str(load_yaml(path).safe_dump(dict(tree), sort_keys=False, allow_unicode=True))
