"""The outcome of each rank of a test, and the result of the whole."""

from __future__ import annotations

import io
import math
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any

import torch

from accelfn.context import Context, announce_end, publish, text_of
from accelfn.errors import (
    CollectiveTimeoutError,
    DistributedError,
    MissingRankError,
    RemoteRankError,
    RemoteTraceback,
)
from accelfn.testing.faults import RankDeath

# Time for the other ranks to raise their own errors after one has failed, before they are killed.
_GRACE_S = 3.0
_STACKS_S = 1.0
#: Makes a rank write its stacks, even from C code that never returns; functions are unlikely to use it.
STACK_SIGNAL: int = getattr(signal, "SIGRTMIN", signal.SIGUSR2) if os.name == "posix" else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Outcome of one rank.

    Attributes:
        value: Its return value.
        error: Its exception, or None.
        ended: Whether it ended by itself.
        waits: Whether it waited for others when it was given up.
        seen_to_die: Whether its process exited without a report.
        stack: Its stacks when it was killed, if known.
    """

    value: Any = None
    error: BaseException | None = None
    ended: bool = True
    waits: bool = False
    seen_to_die: bool = False
    stack: str = ""


def died(rank: int, exitcode: int | None) -> Outcome:
    """Return the outcome of a rank whose process ended without a report."""
    how = f"exited with code {exitcode}"
    if exitcode is not None and exitcode < 0:
        how = f"was killed by {signal.Signals(-exitcode).name}"
    return Outcome(error=MissingRankError(f"rank {rank} {how} before it returned."), seen_to_die=True)


def pack(value: Any, pickler: Any = pickle) -> bytes:
    """Return what :func:`unpack` reads in another process. Not by pickle, which can't read float8 tensors."""
    buffer = io.BytesIO()
    torch.save(value, buffer, pickler, pickle_protocol=4)  # older ones write TimeoutError as OSError
    return buffer.getvalue()


def unpack(content: bytes, device: str | None = None) -> Any:
    """Return a value that a process of this launch has packed, with tensors on their device or on another."""
    return torch.load(io.BytesIO(content), map_location=device, weights_only=False)


def pack_error(rank: int, error: BaseException, pickler: Any = pickle) -> bytes:
    """Return an exception and its traceback, packed: as text if it can't be sent."""
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    with suppress(Exception):
        content = pack((None, error, text), pickler)
        unpack(content, "cpu")  # some exceptions pickle but don't unpickle
        return content
    plain = DistributedError(
        f"rank {rank} raised {type(error).__name__}: {text_of(error)}".removesuffix(": ")
    )
    return pack((None, plain, text), pickler)


def unpack_outcome(content: bytes, device: str | None = None) -> Outcome:
    """Return the outcome of a rank, which packed its value, its exception or None, and its traceback."""
    value, error, text = unpack(content, device)
    if text and error is not None:
        error.__cause__ = RemoteTraceback(text)
    return Outcome(value=value, error=error)


def collect(
    size: int,
    poll: Callable[[int], Outcome | None],
    pause: Callable[[Sequence[int], float], object],
    deadline: float = math.inf,
) -> dict[int, Outcome]:
    """Return the outcomes by rank, when each has one or after a deadline: after a failure, a few seconds.

    Args:
        size: Number of ranks.
        poll: Returns the outcome of a rank; None while it runs.
        pause: Waits for any of some ranks, for at most some seconds.
        deadline: Of ``time.monotonic()``.
    """
    outcomes: dict[int, Outcome] = {}
    while waiting := [rank for rank in range(size) if rank not in outcomes]:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        pause(waiting, left_s)
        for rank in waiting:
            outcome = poll(rank)
            if outcome is not None:
                outcomes[rank] = outcome
                if outcome.error is not None:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
    return outcomes


def read_stacks(pid: int, file: IO[bytes]) -> str:
    """Return the stacks of all threads of a process, which writes them to a file at ``STACK_SIGNAL``."""
    with suppress(OSError, ValueError):  # it has just ended
        os.kill(pid, STACK_SIGNAL)
        until, said = time.monotonic() + _STACKS_S, -1
        while said != (said := os.fstat(file.fileno()).st_size) or not said:
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        return os.pread(file.fileno(), 1 << 16, 0).decode(errors="replace")
    return ""


def conclude(outcomes: Sequence[Outcome], where: str) -> list[Any]:
    """Return the values in rank order, or raise the error that caused the others.

    Args:
        outcomes: One per rank.
        where: Kind of world, for the error's note.
    """
    errors = [(rank, one.error) for rank, one in enumerate(outcomes) if one.error is not None]
    if not errors:
        return [one.value for one in outcomes]
    rank, error = min(errors, key=lambda item: (_consequence(outcomes[item[0]], item[1]), item[0]))
    note = f"raised on rank {rank} of {len(outcomes)} ({where})"
    others = [f"rank {one} {type(it).__name__}" for one, it in errors if one != rank and outcomes[one].ended]
    if others:
        note += "; also failed: " + ", ".join(others)
    lingering = [f"rank {one}" for one, _ in errors if one != rank and not outcomes[one].ended]
    stacks = [one for one, _ in errors if one != rank and outcomes[one].stack]
    if lingering:
        note += "; did not end in time: " + ", ".join(lingering)
        note += "".join(f"\nStacks of rank {one}:\n{outcomes[one].stack}" for one in stacks)
    add_note = getattr(error, "add_note", None)  # Python 3.11 and later
    if add_note is not None:
        add_note(note)
    raise error


def _consequence(outcome: Outcome, error: BaseException) -> int:
    """Rank errors by how likely another rank's error caused them."""
    if outcome.seen_to_die:
        return 0
    if not outcome.ended:  # no report: any other rank's error says more
        return 5 if outcome.waits else 4
    if isinstance(error, RemoteRankError):
        return 3
    if isinstance(error, MissingRankError):
        return 2
    lost_connection = "gloo/transport" in str(error)
    return int(lost_connection or isinstance(error, CollectiveTimeoutError))


@contextmanager
def taking_part(ctx: Context) -> Generator[None]:
    """Report this rank's end or exception to the other ranks."""
    board, call_log, rank = ctx.collectives.board, ctx.collectives.call_log, ctx.rank
    is_well = False
    if ctx.guard.watchdog:
        call_log.watch(ctx.guard.timeout_s)
    try:
        yield
        ctx.world.background.settle()
        is_well = True
    except BaseException as error:
        if not isinstance(error, RankDeath):  # which isn't reported
            publish(board, call_log, rank, error)
        raise
    finally:
        call_log.unwatch()
        if ctx.mesh is not None:
            ctx.mesh.leave(announce=is_well)
        if is_well:
            announce_end(board, call_log, rank)
