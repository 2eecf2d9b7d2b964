"""What a launcher hands to its ranks, and what they hand back: files in a folder that only the two know.

A pipe would do on one machine; files do under torchrun as well, which starts ranks for us.
"""

from __future__ import annotations

import contextlib
import json
import linecache
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelfn.context import text_of
from accelfn.errors import DistributedError, MissingRankError, RemoteTraceback
from accelfn.launch.launchers.sending import pack, pack_call, unpack
from accelfn.testing.outcome import Outcome

__all__ = (
    "END_WITH_PARENT",
    "RANK_COMMAND",
    "WHERE_ARE_YOU",
    "attempts",
    "count_reports",
    "launch_folder",
    "learn_sources",
    "read_call",
    "read_outcome",
    "told_to_end",
    "write_job",
    "write_report",
)

# First of all in a process of a launch: on Linux the system ends it with the one that has started it, though
# that was killed. Elsewhere, and if that is gone already, it looks itself.
END_WITH_PARENT = """
import sys
if sys.platform == "linux":
    import ctypes
    ctypes.CDLL(None).prctl(1, 9)
"""

# Waits for the end of the launcher or of the launch, and takes the folder away.
_KEEPER = """
import os, select, shutil, sys, time
folder, launcher = sys.argv[1], int(sys.argv[2])
while os.getppid() == launcher and not select.select([0], [], [], 1.0)[0]:
    pass
for _ in range(20):  # ranks that are about to end may still write
    shutil.rmtree(folder, ignore_errors=True)
    if not os.path.exists(folder):
        break
    time.sleep(0.1)
"""

# What `python -c` runs in a rank. The search path and the variables are set before anything is imported:
# torch reads OMP_NUM_THREADS when it loads.
_BOOT = f"""{END_WITH_PARENT}
import json, os, pathlib
setup = json.loads(pathlib.Path(sys.argv[1], "setup.json").read_text("utf-8"))
sys.path[:] = setup["path"]
os.environ.update(setup["environment"])
from accelfn.launch.launchers.rank import be_rank
be_rank(sys.argv[1], setup)
"""
RANK_COMMAND = ("-u", "-c", _BOOT)

# A rank that does not end is asked where it is, by a signal that a function is unlikely to use.
WHERE_ARE_YOU: int = getattr(signal, "SIGRTMIN", signal.SIGUSR2) if os.name == "posix" else 0


def write_job(
    folder: Path,
    caller: str,
    fn: Callable[..., Any],
    args: Sequence[Any],
    options: Mapping[str, Any] | None,
    environment: Mapping[str, str],
) -> None:
    """Write what ranks are to do. Effect: fills ``folder``.

    Args:
        folder: Of this launch, and of nobody else's.
        caller: Name of the launcher, for messages.
        fn: The function.
        args: Its arguments.
        options: Of the context that stands before the arguments; None: there is no context.
        environment: Variables to set in each rank.

    Raises:
        MissingExtraError: The function can be sent by cloudpickle only, which isn't installed.
        TypeError: The function or an argument holds what can't be sent to another process.
    """
    (folder / "call").write_bytes(pack_call(caller, fn, args, options))
    setup = {
        "path": [os.path.abspath(part) if part else os.getcwd() for part in sys.path],
        "argv": sys.argv,
        "launcher": os.getpid(),
        "environment": dict(environment),
        "sources": _sources_of_cells(),
    }
    (folder / "setup.json").write_text(json.dumps(setup), encoding="utf-8")


def _sources_of_cells() -> dict[str, list[str]]:
    """Collect the lines of code that lies in no file, as that of a notebook's cells: tracebacks show them."""
    return {
        name: list(entry[2])
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and entry[1] is None and not os.path.exists(name)
    }


def learn_sources(sources: Mapping[str, Sequence[str]]) -> None:
    """Have tracebacks of this process show the lines of the launcher's cells. Effect: fills ``linecache``."""
    for name, lines in sources.items():
        linecache.cache[name] = (sum(map(len, lines)), None, list(lines), name)


@contextlib.contextmanager
def launch_folder() -> Generator[Path]:
    """Make a folder for a launch, which goes when the launch or this process ends, however it ends."""
    with tempfile.TemporaryDirectory(prefix="accelfn-launch-", ignore_cleanup_errors=True) as folder:
        if os.name != "posix":
            yield Path(folder)
            return
        # A killed process can't clean up. Who reads its pipe hears of its end; a session of its own, so that
        # a signal to the whole group leaves it alive.
        keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _KEEPER, folder, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert keeper.stdin is not None
        try:
            yield Path(folder)
        finally:
            keeper.stdin.close()
            keeper.wait()


def read_call(folder: Path) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any] | None]:
    """Read what this rank is to do.

    Raises:
        DistributedError: What the function needs isn't to be had in this process.
    """
    try:
        return unpack((folder / "call").read_bytes(), None)
    except Exception as error:
        raise DistributedError(
            f"the function can't be set up in a fresh process: {type(error).__name__}: {text_of(error)}. "
            "What it is made of must be importable there; what a notebook or a script defines itself takes "
            "cloudpickle: pip install 'accelfn[notebook]'."
        ) from error


def write_report(
    folder: Path, rank: int, attempt: int, value: Any, error: BaseException | None
) -> BaseException | None:
    """Write what became of this rank; the file appears whole.

    Args:
        folder: Of the launch.
        rank: Of this process.
        attempt: How often the ranks were started again before.
        value: What the function returned.
        error: What it raised, or None.

    Returns:
        What was reported as the error: ``error``, or that the value can't be sent.
    """
    if error is None:
        try:
            content = pack((value, None, ""))
        except Exception as problem:  # noqa: BLE001 -- whatever a value does when it is pickled
            error = TypeError(
                f"rank {rank} returned {type(value).__name__}, which can't be sent back: {text_of(problem)}. "
                "Return numbers, texts, tensors, or containers of them."
            )
            content = _pack_error(rank, error)
    else:
        content = _pack_error(rank, error)
    final = folder / f"report-{attempt}-{rank}"
    partial = folder / f"partial-{attempt}-{rank}"
    with contextlib.suppress(OSError):  # the launcher may have given up, and taken the folder with it
        partial.write_bytes(content)
        os.replace(partial, final)
    return error


def _pack_error(rank: int, error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    # That a rank leaves or is interrupted must not end the launcher's process as well.
    if isinstance(error, Exception):
        with contextlib.suppress(Exception):
            content = pack((None, error, text))
            unpack(content, "cpu")  # an exception may pickle and still not come back
            return content
    said = f"left by sys.exit({text_of(error)})" if isinstance(error, SystemExit) else ""
    text_of_error = text_of(error)
    said = said or f"raised {type(error).__name__}" + (f": {text_of_error}" if text_of_error else "")
    return pack((None, DistributedError(f"rank {rank} {said}"), text))


def count_reports(folder: Path, attempt: int) -> int:
    """Count the ranks of an attempt that have reported."""
    return sum(1 for _ in folder.glob(f"report-{attempt}-*"))


def attempts(folder: Path) -> dict[int, int]:
    """Find the ranks that have reported, and of each its last attempt."""
    found: dict[int, int] = {}
    for path in folder.glob("report-*-*"):
        _, attempt, rank = path.name.split("-")
        found[int(rank)] = max(int(attempt), found.get(int(rank), 0))
    return found


def read_outcome(folder: Path, rank: int, attempt: int = 0) -> Outcome | None:
    """Read what a rank has reported in an attempt, or None."""
    path = folder / f"report-{attempt}-{rank}"
    if not path.exists():
        return None
    try:
        value, error, text = unpack(path.read_bytes(), "cpu")
    except Exception as problem:  # noqa: BLE001 -- of classes that only the rank has
        return Outcome(
            error=TypeError(
                f"what rank {rank} returned can't be read in this process: {text_of(problem)}. Return "
                "numbers, texts, tensors, or containers of them."
            )
        )
    if text and error is not None:
        error.__cause__ = RemoteTraceback(text)
    return Outcome(value=value, error=error)


def told_to_end(rank: int, code: int) -> Outcome:
    """Return how the process of a rank without a report ended."""
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    else:
        how = f"exited with code {code}"
    return Outcome(error=MissingRankError(f"rank {rank} {how} before it returned."), seen_to_die=True)
