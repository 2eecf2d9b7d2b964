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
Homes = frozenset[tuple[str, str]]


def table(name: str) -> dict[str, str]:
    """Read one of the tables in the root."""
    for node in ast.parse(ROOT.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            assert isinstance(node.value, ast.Call)
            return ast.literal_eval(node.value.args[0])
    raise AssertionError(f"no table {name}")


PACKAGES = table("_PACKAGES")
HOMES = {name: home for home, names in table("_HOMES").items() for name in names.split()}
ELSEWHERE = {name: hint for hint, names in table("_ELSEWHERE").items() for name in names.split()}


def typed_homes(stub: str) -> Homes:
    """Read what type checkers see: module and name of each import."""
    lines = [node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom)]
    assert all(alias.asname == alias.name for line in lines for alias in line.names)
    return frozenset((str(line.module), alias.name) for line in lines for alias in line.names)


def runtime_homes() -> Homes:
    """Read what Python sees."""
    packages = ((home.rpartition(".")[0], name) for name, home in PACKAGES.items())
    return frozenset((*((home, name) for name, home in HOMES.items()), *packages))


def test_type_checkers_and_python_see_the_same_names() -> None:
    assert typed_homes(STUB) == runtime_homes()
    planted = STUB.replace("from accelfn.context import World as World\n", "", 1)
    assert typed_homes(planted) != runtime_homes()


def test_each_name_has_one_home() -> None:
    listed = " ".join((*table("_HOMES").values(), *table("_ELSEWHERE").values(), *PACKAGES)).split()
    assert len(listed) == len(set(listed))
    assert sorted(af.__all__) == sorted(("__version__", *HOMES))


@pytest.mark.parametrize("name", af.__all__)
def test_every_name_resolves_to_what_its_home_has(name: str) -> None:
    value = getattr(af, name)
    if name == "__version__":
        return
    home = importlib.import_module(HOMES[name])
    assert value is getattr(home, name)
    assert name in home.__all__
    assert vars(af)[name] is value  # the second time without a search


def test_dir_lists_the_public_names_and_the_sub_packages() -> None:
    assert dir(af) == sorted((*af.__all__, *PACKAGES))
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


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_told_of_a_name_of_accelerate_exists(name: str) -> None:
    for word in ELSEWHERE[name].format(name).replace("()", "").replace("(ctx", " ").split():
        value: object = af
        for part in word.strip(".,:").split(".")[1:] if word.startswith("accelfn.") else ():
            value = value if part == "NAME" else getattr(value, part)


def run(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_sub_packages_resolve_in_a_fresh_program() -> None:
    uses = "".join(f"print(af.{name}.__name__)\nfrom accelfn import {name}\n" for name in PACKAGES)
    assert run(f"import accelfn as af\n{uses}").splitlines() == list(PACKAGES.values())


def test_the_command_line_resolves_without_torch() -> None:
    assert run("import sys; import accelfn as af; af.launch; print('torch' in sys.modules)") == "False"


def test_importing_the_root_does_not_import_torch_and_using_it_does() -> None:
    loaded = (
        "print('torch' in sys.modules, sorted(name for name in sys.modules if name.startswith('accelfn')))"
    )
    assert run(f"import sys, accelfn; dir(accelfn); accelfn.__version__; {loaded}") == "False ['accelfn']"
    assert run(f"import sys, accelfn; accelfn.World; {loaded}").startswith("True")


def test_a_star_import_gives_every_name() -> None:
    assert run("from accelfn import *; print(World().size, callable(init_context), __version__)") == (
        f"1 True {af.__version__}"
    )
