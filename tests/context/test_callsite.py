"""Which line of which file an operation is said to be called from."""

import contextlib
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import accelfn.context.callsite
from accelfn.context import call_site

SITE = call_site
PACKAGE = Path(accelfn.context.callsite.__file__).parents[1]


def program(path: Path, source: str, **names: Any) -> dict[str, Any]:
    """Run a module that is said to stand at ``path``, and give its names."""
    made = {**names, "call_site": SITE}
    exec(compile(textwrap.dedent(source), str(path), "exec"), made)
    return made


def test_it_is_the_line_of_the_caller_without_the_folder(tmp_path: Path) -> None:
    found = program(
        tmp_path / "deep" / "train.py",
        """
        def main():
            return (
                call_site()
            )
        def again():
            return [call_site(), call_site(),
                    call_site()]
        class Trainer:
            def fit(self):
                return call_site()
        """,
    )
    assert found["main"]() == "train.py:4 in main"
    assert found["again"]() == ["train.py:7 in again", "train.py:7 in again", "train.py:8 in again"]
    assert found["Trainer"]().fit() == "train.py:11 in fit"


def test_it_is_the_same_wherever_the_program_lies(tmp_path: Path) -> None:
    source = "def main():\n    return call_site()\n"
    sites = {program(tmp_path / name / "train.py", source)["main"]() for name in ("a", "b")}
    assert sites == {"train.py:2 in main"}


def test_frames_of_this_package_are_not_the_users(tmp_path: Path) -> None:
    inner = program(PACKAGE / "comm" / "tensors.py", "def gather():\n    return call_site()\n")["gather"]
    outer = program(tmp_path / "train.py", "def main(call):\n    return call()\n")["main"]
    assert outer(inner) == "train.py:2 in main"
    # A neighbour whose name only begins alike is no part of the package.
    beside = PACKAGE.with_name(PACKAGE.name + "_extra") / "loop.py"
    assert program(beside, "def loop():\n    return call_site()\n")["loop"]() == "loop.py:2 in loop"


@pytest.mark.parametrize("installed", ["site-packages", "dist-packages"])
def test_frames_of_installed_packages_are_passed_over(tmp_path: Path, installed: str) -> None:
    bar = program(
        tmp_path / "lib" / installed / "bar" / "std.py",
        """
        def bar(items):
            for item in items:
                yield item
        """,
    )["bar"]
    batches = program(PACKAGE / "data" / "loader.py", "def batches():\n    yield call_site()\n")["batches"]
    main = program(
        tmp_path / "train.py",
        """
        def main(shown):
            for site in bar(batches()) if shown else batches():
                return site
        def own():
            yield call_site()
        def through():
            return next(bar(own()))
        """,
        bar=bar,
        batches=batches,
    )
    # A progress bar may be shown on the first rank alone.
    assert main["main"](True) == main["main"](False) == "train.py:3 in main"
    assert main["through"]() == "train.py:6 in own"


def test_frames_of_the_standard_library_are_passed_over(tmp_path: Path) -> None:
    first = program(PACKAGE / "comm" / "process_control.py", "def first():\n    yield call_site()\n")["first"]
    main = program(
        tmp_path / "train.py",
        """
        def main():
            with first() as site:
                return site
        """,
        first=contextlib.contextmanager(first),
    )["main"]
    assert main() == "train.py:3 in main"


def test_a_program_that_is_installed_gives_its_nearest_line(tmp_path: Path) -> None:
    inner = program(
        tmp_path / "site-packages" / "trainer" / "loop.py", "def loop():\n    return call_site()\n"
    )["loop"]
    # On a thread of a pool there is no other frame than those of threading and of the pool.
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(inner).result(20) == "loop.py:2 in loop"
        assert pool.submit(SITE).result(20).startswith("thread.py:")
