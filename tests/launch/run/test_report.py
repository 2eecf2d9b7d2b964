"""The last lines of a launch that failed, from what its processes wrote down."""

import json
from pathlib import Path
from typing import Any

import pytest

from accelfn.launch.run.report import Failure, format_report, read_failures

FRAMES = tuple(("f.py", line, "f", "") for line in range(9))
FIRST = Failure(rank=1, exitcode=1, kind="ValueError", text="ValueError: no", frames=FRAMES[:1], time_s=1.0)
ABOVE = "  logs: above; use --log_dir DIR --tee 3 to keep one per rank"


def report(*failures: Failure, size: int | None = 4, log_dir: str | None = None) -> list[str]:
    return format_report(failures, num_processes=size, log_dir=log_dir).splitlines()


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
    # Which of several tracebacks counts is said by frames; one alone stands above.
    assert report(FIRST) == report(FIRST, stopped) == [*head, ABOVE]
    assert report(FIRST, log_dir="logs") == [*head, "    f.py:0 in f", "  logs: logs"]
    assert report() == []


def test_ranks_that_were_asked_to_stop_have_not_failed() -> None:
    asked: dict[str, Any] = {"exitcode": 75, "kind": "SystemExit", "text": "75", "time_s": 2.0}
    stopped = [Failure(rank=rank, **asked) for rank in (0, 2)]
    assert report(*stopped) == ["accelfn launch: all ranks stopped for preemption, with exit status 75."]
    assert "rank 1 of 4 failed" in report(*stopped, FIRST)[0]


def test_long_errors_are_cut() -> None:
    failure = Failure(rank=0, exitcode=1, text="\n".join("abcdefghij"), frames=FRAMES)
    lines = report(failure, size=None, log_dir="logs")
    assert {"  ... (5 more lines)", "    ... (4 frames)"} <= set(lines)
    assert len(lines) <= 14


STARTED: dict[str, Any] = {"rank": 0, "attempt": 0, "host": "b", "pid": 1}
ENDED: dict[str, Any] = {"rank": 0, "exitcode": -9, "time_s": 3.0}
RAISED: dict[str, Any] = {
    **STARTED,
    "kind": "ValueError",
    "text": "ValueError: no",
    "status": 1,
    "time_s": 1.0,
    "frames": [],
}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (
            {"started": STARTED, "agent": {"failures": [ENDED]}},
            "rank 0 of 2 failed on b, killed by SIGKILL (possibly out of memory).",
        ),
        (  # while it was ending, torchrun stopped it for the end of another
            {"failed": RAISED, "agent": {"failures": [{**ENDED, "exitcode": -15}]}},
            "rank 0 of 2 failed on b, with exit status 1:",
        ),
        (
            {"agent": {"error": "RendezvousTimeoutError: too late"}},
            "the processes could not be started:\n  RendezvousTimeoutError: too late",
        ),
        (
            {"started": STARTED, "agent": {"error": "RendezvousConnectionError: no"}},
            "this machine lost the connection to the others, and stopped its processes:\n  Rendezvous",
        ),
    ],
)
def test_what_was_written_is_reported(files: dict[str, Any], expected: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / f"{name}{'' if name == 'agent' else '.0.0'}.json").write_text(json.dumps(content))
    output = format_report(read_failures(str(tmp_path)), num_processes=2, log_dir=None)
    assert output.startswith(f"accelfn launch: {expected}")
