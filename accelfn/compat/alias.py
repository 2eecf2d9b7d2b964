"""``import accelerate`` gives accelfn: a finder at the head of ``sys.meta_path``."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from accelfn.compat import names
from accelfn.compat.names import explain, modules, names_of
from accelfn.errors import ConfigurationError

# The release of Accelerate whose interface the modules have.
VERSION = "1.15.0"
_ALIAS = "accelerate"
# Test scripts and what they share: programs that use Accelerate, not a part of it.
_TESTS = "accelerate.test_utils"


class _TableLoader(Loader):
    """Makes a module of Accelerate from the table of its names."""

    def create_module(self, spec: ModuleSpec) -> None:
        """Let Python make an empty module."""

    def exec_module(self, module: ModuleType) -> None:
        own = module.__name__
        # First, since Python sets them as attributes: a function may have the name of its module, as tqdm.
        for inner in sorted(modules()):
            if inner.rpartition(".")[0] == own:
                importlib.import_module(inner)
        for name, (source, there) in names_of(own).items():
            setattr(module, name, getattr(importlib.import_module(source, "accelfn"), there))
        if own == _ALIAS:
            vars(module)["__version__"] = VERSION

        def refuse(name: str) -> NoReturn:
            raise AttributeError(explain(own, name, vars(module)))

        vars(module)["__getattr__"] = refuse


class _Distribution(Distribution):
    """Answers ``importlib.metadata.version("accelerate")``."""

    def read_text(self, filename: str) -> str | None:
        # sentence-transformers takes a package for Accelerate by its name and home page.
        home = "https://github.com/huggingface/accelerate"
        text = f"Metadata-Version: 2.1\nName: {_ALIAS}\nVersion: {VERSION}\nHome-page: {home}\n"
        return text if filename == "METADATA" else None

    def locate_file(self, path: object) -> Path:
        return Path(__file__).parent / str(path)


class Alias(DistributionFinder):
    """Finds ``accelerate`` and its modules, which are made from :mod:`accelfn.compat.names`.

    All of them are packages: of a name that a package doesn't have, Python asks for a module, so that the
    error for it is the one below, with what to use instead, and not Python's.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a module of Accelerate; None for other packages.

        Raises:
            ModuleNotFoundError: There is no such module here.
        """
        del target
        if fullname.partition(".")[0] != _ALIAS:
            return None
        if f"{fullname}.".startswith(f"{_TESTS}."):
            found = _find_test(fullname, path)
            if found is not None:
                return found
        if fullname in modules():
            spec = ModuleSpec(fullname, _TableLoader(), origin=names.__file__, is_package=True)
            spec.has_location = True
            return spec
        caller = sys._getframe(2)  # pyright: ignore[reportPrivateUsage] -- under this one, Python's own
        if caller.f_globals.get("__name__") == "importlib.util":  # which asks whether there is a module
            return None
        module, _, name = fullname.rpartition(".")
        # Not named: of a missing module with this name Python would say its own text.
        raise ModuleNotFoundError(explain(module, name, vars(sys.modules[module])), name=module)

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        """Yield the distribution ``accelerate``, if it is asked for."""
        name = None if context is None else context.name
        if name is None or name.lower() == _ALIAS:
            yield _Distribution()


def is_installed() -> bool:
    """Return whether ``import accelerate`` gives accelfn in this process."""
    return any(isinstance(finder, Alias) for finder in sys.meta_path)


def install() -> None:
    """Make ``import accelerate`` give accelfn in this process, whether Accelerate is installed or not.

    Call it before anything imports Accelerate: first in the program, or start the program with
    ``python -m accelfn.compat``. Nothing of another package is changed. Calling it again does nothing.

    Accelerators have Accelerate's arithmetic, which the program may have allowed for: a scheduler steps once
    per rank for each step of its optimizer, and a short last window is divided by the length of a full one.

    Raises:
        ConfigurationError: Accelerate was imported already.
    """
    if is_installed():
        return
    imported = sorted(_imported())
    if imported:
        raise ConfigurationError(
            f"install: {imported[0]} was imported already, and what imported it keeps it. Call "
            "accelfn.compat.install() before any import of accelerate, transformers, peft, ..., or run "
            "the program by python -m accelfn.compat."
        )
    # Nothing else: torch is imported by what imports Accelerate.
    sys.meta_path.insert(0, Alias())


def uninstall() -> None:
    """Undo :func:`install`: the next ``import accelerate`` gives Accelerate, if it is installed.

    Modules that have imported names of accelfn keep them.
    """
    if not is_installed():
        return
    sys.meta_path[:] = [finder for finder in sys.meta_path if not isinstance(finder, Alias)]
    for name in _imported():
        del sys.modules[name]


def _find_test(fullname: str, path: Sequence[str] | None) -> ModuleSpec | None:
    """Return the spec of a module of tests in Accelerate's own files, if it is installed."""
    if fullname == _TESTS:
        installed = PathFinder.find_spec(_ALIAS)
        path = None if installed is None else installed.submodule_search_locations
    return PathFinder.find_spec(fullname, path) if path else None


def child_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with which a Python process that is started has the alias too.

    Args:
        environment: The variables that the process inherits.

    Returns:
        The variables to set; none, unless the alias is installed here.
    """
    if not is_installed():
        return {}
    folder = str(Path(__file__).with_name("children"))
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path != folder]
    return {
        "PYTHONPATH": os.pathsep.join([folder, *filter(None, paths)]),
        "ACCELFN_COMPAT_CHILD": "1",
    }


def _imported() -> Iterable[str]:
    return [name for name in sys.modules if name.partition(".")[0] == _ALIAS]
