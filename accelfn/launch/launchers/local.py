"""Start ranks on this machine, wait for them, and leave none behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

from accelfn.errors import CollectiveTimeoutError, ConfigurationError
from accelfn.launch.launchers.job import RANK_COMMAND, WHERE_ARE_YOU, read_outcome, told_to_end
from accelfn.testing.outcome import Outcome

__all__ = ("ending", "run_locally", "world_variables")

# After one rank has failed, the others get this long to fail in their own words before they are ended.
_GRACE_S = 3.0
# And this long to end once they were told to.
_LAST_S = 5.0
_ANSWER_S = 1.0


def world_variables(rank: int, size: int, address: str, port: int) -> dict[str, str]:
    """Name the variables by which a rank on this machine finds its world: those of torchrun. Pure.

    >>> world_variables(1, 2, "127.0.0.1", 4000)["LOCAL_RANK"]
    '1'
    """
    own = ("RANK", "LOCAL_RANK", "ROLE_RANK")
    whole = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")
    return {
        **dict.fromkeys(own, str(rank)),
        **dict.fromkeys(whole, str(size)),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"accelfn-{os.getpid()}",
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the launcher hosts the store, so that no port is guessed
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
    }


def run_locally(
    caller: str,
    folder: Path,
    size: int,
    *,
    address: str = "127.0.0.1",
    port: int = 0,
    timeout_s: float | None = None,
    look_s: float = 0.02,
) -> list[Outcome]:
    """Run the job in ``folder`` on ``size`` fresh processes. Effect: starts them, and hosts their store.

    Args:
        caller: Name of the launcher, for messages.
        folder: Of the launch, filled by ``write_job``.
        size: Number of ranks.
        address: At which the ranks find the store.
        port: Of the store; 0: any that is free.
        timeout_s: How long the ranks may take, or None.
        look_s: Time between looks at the processes.

    Returns:
        What became of each rank, by rank. None of them runs any more.

    Raises:
        ConfigurationError: The port is taken.
    """
    try:
        store = dist.TCPStore(address, port, None, True, wait_for_workers=False)  # pyright: ignore[reportPrivateImportUsage] -- documented, but not exported
    except RuntimeError as error:
        raise ConfigurationError(
            f"{caller}: port {port} of {address} can't be had: {error}. Leave the port out to take any that "
            "is free."
        ) from error
    processes: list[subprocess.Popen[bytes]] = []
    with ending(processes):
        for rank in range(size):
            environment = {**os.environ, **world_variables(rank, size, address, store.port)}
            processes.append(_start(folder, environment))
        return _collect(caller, folder, processes, timeout_s, look_s)


def _start(folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start one rank. Its output goes where that of this process goes."""
    sys.stdout.flush()
    sys.stderr.flush()
    return subprocess.Popen(
        [sys.executable, *RANK_COMMAND, str(folder)], env=environment, stdin=subprocess.DEVNULL
    )


@contextlib.contextmanager
def ending(processes: Sequence[subprocess.Popen[bytes]], last_s: float = _LAST_S) -> Generator[None]:
    """Leave none of ``processes`` behind, also when the user interrupts."""
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(OSError):
                process.terminate()
        until = time.monotonic() + last_s
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            if process.poll() is None:
                process.kill()
                process.wait()


def _collect(
    caller: str,
    folder: Path,
    processes: Sequence[subprocess.Popen[bytes]],
    timeout_s: float | None,
    look_s: float,
) -> list[Outcome]:
    """Wait until each rank has reported or died; after a failure not much longer."""
    outcomes: dict[int, Outcome] = {}
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    failed = False
    while len(outcomes) < len(processes):
        if deadline is not None and time.monotonic() > deadline:
            break
        for rank, process in enumerate(processes):
            if rank in outcomes:
                continue
            code = process.poll()  # before the look for a report, which it may write last of all
            found = read_outcome(folder, rank, 0)
            if found is None and code is None:
                continue
            outcomes[rank] = told_to_end(rank, code or 0) if found is None else found
            if outcomes[rank].error is not None and not failed:
                failed = True
                soon = time.monotonic() + _GRACE_S
                deadline = soon if deadline is None else min(deadline, soon)
        time.sleep(look_s)
    return [
        outcomes.get(rank) or _unended(caller, folder, rank, process, timeout_s)
        for rank, process in enumerate(processes)
    ]


def _unended(
    caller: str, folder: Path, rank: int, process: subprocess.Popen[bytes], timeout_s: float | None
) -> Outcome:
    stack = _ask_where(folder, rank, process)
    advice = "Look" if timeout_s is None else f"Give {caller} a longer timeout_s than {timeout_s:g}, or look"
    error = CollectiveTimeoutError(
        f"rank {rank} did not end in time and was ended. {advice} for what it waits for."
        + (f" It was here:\n{stack}" if stack else "")
    )
    return Outcome(error=error, ended=False, stack=stack)


def _ask_where(folder: Path, rank: int, process: subprocess.Popen[bytes]) -> str:
    """Have a rank that does not end write where each of its threads is."""
    where = folder / f"where-{rank}"
    if not where.exists():  # it has not come so far that it could answer
        return ""
    with contextlib.suppress(OSError):
        process.send_signal(signal.Signals(WHERE_ARE_YOU))
        until, said = time.monotonic() + _ANSWER_S, -1
        while said != (said := where.stat().st_size) or not said:
            if time.monotonic() > until:
                break
            time.sleep(0.05)
        return where.read_text("utf-8", errors="replace")
    return ""
