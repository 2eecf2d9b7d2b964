"""Names of a package that are imported when they are asked for (PEP 562).

Type checkers read imports of them under ``TYPE_CHECKING``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module


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


def list_names(package: str, homes: Mapping[str, Sequence[str]]) -> list[str]:
    """List the names of a package, for its ``__dir__``."""
    return sorted({*vars(sys.modules[package]), *(name for names in homes.values() for name in names)})
