"""The rules of the house, held by tests: floors, no hidden state, silent imports, honest exports."""

import __future__

import ast
import datetime
import enum
import functools
import importlib
import itertools
import logging
import os
import pathlib
import pkgutil
import random
import re
import struct
import subprocess
import sys
import threading
import types
import typing
from collections import deque
from collections.abc import Iterator, MutableMapping, MutableSequence, MutableSet
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, fields, is_dataclass
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

import accelfn

ROOT = pathlib.Path(__file__).parents[1]

# From the ground up; packages in one row may not import each other.
FLOORS = (
    ("errors", "devices", "svg", "lazy", "keys"),
    ("storage", "config"),
    ("context",),
    ("tree",),
    ("comm",),
    ("data", "parallel", "tracking", "testing"),
    ("training",),
    ("weights",),
    ("checkpoint",),
    ("elastic",),
    ("bigmodel",),
    ("accelerator", "engines"),
    ("launch",),
    ("__main__",),
    ("compat",),
)
FLOOR_OF = types.MappingProxyType({name: height for height, row in enumerate(FLOORS) for name in row})


def module_names() -> tuple[str, ...]:
    below = pkgutil.walk_packages(accelfn.__path__, prefix="accelfn.")
    return ("accelfn", *sorted(found.name for found in below))


MODULES = module_names()
PACKAGES = tuple(name for name in MODULES[1:] if (ROOT / name.replace(".", "/")).is_dir())


def source_path(module: str) -> pathlib.Path:
    base = ROOT / module.replace(".", "/")
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


# --- devices -------------------------------------------------------------------------------------

# Functions of torch that use the program's default device where none is passed.
CONSTRUCTORS = frozenset(
    ("arange", "as_tensor", "asarray", "empty", "eye", "full", "linspace", "logspace", "ones", "rand")
) | frozenset(("randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros"))


def tensors_on_the_default_device(source: str) -> list[int]:
    """Return the lines that make a tensor without saying where."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in CONSTRUCTORS
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and not any(keyword.arg in ("device", "out") for keyword in node.keywords)
    ]


@pytest.mark.parametrize("package", ["tree", "context", "comm", "data", "training"])
def test_no_operation_uses_the_programs_default_device(package: str) -> None:
    files = (ROOT / "accelfn" / package).rglob("*.py")
    found = {path.name: tensors_on_the_default_device(path.read_text("utf-8")) for path in files}
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert tensors_on_the_default_device("torch.tensor([1])") == [1]


# --- floors --------------------------------------------------------------------------------------


def imported_names(source: str, module: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute dotted name) of each import, wherever it stands in the module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = module.split(".")
                parent = parts[: len(parts) - node.level + is_package]
                base = ".".join((*parent, *((base,) if base else ())))
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            target = node.args[0].value
            if called in ("import_module", "__import__") and isinstance(target, str):
                yield node.lineno, target


def floor_violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Say which imports of a module leave its floor sideways or upwards."""
    package = module.split(".")[1]
    if package not in FLOOR_OF:
        return [f"{module} stands on no floor. Add {package!r} to FLOORS, or move the module."]
    found: list[str] = []
    for line, name in imported_names(source, module, is_package=is_package):
        parts = name.split(".")
        if parts[0] != "accelfn" or name == "accelfn.__version__":
            continue
        target = parts[1] if len(parts) > 1 else ""
        if target not in FLOOR_OF:
            found.append(f"{module}:{line} imports {name} from the root. Import it from its own package.")
        elif target != package and FLOOR_OF[target] >= FLOOR_OF[package]:
            found.append(f"{module}:{line} imports {name}, which is not below {package}.")
        elif target == "accelerator" and package not in ("accelerator", "launch", "compat"):
            found.append(f"{module}:{line} imports {name}; nothing below the launcher needs the shim.")
    return found


def test_imports_only_go_down() -> None:
    paths = [(module, source_path(module)) for module in MODULES[1:]]
    assert [
        found
        for module, path in paths
        for found in floor_violations(path.read_text(), module, is_package=path.name == "__init__.py")
    ] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("accelfn.context.world", "from accelfn.tree import pack"),
        ("accelfn.context.world", "import accelfn.tree.packing"),
        ("accelfn.context.world", "from ..tree import pack"),
        ("accelfn.context.world", "from accelfn import tree"),
        ("accelfn.context.world", "def f():\n    from accelfn.comm import gather"),
        ("accelfn.context.world", "if TYPE_CHECKING:\n    from accelfn.comm import gather"),
        ("accelfn.context.world", "importlib.import_module('accelfn.comm')"),
        ("accelfn.data.loader", "from accelfn.parallel import mesh"),
        ("accelfn.data.loader", "from accelfn import gather"),
        ("accelfn.data.loader", "import accelfn"),
        ("accelfn.errors", "from accelfn.context import Context"),
        ("accelfn.launch.main", "from accelfn.compat import install"),
        ("accelfn.utils", "import os"),
    ],
)
def test_the_floor_check_can_fail(module: str, source: str) -> None:
    assert len(floor_violations(source, module)) == 1


def imports_of(module: str) -> set[str]:
    """Return the modules of the package that a module imports, also for type checkers alone."""
    path = source_path(module)
    names = imported_names(path.read_text("utf-8"), module, is_package=path.name == "__init__.py")
    found: set[str] = set()
    for _, name in names:
        while name not in MODULES and "." in name:
            name = name.rpartition(".")[0]
        found.add(name)
    return found & set(MODULES) - {module}


def test_no_module_imports_itself_through_others() -> None:
    free = {
        module: imports_of(module)
        for module in MODULES
        if module.split(".")[1:2] not in (["bigmodel"], ["compat"])
    }
    while ends := [module for module, imported in free.items() if not imported & free.keys()]:
        for module in ends:
            del free[module]
    assert sorted(free) == []


# --- no hidden state -----------------------------------------------------------------------------

# Names that the import system, the compiler or the warnings module puts into a module.
SYSTEM_NAMES = frozenset(
    (
        *("__annotate__", "__annotations__", "__builtins__", "__cached__", "__conditional_annotations__"),
        *("__doc__", "__file__", "__loader__", "__name__", "__package__", "__path__", "__spec__"),
        "__warningregistry__",
    )
)
IMMUTABLE_TYPES = (
    *(type(None), type(...), type(NotImplemented), bool, int, float, complex, str, bytes, range, slice),
    *(ModuleType, types.BuiltinFunctionType, types.GenericAlias, types.UnionType, re.Pattern, enum.Enum),
    *(pathlib.PurePath, datetime.timedelta, datetime.datetime, __future__._Feature),  # pyright: ignore[reportPrivateUsage]
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, struct.Struct, type(KW_ONLY)),
    type(pytest.fixture(lambda: None)),  # a function, and what pytest has to know of it
)
# What has no place in a default value or on a class either.
STATEFUL_TYPES: tuple[type, ...] = (
    *(MutableSequence, MutableMapping, MutableSet, Iterator, torch.Tensor, torch.Generator, random.Random),
    *(ContextVar, threading.local, threading.Event, threading.Condition, logging.Logger),
    *(type(threading.Lock()), type(threading.RLock())),
)
# What functools.wraps and typing.NamedTuple, which is a function, keep on a function.
FUNCTION_MACHINERY = frozenset({"__wrapped__", "__mro_entries__"})
# What enum and NamedTuple keep on the class, under names of their own.
CLASS_MACHINERY = frozenset({"_field_defaults", "_abc_impl"})


def mutable_parts(value: object, path: str) -> Iterator[str]:
    """Yield what could change in a module global. A type that is not known counts as mutable."""
    kind = type(value)
    if isinstance(value, type):
        if value.__module__.split(".")[0] == "accelfn" or value.__module__ == "planted":
            yield from mutable_class_parts(value, path)
    elif isinstance(value, types.FunctionType):
        yield from (
            f"{path}.{name} (attribute of a function)"
            for name in vars(value)
            if name not in FUNCTION_MACHINERY
        )
        for default in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
            if isinstance(default, STATEFUL_TYPES):
                yield f"{path} (a default value can change)"
    elif isinstance(value, tuple | frozenset):
        for index, part in enumerate(typing.cast("tuple[object, ...]", value)):
            yield from mutable_parts(part, f"{path}[{index}]")
    elif isinstance(value, types.MappingProxyType):
        for key, part in typing.cast("types.MappingProxyType[object, object]", value).items():
            yield from mutable_parts(part, f"{path}[{key!r}]")
    elif isinstance(value, functools.partial):
        call = typing.cast("functools.partial[object]", value)
        yield from mutable_parts((call.func, call.args, *call.keywords.values()), f"{path}(partial)")
    elif is_dataclass(value) and typing.cast("Any", kind).__dataclass_params__.frozen:
        for field in fields(value):
            yield from mutable_parts(getattr(value, field.name), f"{path}.{field.name}")
    elif not isinstance(value, IMMUTABLE_TYPES) and kind.__module__ not in ("typing", "typing_extensions"):
        yield f"{path} ({kind.__module__}.{kind.__qualname__})"


def mutable_class_parts(cls: type, path: str) -> Iterator[str]:
    """Yield the class attributes in which state could hide."""
    for name, value in vars(cls).items():
        sunder = issubclass(cls, enum.Enum) and name.startswith("_") and name.endswith("_")
        if name.startswith("__") or sunder or name in CLASS_MACHINERY:
            continue
        if isinstance(value, STATEFUL_TYPES) or hasattr(value, "cache_info"):
            yield f"{path}.{name} ({type(value).__qualname__}, attribute of a class)"


# What the calling thread has entered, which torch's hooks of the whole process have to find; and a lock
# around a function of the interpreter that isn't safe in threads.
OF_THREADS = ("accelfn.bigmodel.empty._HERE", "accelfn.parallel.facts._PARSING")

# The world of a process whose program passes no context: the only state of accelfn's own.
OF_PROCESS = ("accelfn.compat.current._CURRENT",)

# What torch.compile leaves in the modules of functions that it has traced, for itself.
OF_TORCH_COMPILE = ("__builtins_dict__", "__compiled_fn_", "__import_", "__resume_at_")


def mutable_globals(module: ModuleType) -> list[str]:
    """List the globals of a module that could hold state."""
    return [
        found
        for name, value in vars(module).items()
        if name not in SYSTEM_NAMES and not name.startswith(OF_TORCH_COMPILE)
        if f"{module.__name__}.{name}" not in (*OF_THREADS, *OF_PROCESS)
        for found in mutable_parts(value, f"{module.__name__}.{name}")
    ]


def test_no_module_holds_state() -> None:
    assert [found for module in MODULES for found in mutable_globals(importlib.import_module(module))] == []


class Plain:
    """Stands for a class whose instances can change."""


class Point(NamedTuple):
    x: object


@dataclass(frozen=True)
class Frozen:
    x: object


@dataclass
class Thawed:
    x: object


class Hider:
    registry: typing.ClassVar[dict[str, int]] = {}


Hider.__module__ = "planted"


def tagged() -> None: ...


tagged.calls = 0  # pyright: ignore[reportFunctionMemberAccess]


def remembers(seen: list[int] = []) -> list[int]:  # noqa: B006 - the fault is planted
    return seen


@functools.lru_cache
def cached() -> None: ...


@pytest.mark.parametrize(
    "value",
    [
        *([], {}, set[int](), bytearray(), deque[int](), (1, []), Point([]), Frozen([]), Thawed(1), Plain()),
        *(types.MappingProxyType({"a": []}), functools.partial(print, []), cached, tagged, remembers, Hider),
        *(torch.zeros(1), torch.Generator(), random.Random(), itertools.count(), iter(())),
        *(threading.local(), threading.Lock(), threading.RLock(), ContextVar[int]("planted"), os.environ),
        logging.getLogger("planted"),
    ],
    ids=lambda value: type(value).__qualname__,
)
def test_the_state_check_finds_what_is_planted(value: object) -> None:
    module = ModuleType("planted")
    vars(module)["_hidden"] = value
    assert len(mutable_globals(module)) == 1


# --- silent imports ------------------------------------------------------------------------------

# What imports may change in torch and the other dependencies is theirs: they are loaded first.
SILENCE_PROBE = """
import contextlib, importlib, io, logging, os, random, signal, sys, threading, warnings
import hypothesis, optree, pytest, safetensors, torch
import torch.distributed
try:
    import numpy
except ImportError:
    numpy = None

def observe():
    manager = logging.root.manager
    return {
        "environment": dict(os.environ),
        "loggers": sorted(name for name in manager.loggerDict if name.partition(".")[0] == "accelfn"),
        "root logger": (logging.root.level, list(logging.root.handlers), list(logging.root.filters)),
        "random": random.getstate(),
        "torch random": torch.get_rng_state().tolist(),
        "numpy random": numpy and [str(part) for part in numpy.random.get_state()],
        "process group": torch.distributed.is_initialized(),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "warnings": list(warnings.filters),
        "hooks": (sys.excepthook, threading.excepthook, list(sys.meta_path), list(sys.path)),
        "directory": os.getcwd(),
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "threads of torch": torch.get_num_threads(),
    }

before = observe()
with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
    for name in sys.argv[1:]:
        importlib.import_module(name)
    PLANTED
after = observe()
changed = [key for key in before if before[key] != after[key]]
print("changed:", changed + ["output"] * bool(out.getvalue() + err.getvalue()))
"""


def probe_silence(planted: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", SILENCE_PROBE.replace("PLANTED", planted), *MODULES],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout + done.stderr


@pytest.mark.slow
def test_importing_everything_changes_nothing() -> None:
    assert probe_silence("pass") == "changed: []\n"


@pytest.mark.slow
def test_the_silence_check_can_fail() -> None:
    planted = (
        "os.environ['A'] = 'b'; logging.getLogger('accelfn.x'); "
        "logging.root.addHandler(logging.NullHandler()); "
        "random.random(); torch.rand(1); threading.Timer(2, print).start(); print('hello')"
    )
    found = "'environment', 'loggers', 'root logger', 'random', 'torch random', 'threads', 'output'"
    assert probe_silence(planted).startswith(f"changed: [{found}]\n")


# --- exports -------------------------------------------------------------------------------------


def public_names(module: ModuleType) -> set[str]:
    """Name what a reader finds in a module: no submodules, nothing private, no `annotations`."""
    return {
        name
        for name in dir(module)  # also those that are imported on first use
        if not name.startswith("_")
        and not isinstance(getattr(module, name), ModuleType | __future__._Feature)  # pyright: ignore[reportPrivateUsage]
    }


def own_public_names(module: ModuleType) -> set[str]:
    """Name the classes and functions that a module defines itself."""
    return {
        name
        for name in public_names(module)
        if isinstance(getattr(module, name), type | types.FunctionType)  # a type variable is neither
        and getattr(module, name).__module__ == module.__name__
    }


def exported_names(module: ModuleType) -> tuple[str, ...]:
    """Name what a module exports; one without ``__all__``: whatever it defines without an underscore."""
    own = public_names(module) if hasattr(module, "__path__") else own_public_names(module)
    return getattr(module, "__all__", None) or tuple(sorted(own))


def test_all_is_a_tuple_of_names_that_exist() -> None:
    assert hasattr(accelfn, "__all__")
    for module in MODULES:
        loaded = importlib.import_module(module)
        assert loaded.__doc__, module
        exported = getattr(loaded, "__all__", ())
        assert isinstance(exported, tuple), module
        names = typing.cast("tuple[str, ...]", exported)
        assert len(set(names)) == len(names), module
        assert [name for name in names if not hasattr(loaded, name)] == [], module


def test_a_package_exports_exactly_what_it_holds() -> None:
    for package in PACKAGES:
        loaded = importlib.import_module(package)
        tree = ast.parse(source_path(package).read_text())
        imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        # As good as __all__, for checkers.
        renamed = {name.name for node in imports for name in node.names if name.asname == name.name}
        for node in imports:
            if node.names[0].name == "*":
                renamed |= public_names(importlib.import_module(str(node.module)))
        renamed -= {name for name in renamed if isinstance(getattr(loaded, name), ModuleType)}
        assert set(getattr(loaded, "__all__", renamed)) == public_names(loaded), package


def test_a_public_definition_is_exported() -> None:
    for module in MODULES:
        loaded = importlib.import_module(module)
        assert own_public_names(loaded) - set(exported_names(loaded)) == set(), module


def test_no_module_shares_its_name_with_what_its_package_exports() -> None:
    """Else a reference of the API shows the module where the function is meant."""
    for package in PACKAGES:
        loaded = importlib.import_module(package)
        below = {name.rpartition(".")[2] for name in MODULES if name.rpartition(".")[0] == package}
        assert below & {*getattr(loaded, "__all__", ()), *public_names(loaded)} == set(), package


# --- the tree as a whole -------------------------------------------------------------------------


def test_required_dependencies_are_exactly_four() -> None:
    block = re.search(
        r"^dependencies = \[(.*?)\]", (ROOT / "pyproject.toml").read_text(), re.DOTALL | re.MULTILINE
    )
    assert block is not None
    required = [re.split(r"[<>=!~; \[]", spec)[0] for spec in re.findall(r'"(.+?)"', block[1])]
    assert sorted(required) == ["optree", "safetensors", "torch", "typing-extensions"]


def test_version_is_one_number() -> None:
    declared = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared is not None
    assert declared[1] == accelfn.__version__


def project_files() -> Iterator[pathlib.Path]:
    """Yield the files that belong to the project; tools leave others beside them."""
    tops = ("accelfn", "tests", "docs", "typings", ".ci")
    for path in (
        *ROOT.glob("*"),
        *ROOT.glob(".*"),
        *(path for top in tops for path in (ROOT / top).rglob("*")),
    ):
        if path.is_file() and path.name != ".git" and "__pycache__" not in path.parts:
            yield path


def test_no_file_names_a_path_of_one_machine() -> None:
    paths = re.compile(rb"(?<![\w.:/-])/(?:work|tmp/venv|tmp/w)/")
    assert paths.search(b"see " + b"/work" + b"/x")
    files = list(project_files())
    assert ROOT / "pyproject.toml" in files
    assert [str(path.relative_to(ROOT)) for path in files if paths.search(path.read_bytes())] == []


def test_continuous_integration_runs_the_test_command_of_the_readme() -> None:
    commands = [line for line in (ROOT / "README.md").read_text().splitlines() if "-m pytest" in line]
    assert len(commands) == 1, "README.md shows one test command, on one line"
    assert commands[0].strip() in (ROOT / ".ci" / "run").read_text()


# --- the table of laws ---------------------------------------------------------------------------

NAMED_TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+(?:::\w+)?)`")


@functools.cache
def declared_in(source: str) -> set[str]:
    """Name the tests of a file as pytest does, but without parameters."""
    found: set[str] = set()
    for node in ast.parse(source).body:
        prefix, body = (f"{node.name}::", node.body) if isinstance(node, ast.ClassDef) else ("", [node])
        functions = (one for one in body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
        found |= {prefix + one.name for one in functions if one.name.startswith("test_")}
    return found


def laws_without_tests(table: str) -> list[str]:
    """Name what the table lacks: tests of a law, and tests that exist."""
    found: list[str] = []
    for row in re.findall(r"^\| L\d+ .*$", table, re.MULTILINE):
        named = NAMED_TEST.findall(row)
        if not 1 <= len(named) <= 3 or len(named) != row.count("::"):
            found.append(row)
        for file, name in named:
            path = ROOT / file
            if not path.is_file() or name not in declared_in(path.read_text()):
                found.append(f"{file}::{name}")
    return found


def test_every_test_that_the_table_of_laws_names_exists() -> None:
    table = (ROOT / "tests" / "README.md").read_text()
    assert re.findall(r"^\| (L\d+) ", table, re.MULTILINE) == [f"L{number}" for number in range(1, 46)]
    assert laws_without_tests(table) == []


def test_the_check_of_the_table_can_fail() -> None:
    here, gone = "tests/test_house.py", "tests/test_gone.py"
    known = "test_version_is_one_number"
    assert laws_without_tests(f"| L1 a | b | `{here}::{known}` |") == []
    assert laws_without_tests(f"| L1 a | b | `{here}::test_gone` |") == [f"{here}::test_gone"]
    assert laws_without_tests(f"| L1 a | b | `{gone}::{known}` |") == [f"{gone}::{known}"]
    assert len(laws_without_tests("| L1 a | b | |")) == 1
    assert declared_in("class TestA:\n    def test_b(self): ...\n@mark\ndef test_c(): ...\ndef d(): ...") == {
        "TestA::test_b",
        "test_c",
    }
