"""The final report of a failed launch: the first failed rank, its error, the user's frames and the logs."""

from __future__ import annotations

import json
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_MAX_FRAMES = 5
_MAX_LINES = 6
# Exceptions that follow from the failure of another rank.
_SECONDARY = ("RemoteRankError", "MissingRankError", "DistBackendError", "DistNetworkError", "DistError")
# `accelfn.checkpoint.EXIT_PREEMPTED`, whose module imports torch.
_PREEMPTED = 75


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a process failed.

    Attributes:
        rank: Its rank; None for torchrun's agent.
        host: Host name of its machine.
        time_s: Time of the failure.
        attempt: Number of restarts before: of all processes, in elastic training of this rank's.
        exitcode: As in ``subprocess``: negative for a signal; None if unknown.
        kind: Class of the exception; empty if there was none. For the agent, ``"lost"`` if the connection to
            other machines was lost, else ``"agent"``.
        text: The exception as Python prints it, or why the launcher killed the process.
        frames: File, line, function and source line of the user's frames, the innermost last.
        log_dir: Folder of the logs of its attempt.
        elsewhere: Whether it ran on another machine.
    """

    rank: int | None
    host: str = ""
    time_s: float = 0.0
    attempt: int = 0
    exitcode: int | None = None
    kind: str = ""
    text: str = ""
    frames: tuple[tuple[str, int, str, str], ...] = ()
    log_dir: str = ""
    elsewhere: bool = False


def read_failures(folder: str, seen: Sequence[Failure]) -> tuple[Failure, ...]:
    """Read what processes wrote into torch's error files.

    Args:
        folder: Of the run, where each process has said which its error file is.
        seen: How processes failed, as their launcher saw it; none after a signal.
    """
    if seen:
        return tuple(_complete(failure, folder) for failure in seen)
    # After a signal nobody says how the processes ended: some raised while they were stopped.
    started = [path.name.split(".") for path in Path(folder).glob("started.*[0-9]")]
    last = max((int(attempt) for _, _, attempt, _ in started), default=0)
    ranks = sorted(int(rank) for _, rank, attempt, _ in started if int(attempt) == last)
    stopped = (Failure(rank=rank, attempt=last, exitcode=-signal.SIGTERM) for rank in ranks)
    return tuple(failure for each in stopped if (failure := _complete(each, folder)).kind)


def _complete(failure: Failure, folder: str) -> Failure:
    """Add what a process has written into its error file, if it has."""
    failure = replace(failure, host=socket.gethostname())
    try:
        (started,) = Path(folder).glob(f"started.{failure.rank}.{failure.attempt}.*[0-9]")
        error_file = Path(started.read_text(encoding="utf-8"))
        failure = replace(failure, log_dir=str(error_file.parents[1]))
        facts: dict[str, Any] = json.loads(error_file.read_text(encoding="utf-8"))["message"]["extraInfo"][
            "accelfn"
        ]
    except (OSError, ValueError, LookupError, TypeError):  # none, or that of another writer
        return failure
    status, frames = facts.pop("status"), facts.pop("frames")
    # A rank that fails while the agent stops it has its own status.
    exitcode = status if failure.exitcode == -signal.SIGTERM else failure.exitcode
    return replace(failure, **facts, exitcode=exitcode, frames=tuple(tuple(frame) for frame in frames))


def first_failure(failures: Sequence[Failure]) -> Failure | None:
    """Return the failure that caused the others: the earliest one that isn't secondary. Pure."""
    return min(
        failures,
        key=lambda failure: (
            failure.rank is None,
            failure.kind in _SECONDARY or (not failure.kind and failure.exitcode == -signal.SIGTERM),
            failure.time_s,
        ),
        default=None,
    )


def format_report(failures: Sequence[Failure], *, num_processes: int, has_logs: bool) -> str:
    """Format the last lines of a failed launch. Pure.

    Args:
        failures: From ``read_failures``.
        num_processes: World size.
        has_logs: Whether the output of ranks went to files.

    >>> frames = (("t.py", 3, "f", "g()"),)
    >>> failed = Failure(rank=1, host="a", exitcode=1, text="ValueError: no", frames=frames, log_dir="logs")
    >>> print(format_report([failed], num_processes=2, has_logs=True))
    accelfn launch: rank 1 of 2 failed on a, with exit status 1:
      ValueError: no
        t.py:3 in f: g()
      logs: logs
    """
    first = first_failure(failures)
    if first is None:
        return ""
    if all(failure.exitcode == _PREEMPTED for failure in failures):
        return f"accelfn launch: all ranks stopped for preemption, with exit status {_PREEMPTED}."
    if first.kind == "lost":
        return (
            "accelfn launch: this machine lost the connection to the others, and stopped its processes:\n"
            f"  {first.text}\n  see the report on the machine that failed first"
        )
    if first.rank is None:
        return f"accelfn launch: the processes could not be started:\n  {first.text}"
    on = f" on {first.host}" if first.host else ""
    after = f" after {first.attempt} restart{'s' if first.attempt > 1 else ''}" if first.attempt else ""
    text = first.text.splitlines()
    end = ":" if text or first.frames else "."
    hint = " (possibly out of memory)" if first.exitcode == -9 and not text else ""
    who, how = f"rank {first.rank} of {num_processes}", describe_exit(first.exitcode)
    lines = [f"accelfn launch: {who} failed{on}{after}, {how}{hint}{end}"]
    if len(text) > _MAX_LINES:
        text = [*text[: _MAX_LINES - 1], f"... ({len(text) - _MAX_LINES + 1} more lines)"]
    lines += [f"  {line}" for line in text]
    frames = first.frames[-_MAX_FRAMES:]
    if len(frames) < len(first.frames):
        lines.append("    ... (earlier frames)")
    for path, line, function, source in frames:
        where = f"{path}:{line}" + (f" in {function}" if function else "")
        lines.append(f"    {where}: {source}" if source else f"    {where}")
    stops = (-signal.SIGTERM, -getattr(signal, "SIGKILL", 9))
    others = [
        failure
        for failure in sorted(failures, key=lambda failure: failure.rank or 0)
        if failure is not first
        and failure.rank is not None
        and (failure.kind or failure.exitcode not in stops)
    ]
    same = [str(failure.rank) for failure in others if _is_same(failure, first)]
    later = [str(failure.rank) for failure in others if not _is_same(failure, first)]
    lines += [f"  same failure: rank {', '.join(same)}"] if same else []
    lines += [f"  failed later: rank {', '.join(later)}"] if later else []
    logs = first.log_dir if has_logs else "above; use --log_dir DIR --tee 3 to keep one per rank"
    lines.append(f"  logs: {f'on {first.host}' if first.elsewhere else logs}")
    return "\n".join(lines)


def _is_same(failure: Failure, first: Failure) -> bool:
    """Return whether two ranks raised the same exception at the same place."""
    this, other = ((each.kind, each.text, [frame[:2] for frame in each.frames]) for each in (failure, first))
    return bool(failure.kind) and this == other


def describe_exit(exitcode: int | None) -> str:
    """Describe how a process ended. Pure.

    >>> describe_exit(3), describe_exit(-15)
    ('with exit status 3', 'killed by SIGTERM')
    """
    if exitcode is None or exitcode >= 0:
        return f"with exit status {1 if exitcode is None else exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    return f"killed by {name}"
