"""YAML and JSON: read texts as trees with the lines of keys, and write them."""

from __future__ import annotations

import importlib
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, cast

from accelfn.errors import ConfigurationError, MissingExtraError

#: YAML's null.
NULLS = ("", "~", "null", "Null", "NULL")


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


def format_tree(tree: Mapping[str, Any], path: str) -> str:
    """Format a mapping as JSON if ``path`` ends in ``.json``, else as YAML. Pure.

    Raises:
        MissingExtraError: The format is YAML, and PyYAML isn't installed.
    """
    if path.endswith(".json"):
        return json.dumps(tree, indent=2) + "\n"
    return str(load_yaml(path).safe_dump(dict(tree), sort_keys=False, allow_unicode=True))
