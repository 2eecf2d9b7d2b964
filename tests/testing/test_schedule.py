"""Schedules and traces as values."""

from typing import Any, cast

import pytest

from accelfn.testing import Fault, Schedule, Step, Switch, Trace

RUN = Trace(
    steps=(
        Step("rank 1", 1, 0, "gather", "train.py:5 in main", is_switched=True),
        Step("rank 1", 1, 1, "write model", "train.py:6 in main", fault="die"),
        Step("rank 0 save", 0, 0, "gather", "train.py:5 in main"),
        Step("rank 0 save", 0, None, "ended", ""),
    )
)
TABLE = """\
    thread       at  operation          line of the program
>   rank 1       0   gather             train.py:5 in main
 !               1   write model (die)  train.py:6 in main
    rank 0 save  0   gather             train.py:5 in main
                     ended"""


def test_the_table_shows_who_did_what() -> None:
    assert RUN.table() == TABLE
    assert RUN.num_hand_overs == 1


def test_a_table_may_show_only_the_end() -> None:
    lines = RUN.table(last=1).splitlines()
    assert lines[1:] == ["   ... 3 operations before", "    rank 0 save      ended"]


def test_a_schedule_prints_as_the_call_that_makes_it() -> None:
    made = Schedule(seed=3, switches=(Switch(1), Switch(4, 2)), faults=(Fault(kind="die", rank=1, at=2),))
    names = {"Schedule": Schedule, "Switch": Switch, "Fault": Fault}
    assert eval(repr(made), names) == made
    assert repr(Schedule(seed=3, max_faults=1)) == "Schedule(seed=3, max_faults=1)"


def test_what_no_run_can_do_is_refused() -> None:
    with pytest.raises(ValueError, match=r"each Switch.to at least 1, got Schedule\(max_faults=-1\)"):
        Schedule(max_faults=-1)
    with pytest.raises(ValueError, match=r"each Switch.to at least 1, got .*to=0"):
        Schedule(switches=(Switch(0, 0),))
    with pytest.raises(ValueError, match="seed must be an integer or None, got 'x'"):
        Schedule(seed=cast("Any", "x"))
