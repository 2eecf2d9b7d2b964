"""``accelfn config`` writes, shows, renews and takes over files."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from accelfn.launch.config import LaunchConfig
from accelfn.launch.config_file import read_config

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCELFN_CONFIG", "HF_HOME", "APPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_what_no_launch_could_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    status, _, stderr = command("config default --config_file a.yaml")
    assert status == 2
    assert "a.yaml is YAML, and PyYAML is not installed. Run: pip install" in stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a.yaml", "a.json"])
def test_default_writes_what_launch_reads_and_never_overwrites(name: str, command: Command) -> None:
    path = Path("deep", name)
    assert command(f"config --config-file {path} default --mixed_precision bf16")[0] == 0
    assert LaunchConfig(**read_config(str(path)).values).mixed_precision == "bf16"
    before = path.read_text()
    status, _, stderr = command(f"config default --config_file {path}")
    assert (status, " exists. Pass --overwrite" in stderr) == (2, True)
    assert path.read_text() == before
    assert command(f"config default --config_file {path} --overwrite")[0] == 0
    assert path.read_text() != before


def test_update_writes_the_same_in_todays_words(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("cpu: yes  # the laptop\nmixed_precision: no\nnum_machines: 1\n")
    assert command("config update --config_file a.yaml")[0] == 0
    assert path.read_text() == "config_version: 1\ncpu: true\nmixed_precision: 'no'\nnum_machines: 1\n"
    path.write_text("cpu: [")
    status, _, stderr = command("config update --config_file a.yaml")
    assert (status, stderr.count("\n")) == (2, 1)


def test_show_prints_the_sources_of_values(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command("config show")[:2] == (0, f"file: {tmp_path}/accelfn/config.yaml (doesn't exist)\n")
    (tmp_path / "accelfn").mkdir()
    (tmp_path / "accelfn" / "config.yaml").write_text("num_processes: 2")
    monkeypatch.setenv("ACCELFN_CPU", "1")
    status, stdout, _ = command("config show")
    lines = stdout.splitlines()[1:]
    assert (status, lines[0].split()) == (0, ["cpu", "true", "environment", "ACCELFN_CPU"])
    assert lines[1].split()[:3] == ["num_processes", "2", "file"]


def test_update_takes_a_file_of_accelerate(tmp_path: Path, command: Command) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text("distributed_type: MULTI_GPU\nnum_processes: 4")
    status, _, stderr = command("config update --config_file theirs.yaml")
    assert (status, stderr) == (0, "note: theirs.yaml is a config file of Accelerate, and was imported.\n")
    assert read_config(str(path)).values == {"multi_gpu": True, "num_processes": 4}


def test_import_takes_accelerates_file_from_its_usual_place(tmp_path: Path, command: Command) -> None:
    (tmp_path / "empty.yaml").write_text("\n")
    for source, message in (
        ("", "there is no configuration of Accelerate"),
        ("empty.yaml", "empty.yaml is empty, so there is nothing to import"),
        (".", "Is a directory"),
    ):
        status, _, stderr = command(f"config import {source}")
        assert (status, message in stderr) == (2, True), stderr
    source = tmp_path / "cache" / "huggingface" / "accelerate" / "default_config.yaml"
    source.parent.mkdir(parents=True)
    source.write_text('{"distributed_type": "MULTI_GPU", "num_processes": 4, "mixed_precision": "no"}')
    assert command("config import")[0] == 0
    found = LaunchConfig(**read_config(str(tmp_path / "accelfn" / "config.yaml")).values)
    assert found == LaunchConfig(multi_gpu=True, num_processes=4, mixed_precision="no")
    assert command(f"config import {source}")[0] == 2


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path: Path, command: Command) -> None:
    (tmp_path / "file").touch()
    status, _, stderr = command("config default --overwrite --config_file file/a.yaml")
    assert (status, stderr.count("\n")) == (2, 1)
    assert stderr.startswith("accelfn config default: error: file/a.yaml: can't be written: ")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is always full")
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, command: Command) -> None:
    (tmp_path / f"a.yaml.{os.getpid()}.part").symlink_to("/dev/full")
    message = "accelfn config default: error: a.yaml: can't be written: No space left on device.\n"
    assert command("config default --config_file a.yaml") == (1, "", message)
    assert list(tmp_path.iterdir()) == []
