"""The root package: lazy names, and one list of them in three places."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import accelfn

SOURCE = Path(accelfn.__file__).read_text(encoding="utf-8")
Homes = dict[str, frozenset[str]]


def typed_homes(source: str) -> Homes:
    """Read what type checkers see: the imports below ``if TYPE_CHECKING``."""
    found: Homes = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            for line in node.body:
                assert isinstance(line, ast.ImportFrom)
                assert line.module is not None
                assert all(alias.asname is None for alias in line.names)
                found[line.module] = frozenset(alias.name for alias in line.names)
    return found


def runtime_homes(source: str) -> Homes:
    """Read what Python sees: the table ``_HOMES``."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES":
            assert isinstance(node.value, ast.Call)
            table: dict[str, tuple[str, ...]] = ast.literal_eval(node.value.args[0])
            assert all(len(names) == len(set(names)) for names in table.values())
            return {home: frozenset(names) for home, names in table.items()}
    raise AssertionError("no table of homes")


def test_type_checkers_and_python_see_the_same_names() -> None:
    assert typed_homes(SOURCE) == runtime_homes(SOURCE)
    assert runtime_homes(SOURCE)


def test_the_comparison_of_homes_can_fail() -> None:
    planted = SOURCE.replace("        World,\n", "", 1)
    assert planted != SOURCE
    assert typed_homes(planted) != runtime_homes(planted)


def test_all_lists_exactly_the_names_of_the_table() -> None:
    names = [name for names in runtime_homes(SOURCE).values() for name in names]
    assert len(names) == len(set(names))
    assert sorted(accelfn.__all__) == sorted(("__version__", *names))


@pytest.mark.parametrize("name", accelfn.__all__)
def test_every_name_resolves_to_what_its_home_has(name: str) -> None:
    value = getattr(accelfn, name)
    home = next((home for home, names in runtime_homes(SOURCE).items() if name in names), None)
    if home is None:
        assert name == "__version__"
        return
    assert value is getattr(importlib.import_module(home), name)
    assert name in importlib.import_module(home).__all__
    assert vars(accelfn)[name] is value  # the second time without a search


def test_dir_lists_the_public_names() -> None:
    assert dir(accelfn) == sorted(accelfn.__all__)


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    with pytest.raises(AttributeError, match="module 'accelfn' has no attribute 'broadcst'"):
        getattr(accelfn, "broadcst")  # noqa: B009 -- pyright knows that there is no such name
    with pytest.raises(ImportError, match="cannot import name 'broadcst' from 'accelfn'"):
        exec("from accelfn import broadcst")
    assert not hasattr(accelfn, "__path_of_nothing__")


def run(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_root_does_not_import_torch_and_using_it_does() -> None:
    loaded = (
        "print('torch' in sys.modules, sorted(name for name in sys.modules if name.startswith('accelfn')))"
    )
    assert run(f"import sys, accelfn; dir(accelfn); accelfn.__version__; {loaded}") == "False ['accelfn']"
    assert run(f"import sys, accelfn; accelfn.World; {loaded}").startswith("True")


def test_a_star_import_gives_every_name() -> None:
    assert run("from accelfn import *; print(World().size, callable(init_context), __version__)") == (
        f"1 True {accelfn.__version__}"
    )
