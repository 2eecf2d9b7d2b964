"""Run a script as Python does, and record its exception in torch's error file, for the report.

Usage: ``python worker.py [-m] script arguments``. Before the script runs, this file is removed from
``sys.path``, ``sys.argv`` and ``__main__``. With ``--exec`` in place of ``-m``, the script is any program,
which takes the place of this process.
"""

# Import nothing else here: this directory is first on sys.path. These modules are loaded already or built in.
import atexit
import os
import sys
import time
from types import CodeType, ModuleType, TracebackType

_Frame = tuple[str, int, str, str]
_MAX_FRAMES = 40
_MAX_TEXT = 4000
_THREADS_END_S = 0.05
# torch's exception for a lost connection; gloo itself raises RuntimeError.
_CONNECTION_LOST = "DistNetworkError"


def main() -> None:
    """Run the script on the command line as ``__main__``.

    Raises:
        SystemExit: With the status of the script; 1 after an uncaught exception, which is printed.
    """
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    is_module = sys.argv[1] == "-m"
    script = sys.argv[2 if is_module else 1]
    pid = os.getpid()
    _announce()
    atexit.register(_wait_for_threads)  # first, so that it runs last
    try:
        if script == "--exec":
            _become(sys.argv[2:])
        elif is_module:
            _run_module(script)
        else:
            _run_file(script)
    except SystemExit as stop:
        if stop.code not in (None, 0) and os.getpid() == pid:
            _record(stop)
        raise
    except KeyboardInterrupt as stop:
        if not os.path.isdir(os.environ.get("ACCELFN_RUN_DIR", "")):
            raise
        _print_interrupt(stop)
        sys.exit(130)
    except BaseException as error:  # noqa: BLE001 -- any exception is recorded
        trace = _strip(error.__traceback__)
        _set_last_exception(error, trace)
        # A child that the script forked has no record of its own.
        is_first = _record(error) if os.getpid() == pid else True
        rank = os.environ.get("RANK")
        line = str(error).partition("\n")[0]
        if _is_secondary(error):
            _print_line(f"rank {rank} stops too: {line}")
        elif not is_first:
            _print_line(f"rank {rank} failed in the same way: {type(error).__name__}: {line}")
        else:
            _print_exception(error, trace)
        sys.exit(1)


def _wait_for_threads() -> None:
    """Wait until the threads of an open process group have released their last tensor.

    That needs the interpreter. A thread that still waits for it at exit would abort the process.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        time.sleep(_THREADS_END_S)


def _new_main() -> ModuleType:
    """Replace this module by an empty ``__main__``."""
    import builtins

    fresh = ModuleType("__main__")
    vars(fresh).update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = fresh
    return fresh


def _become(command: list[str]) -> None:
    import signal

    for name in ("SIGPIPE", "SIGXFSZ"):  # which Python ignores
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_DFL)
    os.execvp(command[0], command)


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
    # `python -m` calls this too. Pickle can't find functions in the __main__ of the public run_module.
    vars(runpy)["_run_module_as_main"](name)


def _strip(trace: TracebackType | None) -> TracebackType | None:
    """Remove the frames of this file and of runpy."""
    ours = (__file__, "<frozen runpy>", os.path.join(os.path.dirname(os.__file__), "runpy.py"))
    while trace is not None and trace.tb_frame.f_code.co_filename in ours:
        trace = trace.tb_next
    return trace


def _set_last_exception(error: BaseException, trace: TracebackType | None) -> None:
    """Set ``sys.last_exc`` and the like, as the interpreter does after an uncaught exception."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = error


def _is_secondary(error: BaseException) -> bool:
    """Return whether an exception follows from the failure of another rank, which the launcher reports."""
    is_ours = type(error).__module__ == "accelfn.errors"
    is_remote = is_ours and type(error).__name__ in ("RemoteRankError", "MissingRankError")
    return (is_remote or _kind(error) == _CONNECTION_LOST) and os.path.isdir(
        os.environ.get("ACCELFN_RUN_DIR", "")
    )


def _kind(error: BaseException) -> str:
    """Return the class name of an exception. A lost connection of gloo has the name of torch's exception."""
    is_lost = isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    return _CONNECTION_LOST if is_lost else type(error).__name__


def _print_exception(error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught exception as the interpreter does."""
    error.__traceback__ = trace
    try:
        sys.excepthook(type(error), error, trace)
    except Exception:  # noqa: BLE001 - a broken hook must not hide the error
        sys.__excepthook__(type(error), error, trace)


def _print_interrupt(stop: KeyboardInterrupt) -> None:
    """Print in one line where the script was interrupted, since every rank does so."""
    frames, own = _read_frames(_strip(stop.__traceback__))
    places = [f" at {path}:{line} in {function}" for path, line, function, _ in own or frames]
    rank = os.environ.get("RANK")
    _print_line(f"{f'rank {rank}' if rank else 'the script'} was interrupted{''.join(places[-1:])}.")


def _print_line(line: str) -> None:
    sys.stdout.flush()
    # A single write, because other ranks print at the same time.
    sys.stderr.write(f"accelfn launch: {line}\n")
    sys.stderr.flush()


def _record(error: BaseException) -> bool:
    """Write the exception into torch's error file. Return whether this rank is the first with this exception.

    What the launcher reports of it stands beside what torch reads.
    """
    import json
    import traceback

    trace = _strip(error.__traceback__)
    frames, own = _read_frames(trace)
    if isinstance(error, SyntaxError) and error.filename:
        own.append((error.filename, error.lineno or 0, "", ""))
    text, status = "".join(traceback.format_exception_only(type(error), error)).strip(), 1
    if isinstance(error, SystemExit):  # the program has reported its error
        text, status = ("", error.code) if isinstance(error.code, int) else (str(error.code), 1)
        frames = own
    time_s = time.time()
    facts = {"kind": _kind(error), "text": text[:_MAX_TEXT], "status": status & 0xFF, "time_s": time_s}
    more = {
        "py_callstack": "".join(traceback.format_exception(type(error), error, trace)),
        "timestamp": str(int(time_s)),
        "accelfn": {**facts, "frames": own or frames},
    }
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        _write(path, json.dumps({"message": {"message": text, "extraInfo": more}}))
    return _is_first(repr((type(error).__name__, text, [frame[:2] for frame in own])))


def _read_frames(trace: TracebackType | None) -> tuple[list[_Frame], list[_Frame]]:
    """Return file, line, function and source of all frames, the innermost last, and of the user's."""
    import linecache
    import traceback

    frames: list[_Frame] = []
    for frame, line in list(traceback.walk_tb(trace))[-_MAX_FRAMES:]:
        path = frame.f_code.co_filename
        frames.append((path, line, frame.f_code.co_name, linecache.getline(path, line).strip()[:200]))
    return frames, [frame for frame in frames if _is_users(frame[0])]


def _is_first(key: str) -> bool:
    """Return whether this process is the first of its machine and attempt with a key."""
    import zlib

    folder = os.environ.get("ACCELFN_RUN_DIR", "")
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        # Only one process can create the file.
        name = f"printed.{zlib.crc32(key.encode(errors='replace'))}.{attempt}"
        open(os.path.join(folder, name), "x").close()
    except FileExistsError:
        return False
    except OSError:
        pass  # no folder, or the disk is full: print it
    return True


def _is_users(path: str) -> bool:
    """Return whether a file is the user's: not part of Python, an installed package or accelfn."""
    import sysconfig

    # Also packages of another interpreter, for virtual environments with system packages.
    if not {"site-packages", "dist-packages"}.isdisjoint(path.split(os.sep)):
        return False
    folders = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders.add(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return not path.startswith("<") and not any(
        path.startswith(folder + os.sep) for folder in folders if folder
    )


def _announce() -> None:
    """Report to the launcher the process ID, and where torch's error file is."""
    rank, attempt = (os.environ.get(name, "0") for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
    folder = os.environ.get("ACCELFN_RUN_DIR")  # which may be on another machine, or removed
    if folder:
        path = os.path.join(folder, f"started.{rank}.{attempt}.{os.getpid()}")
        _write(path, os.environ.get("TORCHELASTIC_ERROR_FILE", ""))


def _write(path: str, text: str) -> None:
    try:
        with open(f"{path}.part", "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(f"{path}.part", path)
    except OSError:
        pass  # an error of this file would hide the user's


if __name__ == "__main__":
    main()
