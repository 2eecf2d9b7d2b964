"""``accelfn config`` writes, shows, renews and takes over files."""

import os
import sys
from pathlib import Path

import pytest

from accelfn.launch.config import LaunchConfig, read_config
from accelfn.launch.main import main


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ACCELFN_CONFIG", "HF_HOME", "APPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_what_no_launch_could_read_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert main(["config", "default", "--config_file", str(tmp_path / "a.yaml")]) == 2
    assert "a.yaml is YAML, and PyYAML is not installed. Run: pip install" in capsys.readouterr().err
    assert main(["config", "default", "--config_file", str(tmp_path / "a.json")]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert read_config(str(tmp_path / "a.json")).values


@pytest.mark.parametrize("name", ["a.yaml", "a.json"])
def test_default_writes_what_launch_reads_and_never_overwrites(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "deep" / name
    assert main(["config", "default", "--config-file", str(path), "--mixed_precision", "bf16"]) == 0
    config = LaunchConfig(**read_config(str(path)).values)
    assert config.mixed_precision == "bf16"
    before = path.read_text()
    assert main(["config", "default", "--config_file", str(path)]) == 2
    assert " exists. Pass --overwrite" in capsys.readouterr().err
    assert path.read_text() == before
    assert main(["config", "default", "--config_file", str(path), "--overwrite"]) == 0
    assert path.read_text() != before


def test_update_writes_the_same_in_todays_words(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("cpu: yes  # the laptop\nmixed_precision: no\nnum_machines: 1\n")
    assert main(["config", "update", "--config_file", str(path)]) == 0
    assert path.read_text() == "config_version: 1\ncpu: true\nmixed_precision: 'no'\nnum_machines: 1\n"


def test_show_prints_the_sources_of_values(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["config", "show"]) == 0
    assert capsys.readouterr().out == f"file: {tmp_path}/accelfn/config.yaml (doesn't exist)\n"
    (tmp_path / "accelfn").mkdir()
    (tmp_path / "accelfn" / "config.yaml").write_text("num_processes: 2")
    monkeypatch.setenv("ACCELFN_CPU", "1")
    assert main(["config", "show"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert lines[0].split() == ["cpu", "true", "environment", "ACCELFN_CPU"]
    assert lines[1].split()[:3] == ["num_processes", "2", "file"]


def test_import_takes_accelerates_file_from_its_usual_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", "import"]) == 2
    assert "there is no configuration of Accelerate" in capsys.readouterr().err
    (tmp_path / "empty.yaml").write_text("\n")
    assert main(["config", "import", str(tmp_path / "empty.yaml")]) == 2
    assert "empty.yaml is empty, so there is nothing to import" in capsys.readouterr().err
    source = tmp_path / "cache" / "huggingface" / "accelerate" / "default_config.yaml"
    source.parent.mkdir(parents=True)
    source.write_text('{"distributed_type": "MULTI_GPU", "num_processes": 4, "mixed_precision": "no"}')
    assert main(["config", "import"]) == 0
    found = LaunchConfig(**read_config(str(tmp_path / "accelfn" / "config.yaml")).values)
    assert found == LaunchConfig(multi_gpu=True, num_processes=4, mixed_precision="no")
    assert main(["config", "import", str(source)]) == 2
    assert main(["config", "import", str(tmp_path)]) == 2


def test_a_place_that_cannot_be_written_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for name, why in (
        ("file/a.yaml", ": can't be written: "),
        ("folder", " is a directory"),
    ):
        place = tmp_path / name
        assert main(["config", "default", "--overwrite", "--config_file", str(place)]) == 2
        output = capsys.readouterr().err
        assert f"{place}{why}" in output
        assert output.startswith("accelfn config default: error: ")
        assert len(output.splitlines()) == 1
    assert sorted(one.name for one in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is always full")
def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / f"a.yaml.{os.getpid()}.part").symlink_to("/dev/full")
    assert main(["config", "default", "--config_file", str(tmp_path / "a.yaml")]) == 1
    output = "accelfn config default: error: {}: can't be written: No space left on device.\n"
    assert capsys.readouterr().err == output.format(tmp_path / "a.yaml")
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_file_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.yaml").write_text("cpu: [")
    assert main(["config", "update", "--config_file", str(tmp_path / "a.yaml")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
