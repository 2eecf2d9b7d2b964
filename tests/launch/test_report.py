"""The last lines of a launch that failed, from what its processes wrote down."""

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from accelfn.launch.report import Failure, format_report, read_failures

FRAMES = tuple(("f.py", line, "f", "") for line in range(9))
FIRST = Failure(rank=1, exitcode=1, kind="ValueError", text="ValueError: no", frames=FRAMES[:1], time_s=1.0)
ABOVE = "  logs: above; use --log_dir DIR --tee 3 to keep one per rank"


def report(*failures: Failure, size: int = 4, has_logs: bool = False) -> list[str]:
    return format_report(failures, num_processes=size, has_logs=has_logs).splitlines()


def test_those_that_were_stopped_have_not_failed_and_those_that_raised_have() -> None:
    raised = Failure(rank=2, exitcode=-15, kind="RuntimeError", text="closed", time_s=2.0)
    stopped = Failure(rank=0, exitcode=-15, time_s=0.5)
    killed = Failure(rank=3, exitcode=-9, time_s=30.0)
    lost = Failure(rank=None, kind="lost", text="gone")
    head = ["accelfn launch: rank 1 of 4 failed, with exit status 1:", "  ValueError: no"]
    assert report(raised, stopped, killed, FIRST, lost) == [
        *head,
        "    f.py:0 in f",
        "  failed later: rank 2",
        ABOVE,
    ]
    assert report(FIRST) == report(FIRST, stopped) == [*head, "    f.py:0 in f", ABOVE]
    assert report(replace(FIRST, log_dir="logs"), has_logs=True) == [*head, "    f.py:0 in f", "  logs: logs"]
    assert report() == []


def test_ranks_that_were_asked_to_stop_have_not_failed() -> None:
    asked: dict[str, Any] = {"exitcode": 75, "kind": "SystemExit", "text": "75", "time_s": 2.0}
    stopped = [Failure(rank=rank, **asked) for rank in (0, 2)]
    assert report(*stopped) == ["accelfn launch: all ranks stopped for preemption, with exit status 75."]
    assert "rank 1 of 4 failed" in report(*stopped, FIRST)[0]


def test_long_errors_are_cut() -> None:
    failure = Failure(rank=0, exitcode=1, text="\n".join("abcdefghij"), frames=FRAMES)
    lines = report(failure, size=0, has_logs=True)
    assert {"  ... (5 more lines)", "    ... (earlier frames)"} <= set(lines)
    assert len(lines) <= 14


KILLED = Failure(rank=0, exitcode=-9, time_s=3.0)
RAISED = {
    "kind": "ValueError",
    "text": "ValueError: no",
    "status": 3,
    "time_s": 1.0,
    "frames": [["f", 1, "g", ""]],
}


@pytest.mark.parametrize(
    ("seen", "facts", "exitcode"),
    [
        ((KILLED,), None, -9),
        ((KILLED,), {"message": "by another writer"}, -9),
        ((replace(KILLED, exitcode=1),), RAISED, 1),
        ((replace(KILLED, exitcode=-15),), RAISED, 3),  # it was ending when it was stopped
        ((), RAISED, 3),  # after a signal nobody has seen how it ended
    ],
)
def test_error_files_say_what_was_raised(seen: Any, facts: Any, exitcode: int, tmp_path: Path) -> None:
    error_file = tmp_path / "error.json"
    (tmp_path / "started.0.0.17").write_text(str(error_file))
    (tmp_path / "started.1.0.18").write_text(str(tmp_path / "none"))
    if facts is not None:
        written = {"message": {"extraInfo": {"accelfn": facts}}} if "kind" in facts else facts
        error_file.write_text(json.dumps(written))
    (failure,) = read_failures(str(tmp_path), seen)
    assert (failure.rank, failure.exitcode, failure.host) == (0, exitcode, socket.gethostname())
    assert failure.log_dir == str(tmp_path.parent)
    assert failure.frames == ((("f", 1, "g", ""),) if facts is RAISED else ())


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("agent", "the processes could not be started:"),
        ("lost", "this machine lost the connection to the others, and stopped its processes:"),
    ],
)
def test_a_launcher_that_fails_itself_says_why(kind: str, text: str) -> None:
    failure = Failure(rank=None, kind=kind, text="RendezvousTimeoutError: too late", exitcode=1)
    assert report(failure)[:2] == [f"accelfn launch: {text}", "  RendezvousTimeoutError: too late"]
