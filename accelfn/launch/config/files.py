"""Configuration files: where they lie, how they are read, and how one is written."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath, PurePosixPath, PureWindowsPath
from types import MappingProxyType
from typing import Any, cast

from accelfn.errors import ConfigurationError, MissingExtraError
from accelfn.launch.config.fields import FIELDS, RENAMED, SECTIONS, Field, read_value, suggest, value_of
from accelfn.launch.config.record import LaunchConfig

#: The layout that this version writes.
CONFIG_VERSION = 1

# Keys that only files of Accelerate have at the top.
_OF_ACCELERATE = (
    "distributed_type",
    "deepspeed_config",
    "fsdp_config",
    "megatron_lm_config",
    "mpirun_config",
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A value in a file: its text, or a list or mapping of entries, and where it stands."""

    value: str | tuple[Entry, ...] | Mapping[str, Entry]
    where: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFile:
    """What a configuration file says.

    Attributes:
        path: Where it was read.
        values: Values by the fields' names; only those that stand in it.
        places: The place of each, such as ``line 3``; empty for JSON.
    """

    path: str
    values: Mapping[str, object]
    places: Mapping[str, str]


def default_path(environment: Mapping[str, str], platform: str, home: str) -> PurePath:
    """Return where the configuration lies if nobody says otherwise. Pure.

    Args:
        environment: Variables; ``XDG_CONFIG_HOME`` or ``APPDATA`` counts.
        platform: As ``sys.platform``.
        home: The user's folder.

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
        # The convention's own rule: a path that isn't absolute doesn't count.
        base = PurePosixPath(given) if given and given.startswith("/") else PurePosixPath(home, ".config")
    return base / "accelfn" / "config.yaml"


def find_config_file(
    given: str | None, environment: Mapping[str, str], platform: str, home: str
) -> tuple[str, bool]:
    """Return which configuration file counts: the flag's, else ``ACCELFN_CONFIG``, else the default place.

    Args:
        given: Value of ``--config_file``.
        environment: Variables.
        platform: As ``sys.platform``.
        home: The user's folder.

    Returns:
        Its path, and whether it was asked for, so that it is an error if it isn't there.

    Raises:
        ConfigurationError: The flag names no file.

    >>> find_config_file(None, {"ACCELFN_CONFIG": "my.yaml"}, "linux", "/home/ann")
    ('my.yaml', True)
    """
    if given is not None and not given.strip():
        raise ConfigurationError(f"--config_file needs the name of a file, got {given!r}.")
    named = given or environment.get("ACCELFN_CONFIG", "").strip()
    if named:
        return os.path.expanduser(named), True
    return str(default_path(environment, platform, home)), False


def read_config(path: str) -> ConfigFile:
    """Read a configuration file. Effect: reads the disk.

    Raises:
        ConfigurationError: It can't be read, isn't YAML or JSON, or a key or value in it is wrong.
        MissingExtraError: It is YAML and PyYAML isn't installed.
    """
    try:
        return parse_config(read_text(path), path)
    except FileNotFoundError:
        raise ConfigurationError(
            f"there is no configuration file {path!r}. Check the path, or make one with accelfn config."
        ) from None


def read_text(path: str) -> str:
    """Read the text of a configuration file. Effect: reads the disk.

    Raises:
        FileNotFoundError: There is none.
        ConfigurationError: It can't be read.
    """
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it isn't a text in UTF-8"
        raise ConfigurationError(f"the configuration file {path!r} can't be read: {reason}.") from error


def parse_config(text: str, path: str) -> ConfigFile:
    """Read the text of a configuration file. Pure.

    Args:
        text: JSON if ``path`` ends in ``.json``, else YAML.
        path: Its name, for messages.

    Raises:
        ConfigurationError: As for :func:`read_config`.
        MissingExtraError: As for :func:`read_config`.
    """
    tree = read_tree(text, path)
    if is_of_accelerate(tree):
        raise ConfigurationError(
            f"{path} is a configuration of Accelerate. Take it over with: accelfn config import {path}"
        )
    _check_version(tree, path)
    by_path = {field.path: field for field in FIELDS}
    sections = {section.name for section in SECTIONS}
    values: dict[str, object] = {}
    places: dict[str, str] = {}
    for key, entry in tree.items():
        if key == "config_version":
            continue
        if key not in sections:
            _take(key, entry, by_path, path, values, places)
        elif isinstance(entry.value, Mapping):
            for inner, one in entry.value.items():
                _take(f"{key}.{inner}", one, by_path, path, values, places)
        elif entry.value != "":
            raise ConfigurationError(
                f"{_at(path, entry)}: {key} must be a section of its own, with keys in it."
            )
    return ConfigFile(path=path, values=MappingProxyType(values), places=MappingProxyType(places))


def is_of_accelerate(tree: Mapping[str, Entry]) -> bool:
    """Whether a file is one of Accelerate's, by the keys that only those have at the top. Pure."""
    return "config_version" not in tree and any(key in tree for key in _OF_ACCELERATE)


def _check_version(tree: Mapping[str, Entry], path: str) -> None:
    entry = tree.get("config_version")
    if entry is None:
        return
    given = entry.value
    if not (isinstance(given, str) and given.isdecimal() and int(given) > 0):
        raise ConfigurationError(f"{_at(path, entry)}: config_version must be {CONFIG_VERSION}.")
    if int(given) > CONFIG_VERSION:
        raise ConfigurationError(
            f"{_at(path, entry)}: config_version {given} is newer than this accelfn, which knows "
            f"{CONFIG_VERSION}. Update accelfn, or write the file anew with accelfn config."
        )


def _take(
    key: str,
    entry: Entry,
    by_path: Mapping[str, Field],
    path: str,
    values: dict[str, object],
    places: dict[str, str],
) -> None:
    field = by_path.get(key)
    if field is None:
        hint = _hint(key, by_path)
        if key in _OF_ACCELERATE:
            hint = (
                f" It is one of Accelerate's: accelfn config import {path} takes over a file of its layout."
            )
        raise ConfigurationError(f"{_at(path, entry)}: unknown key {key!r}.{hint}")
    if entry.value == "" or entry.value == ():
        return  # a key without a value says nothing
    try:
        values[field.name] = _read_entry(field, entry)
    except ValueError as error:
        raise ConfigurationError(f"{_at(path, entry)}: {key}: {error}") from None
    places[field.name] = entry.where


def _hint(key: str, by_path: Mapping[str, Field]) -> str:
    wanted = key.rpartition(".")[2]
    flat = {field.name: field.path for field in by_path.values()}
    names = {
        **{path.rpartition(".")[2]: path for path in by_path},
        **flat,
        **{path: path for path in by_path},
    }
    # Within its section first: `versoin` under fsdp is fsdp.version.
    close = RENAMED.get(key) or suggest(key, by_path) or suggest(wanted, names)
    meant = names.get(close) if close else None
    if meant is None:
        return ""
    section, dot, inner = meant.rpartition(".")
    return f" Did you mean {inner} in the section {section}?" if dot else f" Did you mean {meant}?"


def _read_entry(field: Field, entry: Entry) -> object:
    if isinstance(entry.value, Mapping):
        raise ValueError(f"it must be {field.kind.accepts}, got a section.")
    if isinstance(entry.value, str):
        return read_value(field, entry.value)
    texts = [one.value for one in entry.value if isinstance(one.value, str)]
    if len(texts) < len(entry.value):
        raise ValueError(f"it must be {field.kind.accepts}, got a list of lists.")
    return read_value(field, ("\n" if field.kind.repeats else ",").join(texts))


def _at(path: str, entry: Entry) -> str:
    return f"{path}, {entry.where}" if entry.where else path


def read_tree(text: str, path: str) -> Mapping[str, Entry]:
    """Read YAML or JSON into entries; every scalar is the text that stands there. Pure.

    Raises:
        ConfigurationError: It is not valid, with line and column, or not a mapping, or has a key twice.
        MissingExtraError: It is YAML and PyYAML isn't installed.
    """
    try:
        entry = _read_json(text, path) if PurePath(path).suffix == ".json" else _read_yaml(text, path)
    except RecursionError:
        raise ConfigurationError(
            f"{path}: this is nested too deeply, or contains itself; a configuration has sections, and keys "
            "in them."
        ) from None
    if not isinstance(entry.value, Mapping):
        raise ConfigurationError(
            f"{path}: a configuration is a list of `key: value`, this is something else."
        )
    return entry.value


def _read_json(text: str, path: str) -> Entry:
    try:
        return _json_entry(json.loads(text))
    except ValueError as error:
        raise ConfigurationError(f"{path}: this is not valid JSON: {error}.") from error


def _json_entry(value: object) -> Entry:
    if isinstance(value, dict):
        items = cast("dict[str, object]", value)
        return Entry({key: _json_entry(one) for key, one in items.items()}, "")
    if isinstance(value, list):
        return Entry(tuple(_json_entry(one) for one in cast("list[object]", value)), "")
    return Entry("" if value is None else value if isinstance(value, str) else json.dumps(value), "")


def require_reader(path: str) -> None:
    """Refuse a file that can't be read here.

    Raises:
        MissingExtraError: It is YAML and PyYAML isn't installed.
    """
    if PurePath(path).suffix != ".json" and importlib.util.find_spec("yaml") is None:
        raise MissingExtraError(
            f"{path} is YAML, and PyYAML is not installed. Run: pip install 'accelfn[cli]'. A file that ends "
            "in .json needs nothing."
        )


def _read_yaml(text: str, path: str) -> Entry:
    require_reader(path)
    import yaml

    try:
        node: Any = yaml.compose(text, Loader=yaml.BaseLoader)  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    except yaml.YAMLError as error:
        mark: Any = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        said = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigurationError(f"{path}{where}: this is not valid YAML: {said}.") from error
    return Entry(MappingProxyType({}), "") if node is None else _yaml_entry(node, path)


def _yaml_entry(node: Any, path: str) -> Entry:
    where = f"line {node.start_mark.line + 1}, column {node.start_mark.column + 1}"
    if node.id == "scalar":
        plain = node.style is None  # only without quotes do these words mean: no value
        return Entry("" if plain and node.value in ("~", "null", "Null", "NULL") else str(node.value), where)
    if node.id == "sequence":
        return Entry(tuple(_yaml_entry(one, path) for one in node.value), where)
    found: dict[str, Entry] = {}
    for key_node, value_node in node.value:
        key = str(key_node.value)
        at = f"line {key_node.start_mark.line + 1}, column {key_node.start_mark.column + 1}"
        if key in found:
            raise ConfigurationError(f"{path}, {at}: the key {key!r} stands there twice. Remove one.")
        found[key] = Entry(_yaml_entry(value_node, path).value, at)
    return Entry(MappingProxyType(found), where)


def format_config(config: LaunchConfig, path: str, names: frozenset[str] | None = None) -> str:
    """Write a configuration as the text of a file. Pure; what is read from it is equal.

    Args:
        config: What to write.
        path: JSON if it ends in ``.json``, else YAML.
        names: Fields to write; those that differ from their defaults if None. Secrets are never written.

    >>> print(format_config(LaunchConfig(num_processes=2, use_fsdp=True), "a.yaml"), end="")
    config_version: 1
    num_processes: 2
    use_fsdp: true
    """
    top: dict[str, object] = {"config_version": CONFIG_VERSION}
    sections: dict[str, dict[str, object]] = {}
    for field in FIELDS:
        value = value_of(config, field)
        wanted = value != field.default if names is None else field.name in names
        if not wanted or value is None or field.secret:
            continue
        written = list(cast("tuple[object, ...]", value)) if isinstance(value, tuple) else value
        (sections.setdefault(field.section, {}) if field.section else top)[field.key] = written
    tree = {**top, **sections}
    if PurePath(path).suffix == ".json":
        return json.dumps(tree, indent=2) + "\n"
    lines: list[str] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            lines.append(f"{key}:")
            inner = cast("dict[str, object]", value)
            lines += [f"  {name}: {_yaml_text(one)}" for name, one in inner.items()]
        else:
            lines.append(f"{key}: {_yaml_text(value)}")
    return "\n".join(lines) + "\n"


def _yaml_text(value: object) -> str:
    # JSON is YAML, so quotes and escapes of JSON do; plain words look better without.
    if isinstance(value, str) and value.replace("_", "").replace("-", "").isalnum() and value.isascii():
        plain = value.lower() not in ("null", "true", "false", "yes", "no", "on", "off", "y", "n")
        return value if plain and not value[0].isdigit() and value[0] != "-" else json.dumps(value)
    return json.dumps(value)


def read_plain(path: str) -> dict[str, Any]:
    """Read a YAML or JSON file of names and values. Effect: reads the disk.

    Args:
        path: JSON where it ends in ``.json``.

    Raises:
        ConfigurationError: It isn't there, is empty, or is no such file; with line and column where known.
        MissingExtraError: It is YAML, and PyYAML isn't installed.
    """
    if not path.strip():
        raise ConfigurationError(f"--config_file needs the name of a file, got {path!r}.")
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise ConfigurationError(f"there is no configuration file {path!r}. Check the path.") from None
    read_tree(text, path)  # says what is wrong, and where
    try:
        tree: object = json.loads(text) if path.endswith(".json") else _yaml().safe_load(text)
    except (ValueError, *_yaml_errors()) as error:
        raise ConfigurationError(f"{path}: a value can't be read: {str(error).splitlines()[0]}.") from None
    if not isinstance(tree, dict) or not tree:
        what = "is empty" if not tree else "has no names with values at its top"
        raise ConfigurationError(f"{path} {what}. Make a new file, or give another one.")
    return {str(key): value for key, value in cast("dict[Any, Any]", tree).items()}


def _yaml() -> Any:
    try:
        return importlib.import_module("yaml")
    except ImportError:
        raise MissingExtraError(
            "configuration files in YAML take PyYAML: pip install 'accelfn[cli]'. Or write it as .json."
        ) from None


def _yaml_errors() -> tuple[type[Exception], ...]:
    try:
        return (importlib.import_module("yaml").YAMLError,)
    except ImportError:
        return ()


def format_plain(path: str, tree: Mapping[str, Any]) -> str:
    """Write names and values as text: JSON where ``path`` ends in ``.json``, else YAML. Pure.

    Raises:
        MissingExtraError: It is to be YAML, and PyYAML isn't installed.
    """
    if os.fspath(path).endswith(".json"):
        return json.dumps(dict(tree), indent=2, sort_keys=True) + "\n"
    return str(_yaml().safe_dump(dict(tree), sort_keys=True))
