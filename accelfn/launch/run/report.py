"""What a failed launch says last: which rank, what, where in the user's program, and where the logs are."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

_MAX_FRAMES = 5
_MAX_LINES = 6
# What ranks raise because another one has failed.
_ECHOES = ("RemoteRankError", "MissingRankError", "DistBackendError", "DistNetworkError", "DistError")
# `accelfn.checkpoint.EXIT_PREEMPTED`, whose module would import torch.
_PREEMPTED = 75
# Those of which a rank prints one line, and no traceback.
_LINES = ("RemoteRankError", "MissingRankError", "DistNetworkError")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How one process ended badly.

    Attributes:
        rank: Its rank; None for torchrun itself.
        host: Name of its machine.
        time_s: When.
        exitcode: As ``subprocess`` gives it: negative for a signal; None if it isn't known.
        kind: Class of the exception; empty if there was none; of torchrun ``"lost"`` where the other machines
            have gone, else ``"agent"``.
        text: The exception as Python prints it.
        frames: File, line, function and source of its frames, the innermost last; the user's where known.
        elsewhere: Whether it ended on another machine, whose launcher has reported it.
    """

    rank: int | None
    host: str = ""
    time_s: float = 0.0
    exitcode: int | None = None
    kind: str = ""
    text: str = ""
    frames: tuple[tuple[str, int, str, str], ...] = ()
    elsewhere: bool = False


def read_failures(folder: str) -> tuple[Failure, ...]:
    """Read what workers and the agent wrote into the folder of a run. Effect: reads the disk."""
    outcome = _read(Path(folder, "agent.json"))
    ended = {int(one["rank"]): one for one in outcome.get("failures", ())}
    written = [_read(path) for path in sorted(Path(folder).glob("failed.*.json"))]
    last_attempt = max((int(one["attempt"]) for one in written), default=0)
    started = [_read(path) for path in Path(folder).glob("started.*.json")]
    last_attempt = max([last_attempt, *(int(one["attempt"]) for one in started)])
    found: dict[int, Failure] = {}
    for one in written:
        if int(one["attempt"]) != last_attempt:
            continue  # it was restarted since
        rank = int(one["rank"])
        frames = [frame for frame in one["frames"] if frame["own"]]
        if not frames and one["kind"] != "SystemExit":  # accelfn's own programs print what is wrong
            frames = one["frames"]
        exitcode = int(one["status"]) & 0xFF
        # Which failed, and was on its way out, may be stopped all the same: another rank's end came first.
        if rank in ended and ended[rank]["exitcode"] != -signal.SIGTERM:
            exitcode = ended[rank]["exitcode"]
        found[rank] = Failure(
            rank=rank,
            host=one["host"],
            time_s=one["time_s"],
            exitcode=exitcode,
            kind=one["kind"],
            text=one["text"],
            frames=tuple((f["file"], f["line"], f["function"], f["source"]) for f in frames),
        )
    hosts = {int(one["rank"]): str(one["host"]) for one in started}
    for rank, one in ended.items():
        if rank not in found:
            found[rank] = Failure(
                rank=rank,
                host=hosts.get(rank) or str(one.get("host", "")),
                time_s=float(one["time_s"]),
                exitcode=one["exitcode"],
            )
    if not found and "error" in outcome:
        kind = "lost" if started else "agent"
        return (Failure(rank=None, text=str(outcome["error"]), kind=kind, exitcode=1),)
    return tuple(found[rank] for rank in sorted(found))


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def first_failure(failures: Sequence[Failure]) -> Failure | None:
    """Choose the failure that the others follow from: the earliest that is no echo of another one. Pure."""
    return min(
        failures,
        key=lambda one: (
            one.rank is None,
            one.kind in _ECHOES or (not one.kind and one.exitcode == -signal.SIGTERM),
            one.time_s,
        ),
        default=None,
    )


def format_report(
    failures: Sequence[Failure], *, num_processes: int | None, log_dir: str | None, restarts: int = 0
) -> str:
    """Write the last lines of a failed launch. Pure.

    The user's frames are among them unless the failed rank's traceback is the only one printed above.

    Args:
        failures: From ``read_failures``.
        num_processes: Of the whole world, if it is known.
        log_dir: Where the output of each rank is kept, if it is.
        restarts: How often the processes were started again before.

    >>> frames = (("t.py", 3, "f", "g()"),)
    >>> failed = Failure(rank=1, host="a", exitcode=1, text="ValueError: no", frames=frames)
    >>> print(format_report([failed], num_processes=2, log_dir="logs"))
    accelfn launch: rank 1 of 2 failed on a, with exit status 1:
      ValueError: no
        t.py:3 in f: g()
      logs: logs
    """
    first = first_failure(failures)
    if first is None:
        return ""
    if all(one.exitcode == _PREEMPTED for one in failures):
        return f"accelfn launch: the ranks stopped as they were asked to, with exit status {_PREEMPTED}."
    if first.kind == "lost":
        return (
            "accelfn launch: this machine has lost the others, and its processes were ended:\n"
            f"  {first.text}\n  see the report on the machine that failed first"
        )
    if first.rank is None:
        return f"accelfn launch: the processes could not be started:\n  {first.text}"
    of = f" of {num_processes}" if num_processes else ""
    on = f" on {first.host}" if first.host else ""
    after = f" after {restarts} restart{'s' if restarts > 1 else ''}" if restarts else ""
    lines = [f"accelfn launch: rank {first.rank}{of} failed{on}{after}, {_ended(first.exitcode)}:"]
    text = first.text.splitlines()
    if len(text) > _MAX_LINES:
        text = [*text[: _MAX_LINES - 1], f"... ({len(text) - _MAX_LINES + 1} more lines)"]
    lines += [f"  {line}" for line in text]
    if not text and not first.frames:
        lines[0] = lines[0].removesuffix(":") + "."
    shown = () if _is_traceback_above(first, failures, log_dir) else first.frames[-_MAX_FRAMES:]
    if shown and len(shown) < len(first.frames):
        lines.append(f"    ... ({len(first.frames) - len(shown)} frames)")
    for path, line, function, source in shown:
        where = f"{path}:{line}" + (f" in {function}" if function else "")
        lines.append(f"    {where}: {source}" if source else f"    {where}")
    # Those that were stopped because of it have not failed.
    stops = (-signal.SIGTERM, -getattr(signal, "SIGKILL", 9))
    others = [
        one
        for one in sorted(failures, key=lambda one: one.rank or 0)
        if one is not first and one.rank is not None and (one.kind or one.exitcode not in stops)
    ]
    for label, has in (("alike", True), ("then", False)):
        ranks = [str(one.rank) for one in others if _is_alike(one, first) == has]
        if ranks:
            lines.append(f"  {label}: rank {', '.join(ranks)}")
    if first.elsewhere:
        lines.append(f"  logs: on {first.host}" if first.host else "  logs: on that machine")
    elif log_dir is not None:
        lines.append(f"  logs: {log_dir}")
    else:
        lines.append("  logs: above; --log_dir DIR --tee 3 keeps those of each rank")
    return "\n".join(lines)


def _is_traceback_above(first: Failure, failures: Sequence[Failure], log_dir: str | None) -> bool:
    """Whether the one traceback in the output above is that of the first failure."""
    has_printed = first.kind not in ("", "SystemExit", *_LINES) and not first.elsewhere and log_dir is None
    return has_printed and all(one.kind in ("", *_LINES) or _is_alike(one, first) for one in failures)


def _is_alike(one: Failure, first: Failure) -> bool:
    """Whether two processes have failed in the same way at the same place; the frames of one say it all."""
    this, of_first = ((each.kind, each.text, [frame[:2] for frame in each.frames]) for each in (one, first))
    return bool(one.kind) and this == of_first


def _ended(exitcode: int | None) -> str:
    if exitcode is None or exitcode >= 0:
        return f"with exit status {1 if exitcode is None else exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    hint = " (the system may have run out of memory)" if -exitcode == 9 else ""
    return f"killed by {name}{hint}"
