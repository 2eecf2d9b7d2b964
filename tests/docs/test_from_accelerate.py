"""The page for people who know Accelerate shows what the command prints."""

import re
from pathlib import Path

import pytest

from accelfn.launch.main import main
from accelfn.launch.migrate import plan_migration

PAGE = (Path(__file__).parents[2] / "docs" / "pages" / "guide" / "from-accelerate.md").read_text()


def block(language: str, heading: str) -> list[str]:
    """Return the blocks of a language in a section."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)


def test_the_program_of_the_page_becomes_what_it_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    title = "The loop, before and after"
    Path("train.py").write_text(block("python", title)[0])
    assert main(["migrate", "train.py"]) == 0
    printed = capsys.readouterr()
    assert printed.out == block("diff", title)[0]
    assert f"$ accelfn migrate train.py\n{printed.err}" == block("text", title)[0]


def test_the_refusals_of_the_page_are_those_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = ["from accelerate import Accelerator", "accelerator = Accelerator()", *[""] * 38]
    lines[30], lines[39] = "accelerator.set_trigger()", "report(accelerator)"
    Path("train.py").write_text("\n".join(lines))
    assert main(["migrate", "train.py"]) == 2
    assert (
        f"$ accelfn migrate train.py\n{capsys.readouterr().err}"
        == block("text", "What the command understands")[0]
    )


def test_a_function_that_trains_becomes_what_the_page_shows() -> None:
    function, call = block("diff", "What the command understands")

    def side(text: str, sign: str) -> str:
        return "".join(line[1:] for line in text.splitlines(keepends=True) if line[0] in (sign, " "))

    source = (
        f"from accelerate import Accelerator\n{side(function, '-')}accelerator = Accelerator()\n"
        "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)\n"
        f"for epoch in range(3):\n{side(call, '-')}"
    )
    after = plan_migration(source).text
    assert side(function, "+") in after
    assert after.endswith(side(call, "+"))
