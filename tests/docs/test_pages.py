"""The pages keep up with the code: names, examples and variables."""

import importlib
import pathlib
import re

import accelfn
from accelfn.config import VARIABLES, Variable
from accelfn.devices import DEVICE_TYPES, DeviceType

ROOT = pathlib.Path(__file__).parents[2]
PAGES = ROOT / "docs" / "pages"
EXAMPLES = sorted(
    path.relative_to(ROOT / "docs" / "examples").as_posix() for path in ROOT.glob("docs/examples/**/*.py")
)


def read_all(folder: pathlib.Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.rglob("*.md")))


def directives() -> frozenset[str]:
    """Names that the reference describes."""
    return frozenset(re.findall(r"^::: accelfn\.[\w.]*?(\w+)$", read_all(PAGES / "api"), re.MULTILINE))


def table_row(variable: Variable) -> str:
    first, *others = (f"`{name}`" for name in variable.names)
    field = ".".join(filter(None, (variable.record.__name__, variable.field)))
    return f"| {first} | {', '.join(others)} | `{field}` | {variable.accepts} |"


def test_every_root_name_is_documented() -> None:
    text = read_all(PAGES / "guide") + (PAGES / "install.md").read_text()
    code = " ".join(re.findall(r"`[^`\n]*`", text))
    words = {*re.findall(r"\w+", code), *directives()}
    assert sorted(set(accelfn.__all__) - words) == []


def test_the_reference_names_only_what_exists() -> None:
    for line in re.findall(r"^::: (.+)$", read_all(PAGES / "api"), re.MULTILINE):
        package, _, name = line.rpartition(".")
        assert hasattr(importlib.import_module(package), name), line


def test_every_example_stands_on_a_page() -> None:
    text = read_all(PAGES)
    assert [example for example in EXAMPLES if f"docs/examples/{example}" not in text] == []


def test_every_page_stands_in_the_navigation() -> None:
    navigation = (ROOT / "docs" / "mkdocs.yml").read_text().partition("\nnav:\n")[2]
    pages = sorted(path.relative_to(PAGES).as_posix() for path in PAGES.rglob("*.md"))
    assert sorted(re.findall(r"- (\S+\.md)$", navigation, re.MULTILINE)) == pages


def test_every_file_that_a_page_includes_is_there() -> None:
    """A formatter of code in pages has once rewritten such a line, and the page showed the line itself."""
    for line in re.findall(r"^--8.*$", read_all(PAGES), re.MULTILINE):
        included = re.fullmatch(r'--8<-- "(.+)"', line)
        assert included is not None, line
        assert (ROOT / "docs" / included[1]).is_file()


def test_the_table_of_variables_is_what_the_code_reads() -> None:
    text = (PAGES / "guide" / "variables.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| `ACCELFN_")]
    assert rows == [table_row(variable) for variable in VARIABLES]


def row_of(row: DeviceType) -> str:
    cells = (
        f"`{row.name}`",
        row.hardware,
        f"`{row.package}`" if row.package else "torch",
        row.backend or "none: one process",
        ", ".join(row.precisions),
        f"`{row.world}`" if row.world else "",
        f"`{row.visible}`" if row.visible else "",
        "run" if row.name == "cpu" else "not run",
    )
    return f"| {' | '.join(cells)} |"


def test_the_table_of_devices_is_that_of_the_code() -> None:
    text = (PAGES / "guide" / "accelerators.md").read_text()
    rows = [line for line in text.splitlines() if re.match(r"\| `\w+` \|.* (run|not run) \|$", line)]
    assert rows == [row_of(row) for row in DEVICE_TYPES.values()]


def test_the_tree_of_errors_is_that_of_the_module() -> None:
    tree = re.search(r"^    (AccelfnError\n.*?)\n\n", accelfn_errors_docstring(), re.DOTALL | re.MULTILINE)
    assert tree is not None
    lines = [line.removeprefix("    ") for line in tree[1].splitlines()]
    assert "\n".join(lines) in (PAGES / "guide" / "errors.md").read_text()


def accelfn_errors_docstring() -> str:
    from accelfn import errors

    return errors.__doc__ or ""
