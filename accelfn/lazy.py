"""Names of a package that are imported when they are asked for (PEP 562).

Type checkers read imports of them under ``TYPE_CHECKING``, or in the ``.pyi`` of the package.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType


def find_name(package: str, homes: Mapping[str, Sequence[str]], name: str) -> object:
    """Return what a package has by a name, for its ``__getattr__``.

    Args:
        package: Its name.
        homes: Names by the module that has them.
        name: That was asked for.

    Raises:
        AttributeError: It isn't among them.
    """
    for home, names in homes.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module {package!r} has no attribute {name!r}")


def read_homes(package_file: str) -> Mapping[str, Sequence[str]]:
    """Return the names by their module that the ``.pyi`` beside a package's ``__init__.py`` imports."""
    stub = Path(package_file).with_suffix(".pyi").read_text(encoding="utf-8")
    pairs = re.findall(r"^from (\S+) import (\w+) as", stub, re.MULTILINE)
    return MappingProxyType({home: tuple(name for of, name in pairs if of == home) for home, _ in pairs})


def list_names(package: str, homes: Mapping[str, Sequence[str]]) -> list[str]:
    """List the names of a package, for its ``__dir__``."""
    return sorted({*vars(sys.modules[package]), *(name for names in homes.values() for name in names)})
