"""Workers of loaders: they outlive a signal that their rank takes for a request, and are named when dead.

Launchers signal a whole process group, clusters every process of a job. A rank with a guard against
preemption finishes its step then, and for that it needs its workers, which torch lets die at once.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from multiprocessing import resource_tracker
from multiprocessing.context import get_spawning_popen
from multiprocessing.sharedctypes import RawValue
from traceback import walk_tb
from types import FrameType
from typing import Any, NamedTuple

import torch

__all__ = ("Hold", "SignalHolder", "StartWorker", "begin_reading", "held_signals", "naming_dead_workers")


# Of torch's DataLoader: it takes from the queue what workers have sent; what they have raised comes later.
_RECEIVES = "_try_get_data"


class Hold:
    """Whether signals are requests now: written by a rank, read by its workers.

    Attributes:
        is_on: A byte that the processes share, so a worker must inherit it.
    """

    def __init__(self) -> None:
        """Share a byte, which says yes."""
        self.is_on: Any = RawValue("b", 1)


class SignalHolder:
    """Base of a rank's handlers of signals that its workers shall outlive.

    Workers find it where Python keeps the handlers of a process.
    """

    def holds(self) -> tuple[Hold, ...]:
        """Return those of which one that is on makes workers stay."""
        raise NotImplementedError


class _Held(NamedTuple):
    number: int
    holds: tuple[Hold, ...]


def held_signals() -> tuple[_Held, ...]:
    """Return which signals this process holds off from its workers, and while what is on."""
    handlers = ((number, signal.getsignal(number)) for number in sorted(signal.valid_signals()))
    return tuple(
        _Held(number, handler.holds()) for number, handler in handlers if isinstance(handler, SignalHolder)
    )


class StartWorker:
    """A ``worker_init_fn`` that keeps a worker alive while its rank holds signals off, and then the user's.

    What torch has set up for workers stays for the other signals, and all of it where nobody holds any.
    """

    def __init__(self, then: Callable[[int], object] | None, held: tuple[_Held, ...] = ()) -> None:
        """Go on with ``then``; ``held`` is what a worker that isn't forked can't see for itself."""
        self._then = then
        self._held = held

    def __call__(self, worker_id: int) -> None:
        """Begin worker ``worker_id``, in its process."""
        # A forked worker has a copy of the rank's handlers: for Python, torch's in C don't replace them.
        held = self._held or held_signals()
        for number, holds in held:
            signal.signal(number, partial(_stay, holds, os.getppid()))
        if held:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [one.number for one in held])
        if self._then is not None:
            self._then(worker_id)

    def __reduce__(self) -> tuple[Any, ...]:
        # What is shared travels only to a process that is being started.
        return StartWorker, (self._then, held_signals() if get_spawning_popen() is not None else ())


def _stay(holds: tuple[Hold, ...], parent: int, number: int, frame: FrameType | None) -> None:
    """Handle a signal in a worker. Torch too ends workers by one: those that don't leave when asked to."""
    del number, frame
    if os.getppid() != parent or not any(hold.is_on.value for hold in holds):
        os._exit(0)  # as torch's own handler does when the rank has sent it


def begin_reading(loader: Any, *, goes_on: bool = False) -> Any:
    """Begin a pass over a DataLoader, which starts its workers as :class:`StartWorker` does.

    Torch draws a number as a pass begins. One that goes on in an epoch leaves the program's generator as it
    is: its number was drawn when the epoch began, before the state was taken that the program has now.

    Args:
        loader: To read from.
        goes_on: Whether samples of the epoch have been read before.
    """
    if not goes_on or loader.generator is not None:  # the user's own, which is brought back with the sampler
        return _begin(loader)
    before = torch.get_rng_state()
    try:
        return _begin(loader)
    finally:
        torch.set_rng_state(before)


def _begin(loader: Any) -> Any:
    then = loader.worker_init_fn
    if not loader.num_workers or isinstance(then, StartWorker):
        return iter(loader)
    # For a moment and not for good: the loader may be the user's own, and is to look as they have made it.
    loader.worker_init_fn = StartWorker(then)
    try:
        with _put_off(loader.multiprocessing_context or multiprocessing):
            return iter(loader)
    finally:
        loader.worker_init_fn = then


@contextmanager
def _put_off(context: Any) -> Generator[None, None, None]:
    """Let held signals wait, here and in the processes that start meanwhile, until those have handlers."""
    numbers = [one.number for one in held_signals()]
    # A fork server may start meanwhile as well, and what others let it start would never hear a signal.
    if not numbers or context.get_start_method() == "forkserver":
        yield
        return
    if context.get_start_method() == "spawn":
        resource_tracker.ensure_running()  # which, where it has to start it, unblocks signals behind it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
