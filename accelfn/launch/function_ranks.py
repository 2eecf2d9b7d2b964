"""What the launchers in code hand to their ranks, and a rank's life: files in a folder that only these know.

A pipe would do on one machine; files do under torchrun as well, which starts ranks for us.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import io
import json
import linecache
import marshal
import os
import pickle
import shutil
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from accelfn.context import Context, init_context, text_of
from accelfn.errors import DistributedError, MissingExtraError, MissingRankError, RemoteTraceback
from accelfn.testing.part import Outcome

# What `python -c` runs in a rank. The search path and the variables are set before anything is imported:
# torch reads OMP_NUM_THREADS when it loads.
_BOOT = """
import json, os, pathlib, sys
setup = json.loads(pathlib.Path(sys.argv[1], "setup.json").read_text("utf-8"))
sys.path[:] = setup["path"]
os.environ.update(setup["environment"])
from accelfn.launch.function_ranks import be_rank
be_rank(sys.argv[1], setup)
"""
RANK_COMMAND = ("-u", "-c", _BOOT)
# A rank that does not end is asked where it is, by a signal that a function is unlikely to use.
WHERE_ARE_YOU: int = getattr(signal, "SIGRTMIN", signal.SIGUSR2) if os.name == "posix" else 0
_LOOK_S = 0.5
# A rank that is done waits so long for the others: gloo may still be connecting one of them to this process,
# which fails where the function is very short.
_LINGER_S = 5.0


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
        folder: Of this launch alone.
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
        "path": [os.path.abspath(part) for part in sys.path],
        "argv": sys.argv,
        "launcher": os.getpid(),
        "environment": dict(environment),
        # Of code that lies in no file, as that of a notebook's cells: tracebacks show its lines.
        "sources": {
            name: entry[2]
            for name, entry in linecache.cache.items()
            if len(entry) == 4 and entry[1] is None and not os.path.exists(name)
        },
    }
    (folder / "setup.json").write_text(json.dumps(setup), encoding="utf-8")


def be_rank(folder: str, setup: Mapping[str, Any]) -> NoReturn:
    """Do the job in ``folder``, report, and leave.

    Args:
        folder: Of the launch.
        setup: What :func:`write_job` wrote.
    """
    place = Path(folder)
    rank, attempt = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    sys.argv[:] = setup["argv"]
    threading.Thread(target=_end_with, args=(place, setup["launcher"], os.getppid()), daemon=True).start()
    if os.name == "posix":
        where = open(place / f"where-{rank}", "wb")  # noqa: SIM115 -- open as long as the process
        faulthandler.register(WHERE_ARE_YOU, file=where, all_threads=True)
    error = _work(place, setup, rank, attempt)
    if error is not None:
        # A context that the function has left open tells the other ranks at exit, and looks here for what.
        sys.last_value = error
        sys.exit(1)
    until = time.monotonic() + _LINGER_S
    while place.exists() and len(reported(place, attempt)) < int(os.environ["LOCAL_WORLD_SIZE"]):
        if time.monotonic() > until:
            break
        time.sleep(0.02)
    sys.exit(0)


def be_xla_rank(index: int, folder: str) -> None:
    """Be one rank of a TPU: what torch_xla calls in each process."""
    place = Path(folder)
    setup = json.loads((place / "setup.json").read_text("utf-8"))
    os.environ.update(setup["environment"])
    os.environ["ACCELFN_TORCH_DEVICE"] = "xla"  # which init_context refuses, with what there is
    error = _work(place, setup, index, 0)
    if error is not None:
        raise error


def _work(place: Path, setup: Mapping[str, Any], rank: int, attempt: int) -> BaseException | None:
    """Call the function and report. Returns what was reported as the error."""
    for name, lines in setup["sources"].items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    error: BaseException | None = None
    value: Any = None
    try:
        fn, args, options = _read_call(place)
        if options is None:
            value = fn(*args)
        else:
            with init_context(**options) as ctx:
                ctx.collectives.barrier()  # nobody may end while others still connect to it
                value = fn(ctx, *args)
    except BaseException as raised:  # noqa: BLE001 -- whatever ends a rank is reported
        error = raised
    return write_report(place, rank, attempt, value, error)


def _end_with(place: Path, launcher: int, parent: int) -> None:
    """End this process when the launcher has gone, however it went: else it would wait for ever."""
    with contextlib.suppress(ProcessLookupError):
        while os.getppid() == parent:
            os.kill(launcher, 0)
            time.sleep(_LOOK_S)
    shutil.rmtree(place, ignore_errors=True)  # a killed launcher couldn't
    os._exit(1)


def _read_call(folder: Path) -> tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any] | None]:
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
    content = b""
    if error is None:
        try:
            content = _pack((value, None, ""))
        except Exception as problem:  # noqa: BLE001 -- whatever a value does when it is pickled
            error = TypeError(
                f"rank {rank} returned {type(value).__name__}, which can't be sent back: {text_of(problem)}. "
                "Return numbers, texts, tensors, or containers of them."
            )
    content = content if error is None else _pack_error(rank, error)
    with contextlib.suppress(OSError):  # the launcher may have given up, and taken the folder with it
        partial = folder / f"partial-{attempt}-{rank}"
        partial.write_bytes(content)
        os.replace(partial, folder / f"report-{attempt}-{rank}")
    return error


def _pack_error(rank: int, error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    # That a rank leaves or is interrupted must not end the launcher's process as well.
    if isinstance(error, Exception):
        with contextlib.suppress(Exception):
            content = _pack((None, error, text))
            _unpack(content, "cpu")  # an exception may pickle and still not come back
            return content
    how = f"left by sys.exit({text_of(error)})" if isinstance(error, SystemExit) else ""
    how = how or f"raised {type(error).__name__}: {text_of(error)}".removesuffix(": ")
    return _pack((None, DistributedError(f"rank {rank} {how}"), text))


def reported(folder: Path, attempt: int | None = None) -> dict[int, int]:
    """List the ranks that have reported, of all attempts or of one, each with its last attempt."""
    found: dict[int, int] = {}
    for path in folder.glob("report-*-*" if attempt is None else f"report-{attempt}-*"):
        _, one, rank = path.name.split("-")
        found[int(rank)] = max(int(one), found.get(int(rank), 0))
    return found


def read_outcome(folder: Path, rank: int, attempt: int = 0) -> Outcome | None:
    """Return what a rank has reported in an attempt, or None."""
    path = folder / f"report-{attempt}-{rank}"
    if not path.exists():
        return None
    try:
        value, error, text = _unpack(path.read_bytes(), "cpu")
    except Exception as problem:  # noqa: BLE001 -- of classes that only the rank has
        value, text = None, ""
        error = TypeError(
            f"what rank {rank} returned can't be read in this process: {text_of(problem)}. Return numbers, "
            "texts, tensors, or containers of them."
        )
    if text and error is not None:
        error.__cause__ = RemoteTraceback(text)
    return Outcome(value=value, error=error)


def died(rank: int, code: int) -> Outcome:
    """Return how the process of a rank without a report ended."""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    return Outcome(error=MissingRankError(f"rank {rank} {how} before it returned."), seen_to_die=True)


# --- How functions, arguments and results become bytes ----------------------------------------------


def _pack(value: Any) -> bytes:
    # By torch, which writes float8 and unsigned tensors too; pickle alone can't read those.
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=_refusing(_find_pickler()))
    return buffer.getvalue()


def _unpack(content: bytes, device: str | None) -> Any:
    # Written in this very launch, into a folder of its own.
    return torch.load(io.BytesIO(content), map_location=device, weights_only=False)


def _pack_call(
    caller: str, fn: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any] | None
) -> bytes:
    has_cloudpickle = _find_pickler() is not pickle
    called = name_of(fn)
    missing = MissingExtraError(
        f"{caller}: {called} is written in a notebook, in the script itself or inside of another function. "
        "To send such a function to fresh processes takes cloudpickle: pip install 'accelfn[notebook]'. Or "
        "write it at the top of a module of its own, and import it from there."
    )
    try:
        packed = _pack((fn, tuple(args), options))
    except _OfThisProcessError as error:
        where = _place_of(error.thing, fn, args)
        raise TypeError(
            f"{caller}: {called} and its arguments can't be sent to fresh processes{where}: {error}. Make it "
            "inside of the function, where it joins the ranks."
        ) from None
    except Exception as error:
        if not has_cloudpickle and "<" in called:
            raise missing from error
        raise TypeError(
            f"{caller}: {called} and its arguments can't be sent to fresh processes: {text_of(error)}. "
            "Make what can't be sent (locks, open files, generators, process groups, contexts) inside of "
            "the function."
        ) from error
    if not has_cloudpickle and getattr(fn, "__module__", None) == "__main__":
        raise missing  # a rank has another __main__, without the function
    return packed


class _OfThisProcessError(TypeError):
    """What was to be sent holds a part of this process's world; ``thing`` is that part."""

    def __init__(self, thing: object) -> None:
        super().__init__(
            f"the {type(thing).__name__} in it belongs to this process, and in another one it would be alone"
        )
        self.thing = thing


def _refusing(pickler: ModuleType) -> Any:
    """Return a pickler that refuses what pickles, but would silently become a world of one elsewhere."""

    class Refusing(pickler.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            # The shim by its name: to import it would cost each rank more than a second look.
            if isinstance(obj, Context | dist.ProcessGroup | DeviceMesh | DistributedDataParallel) or any(
                (one.__module__, one.__name__) == ("accelfn.accelerator.accelerator", "Accelerator")
                for one in type(obj).__mro__
            ):
                raise _OfThisProcessError(obj)
            if isinstance(obj, CodeType):  # newer versions of cloudpickle forget which file it is from
                return marshal.loads, (marshal.dumps(obj),)
            below = getattr(super(), "reducer_override", None)
            return NotImplemented if below is None else below(obj)

    return SimpleNamespace(Pickler=Refusing, __name__=pickler.__name__)


def _place_of(thing: object, fn: object, args: Sequence[Any]) -> str:
    """Return by which name a function reaches a thing, if it is an easy one."""
    number = next((number for number, one in enumerate(args) if one is thing), None)
    if number is not None:
        return f", because of argument {number}"
    if not isinstance(fn, FunctionType):
        return ""
    reached = {name: fn.__globals__[name] for name in fn.__code__.co_names if name in fn.__globals__}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # of a cell that nothing was put into
            reached[name] = cell.cell_contents
    name = next((name for name, one in reached.items() if one is thing), None)
    return "" if name is None else f", because of {name!r}"


def name_of(fn: object) -> str:
    """Return what a function is called in messages."""
    return str(getattr(fn, "__qualname__", f"<{type(fn).__name__}>"))


def _find_pickler() -> ModuleType:
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        return pickle
