"""The ``accelfn`` command, also as ``python -m accelfn``."""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

__all__ = ("main",)


def main() -> int:
    """Run the command line. Effect: an interrupt while it loads ends the process without a traceback.

    Returns:
        The exit status.
    """
    # Python's own handler stands in the foreground only; what is ignored stays ignored.
    loading = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if loading:
        signal.signal(signal.SIGINT, _leave)
    from accelfn.launch.main import main as run

    if loading:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return run()
    except KeyboardInterrupt:
        return 130


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(130)


if __name__ == "__main__":
    sys.exit(main())
