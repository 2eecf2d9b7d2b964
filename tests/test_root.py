"""The root package: names and sub-packages on first use, as type checkers see them."""

import ast
import importlib
import re
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import pytest

import accelfn as af

ROOT = Path(af.__file__)
STUB = ROOT.with_suffix(".pyi").read_text(encoding="utf-8")
HOMES: dict[str, str] = dict(af._HOMES)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]
PACKAGES = tuple(name for name in dir(af) if name not in af.__all__)
PAGE = ROOT.parents[1] / "docs" / "pages" / "names.md"


def test_type_checkers_and_python_see_the_same_names() -> None:
    lines = [node for node in ast.parse(STUB).body if isinstance(node, ast.ImportFrom)]
    assert all(alias.asname == alias.name for line in lines for alias in line.names)
    assert {alias.name: line.module for line in lines for alias in line.names} == HOMES


def test_each_name_has_one_home() -> None:
    assert sorted(af.__all__) == sorted(("__version__", *(set(HOMES) - set(PACKAGES))))


def test_every_name_resolves_to_what_its_home_has() -> None:
    for name in set(af.__all__) - {"__version__"}:
        value = getattr(af, name)
        assert value is getattr(importlib.import_module(HOMES[name]), name), name
        assert vars(af)[name] is value, name  # the second time without a search


def test_dir_lists_the_public_names_and_the_sub_packages() -> None:
    folders = {path.parent.name for path in ROOT.parent.glob("*/__init__.py")}
    assert {*folders, "engines", "errors", "keys"} == set(PACKAGES)
    assert len(af.__all__) - len(["__version__"]) <= 110


def attempt(code: str) -> str:
    """Run a line of a program, and say how it failed."""
    try:
        exec(code, {"af": af})
    except (AttributeError, ImportError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_an_unknown_name_is_an_attribute_error_that_names_it_and_the_page_of_names() -> None:
    title = PAGE.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    said = attempt("af.PartialState")
    assert said.startswith("AttributeError: module 'accelfn' has no attribute 'PartialState'. ")
    assert said.endswith(f"The page {title!r} of the documentation has Accelerate's names.")
    assert "cannot import name 'PartialState' from 'accelfn' (" in attempt("from accelfn import PartialState")
    assert "'accelfn.utils'" in attempt("import accelfn.utils")  # Python's own text
    assert not hasattr(af, "__path_of_nothing__")


@pytest.mark.parametrize(
    ("name", "homes"),
    [
        ("listify", ["accelfn.tree"]),  # exported "as" itself
        ("EXIT_PREEMPTED", ["accelfn.checkpoint"]),  # exported by __all__
        ("debug_launcher", ["accelfn.launch"]),  # imported when it is asked for
        ("zero3_init", ["accelfn.engines"]),
        ("uniform", ["accelfn.keys"]),
        ("Precision", ["accelfn.config", "accelfn.context"]),
        ("gather_fr", []),
        ("_find_name", []),
    ],
)
def test_the_error_of_a_name_that_is_elsewhere_says_where(name: str, homes: list[str]) -> None:
    said = attempt(f"af.{name}").partition(f"{name!r}. ")[2]
    found = [word.strip(".").rpartition(".")[0] for word in said.removeprefix("It is ").split(" and ")]
    assert (found if said.startswith("It is ") else []) == homes
    for home in homes:
        assert hasattr(importlib.import_module(home), name)


def test_names_that_are_not_at_the_root_are_where_the_page_says() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Names that aren't at the root\n")[2]
    names, modules = (
        [[re.findall(r"`([\w.]+)", cell) for cell in line.split(" | ")] for line in table.splitlines()]
        for table in section.partition("\n## ")[0].strip().split("\n\n")
    )
    listed = [name for _, own in names for name in own]
    assert len(listed) > 50
    assert not set(listed) & set(HOMES)
    for place in (word for places, _ in [*names, *modules] for word in places):
        assert attrgetter(place.removeprefix("accelfn."))(af) is not None
    for places, own in names:
        for name in own if places and places[0].removeprefix("accelfn.") in PACKAGES else ():
            assert hasattr(getattr(af, places[0].removeprefix("accelfn.")), name), name


def run(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_sub_packages_resolve_in_a_fresh_program() -> None:
    uses = "".join(f"print(af.{name}.__name__)\nfrom accelfn import {name}\n" for name in PACKAGES)
    assert run(f"import accelfn as af\n{uses}").splitlines() == [f"accelfn.{name}" for name in PACKAGES]


def test_the_command_line_resolves_without_torch() -> None:
    assert run("import sys; import accelfn as af; af.launch; print('torch' in sys.modules)") == "False"


def test_importing_the_root_does_not_import_torch_and_using_it_does() -> None:
    loaded = (
        "print('torch' in sys.modules, sorted(name for name in sys.modules if name.startswith('accelfn')))"
    )
    assert run(f"import sys, accelfn; dir(accelfn); accelfn.__version__; {loaded}") == "False ['accelfn']"
    assert run(f"import sys, accelfn; accelfn.Context; {loaded}").startswith("True")


@pytest.mark.slow
@pytest.mark.parametrize("collects", [True, False])
def test_garbage_is_collected_after_a_name_has_loaded_as_it_was_before(collects: bool) -> None:
    before = "" if collects else "gc.disable(); "
    code = f"import gc, sys, accelfn; {before}accelfn.errors; accelfn.Context; print(gc.isenabled())\n"
    code += "sys.modules['accelfn.tree'] = None\n"
    code += "try: accelfn.tree\nexcept ImportError: print(gc.isenabled())"
    assert run(code).split() == [str(collects)] * 2


def test_a_star_import_gives_every_name() -> None:
    names: dict[str, object] = {}
    exec("from accelfn import *", names)
    assert set(af.__all__) <= set(names)
