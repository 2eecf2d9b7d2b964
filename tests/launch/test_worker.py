"""A script under the bootstrap behaves as under Python itself; what goes wrong in it is kept."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from accelfn.launch import worker
from tests.launch.processes import environment

WORKER = str(Path(worker.__file__))


def run(folder: Path, *argv: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    command, env = [sys.executable, *argv], {**environment(), **variables}
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False
    )


SELF_PORTRAIT = """
from __future__ import annotations
import inspect, sys
class Own: pass
print(sys.argv, sys.path[0], __name__, __file__, __package__, __spec__ and __spec__.name)
print(sorted(name for name in globals() if name.startswith("__")))
print(sys.modules["__main__"].__dict__ is globals(), inspect.getsource(Own))
import helper
"""
PICKLES = """
import multiprocessing, pickle
class Own:
    def __init__(self, x): self.x = x
def double(own): return Own(own.x * 2)
if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Own(1))).x == 1
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print([one.x for one in pool.map(double, [Own(4)])])
"""
FAILS = """
def deep(x):
    raise ValueError(f"no {x}")
def outer():
    deep("é")
outer()
"""


SOURCES = {
    "globals": SELF_PORTRAIT,
    "pickle and spawn": PICKLES,
    "exception": FAILS,
    "syntax error": "def f(:",
    "exit with words": "import sys; sys.exit('the end')",
    "interrupt": "raise KeyboardInterrupt",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "own hook": "import sys; sys.excepthook = lambda *a: print('mine', a[0]); 1/0",
    "atexit after an exception": "import atexit; atexit.register(print, 'bye'); 1/0",
    "thread": "import threading; threading.Thread(target=print, args=('t',)).start(); 1/0",
    "another encoding": "# coding: latin-1\nprint('\xe9')",
}


@pytest.mark.parametrize(
    ("source", "as_module"),
    [
        *((source, False) for source in SOURCES.values()),
        *((source, True) for source in [*SOURCES.values()][:5]),
    ],
    ids=[*SOURCES, *(f"{name} of a module" for name in [*SOURCES][:5])],
)
def test_a_script_is_run_as_by_python(source: str, as_module: bool, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    for folder in (inner, tmp_path):
        (folder / "helper.py").write_text("print('helper of', __file__)")
    script = inner / "own_script.py"
    script.write_bytes(source.encode("latin-1") if "latin" in source else source.encode())
    named = ("-m", "inner.own_script") if as_module else ("inner/own_script.py",)
    plain = run(tmp_path, *named, "-x", "--", "a b")
    ours = run(tmp_path, WORKER, *named, "-x", "--", "a b")
    assert ours.returncode == plain.returncode
    assert ours.stdout == plain.stdout
    if source != "raise KeyboardInterrupt":  # whose traceback keeps our frames
        output = [line for line in plain.stderr.splitlines() if "frozen runpy" not in line]
        assert ours.stderr.splitlines() == output


def test_a_module_that_is_not_there(tmp_path: Path) -> None:
    done = run(tmp_path, WORKER, "-m", "absent_module")
    assert done.returncode == 1
    assert "No module named absent_module" in done.stderr


def test_the_exception_is_in_torchs_error_file(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text(FAILS)
    box, error_file = tmp_path / "box", tmp_path / "error.json"
    box.mkdir()
    variables = {"RANK": "3", "TORCHELASTIC_RESTART_COUNT": "2", "TORCHELASTIC_ERROR_FILE": str(error_file)}
    done = run(tmp_path, WORKER, "s.py", ACCELFN_RUN_DIR=str(box), **variables)
    assert done.returncode == 1
    (started,) = box.glob("started.3.2.*")
    assert started.read_text() == str(error_file)
    read = ProcessFailure(local_rank=0, pid=int(started.suffix[1:]), exitcode=1, error_file=str(error_file))
    message: Any = read.message
    assert message["message"] == "ValueError: no é"
    facts = message["extraInfo"]["accelfn"]
    assert int(facts["time_s"]) == read.timestamp
    assert (facts["kind"], facts["text"], facts["status"]) == ("ValueError", "ValueError: no é", 1)
    path = str(tmp_path / "s.py")
    assert [frame[:3] for frame in facts["frames"]] == [
        [path, 6, "<module>"],
        [path, 5, "outer"],
        [path, 3, "deep"],
    ]
    assert facts["frames"][-1][3] == 'raise ValueError(f"no {x}")'


def test_a_forked_child_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("import os\nif os.fork() == 0: 1/0\nos.wait()\n")
    error_file = tmp_path / "error.json"
    assert run(tmp_path, WORKER, "s.py", TORCHELASTIC_ERROR_FILE=str(error_file)).returncode == 0
    assert not error_file.exists()


def test_the_bootstrap_imports_next_to_nothing(tmp_path: Path) -> None:
    (tmp_path / "s.py").write_text("import sys; print(sorted(sys.modules))")
    plain, ours = run(tmp_path, "s.py").stdout, run(tmp_path, WORKER, "s.py").stdout
    more = set(ours.split(", ")) - set(plain.split(", "))
    assert len(more) < 15, more
