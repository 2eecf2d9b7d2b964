"""Run a script as Python itself would, and keep what went wrong in it for the report.

This file is started by its path, in front of the script: ``python worker.py [-m] script arguments``. It
imports next to nothing, and is gone from ``sys.path``, ``sys.argv`` and ``__main__`` before the script runs.
"""

# Nothing else here: this file's folder is the first on sys.path, and these are loaded already or built in.
import atexit
import os
import sys
import time
from types import CodeType, ModuleType, TracebackType

_MAX_FRAMES = 40
_MAX_TEXT = 4000
_LET_GO_S = 0.05
# How torch names the loss of a connection; gloo itself raises bare RuntimeErrors.
_LOST = "DistNetworkError"


def main() -> None:
    """Become the script that stands on the command line. Effect: replaces ``__main__``, runs it.

    Raises:
        SystemExit: As the script ends; 1 after an uncaught exception, which was printed.
    """
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    is_module = sys.argv[1] == "-m"
    script = sys.argv[2 if is_module else 1]
    pid = os.getpid()
    _write({"pid": pid}, "started")
    atexit.register(_let_threads_finish)  # before the script's own, so that it comes after them
    try:
        if is_module:
            _run_module(script)
        else:
            _run_file(script)
    except SystemExit as stop:
        if stop.code not in (None, 0) and os.getpid() == pid:
            _keep(stop)
        raise
    except KeyboardInterrupt as stop:
        if not os.path.isdir(os.environ.get("ACCELFN_RUN_DIR", "")):
            raise
        _print_where(stop)
        sys.exit(130)
    except BaseException as error:  # noqa: BLE001 - whatever it is, it is reported and ends the process
        trace = _strip(error.__traceback__)
        _remember(error, trace)
        is_first = True
        if os.getpid() == pid:  # not in a child that the script forked
            is_first = _keep(error)
        rank = os.environ.get("RANK")
        if _is_reported(error):
            _print_line(f"rank {rank} ends too: {_first_line(str(error))}")
        elif not is_first:
            _print_line(f"rank {rank} failed alike: {type(error).__name__}: {_first_line(str(error))}")
        else:
            _print(error, trace)
        sys.exit(1)


def _let_threads_finish() -> None:
    """Wait until the threads of a group that the script has left open have released their last tensor.

    They need the interpreter for it, and one that is left waiting when that ends aborts the process, although
    the script has done all it had to.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        time.sleep(_LET_GO_S)


def _new_main() -> ModuleType:
    """Put an empty ``__main__`` in the place of this module."""
    import builtins

    fresh = ModuleType("__main__")
    vars(fresh).update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = fresh
    return fresh


def _run_file(script: str) -> None:
    import io
    from importlib.machinery import SourceFileLoader

    path = os.path.abspath(script)
    with io.open_code(path) as file:
        source = file.read()
    sys.argv = sys.argv[1:]
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.path.dirname(os.path.realpath(path)))
    main_module = _new_main()
    vars(main_module).update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    code: CodeType = compile(source, path, "exec", dont_inherit=True)
    exec(code, vars(main_module))


def _run_module(name: str) -> None:
    import runpy

    sys.argv = ["-m", *sys.argv[3:]]
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd())
    _new_main()
    # What `python -m` itself calls; the public run_module leaves a __main__ that can't be pickled from.
    vars(runpy)["_run_module_as_main"](name)


def _strip(trace: TracebackType | None) -> TracebackType | None:
    """Leave out what this file and runpy add to the script's frames."""
    ours = (__file__, "<frozen runpy>", os.path.join(os.path.dirname(os.__file__), "runpy.py"))
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _remember(error: BaseException, trace: TracebackType | None) -> None:
    """Leave an uncaught exception where the interpreter does."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error


def _is_reported(error: BaseException) -> bool:
    """Whether the exception only reports another rank's end, which the launcher will report."""
    is_named = type(error).__module__ == "accelfn.errors"
    is_reported = is_named and type(error).__name__ in ("RemoteRankError", "MissingRankError")
    return (is_reported or _kind(error) == _LOST) and os.path.isdir(os.environ.get("ACCELFN_RUN_DIR", ""))


def _kind(error: BaseException) -> str:
    """Return the name of an exception's class; of gloo's RuntimeErrors torch's one for lost connections."""
    is_lost = isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    return _LOST if is_lost else type(error).__name__


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _print(error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught exception as the interpreter does at its end."""
    error.__traceback__ = trace
    try:
        sys.excepthook(type(error), error, trace)
    except Exception:  # noqa: BLE001 - a broken hook must not hide the error
        sys.__excepthook__(type(error), error, trace)


def _print_where(stop: KeyboardInterrupt) -> None:
    """Report in one line where an interrupt has met the script; every process is about to do so."""
    import traceback

    frames = [(frame, line) for frame, line in traceback.walk_tb(_strip(stop.__traceback__))]
    own = [(frame, line) for frame, line in frames if _is_own(frame.f_code.co_filename)] or frames
    where = "".join(
        f" at {frame.f_code.co_filename}:{line} in {frame.f_code.co_name}" for frame, line in own[-1:]
    )
    rank = os.environ.get("RANK")
    who = f"rank {rank}" if rank else "the script"
    _print_line(f"{who} was interrupted{where}.")


def _print_line(line: str) -> None:
    sys.stdout.flush()
    # One write for the whole line: other processes write theirs at this moment.
    sys.stderr.write(f"accelfn launch: {line}\n")
    sys.stderr.flush()


def _keep(error: BaseException) -> bool:
    """Write what went wrong where the report finds it; say whether no rank has failed alike before."""
    import linecache
    import traceback

    trace = _strip(error.__traceback__)
    frames: list[dict[str, object]] = []
    for frame, line in list(traceback.walk_tb(trace))[-_MAX_FRAMES:]:
        path = frame.f_code.co_filename
        frames.append(
            {
                "file": path,
                "line": line,
                "function": frame.f_code.co_name,
                "source": linecache.getline(path, line).strip()[:200],
                "own": _is_own(path),
            }
        )
    if isinstance(error, SystemExit):
        code = error.code
        text = "" if isinstance(code, int) else str(code)
        status = code if isinstance(code, int) else 1
    else:
        status = 1
        text = "".join(traceback.format_exception_only(type(error), error)).strip()
    if isinstance(error, SyntaxError) and error.filename:
        frames.append(
            {"file": error.filename, "line": error.lineno or 0, "function": "", "source": "", "own": True}
        )
    _write(
        {
            "kind": _kind(error),
            "text": text[:_MAX_TEXT],
            "status": status,
            "frames": frames,
            "time_s": time.time(),
            "pid": os.getpid(),
        },
        "failed",
    )
    own = [(frame["file"], frame["line"]) for frame in frames if frame["own"]]
    return _is_first(repr((type(error).__name__, text, own)))


def _is_first(what: str) -> bool:
    """Return whether this process is the first of its machine and attempt to print something."""
    import zlib

    folder = os.environ.get("ACCELFN_RUN_DIR", "")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        # The system gives a name to one only, however many ask for it at once.
        open(
            os.path.join(folder, f"printed.{zlib.crc32(what.encode(errors='replace'))}.{attempt}"), "x"
        ).close()
    except FileExistsError:
        return False
    except OSError:
        pass  # no one is interested, or the disk is full: rather twice than never
    return True


def _is_own(path: str) -> bool:
    """Whether a file is the user's: not Python's, not an installed package's, not accelfn's."""
    import sysconfig

    # Also those of another interpreter, which a virtual environment may look into.
    if not {"site-packages", "dist-packages"}.isdisjoint(path.split(os.sep)):
        return False
    places = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    places.add(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    return not path.startswith("<") and not any(path.startswith(place + os.sep) for place in places if place)


def _write(facts: dict[str, object], what: str) -> None:
    folder = os.environ.get("ACCELFN_RUN_DIR", "")
    if not os.path.isdir(folder):
        return  # another machine's folder, or no one is interested
    import json
    import socket

    rank = next(
        (
            os.environ[name]
            for name in ("RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK")
            if os.environ.get(name)
        ),
        "0",
    )
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    facts = {"rank": int(rank), "attempt": int(attempt), "host": socket.gethostname(), **facts}
    path = os.path.join(folder, f"{what}.{rank}.{attempt}.json")
    try:
        with open(f"{path}.part", "w", encoding="utf-8") as file:
            json.dump(facts, file)
        os.replace(f"{path}.part", path)
    except OSError:
        pass  # a full disk must not be what the user hears of


if __name__ == "__main__":
    main()
