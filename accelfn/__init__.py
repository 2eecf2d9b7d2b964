"""accelfn: distributed PyTorch training as plain functions over one frozen Context.

Importing this module loads nothing: a name or a sub-package is resolved on first use (PEP 562), so that the
command line can answer without importing torch. Type checkers read ``__init__.pyi``.
"""

import gc
import re
import sys
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, ModuleType

__version__ = "0.1.0"

# Where each name comes from: type checkers and Python read the same lines.
_HOMES = MappingProxyType(
    {
        name: home
        for home, name in re.findall(
            r"^from (\S+) import (\w+) as",
            Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"),
            re.M,
        )
    }
)
_PACKAGES = tuple(name for name, home in _HOMES.items() if home == "accelfn")
__all__ = (  # pyright: ignore[reportUnsupportedDunderAll] -- pyright reads the stub
    "__version__",
    *sorted(name for name in _HOMES if name not in _PACKAGES),
)


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(_missing(name), name=name, obj=sys.modules[__name__])
    value = _load(f"accelfn.{name}") if home == "accelfn" else getattr(_load(home), name)
    globals()[name] = value  # found at once from now on
    return value


def _missing(name: str) -> str:
    """Return the error for a name that isn't at the root, with the packages that have it.

    Sources are read, since importing them would load torch.
    """
    imported = rf"(from accelfn\S* import |\s+)[^#\"=\n]*\b{name}\b( as {name})?(,|$)"
    exported = re.compile(rf"^({imported}|def {name}\()", re.M)
    folder = Path(__file__).parent
    sources = [*folder.glob("*/__init__.py*"), folder / "engines.py", folder / "keys.py"]
    homes = [
        f"accelfn.{path.parent.name if path.stem == '__init__' else path.stem}.{name}"
        for path in sorted(sources)
        if not name.startswith("_") and exported.search(path.read_text(encoding="utf-8"))
    ]
    text = f"module 'accelfn' has no attribute {name!r}. "
    if homes:
        return text + f"It is {' and '.join(homes)}."
    return text + "The page 'Every name, and where it is' of the documentation has Accelerate's names."


def _load(module: str) -> ModuleType:
    """Import a module without garbage collections.

    They would take a fifth of the time: they look at torch's many objects, and importing leaves no garbage.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return import_module(module)
    finally:
        if collects:
            gc.enable()


def __dir__() -> list[str]:
    return sorted((*__all__, *_PACKAGES))
