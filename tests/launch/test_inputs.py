"""Files that a launch needs are checked without running any of them."""

import os
import sys
from pathlib import Path

import pytest

from accelfn.errors import ConfigurationError
from accelfn.launch import parse_flags, resolve
from accelfn.launch.launch import check_files
from accelfn.launch.plan import Script


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").touch()
    (tmp_path / "hosts").write_text("node1 slots=8\n")
    (tmp_path / "empty").write_text("\n# node1\n")


def check(*argv: str, script: str = "t.py") -> None:
    check_files(Script(script), resolve(parse_flags(argv).flags, {}))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--mpirun_hostfile=nohosts",), "--mpirun_hostfile: the file 'nohosts' doesn't exist"),
        (("--mpirun_hostfile=.",), "--mpirun_hostfile: the file '.' is a directory"),
        (("--mpirun_hostfile=empty",), "--mpirun_hostfile: 'empty' lists no host. Write one per line"),
        (("--log_dir=t.py",), "--log_dir t.py is a file"),
    ],
    ids=str,
)
def test_missing_files_are_named(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check(*argv)


def test_existing_files_are_accepted() -> None:
    check("--mpirun_hostfile=hosts", "--log_dir=new/folder")
    check("--log_dir=.")
    check("--no_python", script=sys.executable)
    # The script is on the machines of the pod.
    check("--tpu", "--tpu_cluster", "--tpu_name=t", "--tpu_zone=z", script="absent.py")


def test_an_unreadable_file_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    access = os.access

    def refuse_hosts(path: "str | os.PathLike[str]", mode: int) -> bool:
        return os.fspath(path) != "hosts" and access(path, mode)  # chmod doesn't affect root

    monkeypatch.setattr(os, "access", refuse_hosts)
    with pytest.raises(ConfigurationError, match="can't read 'hosts'"):
        check("--mpirun_hostfile=hosts")


def test_a_missing_module_is_found_without_an_import(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text("raise SystemExit('was run')")
    (tmp_path / "space").mkdir()
    with pytest.raises(ConfigurationError, match=f"no module 'nosuch' in {tmp_path} or"):
        check("-m", script="nosuch.train")
    with pytest.raises(ConfigurationError, match=r"the program './t.py' is not executable"):
        check("--no_python", script="./t.py")
    with pytest.raises(ConfigurationError, match="For a file leave -m out"):
        check("-m", script="t.py")
    for name in ("t", "json.tool", "own.train", "space.train"):
        check("-m", script=name)
    assert not {"own", "space"} & set(sys.modules)
