"""Run test scripts of Accelerate, and write which lines of their ``main`` raised.

A line that raises doesn't end the script, so that one difference doesn't hide the next one.
"""

import ast
import importlib.util
import json
import os
import pathlib
import sys
import traceback
from typing import Any

import pytest

FAILED = pytest.fail.Exception  # of pytest.raises; not an Exception
WRAPPED = """
try:
    ...
except (Exception, _FAILED) as _error:
    _failed({line!r}, _error)
else:
    _passed({line!r})
"""


class Lines(ast.NodeTransformer):
    """Wraps each simple statement of a block, and of the blocks in it, in a ``try``."""

    def visit(self, node: ast.AST) -> Any:
        if isinstance(node, (ast.Assign, ast.Expr)):
            [wrapped] = ast.parse(WRAPPED.format(line=ast.unparse(node))).body
            assert isinstance(wrapped, ast.Try)
            wrapped.body = [node]
            return ast.copy_location(wrapped, node)
        return self.generic_visit(node) if isinstance(node, ast.stmt) else node


def is_main(node: ast.stmt) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name == "main"
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def run(name: str, arguments: list[str]) -> dict[str, Any]:
    """Run a script as ``__main__``, and return what its lines did."""
    spec = importlib.util.find_spec(f"accelerate.test_utils.scripts.{name}")
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(pathlib.Path(spec.origin).read_text())
    for node in filter(is_main, tree.body):
        Lines().generic_visit(node)
    failed: dict[str, list[str]] = {}
    passed: list[str] = []

    def note(line: str, error: BaseException) -> None:
        traceback.print_exception(error)
        failed.setdefault(line, []).append(type(error).__name__)

    sys.argv = [spec.origin, *arguments]
    space = {"__name__": "__main__", "__file__": spec.origin}
    try:
        code = compile(ast.fix_missing_locations(tree), spec.origin, "exec")
        exec(code, {**space, "_FAILED": FAILED, "_failed": note, "_passed": passed.append})
    except ImportError as error:
        note("import", error)
    return {"failed": failed, "passed": passed}


def main() -> None:
    folder, scripts = sys.argv[1:]
    reports = [(name, run(name, arguments)) for name, *arguments in json.loads(scripts)]
    files = sorted({str(getattr(one, "__file__", None)) for one in accelerate_modules()})
    rank = os.environ.get("RANK", "0")
    (pathlib.Path(folder) / f"reports-{rank}.json").write_text(json.dumps([reports, files]))


def accelerate_modules() -> list[Any]:
    """Return the imported modules of Accelerate, or of its alias, without those of tests."""
    names = [name for name in sys.modules if name.partition(".")[0] == "accelerate"]
    return [sys.modules[name] for name in names if not f"{name}.".startswith("accelerate.test_utils.")]


if __name__ == "__main__":
    main()
