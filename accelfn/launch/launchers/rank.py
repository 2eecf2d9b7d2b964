"""The whole life of a rank that a launcher in code has started."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from accelfn.context import init_context
from accelfn.launch.launchers.job import WHERE_ARE_YOU, count_reports, learn_sources, read_call, write_report

__all__ = ("be_rank",)

_LOOK_S = 0.5
# A rank that is done waits so long for the others: gloo may still be connecting one of them to this process,
# which fails where the function is very short.
_LINGER_S = 5.0


def be_rank(folder: str, setup: Mapping[str, Any]) -> NoReturn:
    """Do the job in ``folder``, report, and leave.

    Args:
        folder: Of the launch.
        setup: Of the launcher: ``argv`` of its own process, which a function may look at; ``launcher``, the
            id of that process: this one ends when it has gone; ``sources``, the lines of a notebook's cells.
    """
    place = Path(folder)
    rank, attempt = int(os.environ["RANK"]), int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
    sys.argv[:] = setup["argv"]
    learn_sources(setup["sources"])
    error: BaseException | None = None
    value: Any = None
    if os.name == "posix":
        threading.Thread(target=_end_with, args=(setup["launcher"], os.getppid()), daemon=True).start()
        where = open(place / f"where-{rank}", "wb")  # noqa: SIM115 -- open as long as the process
        faulthandler.register(WHERE_ARE_YOU, file=where, all_threads=True)
    try:
        fn, args, options = read_call(place)
        if options is None:
            value = fn(*args)
        else:
            with init_context(**options) as ctx:
                ctx.collectives.barrier()  # nobody may end while others still connect to it
                value = fn(ctx, *args)
    except BaseException as raised:  # noqa: BLE001 -- whatever ends a rank is reported
        error = raised
    # A rank that was interrupted by hand has nobody to report to, but a report does no harm.
    error = write_report(place, rank, attempt, value, error)
    if error is not None:
        # A context that the function has left open tells the other ranks at exit, and looks here for what.
        sys.last_value = error
        sys.exit(1)
    until = time.monotonic() + _LINGER_S
    while place.exists() and count_reports(place, attempt) < int(os.environ["LOCAL_WORLD_SIZE"]):
        if time.monotonic() > until:
            break
        time.sleep(0.02)
    sys.exit(0)


def _end_with(launcher: int, parent: int) -> None:
    """End this process when the launcher has gone, however it went: else it would wait for ever."""
    with contextlib.suppress(ProcessLookupError):
        while os.getppid() == parent:
            os.kill(launcher, 0)
            time.sleep(_LOOK_S)
    os._exit(1)
