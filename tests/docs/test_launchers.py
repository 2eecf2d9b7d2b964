"""What the pages on launchers, the self-test and the small commands show is what happens."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from accelfn.launch.main import main
from accelfn.launch.self_test import CHECK_NAMES, FAULTS

PAGES = Path(__file__).parents[2] / "docs" / "pages" / "guide"


def read(name: str) -> str:
    return (PAGES / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_first_example_gives_what_stands_below_it() -> None:
    pytest.importorskip("cloudpickle")
    code, shown = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)\n```", read("launchers"), re.DOTALL)[0]
    *definitions, call = code.strip().splitlines()
    names: dict[str, Any] = {"__name__": "__main__"}  # as in a notebook
    exec("\n".join(definitions), names)
    assert str(eval(call, names)) == shown


def test_the_table_shows_all_checks_in_their_order_and_the_page_all_faults() -> None:
    page = read("self-test")
    table = page.partition("```text\naccelfn test: ")[2].partition("```")[0]
    assert tuple(re.findall(r"^  pass     (.+?)  +\d+\.\d\d s", table, re.MULTILINE)) == CHECK_NAMES
    assert all(f"`{fault}`" in page for fault in FAULTS)


def test_the_report_has_the_parts_that_the_page_shows(capsys: pytest.CaptureFixture[str]) -> None:
    shown = read("self-test").partition("$ accelfn env\n")[2].partition("```")[0]
    assert main(["env"]) == 0
    parts = re.compile(r"^- (\w+):", re.MULTILINE)
    assert parts.findall(capsys.readouterr().out) == parts.findall(shown)


@pytest.mark.slow
def test_the_small_commands_print_what_the_page_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = read("small-commands")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ACCELFN_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    (old,) = re.findall(r"```yaml\n# old\.yaml\n(.*?)```", page, re.DOTALL)
    Path("old.yaml").write_text(old)
    shown = re.findall(r"```text\n\$ accelfn ([^\n]*)\n(.*?)```", page, re.DOTALL)
    assert [command.split()[0] for command, _ in shown] == ["to-fsdp2", "tpu-config"]
    for command, output in shown:
        assert main(shlex.split(command)) == 0
        assert capsys.readouterr().out == output
