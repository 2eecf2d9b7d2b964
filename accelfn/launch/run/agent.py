"""torchrun, but for what it says at the end: that goes to the report, which has the last word.

``python -m accelfn.launch.run.agent`` takes torchrun's own arguments.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

__all__ = ("main",)


def main(argv: Sequence[str] | None = None) -> int:
    """Run torchrun. Effect: starts processes and waits for them.

    Args:
        argv: torchrun's arguments; this process's own if None.

    Returns:
        The exit status: 0, 1 if a process failed, 128 and more after a signal.
    """
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    parse_args = cast("Callable[[list[str] | None], Any]", torchrun.parse_args)  # pyright: ignore[reportUnknownMemberType]
    run = cast("Callable[[Any], None]", torchrun.run)  # pyright: ignore[reportUnknownMemberType]
    folder = os.environ.get("ACCELFN_RUN_DIR", "")
    if os.path.isdir(folder):
        _end_with_parent()
    try:
        run(parse_args(None if argv is None else list(argv)))
    except ChildFailedError as error:
        if not os.path.isdir(folder):
            raise
        failures = [
            {
                "rank": rank,
                "local_rank": failure.local_rank,
                "exitcode": failure.exitcode,
                "pid": failure.pid,
                "time_s": failure.timestamp,
            }
            for rank, failure in error.failures.items()
        ]
        _tell(folder, {"failures": failures})
        return 1
    except SignalException as stop:
        return 128 + int(stop.sigval)
    except (RuntimeError, OSError, ValueError) as error:  # torch's errors of meeting are RuntimeErrors
        if not os.path.isdir(folder):
            raise
        _tell(folder, {"error": f"{type(error).__name__}: {error}", "time_s": time.time()})
        return 1
    return 0


def _end_with_parent() -> None:
    """Have the system send SIGTERM if the launcher is killed, so that the processes end with it."""
    if sys.platform == "linux":
        set_death_signal = 1
        ctypes.CDLL(None).prctl(set_death_signal, int(signal.SIGTERM))


def _tell(folder: str, said: dict[str, object]) -> None:
    Path(folder, "agent.json").write_text(json.dumps(said), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
