"""The root package: names and sub-packages on first use, as type checkers see them."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import accelfn as af

ROOT = Path(af.__file__)
STUB = ROOT.with_suffix(".pyi").read_text(encoding="utf-8")
HOMES: dict[str, str] = dict(af._HOMES)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]
PACKAGES = tuple(name for name in dir(af) if name not in af.__all__)
ELSEWHERE: dict[str, str] = {
    name: hint
    for hint, names in af._ELSEWHERE.items()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]
    for name in names.split()  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
}


def test_type_checkers_and_python_see_the_same_names() -> None:
    lines = [node for node in ast.parse(STUB).body if isinstance(node, ast.ImportFrom)]
    assert all(alias.asname == alias.name for line in lines for alias in line.names)
    assert {alias.name: line.module for line in lines for alias in line.names} == HOMES


def test_each_name_has_one_home() -> None:
    assert not set(ELSEWHERE) & set(HOMES)
    assert sorted(af.__all__) == sorted(("__version__", *(set(HOMES) - set(PACKAGES))))


def test_every_name_resolves_to_what_its_home_has() -> None:
    for name in set(af.__all__) - {"__version__"}:
        value = getattr(af, name)
        assert value is getattr(importlib.import_module(HOMES[name]), name), name
        assert vars(af)[name] is value, name  # the second time without a search


def test_dir_lists_the_public_names_and_the_sub_packages() -> None:
    folders = {path.parent.name for path in ROOT.parent.glob("*/__init__.py")}
    assert {*folders, "config", "errors"} == set(PACKAGES)


def attempt(code: str) -> str:
    """Run a line of a program, and say how it failed."""
    try:
        exec(code, {"af": af})
    except (AttributeError, ImportError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_an_unknown_name_is_an_attribute_error_that_names_it() -> None:
    assert attempt("af.broadcst") == "AttributeError: module 'accelfn' has no attribute 'broadcst'"
    assert "cannot import name 'broadcst' from 'accelfn' (" in attempt("from accelfn import broadcst")
    assert not hasattr(af, "__path_of_nothing__")


def test_a_name_of_accelerate_is_told_where_it_is_here() -> None:
    told = "'get_balanced_memory'. Use accelfn.bigmodel.get_balanced_memory."
    assert attempt("af.get_balanced_memory").endswith(told)
    assert attempt("from accelfn import get_balanced_memory") == (
        "ImportError: cannot import name 'get_balanced_memory' from 'accelfn'. "
        "Use accelfn.bigmodel.get_balanced_memory."
    )
    for name, part in {"PartialState": "init_context", "utils": "accelfn.NAME", "state": "Context"}.items():
        assert part in attempt(f"af.{name}")
        assert part in attempt(f"from accelfn import {name}")
        assert part in attempt(f"from accelfn import prepare, {name}")
        assert not hasattr(af, name)
    assert "'accelfn.utils'" in attempt("import accelfn.utils")  # Python's own text


def test_what_is_told_of_a_name_of_accelerate_exists() -> None:
    told = (hint.format(name).replace("()", "").replace("(ctx", " ") for name, hint in ELSEWHERE.items())
    for word in " ".join(told).split():
        value: object = af
        for part in word.strip(".,:").split(".")[1:] if word.startswith("accelfn.") else ():
            value = value if part == "NAME" else getattr(value, part)


def run(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_sub_packages_resolve_in_a_fresh_program() -> None:
    uses = "".join(f"print(af.{name}.__name__)\nfrom accelfn import {name}\n" for name in PACKAGES)
    assert run(f"import accelfn as af\n{uses}").splitlines() == [
        f"{'accelfn.context' if name == 'config' else 'accelfn'}.{name}" for name in PACKAGES
    ]


def test_the_command_line_resolves_without_torch() -> None:
    assert run("import sys; import accelfn as af; af.launch; print('torch' in sys.modules)") == "False"


def test_importing_the_root_does_not_import_torch_and_using_it_does() -> None:
    loaded = (
        "print('torch' in sys.modules, sorted(name for name in sys.modules if name.startswith('accelfn')))"
    )
    assert run(f"import sys, accelfn; dir(accelfn); accelfn.__version__; {loaded}") == "False ['accelfn']"
    assert run(f"import sys, accelfn; accelfn.World; {loaded}").startswith("True")


@pytest.mark.slow
@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_after_a_name_has_loaded_as_it_was_before(collects: bool) -> None:
    before = "" if collects else "gc.disable(); "
    code = f"import gc, sys, accelfn; {before}accelfn.errors; accelfn.World; print(gc.isenabled())\n"
    code += "sys.modules['accelfn.tree'] = None\n"
    code += "try: accelfn.tree\nexcept ImportError: print(gc.isenabled())"
    assert run(code).split() == [str(collects)] * 2


def test_a_star_import_gives_every_name() -> None:
    names: dict[str, object] = {}
    exec("from accelfn import *", names)
    assert set(af.__all__) <= set(names)
