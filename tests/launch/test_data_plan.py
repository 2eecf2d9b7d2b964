"""``accelfn data-plan`` as a user runs it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from accelfn.data import draw_plan, draw_plan_svg, plan_epoch

Command = Callable[..., tuple[int, str, str]]
GIVEN = "data-plan --num_samples 11 --batch_size 2"


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        ("", {}),
        ("--no_even_batches", {"even_batches": False}),
        ("--drop-last", {"drop_last": True}),
        ("--split_batches", {"split_batches": True}),
        ("--start=3", {"start": 3}),
        ("--start 3 --no-even-batches", {"start": 3, "even_batches": False}),
    ],
)
def test_the_plan_of_the_flags_is_drawn(flags: str, options: dict[str, Any], command: Command) -> None:
    plan = plan_epoch(11, 2, 2, **options)
    drawn = command(f"{GIVEN} --num_processes 2 {flags} --svg a-b.svg")
    assert drawn == (0, draw_plan(plan) + "\n", "")
    assert Path("a-b.svg").read_text() == draw_plan_svg(plan)


def test_ranks_that_share_a_batch_are_one_row(command: Command) -> None:
    plan = plan_epoch(11, 2, 2)
    drawn = command(f"{GIVEN} --num_processes 4 --sharing 2 --svg shared.svg")[1]
    assert drawn == draw_plan(plan, sharing=2) + "\n"
    assert drawn.splitlines()[1:] == ["ranks 0..1  0 1     4 5     8 9", "ranks 2..3  2 3     6 7     10 (0)"]
    assert Path("shared.svg").read_text() == draw_plan_svg(plan, sharing=2)


@pytest.mark.parametrize(
    ("line", "output"),
    [
        (f"{GIVEN} --num_processes 3 --sharing 2", "--sharing must divide --num_processes 3, got 2"),
        ("data-plan", "--num_samples, --batch_size"),
        (f"{GIVEN} --num_samples -1", "--num_samples must be at least 0, got -1"),
        (f"{GIVEN} --batch_size 0", "--batch_size must be at least 1, got 0"),
        (f"{GIVEN} --num_processes 0", "--num_processes must be at least 1, got 0"),
        (f"{GIVEN} --start -2", "--start must be at least 0, got -2"),
        (f"{GIVEN} --start 12", "--start must be at most --num_samples 11, got 12"),
        (f"{GIVEN} --num_processes 3 --split_batches", "got batch_size=2 and 3 ranks"),
        (f"{GIVEN} --svg /no/such/a.svg", "/no/such/a.svg: can't be written: No such file"),
        (f"{GIVEN} --nonsense", "--nonsense"),
    ],
)
def test_bad_input_is_one_sentence(line: str, output: str, command: Command) -> None:
    status, _, errors = command(line)
    assert status == 2
    assert "accelfn data-plan: error: " in errors
    assert output in errors
