"""What torch raises where a worker process of a DataLoader is gone, in one wording."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from traceback import walk_tb

__all__ = ("naming_dead_workers",)

# Of torch's DataLoader: it takes from the queue what workers have sent; what they have raised comes later.
_RECEIVES = "_try_get_data"


@contextmanager
def naming_dead_workers(rank: int) -> Generator[None, None, None]:
    """Report a dead worker process as one, and whose.

    Torch tells of it by a signal, by looking at the process, or by whichever error a connection that broke
    off has caused.

    Args:
        rank: That the workers are of.

    Raises:
        RuntimeError: A worker has died, in the block; with torch's exception as the cause.
    """
    try:
        yield
    except (RuntimeError, OSError, EOFError) as error:
        if not _is_of_a_dead_worker(error):
            raise
        raise RuntimeError(
            f"a DataLoader worker of rank {rank} exited unexpectedly ({type(error).__name__}: "
            f"{str(error).strip()}). It may have run out of memory, or a library in it has crashed. With "
            "num_workers=0 the rank itself does what the worker did, and shows where it fails."
        ) from error


def _is_of_a_dead_worker(error: Exception) -> bool:
    text = str(error)
    if type(error) is RuntimeError:  # others only quote one
        return text.startswith("DataLoader worker (pid")
    if not isinstance(error, (ConnectionError, FileNotFoundError, EOFError)):
        return False
    if "in pin memory thread" in text:
        return True
    return any(frame.f_code.co_name == _RECEIVES for frame, _ in walk_tb(error.__traceback__))
