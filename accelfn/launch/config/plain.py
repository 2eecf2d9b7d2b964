"""What stands in a configuration file of any layout, unjudged: for commands that leave the rest as it is."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Mapping
from typing import Any, cast

from accelfn.errors import ConfigurationError, MissingExtraError
from accelfn.launch.config.files import read_text, read_tree

__all__ = ("format_plain", "read_plain")


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
