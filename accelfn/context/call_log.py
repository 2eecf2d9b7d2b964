"""The log of a rank's operations, with the lines of the user's program that called them."""

from __future__ import annotations

import faulthandler
import hashlib
import os
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, Protocol
from weakref import WeakKeyDictionary, WeakSet

from accelfn.errors import DistributedError

if TYPE_CHECKING:
    import torch

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Frames of a progress bar, a thread pool or a test runner aren't the user's, and may differ between ranks: a
# bar may be shown on the first rank only.
_LIBRARIES = (os.path.dirname(os.__file__) + os.sep, "<frozen ")
_SITE_PACKAGES, _DIST_PACKAGES = f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}"


def call_site() -> str:
    """Return the line of the user's program that led here, such as ``"train.py:41 in main"``.

    This is the nearest frame outside of this package and of installed packages; if there is none, the nearest
    frame outside of this package. The file's folder is left out, since it may differ between machines.
    """
    nearest: FrameType | None = None
    frame: FrameType | None = sys._getframe()  # pyright: ignore[reportPrivateUsage] -- documented
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_PACKAGE):
            is_installed = path.startswith(_LIBRARIES) or _SITE_PACKAGES in path or _DIST_PACKAGES in path
            if not is_installed:
                return _name(frame)
            nearest = nearest or frame
        frame = frame.f_back
    return "" if nearest is None else _name(nearest)


def _name(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_filename.rpartition(os.sep)[2]}:{frame.f_lineno} in {code.co_name}"


_REMEMBERED = 64
# Number of forms of calls whose first line is stored; then all are dropped.
_MAX_FORMS = 4096
_CHAIN_BYTES = 16
# For callables of Collectives outside of any operation: a guard's default timeout.
_PATIENCE_S = 300.0
_PRINT_S = 1.0


def _print_stacks(seconds: float) -> None:
    title = (
        f"accelfn: process {os.getpid()} has begun no operation across ranks for {seconds:g} s. Its stacks:"
    )
    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        # To the file of stderr: what a notebook or a test has put in the place of sys.stderr may be none. In
        # one piece, since other ranks print at the same time.
        os.write(2, f"{title}\n".encode() + file.read())


class Entry(NamedTuple):
    """One operation across ranks."""

    number: int  # from 1
    operation: str
    site: str  # the user's file, line and function
    chain: bytes  # fingerprint of this call and all previous ones; zeros if nothing is compared


class Position(NamedTuple):
    """How far a rank has come, as it tells the others."""

    rank: int
    number: int  # of its last operation; 0 before the first
    operation: str
    site: str
    chain: str  # hexadecimal
    reductions: int  # number of gradient reductions that it has finished
    gathers: int  # and of gatherings of units

    def __str__(self) -> str:
        """Return the operation and its line."""
        return f"call {self.number}: {self.operation} at {self.site}"


class Unsettled(NamedTuple):
    """An agreement that has started, and whose result hasn't been read yet."""

    settle: Callable[[], None]  # wait for the result; raises if ranks disagree
    abandon: Callable[[], None]  # drop it


@dataclass(slots=True, eq=False)
class OpenPass:
    """A pass over data that the ranks have begun together, and not yet ended together.

    Attributes:
        number: Of the last operation before the pass: the same on every rank, so that it identifies the pass.
        batches: Number of batches that this rank has read in it.
        has_ended: Whether this rank has reached its end, where it waits for the other ranks.
    """

    number: int
    batches: int = 0
    has_ended: bool = False


class BackwardPass(list[Callable[[], None]]):
    """What prepared models do when a backward pass of ``accelfn.backward``, and any within it, has ended.

    Attributes:
        is_exact: Whether its context sums gradients in exact mode.
        value: What is differentiated.
    """

    is_exact: bool = False
    value: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class OpenRead:
    """A loop over a prepared loader that has begun.

    Attributes:
        end: End its pass, if it has yielded the last batch.
    """

    end: Callable[[], None]


class Resumed(Protocol):
    """The passes over a loader that a state was loaded into."""

    def end_rest(self) -> None:
        """Go to the next epoch, if the state leaves nothing of its own."""


@dataclass(frozen=True, eq=False)
class LoaderPlace:
    """The place of a prepared loader among those of its world that are seeded alike. Ends with the loader.

    Attributes:
        generator: The loader's own generator; None if its seed is the program's.
        number: From 0.
    """

    generator: object | None
    number: int


class CallLog:
    """The operations of one rank on one group, in order.

    A process group numbers its collectives; this log does so for operations on trees, and stores what is
    needed to explain a mismatch. It also numbers the loaders that are prepared. All contexts over one group
    share one log. Only operations write to it.

    Attributes:
        number: Of the last operation begun; 0 before the first.
        checked: Number of the last operation that is known to be the same on all ranks.
        chain: Fingerprint of all operations begun so far, 16 bytes.
        patience_s: How long the current operation may wait for other ranks.
        over: Why no further operation is possible, or "".
        closed: Whether the context that opened this world has been closed.
        open_passes: Passes over data that have begun and not ended, oldest first, to explain a mismatch.
        open_reads: Loops over prepared loaders of this rank, oldest first.
        resumed: Passes over prepared loaders that a state was loaded into, oldest first; the values are None.
        reductions: Number of backward passes whose gradients have been reduced over the ranks.
        gathers: Number of units that have been gathered from the ranks.
        inside: What of the last operation this rank waits in, such as "the backward pass of"; or "".
        unsettled: The agreement that must finish before the next operation, if there is one.
        failure: What this rank's latest computation failed with, as on the message board; "" after the next
            operation has begun.
        backward: The backward pass that runs; None outside of ``accelfn.backward``.
        watchdog: Prints the stacks of this process unless the next operation begins in time; None for none.
    """

    def __init__(self) -> None:
        """Start with no calls."""
        self.number: int = 0
        self.checked: int = 0
        self.chain: bytes = bytes(_CHAIN_BYTES)
        self.patience_s: float = _PATIENCE_S
        self.over: str = ""
        self.closed: bool = False
        self.open_passes: list[OpenPass] = []
        self.open_reads: list[OpenRead] = []
        self.resumed: WeakKeyDictionary[Resumed, None] = WeakKeyDictionary()  # in order, unlike a WeakSet
        self.reductions: int = 0
        self.gathers: int = 0
        self.inside: str = ""
        self.unsettled: Unsettled | None = None
        self.failure: str = ""
        self.backward: BackwardPass | None = None
        self.watchdog: threading.Timer | None = None
        self._entries: deque[Entry] = deque(maxlen=_REMEMBERED)
        self._first_sites: dict[int, str] = {}  # by form of call
        self._places: WeakSet[LoaderPlace] = WeakSet()

    def __deepcopy__(self, memo: dict[int, object]) -> CallLog:
        """Return self: a copy of a context uses the same group."""
        return self

    def __reduce__(self) -> tuple[type[CallLog], tuple[()]]:
        """Pickle as an empty log, since a group can't be pickled."""
        return CallLog, ()

    def begin(self, operation: str, site: str, material: str | None, patience_s: float) -> None:
        """Record the start of an operation.

        Args:
            operation: Its name.
            site: Where it was called.
            material: Everything that must be equal on every rank, as text; None if nothing is compared.
            patience_s: How long it may wait.

        Raises:
            DistributedError: This rank has failed, or its context is closed.
        """
        if self.over:
            raise DistributedError(
                f"{operation}: operations across ranks are no longer possible: {self.over}. Start a new "
                "context."
            )
        self.number += 1
        self.failure = ""
        self.patience_s = patience_s
        if material is not None:
            self.chain = hashlib.blake2b(self.chain + material.encode(), digest_size=_CHAIN_BYTES).digest()
        self._entries.append(Entry(self.number, operation, site, self.chain))
        if self.watchdog is not None:
            self.watch(patience_s)

    def watch(self, seconds: float) -> None:
        """Print the stacks of this process's threads in ``seconds``, unless an operation begins before."""
        self.unwatch()
        self.watchdog = threading.Timer(min(seconds, threading.TIMEOUT_MAX), _print_stacks, (seconds,))
        self.watchdog.daemon = True
        self.watchdog.start()

    def unwatch(self) -> None:
        """Print no stacks any more."""
        if self.watchdog is not None:
            self.watchdog.cancel()

    def await_watchdog(self) -> None:
        """Wait until the stacks are printed, since the time is over."""
        if self.watchdog is not None:
            self.watchdog.join(_PRINT_S)

    def position(self, rank: int) -> Position:
        """Return how far this rank, which is ``rank``, has come."""
        now = self.current
        return Position(
            rank, now.number, now.operation, now.site, now.chain.hex(), self.reductions, self.gathers
        )

    def awaits(self, other: Position) -> bool:
        """Return whether another rank has not finished what this rank waits in.

        One that has may be ahead, or gone, by as long as messages take.
        """
        return bool(self.inside) and other.reductions <= self.reductions and other.gathers <= self.gathers

    @contextmanager
    def open_pass(self) -> Generator[OpenPass, None, None]:
        """List a pass over data while the block runs."""
        begun = OpenPass(self.number)
        self.open_passes.append(begun)
        try:
            yield begun
        finally:
            self.open_passes.remove(begun)

    def place_loader(self, generator: object | None) -> LoaderPlace:
        """Return a loader's place: the first that no loader has which exists now.

        So a run that is repeated in one process reads its data in the same order again.

        Args:
            generator: The loader's own generator; None if its seed is the program's.
        """
        taken = {place.number for place in self._places if place.generator is generator}
        place = LoaderPlace(
            generator, next(number for number in range(len(taken) + 1) if number not in taken)
        )
        self._places.add(place)
        return place

    def confirm(self) -> None:
        """Record that the current operation and all previous ones are the same on all ranks."""
        self.checked = self.number

    def settle(self) -> None:
        """Wait for the result of an open agreement.

        Raises:
            Exception: The ranks disagree, or a rank is missing.
        """
        agreement, self.unsettled = self.unsettled, None
        if agreement is not None:
            agreement.settle()

    def abandon(self) -> None:
        """Drop an open agreement, since this rank takes part in no further operation."""
        agreement, self.unsettled = self.unsettled, None
        if agreement is not None:
            agreement.abandon()

    def resume(self, number: int) -> None:
        """Continue at ``number`` after a mismatch that every rank has seen."""
        self.number = number
        self.checked = number
        self._first_sites.clear()  # they may differ from here on
        self.chain = hashlib.blake2b(b"resumed at %d" % number, digest_size=_CHAIN_BYTES).digest()

    def first_site(self, form: int, site: str) -> str:
        """Return the line of the first call of a form, which is ``site`` if this is the first."""
        if len(self._first_sites) == _MAX_FORMS:  # at the same call on all ranks
            self._first_sites.clear()
        return self._first_sites.setdefault(form, site)

    @property
    def current(self) -> Entry:
        """The operation begun last."""
        return self._entries[-1] if self._entries else Entry(0, "", "", self.chain)

    def find(self, number: int) -> Entry | None:
        """Return the operation of that number, if it is still in the log."""
        return next((entry for entry in self._entries if entry.number == number), None)

    def recent(self) -> tuple[Entry, ...]:
        """Return the operations since the last checked one, including the current one."""
        return tuple(entry for entry in self._entries if entry.number > self.checked)
