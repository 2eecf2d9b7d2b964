"""The command line: plan how a training script is started, and carry the plan out.

Nothing here imports torch, and a name is resolved on first use (PEP 562): a command loads its own modules.
So ``accelfn --help``, ``--dry_run`` and bad input answer at once. Type checkers read ``__init__.pyi``.
"""

from accelfn.lazy import find_name as _find_name
from accelfn.lazy import list_names as _list_names
from accelfn.lazy import read_homes as _read_homes

_LAZY = _read_homes(__file__)
__all__ = tuple(name for names in _LAZY.values() for name in names)  # pyright: ignore[reportUnsupportedDunderAll] -- pyright reads the stub


def __getattr__(name: str) -> object:
    return _find_name(__name__, _LAZY, name)


def __dir__() -> list[str]:
    return _list_names(__name__, _LAZY)
