"""Which line of the program an operation is said to be called from."""

import contextlib
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import accelfn
from accelfn.context import call_site

SITE = call_site
PACKAGE = Path(accelfn.__file__).parent


def program(path: Path, source: str, **names: Any) -> dict[str, Any]:
    """Run a module that is said to stand at ``path``, and give its names."""
    made = {**names, "call_site": SITE}
    exec(compile(textwrap.dedent(source), str(path), "exec"), made)
    return made


def site_in(*path: str | Path, name: str = "call") -> Any:
    """Return a function of a module at ``path`` that asks for its call site."""
    return program(Path(*path), f"def {name}():\n    return call_site()\n")[name]


def test_it_is_the_line_of_the_caller_wherever_the_program_lies(tmp_path: Path) -> None:
    source = """
        def again():
            return [call_site(),
                    call_site()]
        class Trainer:
            def fit(self):
                return call_site()
        """
    for folder in ("a", "b"):
        found = program(tmp_path / folder / "train.py", source)
        assert found["again"]() == ["train.py:3 in again", "train.py:4 in again"]
        assert found["Trainer"]().fit() == "train.py:7 in fit"


def test_frames_of_this_package_are_not_the_users(tmp_path: Path) -> None:
    outer = program(tmp_path / "train.py", "def main(call):\n    return call()\n")["main"]
    assert outer(site_in(PACKAGE, "comm", "tensors.py")) == "train.py:2 in main"
    # A neighbour whose name only begins alike is no part of the package.
    assert site_in(f"{PACKAGE}_extra", "loop.py", name="loop")() == "loop.py:2 in loop"


@pytest.mark.parametrize("installed", ["site-packages", "dist-packages"])
def test_frames_of_installed_packages_are_passed_over(tmp_path: Path, installed: str) -> None:
    bar = "def bar(items):\n    for item in items:\n        yield item\n"
    names = {
        "bar": program(tmp_path / "lib" / installed / "bar" / "std.py", bar)["bar"],
        "batches": program(PACKAGE / "data" / "loader.py", "def call():\n    yield call_site()\n")["call"],
    }
    source = """
        def main(shown):
            for site in bar(batches()) if shown else batches():
                return site
        def own():
            yield call_site()
        def through():
            return next(bar(own()))
        """
    main = program(tmp_path / "train.py", source, **names)
    # A progress bar may be shown on the first rank alone.
    assert main["main"](True) == main["main"](False) == "train.py:3 in main"
    assert main["through"]() == "train.py:6 in own"


def test_frames_of_the_standard_library_are_passed_over(tmp_path: Path) -> None:
    first = program(PACKAGE / "comm" / "process_control.py", "def call():\n    yield call_site()\n")["call"]
    source = "def main():\n    with first() as site:\n        return site\n"
    main = program(tmp_path / "train.py", source, first=contextlib.contextmanager(first))["main"]
    assert main() == "train.py:2 in main"


def test_a_program_that_is_installed_gives_its_nearest_line(tmp_path: Path) -> None:
    inner = site_in(tmp_path, "site-packages", "trainer", "loop.py", name="loop")
    # On a thread of a pool there is no other frame than those of threading and of the pool.
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(inner).result(20) == "loop.py:2 in loop"
        assert pool.submit(SITE).result(20).startswith("thread.py:")
