"""Record which functions of the package a call or a process runs, in the order of first use."""

import atexit
import inspect
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2] / "accelfn"

Found = dict[tuple[str, str], None]


def start(found: Found) -> None:
    """Put each function of the package that any thread calls from now on into `found`, as file and name."""

    def look(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_OPTIMIZED  # and neither a module nor the body of a class
        if event == "call" and is_function and code.co_filename.startswith(str(ROOT)):
            found.setdefault((code.co_filename, getattr(code, "co_qualname", code.co_name)))

    threading.setprofile(look)
    sys.setprofile(look)


def stop() -> None:
    sys.setprofile(None)
    threading.setprofile(None)


def record(call: Callable[[], object]) -> Found:
    """Return the functions of the package that a call runs."""
    found: Found = {}
    start(found)
    try:
        call()
    finally:
        stop()
    return found


def record_process(folder: str) -> None:
    """Record this process until it ends or becomes another program, into a file in `folder`."""
    found: Found = {}

    def write() -> None:
        stop()
        if found:
            path = Path(folder) / f"{len(os.listdir(folder))}-{os.getpid()}.txt"
            path.write_text("".join(f"{name}\t{function}\n" for name, function in found))

    def after_writing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            write()
            return function(*arguments)

        return call

    for name in ("execv", "execve", "execvp", "execvpe"):
        setattr(os, name, after_writing(getattr(os, name)))
    atexit.register(write)
    start(found)


def read_recorded(folder: Path) -> Found:
    """Return what the processes wrote, in their order."""
    found: Found = {}
    for path in sorted(folder.iterdir()):
        for line in path.read_text().splitlines():
            name, _, function = line.partition("\t")
            found.setdefault((name, function))
    return found
