"""What this rank has called across ranks, and from which line of the user's program."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
# Frames of a progress bar, a thread pool or a test runner are not the user's: they may differ between ranks,
# as a bar does that is shown on the first rank only.
_LIBRARIES = (os.path.dirname(os.__file__) + os.sep, "<frozen ")
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def call_site() -> str:
    """Name the line outside of this package that led here, such as ``"train.py:41 in main"``.

    The nearest line of a program that isn't installed; of one that is, the nearest line at all. By the file's
    name without its folder, which need not be the same on all machines.
    """
    nearest: FrameType | None = None
    frame = inspect.currentframe()
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_PACKAGE):
            if not path.startswith(_LIBRARIES) and not any(part in path for part in _INSTALLED):
                return _name(frame)
            nearest = nearest or frame
        frame = frame.f_back
    return "" if nearest is None else _name(nearest)


def _name(frame: FrameType) -> str:
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"


_REMEMBERED = 64
# Forms of calls whose first line is known, before all are forgotten.
_MOST_FORMS = 4096
_CHAIN_BYTES = 16
# For what is called on the seam itself, outside of any operation: as long as a guard waits by default.
_PATIENCE_S = 300.0


class Entry(NamedTuple):
    """One operation across ranks."""

    number: int  # from 1
    operation: str
    site: str  # the user's file, line and function
    chain: bytes  # fingerprint of this call and of all before it; zeros where nothing is compared


class Unsettled(NamedTuple):
    """An agreement that has started, and whose result is still to be read."""

    settle: Callable[[], None]  # hear it; raises if ranks disagree
    abandon: Callable[[], None]  # without hearing it


class OpenPass:
    """A pass over data that the ranks have begun together, and whose end they are still to agree on.

    Attributes:
        number: Of the last operation before it: the same on every rank, so that it distinguishes passes.
        batches: Batches that this rank has taken in it.
        has_ended: Whether this rank has come to its end, where it waits for the others.
    """

    __slots__ = ("batches", "has_ended", "number")

    def __init__(self, number: int) -> None:
        """Begin with no batch."""
        self.number: int = number
        self.batches: int = 0
        self.has_ended: bool = False


class CallLog:
    """The calls of one rank on one group, in order.

    A process group counts its collectives; this is the same for operations on trees, and with it what is
    needed to explain a disagreement. All contexts over one group share one call log. Nothing is written to it
    but by the operations themselves.

    Attributes:
        number: Of the last operation begun; 0 before the first.
        checked: Number of the last operation that all ranks are known to have begun alike.
        chain: Fingerprint of all operations begun so far, 16 bytes.
        patience_s: How long the current operation may wait for other ranks.
        over: Why no further operation is possible, or "".
        closed: Whether the context that opened this world has been closed.
        open_passes: Passes over data that were begun and have not ended, in the order of their beginning.
            Each belongs to the loop that goes through it; here it is only listed, to explain a disagreement.
        reductions: Backward passes whose gradients have been reduced over the ranks.
        reducing: Whether this rank waits for such a reduction.
        unsettled: The agreement that comes first at the next operation, if one is open.
        after_backward: What is done when the backward pass under way is over; None while none is that
            ``accelfn.backward`` has started.
    """

    def __init__(self) -> None:
        """Begin with no calls."""
        self.number: int = 0
        self.checked: int = 0
        self.chain: bytes = bytes(_CHAIN_BYTES)
        self.patience_s: float = _PATIENCE_S
        self.over = ""
        self.closed = False
        self.open_passes: list[OpenPass] = []
        self.reductions = 0
        self.reducing = False
        self.unsettled: Unsettled | None = None
        self.after_backward: list[Callable[[], None]] | None = None
        self._entries: deque[Entry] = deque(maxlen=_REMEMBERED)
        self._first_sites: dict[int, str] = {}  # by form of call

    def __deepcopy__(self, memo: dict[int, object]) -> CallLog:
        """Return self: a copy of a context is over the same group."""
        return self

    def __reduce__(self) -> tuple[type[CallLog], tuple[()]]:
        """Pickle as a new call log: what was called stays with the group, which no pickle can hold."""
        return CallLog, ()

    def begin(self, operation: str, site: str, material: str | None, patience_s: float) -> None:
        """Note that an operation begins.

        Args:
            operation: Its name.
            site: Where it was called.
            material: All that must be equal on every rank; None where nothing is compared.
            patience_s: How long it may wait.
        """
        self.number += 1
        self.patience_s = patience_s
        if material is not None:
            self.chain = hashlib.blake2b(self.chain + material.encode(), digest_size=_CHAIN_BYTES).digest()
        self._entries.append(Entry(self.number, operation, site, self.chain))

    @contextmanager
    def open_pass(self) -> Generator[OpenPass, None, None]:
        """List a pass over data for as long as it is open."""
        begun = OpenPass(self.number)
        self.open_passes.append(begun)
        try:
            yield begun
        finally:
            self.open_passes.remove(begun)

    def confirm(self) -> None:
        """Note that all ranks have begun the current operation, and all before it, alike."""
        self.checked = self.number

    def settle(self) -> None:
        """Read the result of an agreement that is still open.

        Raises:
            Exception: The ranks disagree, or one doesn't come.
        """
        open_one, self.unsettled = self.unsettled, None
        if open_one is not None:
            open_one.settle()

    def abandon(self) -> None:
        """Release an agreement that is still open: this rank takes part in nothing more."""
        open_one, self.unsettled = self.unsettled, None
        if open_one is not None:
            open_one.abandon()

    def resume(self, number: int) -> None:
        """Go on from ``number`` after a disagreement that every rank has seen: all ranks do so alike."""
        self.number = number
        self.checked = number
        self._first_sites.clear()  # from here on they may differ
        self.chain = hashlib.blake2b(b"resumed at %d" % number, digest_size=_CHAIN_BYTES).digest()

    def first_site(self, form: int, site: str) -> str:
        """Return the line that calls of one form came from first: ``site``, where this is the first."""
        if len(self._first_sites) == _MOST_FORMS:  # on all ranks at the same call
            self._first_sites.clear()
        return self._first_sites.setdefault(form, site)

    @property
    def current(self) -> Entry:
        """The operation begun last."""
        return self._entries[-1] if self._entries else Entry(0, "", "", self.chain)

    def find(self, number: int) -> Entry | None:
        """Return the operation of that number, where it is remembered."""
        return next((entry for entry in self._entries if entry.number == number), None)

    def recent(self) -> tuple[Entry, ...]:
        """Return the operations since the last one that was checked, the current one included."""
        return tuple(entry for entry in self._entries if entry.number > self.checked)
