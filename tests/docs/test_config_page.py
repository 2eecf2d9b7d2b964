"""What the page on configuration files shows is what is asked, written and printed."""

import os
import re
from pathlib import Path

import pytest

from accelfn.launch.ask import ask_questions, format_launch, format_prompt
from accelfn.launch.config import LaunchConfig
from accelfn.launch.config_file import format_config, parse_config
from accelfn.launch.main import main
from accelfn.launch.questions import Question, first_answers, values_of
from accelfn.launch.sources import resolve

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pages" / "guide" / "config.md").read_text()
SESSION, ORIGINS = re.findall(r"^```text\n\$ ([^\n]*\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
WRITTEN, SHARDED = re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_session_is_what_is_asked_and_written() -> None:
    lines = SESSION.splitlines()
    assert lines[0] == "accelfn config"
    place = 1

    def follow(shown: str) -> str:
        nonlocal place
        line = lines[place]
        place += 1
        assert line.startswith(shown), line
        return line.removeprefix(shown).strip()

    def put(question: Question, few: tuple[str, ...], default: object) -> str:
        if question.kind.is_bool:
            return follow(f"? {question.text}")
        if few:
            title = follow(f"? {question.text}")
            assert title in few
            return title
        return follow(f"? {format_prompt(question, default)}")

    def say(reason: str) -> None:
        assert follow(reason) == ""

    values = values_of(ask_questions(first_answers({}, 4), {}, put, say))
    assert lines[place].startswith("saved ")
    assert lines[place + 1 :] == format_launch(values, None).splitlines()
    assert format_config(LaunchConfig(**values), "a.yaml", frozenset(values)) == WRITTEN


def test_the_file_with_shards_and_a_mesh_is_read() -> None:
    config = resolve({}, {}, parse_config(SHARDED, "a.yaml")).config
    assert (config.num_processes, config.use_fsdp, config.use_parallelism_config) == (4, True, True)
    assert (config.fsdp_version, config.fsdp_activation_checkpointing) == (2, True)
    assert config.parallelism_config_dp_replicate_size == config.parallelism_config_dp_shard_size == 2


def test_the_origins_are_those_that_are_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "made.yaml").write_text(WRITTEN)
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    for name in os.environ:
        if name.startswith(("ACCELFN_", "SLURM_")):
            monkeypatch.delenv(name)
    command, *shown = ORIGINS.splitlines()
    variable, *words = command.split()
    monkeypatch.setenv(*variable.split("="))
    assert main(words[1:]) == 0
    printed = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert all(line.split() in printed for line in shown if line != "...")
