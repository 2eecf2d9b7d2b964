"""What the pages on big models show is what their commands and programs print."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from accelfn.launch.main import main

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "pages" / "guide"
EXAMPLES = ROOT / "docs" / "examples"
SHOWN = re.compile(r"^```text\n\$ (\S+) ([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMANDS = [
    (page, *found)
    for page in ("estimate", "plan-ranks", "device-maps")
    for found in SHOWN.findall((GUIDE / f"{page}.md").read_text())
]


LLAMA_70B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Work in a copy of the examples, with the configuration of a model."""
    folder = tmp_path / "examples"
    shutil.copytree(EXAMPLES, folder)
    (folder / "llama_70b").mkdir()
    (folder / "llama_70b" / "config.json").write_text(json.dumps(LLAMA_70B))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))  # pyright: ignore[reportUnknownMemberType] -- untyped
    return folder


@pytest.mark.slow
@pytest.mark.usefixtures("examples")
@pytest.mark.parametrize(("page", "program", "arguments", "output"), COMMANDS)
def test_what_a_page_shows_is_what_the_command_says(
    page: str, program: str, arguments: str, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line, _, picture = arguments.partition(" > ")
    assert program == "accelfn"
    assert main(shlex.split(line)) == 0
    if picture:
        assert f"]({picture})" in (GUIDE / f"{page}.md").read_text()
        output = (GUIDE / picture).read_text()
    expected = re.escape(output).replace(re.escape("...\n"), r"(?:.*\n)+?")  # lines that the page leaves out
    assert re.fullmatch(expected, capsys.readouterr().out)


PROGRAMS = [
    found
    for page in ("plan-ranks", "device-maps")
    for found in re.findall(
        r"^```python\n((?:(?!```).*\n)*?.*\"(\w+\.svg)\"\)\.write_text\(.*\n)```\n(?:\n```text\n([^$][^`]*))?",
        (GUIDE / f"{page}.md").read_text(),
        re.MULTILINE,
    )
]


@pytest.mark.slow
@pytest.mark.timeout(300)  # a search of meshes takes a minute on a busy machine
@pytest.mark.parametrize(("program", "name", "output"), PROGRAMS, ids=[name for _, name, _ in PROGRAMS])
def test_a_picture_is_what_its_program_draws(
    program: str, name: str, output: str, examples: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(program, {})
    assert capsys.readouterr().out == output
    assert (examples / name).read_text() == (GUIDE / name).read_text(), f"{name} is out of date"


def test_the_pages_show_commands_and_a_picture_each() -> None:
    assert [page for page, *_ in COMMANDS] == ["estimate"] * 3 + ["plan-ranks", "device-maps"]
    pictures = {path.name for pattern in ("estimate_*.svg", "plan_*.svg") for path in GUIDE.glob(pattern)}
    assert pictures == {"estimate_seven_billion.svg", *(name for _, name, _ in PROGRAMS)}


@pytest.mark.slow
@pytest.mark.parametrize("page", ["big-models", "offload"])
def test_a_program_prints_what_its_page_shows(page: str, tmp_path: Path) -> None:
    ((program, script, output),) = SHOWN.findall((GUIDE / f"{page}.md").read_text())
    assert program == "python"
    done = subprocess.run(
        [sys.executable, str(ROOT / script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == output
