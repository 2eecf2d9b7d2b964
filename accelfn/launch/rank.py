"""Exchange functions and results with the ranks of a launcher through files, and run a rank.

Files rather than pipes, because torch's agent may start the ranks.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import linecache
import marshal
import os
import pickle
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from accelfn.context import Context, init_context, text_of
from accelfn.errors import DistributedError, MissingExtraError
from accelfn.testing.part import STACK_SIGNAL, Outcome, pack, pack_error, unpack, unpack_outcome

# Run by `python -c` in a rank. It sets search path and variables before the import of torch, which reads
# OMP_NUM_THREADS.
_BOOT = """
import json, os, pathlib, sys
setup = json.loads(pathlib.Path(sys.argv[1], "setup.json").read_text("utf-8"))
sys.path[:] = setup["path"]
os.environ.update(setup["environment"])
from accelfn.launch.rank import run_rank
run_rank(sys.argv[1], setup)
"""
RANK_COMMAND = ("-u", "-c", _BOOT)
_POLL_S = 0.5
# Time for which a finished rank waits for the others, because gloo may still connect them to it.
_LINGER_S = 5.0


def write_job(
    folder: Path,
    caller: str,
    fn: Callable[..., Any],
    args: Sequence[Any],
    options: Mapping[str, Any] | None,
    environment: Mapping[str, str],
) -> None:
    """Write a function and its arguments into ``folder`` for the ranks.

    Args:
        folder: Folder of this launch.
        caller: Name of the launcher, for messages.
        fn: The function.
        args: Its arguments.
        options: Options of a context to pass as the first argument; None to pass no context.
        environment: Variables to set in each rank.

    Raises:
        MissingExtraError: The function needs cloudpickle, which isn't installed.
        TypeError: The function or an argument can't be sent to another process.
    """
    (folder / "call").write_bytes(_pack_call(caller, fn, args, options))
    setup = {
        "path": [os.path.abspath(part) for part in sys.path],
        "argv": sys.argv,
        "launcher": os.getpid(),
        "environment": dict(environment),
        # Source lines of code without a file, such as notebook cells, for tracebacks.
        "sources": {
            name: entry[2]
            for name, entry in linecache.cache.items()
            if len(entry) == 4 and entry[1] is None and not os.path.exists(name)
        },
    }
    (folder / "setup.json").write_text(json.dumps(setup), encoding="utf-8")


def world_variables(
    rank: int, local_size: int, num_machines: int, address: tuple[str, int], *, run_id: str
) -> dict[str, str]:
    """Return torchrun's variables of a rank, of which a launcher serves the store. Pure.

    >>> found = world_variables(5, 3, 2, ("10.0.0.1", 7), run_id="none")
    >>> found["GROUP_RANK"], found["LOCAL_RANK"], found["MASTER_ADDR"]
    ('1', '2', '10.0.0.1')
    """
    host, port = address
    values = {
        **dict.fromkeys(("RANK", "ROLE_RANK"), rank),
        **dict.fromkeys(("WORLD_SIZE", "ROLE_WORLD_SIZE"), num_machines * local_size),
        **dict.fromkeys(("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"), 0),
        "LOCAL_RANK": rank % local_size,
        "LOCAL_WORLD_SIZE": local_size,
        "GROUP_RANK": rank // local_size,
        "GROUP_WORLD_SIZE": num_machines,
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    return {name: str(value) for name, value in values.items()}


def run_rank(path: str, setup: Mapping[str, Any]) -> NoReturn:
    """Run the job in a folder, write the outcome, and exit. :func:`write_job` wrote ``setup``."""
    folder = Path(path)
    rank, attempt = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    sys.argv[:] = setup["argv"]
    threading.Thread(target=_exit_with, args=(folder, setup["launcher"], os.getppid()), daemon=True).start()
    if os.name == "posix":
        stack = open(folder / f"stack-{rank}", "wb")  # noqa: SIM115 -- open until the process exits
        faulthandler.register(STACK_SIGNAL, file=stack, all_threads=True)
    error = call(folder, setup, rank, attempt)
    if error is not None:
        # An open context reads it at exit, and reports it to the other ranks.
        sys.last_value = error
        sys.exit(1)
    until = time.monotonic() + _LINGER_S
    while folder.exists() and len(reported_ranks(folder, attempt)) < int(os.environ["LOCAL_WORLD_SIZE"]):
        if time.monotonic() > until:
            break
        time.sleep(0.02)
    sys.exit(0)


def call(folder: Path, setup: Mapping[str, Any], rank: int, attempt: int) -> BaseException | None:
    """Call the function and write the outcome. Return the error that was written."""
    for name, lines in setup["sources"].items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    error: BaseException | None = None
    value: Any = None
    try:
        fn, args, options = _read_call(folder)
        if options is None:
            value = fn(*args)
        else:
            with init_context(**options) as ctx:
                ctx.collectives.barrier()  # no rank may end while others connect to it
                value = fn(ctx, *args)
    except BaseException as raised:  # noqa: BLE001 -- any exception is reported
        error = raised
    return write_report(folder, rank, attempt, value, error)


def _exit_with(folder: Path, launcher: int, parent: int) -> None:
    """Exit this process when the launcher or the agent ends, even if that is killed."""
    with contextlib.suppress(ProcessLookupError):
        while os.getppid() == parent:
            os.kill(launcher, 0)
            time.sleep(_POLL_S)
    shutil.rmtree(folder, ignore_errors=True)  # in case the launcher was killed
    os._exit(1)


def _read_call(folder: Path) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any] | None]:
    try:
        return unpack((folder / "call").read_bytes())
    except Exception as error:
        raise DistributedError(
            f"the function can't be loaded in a fresh process: {type(error).__name__}: {text_of(error)}. Its "
            "modules must be importable there. Functions and classes of a notebook or script need "
            "cloudpickle: pip install 'accelfn[notebook]'."
        ) from error


def write_report(
    folder: Path, rank: int, attempt: int, value: Any, error: BaseException | None
) -> BaseException | None:
    """Write the outcome of this rank atomically.

    Args:
        folder: Folder of the launch.
        rank: This rank.
        attempt: Number of previous restarts.
        value: Return value of the function.
        error: Exception of the function, or None.

    Returns:
        The error that was written: ``error``, or a TypeError if the value can't be sent.
    """
    content, pickler = b"", _refusing(_find_pickler())
    if error is None:
        try:
            content = pack((value, None, ""), pickler)
        except Exception as problem:  # noqa: BLE001 -- pickling may raise anything
            error = TypeError(
                f"rank {rank} returned {type(value).__name__}, which can't be sent back: {text_of(problem)}. "
                "Return numbers, strings, tensors, or containers of them."
            )
    if error is not None:
        sent = error
        if not isinstance(error, Exception):  # those of a rank must not end the launcher
            how = f"called sys.exit({error})" if isinstance(error, SystemExit) else f"raised {error!r}"
            sent = DistributedError(f"rank {rank} {how}").with_traceback(error.__traceback__)
        content = pack_error(rank, sent, pickler)
    with contextlib.suppress(OSError):  # the launcher may have removed the folder
        partial = folder / f"partial-{attempt}-{rank}"
        partial.write_bytes(content)
        os.replace(partial, folder / f"report-{attempt}-{rank}")
    return error


def reported_ranks(folder: Path, attempt: int | None = None) -> dict[int, int]:
    """Return the ranks with an outcome, of one attempt or of all, each with its last attempt."""
    ranks: dict[int, int] = {}
    for path in folder.glob("report-*-*" if attempt is None else f"report-{attempt}-*"):
        _, number, rank = path.name.split("-")
        ranks[int(rank)] = max(int(number), ranks.get(int(rank), 0))
    return ranks


def read_outcome(folder: Path, rank: int, attempt: int = 0) -> Outcome | None:
    """Return the outcome of a rank in an attempt, or None."""
    path = folder / f"report-{attempt}-{rank}"
    if not path.exists():
        return None
    try:
        return unpack_outcome(path.read_bytes(), "cpu")
    except Exception as problem:  # noqa: BLE001 -- unpickling may raise anything
        return Outcome(
            error=TypeError(
                f"the result of rank {rank} can't be loaded in this process: {text_of(problem)}. Return "
                "numbers, strings, tensors, or containers of them."
            )
        )


# --- Serialization of functions, arguments and results --------------------------------------------


def _pack_call(
    caller: str, fn: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any] | None
) -> bytes:
    has_cloudpickle, name = _find_pickler() is not pickle, name_of(fn)
    problem: Exception | None = None
    try:
        packed = pack((fn, tuple(args), options), _refusing(_find_pickler()))
    except Exception as error:  # noqa: BLE001 -- pickling may raise anything
        packed, problem = b"", error
    # Pickle finds a function of the script itself here; the rank has another __main__.
    is_of_main = problem is None and getattr(fn, "__module__", None) == "__main__"
    is_local = "<" in name and problem is not None and not isinstance(problem, _ProcessBoundError)
    if not has_cloudpickle and (is_of_main or is_local):
        raise MissingExtraError(
            f"{caller}: {name} is defined in a notebook, in the script itself or in another function. "
            "Sending it to fresh processes needs cloudpickle: pip install 'accelfn[notebook]'. Or move it to "
            "the top level of a module, and import it."
        ) from problem
    if problem is not None:
        raise TypeError(
            f"{caller}: {name} and its arguments can't be sent to fresh processes: {text_of(problem)}. "
            "Create it inside the function, like locks, open files, generators and contexts."
        ) from problem
    return packed


class _ProcessBoundError(TypeError):
    """An object to send belongs to the world of this process."""


def _refusing(pickler: ModuleType) -> Any:
    """Return a pickler that refuses objects which would become a world of one rank in another process."""

    class Pickler(pickler.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            # Accelerator by name, because importing it takes long.
            if isinstance(obj, Context | dist.ProcessGroup | DeviceMesh | DistributedDataParallel) or any(
                (base.__module__, base.__name__) == ("accelfn.accelerator.accelerator", "Accelerator")
                for base in type(obj).__mro__
            ):
                raise _ProcessBoundError(f"its {type(obj).__name__} is bound to this process")
            if isinstance(obj, CodeType):  # recent cloudpickle drops the file name
                return marshal.loads, (marshal.dumps(obj),)
            override = getattr(super(), "reducer_override", None)
            return NotImplemented if override is None else override(obj)

    return SimpleNamespace(Pickler=Pickler, __name__=pickler.__name__)


def name_of(fn: object) -> str:
    """Return the name of a function for messages."""
    return str(getattr(fn, "__qualname__", f"<{type(fn).__name__}>"))


def _find_pickler() -> ModuleType:
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return pickle
