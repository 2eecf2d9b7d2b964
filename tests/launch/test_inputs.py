"""What a launch names must be there, and is looked for without running any of it."""

import os
import sys
from pathlib import Path

import pytest

from accelfn.errors import ConfigurationError
from accelfn.launch import parse_flags, resolve
from accelfn.launch.launch import refuse_missing
from accelfn.launch.plan import Script


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "t.py").touch()
    (tmp_path / "hosts").write_text("node1 slots=8\n")
    (tmp_path / "empty").write_text("\n# node1\n")


def refuse(*argv: str, script: str = "t.py") -> None:
    refuse_missing(Script(script), resolve(parse_flags(argv).flags, {}))


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--mpirun_hostfile=nohosts",), "--mpirun_hostfile: there is no file 'nohosts'"),
        (("--mpirun_hostfile=.",), "--mpirun_hostfile: it must be a file, and is a folder: '.'"),
        (("--mpirun_hostfile=empty",), "--mpirun_hostfile: 'empty' names no host. Write one on each line"),
        (("--log_dir=t.py",), "--log_dir t.py must be a folder, and is a file"),
    ],
    ids=str,
)
def test_what_is_not_there_is_named(argv: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        refuse(*argv)


def test_what_is_there_is_left_alone() -> None:
    refuse("--mpirun_hostfile=hosts", "--log_dir=new/folder")
    refuse("--log_dir=.")
    refuse("--no_python", script=sys.executable)
    # On the machines of a pod, which may have what this one hasn't.
    refuse("--tpu", "--tpu_cluster", "--tpu_name=t", "--tpu_zone=z", script="absent.py")


def test_what_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    access = os.access

    def refuse_hosts(path: "str | os.PathLike[str]", mode: int) -> bool:
        return os.fspath(path) != "hosts" and access(path, mode)  # not by chmod: root may read all files

    monkeypatch.setattr(os, "access", refuse_hosts)
    with pytest.raises(ConfigurationError, match="'hosts' can't be read"):
        refuse("--mpirun_hostfile=hosts")


def test_a_missing_module_is_told_without_an_import(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "__init__.py").write_text("raise SystemExit('was run')")
    (tmp_path / "space").mkdir()
    with pytest.raises(ConfigurationError, match=f"no module 'nosuch' to run: looked in {tmp_path} and"):
        refuse("-m", script="nosuch.train")
    with pytest.raises(ConfigurationError, match=r"the program './t.py' can't be executed"):
        refuse("--no_python", script="./t.py")
    with pytest.raises(ConfigurationError, match="For a file leave -m out"):
        refuse("-m", script="t.py")
    for name in ("t", "json.tool", "own.train", "space.train"):
        refuse("-m", script=name)
    assert not {"own", "space"} & set(sys.modules)
