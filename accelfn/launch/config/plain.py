"""What stands in a configuration file of any layout, unjudged: for commands that leave the rest as it is."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from accelfn.errors import ConfigurationError, MissingExtraError

__all__ = ("format_plain", "read_plain")


def read_plain(path: str) -> dict[str, Any]:
    """Read a YAML or JSON file of names and values. Effect: reads the disk.

    Args:
        path: JSON where it ends in ``.json``.

    Raises:
        ConfigurationError: It isn't there, is empty, or is no such file; with line and column where known.
        MissingExtraError: It is YAML, and PyYAML isn't installed.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigurationError(f"there is no configuration file {path!r}. Check the path.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} can't be read: {error}.") from error
    if path.endswith(".json"):
        try:
            tree: object = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigurationError(
                f"{path}, line {error.lineno}, column {error.colno}: {error.msg}. Correct it."
            ) from None
    else:
        tree = _parse_yaml(path, text)
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


def _parse_yaml(path: str, text: str) -> object:
    yaml = _yaml()
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f", line {mark.line + 1}, column {mark.column + 1}"
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigurationError(f"{path}{where}: {problem}. Correct it, or make a new file.") from None


def format_plain(path: str, tree: Mapping[str, Any]) -> str:
    """Write names and values as text: JSON where ``path`` ends in ``.json``, else YAML. Pure.

    Raises:
        MissingExtraError: It is to be YAML, and PyYAML isn't installed.
    """
    if os.fspath(path).endswith(".json"):
        return json.dumps(dict(tree), indent=2, sort_keys=True) + "\n"
    return str(_yaml().safe_dump(dict(tree), sort_keys=True))
