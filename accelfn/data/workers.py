"""Workers of loaders: keep them alive while their rank handles a signal, and name dead ones in errors.

Launchers signal a process group, and clusters every process of a job. A rank with a preemption guard then
finishes its step, for which it needs its workers; torch would let them die at once.
"""

from __future__ import annotations

import gc
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
from typing import Any, TypeAlias

import torch

__all__ = ("Hold", "SignalHolder", "StartWorker", "begin_reading", "explain_dead_workers", "held_signals")


# The method of torch's DataLoader that reads the workers' queue; a worker's own exception is raised later.
_RECEIVES = "_try_get_data"


class Hold:
    """A flag that a rank shares with its workers: whether they ignore signals now.

    Attributes:
        is_on: A byte in shared memory, which a worker must inherit.
    """

    def __init__(self) -> None:
        """Allocate the flag, switched on."""
        self.is_on: Any = RawValue("b", 1)


class SignalHolder:
    """Base of a rank's handlers of signals that its workers ignore. Found by ``signal.getsignal``."""

    def holds(self) -> tuple[Hold, ...]:
        """Return the flags; workers ignore the signal while any of them is on."""
        raise NotImplementedError


_Held: TypeAlias = "tuple[int, tuple[Hold, ...]]"


def held_signals() -> tuple[_Held, ...]:
    """Return the signals that workers of this process ignore, with their flags."""
    handlers = ((number, signal.getsignal(number)) for number in sorted(signal.valid_signals()))
    return tuple(
        (number, handler.holds()) for number, handler in handlers if isinstance(handler, SignalHolder)
    )


class StartWorker:
    """A ``worker_init_fn`` that makes a worker ignore its rank's held signals, then calls the user's.

    For all other signals, torch's handlers stay. What is garbage in the rank isn't collected in a forked
    worker: a process group there would wait for threads that the worker doesn't have.
    """

    def __init__(self, then: Callable[[int], object] | None, held: tuple[_Held, ...] = ()) -> None:
        """Call ``then`` afterwards; ``held`` are the held signals, which only a forked worker inherits."""
        self._then = then
        self._held = held

    def __call__(self, worker_id: int) -> None:
        """Initialise worker ``worker_id``, in its process."""
        gc.freeze()
        gc.enable()  # it was disabled for the fork
        # A forked worker inherits the rank's Python handlers, which torch's C handlers don't replace.
        held = self._held or held_signals()
        for number, holds in held:
            signal.signal(number, partial(_ignore_signal, holds, os.getppid()))
        if held:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [number for number, _ in held])
        if self._then is not None:
            self._then(worker_id)

    def __reduce__(self) -> tuple[Any, ...]:
        # Shared memory can be pickled only for a process that is being started.
        return StartWorker, (self._then, held_signals() if get_spawning_popen() is not None else ())


def _ignore_signal(holds: tuple[Hold, ...], parent: int, number: int, frame: FrameType | None) -> None:
    """Handle a signal in a worker: exit unless it is held. torch, too, terminates workers by a signal."""
    del number, frame
    if os.getppid() != parent or not any(hold.is_on.value for hold in holds):
        os._exit(0)  # as torch's handler does for a signal from the rank


def begin_reading(loader: Any, *, is_resumed: bool = False, is_seeded: bool = False) -> Any:
    """Begin a pass over a DataLoader, starting its workers with :class:`StartWorker`.

    torch draws a number from the program's generator when a pass begins. A resumed pass must not: that number
    was drawn when the epoch began, before the program's state was saved.

    Args:
        loader: The loader.
        is_resumed: Whether samples of the epoch have been read before.
        is_seeded: Nothing uses what torch draws from the loader's own generator, which is to stay as it is;
            otherwise its state is restored with the sampler's.
    """
    own: torch.Generator | None = loader.generator
    generator = torch.default_generator if own is None else own
    keeps = is_resumed if own is None else is_seeded
    before = generator.get_state() if keeps else None
    try:
        return _begin(loader)
    finally:
        if before is not None:
            generator.set_state(before)


def _begin(loader: Any) -> Any:
    then = loader.worker_init_fn
    if not loader.num_workers or isinstance(then, StartWorker):
        return iter(loader)
    # Only while the workers start, since the loader may be the user's.
    loader.worker_init_fn = StartWorker(then)
    is_collecting = gc.isenabled()
    gc.disable()
    try:
        with _block_signals(loader.multiprocessing_context or multiprocessing):
            return iter(loader)
    finally:
        loader.worker_init_fn = then
        if is_collecting:
            gc.enable()


@contextmanager
def _block_signals(context: Any) -> Generator[None, None, None]:
    """Block held signals in this process and in the workers that it starts, until they have handlers."""
    numbers = [number for number, _ in held_signals()]
    # A fork server that starts meanwhile would keep the signals blocked in all its later processes.
    if not numbers or context.get_start_method() == "forkserver":
        yield
        return
    if context.get_start_method() == "spawn":
        resource_tracker.ensure_running()  # first, since starting it unblocks signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def explain_dead_workers(rank: int) -> Generator[None, None, None]:
    """Turn the various errors that torch raises for a dead worker into one that names the rank.

    Args:
        rank: The rank of this process.

    Raises:
        RuntimeError: A worker died in the block; torch's exception is the cause.
    """
    try:
        yield
    except (RuntimeError, OSError, EOFError) as error:
        if not _is_dead_worker_error(error):
            raise
        raise RuntimeError(
            f"a DataLoader worker of rank {rank} exited unexpectedly ({type(error).__name__}: "
            f"{str(error).strip()}). It may have run out of memory, or a library in it has crashed. Use "
            "num_workers=0 to see where it fails, in the rank's own process."
        ) from error


def _is_dead_worker_error(error: Exception) -> bool:
    text = str(error)
    if type(error) is RuntimeError:  # subclasses may quote such a message
        return text.startswith("DataLoader worker (pid")
    if not isinstance(error, (ConnectionError, FileNotFoundError, EOFError)):
        return False
    if "in pin memory thread" in text:
        return True
    return any(frame.f_code.co_name == _RECEIVES for frame, _ in walk_tb(error.__traceback__))
