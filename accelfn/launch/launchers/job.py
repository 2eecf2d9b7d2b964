"""What a launcher hands to its ranks, and what they hand back: files in a folder that only the two know.

A pipe would do on one machine; files do under torchrun as well, which starts ranks for us.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from accelfn.context import text_of
from accelfn.errors import DistributedError, MissingExtraError, MissingRankError, RemoteTraceback
from accelfn.testing.outcome import Outcome

__all__ = (
    "RANK_COMMAND",
    "WHERE_ARE_YOU",
    "attempts",
    "count_reports",
    "name_of",
    "read_call",
    "read_outcome",
    "told_to_end",
    "write_job",
    "write_report",
)

# What `python -c` runs in a rank. The search path and the variables are set before anything is imported:
# torch reads OMP_NUM_THREADS when it loads.
_BOOT = """
import json, os, pathlib, sys
setup = json.loads(pathlib.Path(sys.argv[1], "setup.json").read_text("utf-8"))
sys.path[:] = setup["path"]
os.environ.update(setup["environment"])
from accelfn.launch.launchers.rank import be_rank
be_rank(sys.argv[1], setup["argv"], setup["launcher"])
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
    (folder / "call").write_bytes(_pack_call(caller, fn, args, options))
    setup = {
        "path": [os.path.abspath(part) if part else os.getcwd() for part in sys.path],
        "argv": sys.argv,
        "launcher": os.getpid(),
        "environment": dict(environment),
    }
    (folder / "setup.json").write_text(json.dumps(setup), encoding="utf-8")


def _pack_call(
    caller: str, fn: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any] | None
) -> bytes:
    pickler = _pickler()
    has_cloudpickle = pickler is not pickle
    called = name_of(fn)
    try:
        packed = _pack((fn, tuple(args), options), pickler)
    except Exception as error:
        if has_cloudpickle or not _is_unnamed(fn):
            raise TypeError(
                f"{caller}: {called} and its arguments can't be sent to fresh processes: {text_of(error)}. "
                "Make what can't be sent (locks, open files, generators, process groups, contexts) inside of "
                "the function."
            ) from error
        raise _cloudpickle_is_missing(caller, called) from error
    if not has_cloudpickle and getattr(fn, "__module__", None) == "__main__":
        raise _cloudpickle_is_missing(caller, called)  # a rank has another __main__, without the function
    return packed


def _is_unnamed(fn: object) -> bool:
    return "<" in str(getattr(fn, "__qualname__", "<object>"))


def _cloudpickle_is_missing(caller: str, called: str) -> MissingExtraError:
    return MissingExtraError(
        f"{caller}: {called} is written in a notebook, in the script itself or inside of another function. "
        "To send such a function to fresh processes takes cloudpickle: pip install 'accelfn[notebook]'. Or "
        "write it at the top of a module of its own, and import it from there."
    )


def name_of(fn: object) -> str:
    """Give what a function is called in messages."""
    return str(getattr(fn, "__qualname__", type(fn).__name__))


def _pickler() -> ModuleType:
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return pickle


def _pack(value: Any, pickler: ModuleType | None = None) -> bytes:
    # By torch, which writes float8 and unsigned tensors too; pickle alone can't read those.
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=pickler or _pickler())
    return buffer.getvalue()


def _unpack(content: bytes, device: str | None) -> Any:
    # Of a file that this very launch has written, in a folder of its own.
    return torch.load(io.BytesIO(content), map_location=device, weights_only=False)


def read_call(folder: Path) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any] | None]:
    """Read what this rank is to do.

    Raises:
        DistributedError: What the function needs isn't to be had in this process.
    """
    try:
        return _unpack((folder / "call").read_bytes(), None)
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
            content = _pack((value, None, ""))
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
            content = _pack((None, error, text))
            _unpack(content, "cpu")  # an exception may pickle and still not come back
            return content
    said = f"left by sys.exit({text_of(error)})" if isinstance(error, SystemExit) else ""
    said = said or f"raised {type(error).__name__}: {text_of(error)}"
    return _pack((None, DistributedError(f"rank {rank} {said}"), text))


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
        value, error, text = _unpack(path.read_bytes(), "cpu")
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
    """Say of a rank without a report how its process ended."""
    if code < 0:
        how = f"was killed by {signal.Signals(-code).name}"
    else:
        how = f"exited with code {code}"
    return Outcome(error=MissingRankError(f"rank {rank} {how} before it returned."), seen_to_die=True)
