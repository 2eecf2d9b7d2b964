"""``accelfn data-plan`` as a user runs it."""

from pathlib import Path
from typing import Any

import pytest

from accelfn.data import draw_plan, draw_plan_svg, plan_epoch
from accelfn.launch.main import main

GIVEN = ("--num_samples", "11", "--batch_size", "2", "--num_processes", "2")


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ((), {}),
        (("--no_even_batches",), {"even_batches": False}),
        (("--drop-last",), {"drop_last": True}),
        (("--split_batches",), {"split_batches": True}),
        (("--start=3",), {"start": 3}),
        (("--start", "3", "--no-even-batches"), {"start": 3, "even_batches": False}),
    ],
)
def test_the_plan_of_the_flags_is_drawn(
    flags: tuple[str, ...], options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_epoch(11, 2, 2, **options)
    target = tmp_path / "a-b.svg"
    assert main(["data-plan", *GIVEN, *flags, "--svg", str(target)]) == 0
    assert capsys.readouterr().out == draw_plan(plan) + "\n"
    assert target.read_text() == draw_plan_svg(plan)


def test_ranks_that_share_a_batch_are_one_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "shared.svg"
    numbers = ("--num_samples", "11", "--batch_size", "2", "--num_processes", "4")
    assert main(["data-plan", *numbers, "--sharing", "2", "--svg", str(target)]) == 0
    plan = plan_epoch(11, 2, 2)
    drawn = capsys.readouterr().out
    assert drawn == draw_plan(plan, sharing=2) + "\n"
    assert drawn.splitlines()[1:] == [
        "ranks 0..1  0 1     4 5     8 9",
        "ranks 2..3  2 3     6 7     10 (0)",
    ]
    assert target.read_text() == draw_plan_svg(plan, sharing=2)
    assert "ranks 2..3" in target.read_text()


@pytest.mark.parametrize(
    ("argv", "output"),
    [
        (
            ("--num_samples", "1", "--batch_size", "1", "--num_processes", "3", "--sharing", "2"),
            "--sharing must divide --num_processes 3, got 2",
        ),
        ((), "--num_samples, --batch_size"),
        (("--num_samples", "-1", "--batch_size", "2"), "--num_samples must be at least 0, got -1"),
        (("--num_samples", "1", "--batch_size", "0"), "--batch_size must be at least 1, got 0"),
        ((*GIVEN, "--num_processes", "0"), "--num_processes must be at least 1, got 0"),
        ((*GIVEN, "--start", "-2"), "--start must be at least 0, got -2"),
        ((*GIVEN, "--start", "12"), "--start must be at most --num_samples 11, got 12"),
        ((*GIVEN, "--num_processes", "3", "--split_batches"), "got batch_size=2 and 3 ranks"),
        ((*GIVEN, "--svg", "/no/such/folder/a.svg"), "/no/such/folder/a.svg: can't be written: No such file"),
        ((*GIVEN, "--nonsense"), "--nonsense"),
    ],
)
def test_bad_input_is_one_sentence(
    argv: tuple[str, ...], output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["data-plan", *argv]) == 2
    errors = capsys.readouterr().err
    assert "accelfn data-plan: error: " in errors
    assert output in errors
