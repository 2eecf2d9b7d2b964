"""The bugs of :mod:`tests.checkpoint.mutations` can be planted, and are found."""

import ast
import os
import subprocess
import sys

import pytest

from tests.checkpoint.mutations import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.name)
def test_a_bug_has_its_place_and_its_tests(mutation: Mutation) -> None:
    text = (ROOT / "accelfn" / "checkpoint" / f"{mutation.module}.py").read_text()
    assert [text.count(old) for old, _ in mutation.changes] == [1] * len(mutation.changes)
    for node in mutation.tests:
        file, _, name = node.partition("::")
        tree = ast.parse((ROOT / file).read_text())
        names = {one.name for one in tree.body if isinstance(one, ast.FunctionDef)}
        assert not name or name.partition("[")[0] in names


@pytest.mark.slow
@pytest.mark.timeout(850)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="each bug is tried in a fork")
def test_every_bug_is_found() -> None:
    command = [sys.executable, "-m", "tests.checkpoint.mutations", "--bugs-only"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
