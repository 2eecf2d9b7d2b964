"""Start ``accelfn`` as its users do, and look after the processes."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# In place of torch's launcher, which takes seconds to import.
STAND_IN = ROOT / "tests" / "stand_ins" / "torchrun"


def environment(*, real: bool = True, **more: str) -> dict[str, str]:
    """Return this process's variables without what would configure a launch."""
    ours = ("ACCELFN_", "SLURM_", "OMP_", "PYTHON")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    path = os.pathsep.join(map(str, (ROOT,) if real else (STAND_IN, ROOT)))
    return {
        **inherited,
        "PYTHONPATH": path,
        "XDG_CONFIG_HOME": "/nonexistent",
        "OMP_NUM_THREADS": "1",
        **more,
    }


def start(folder: Path, *argv: str, real: bool = True, **more: str) -> "subprocess.Popen[str]":
    """Start a command, with torch's launcher or the stand-in."""
    return subprocess.Popen(
        [sys.executable, "-m", "accelfn", *argv],
        cwd=folder,
        env=environment(real=real, **more),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Wait for the end, and return status, stdout and stderr."""
    try:
        stdout, stderr = process.communicate(timeout=100)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, stdout, stderr


def run(folder: Path, *argv: str, real: bool = True, **more: str) -> tuple[int, str, str]:
    """Run a command to its end."""
    return finish(start(folder, *argv, real=real, **more))


def wait_for(found: Callable[[], Any]) -> Any:
    """Wait until ``found`` returns something true, and return it."""
    until_s = time.monotonic() + 60
    while not (value := found()):
        assert time.monotonic() < until_s
        time.sleep(0.02)
    return value


def is_alive(pid: int) -> bool:
    """Return whether a process runs: a zombie has ended, and whoever adopted it has to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def free_port() -> str:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
