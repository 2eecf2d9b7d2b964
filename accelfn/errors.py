"""Every exception that accelfn raises on purpose.

::

    AccelfnError
    |-- ConfigurationError        (ValueError)           a record or an option is not valid
    |   `-- EnvironmentPlanError                         the launcher's variables contradict each other
    |-- NotAvailableError         (NotImplementedError)  valid, but not supported yet
    |-- MissingExtraError         (ImportError)          an optional package is not installed
    |-- NonFiniteGradientError    (FloatingPointError)   a gradient is infinite or NaN
    |-- DoesNotFitError           (ValueError)           a model doesn't fit into the memory it may use
    |-- CheckpointError                                  a checkpoint can't be written or loaded
    |   |-- NoCheckpointError     (FileNotFoundError)    there is no committed one in the directory
    |   |-- DamagedCheckpointError (ValueError)          its bytes aren't those that were written
    |   `-- CheckpointMismatchError (ValueError)         it holds another tree than the one to load into
    `-- DistributedError          (RuntimeError)         several ranks are involved
        |-- MismatchError                                ranks called different things
        |   `-- UnevenDataError                          ranks have different numbers of batches
        |-- ReplicaDriftError                            what should be equal on every rank isn't
        |-- RemoteRankError                              another rank failed
        |-- MissingRankError                             a rank ended without taking part
        `-- CollectiveTimeoutError (TimeoutError)        a rank did not arrive in time

A wrong argument of a single call is a plain ``ValueError`` or ``TypeError``.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = (
    "AccelfnError",
    "Caller",
    "CheckpointError",
    "CheckpointMismatchError",
    "CollectiveTimeoutError",
    "ConfigurationError",
    "DamagedCheckpointError",
    "Disagreement",
    "DistributedError",
    "DoesNotFitError",
    "Drift",
    "EnvironmentPlanError",
    "Misfit",
    "MismatchError",
    "MissingExtraError",
    "MissingRankError",
    "NoCheckpointError",
    "NonFiniteGradientError",
    "NotAvailableError",
    "RemoteRankError",
    "RemoteTraceback",
    "ReplicaDriftError",
    "UnevenDataError",
)


_MAX_ROWS = 20


class AccelfnError(Exception):
    """Base of every exception that accelfn raises on purpose."""


class ConfigurationError(AccelfnError, ValueError):
    """A configuration record or an option of ``init_context`` is not valid."""


class EnvironmentPlanError(ConfigurationError):
    """The variables that a launcher set do not describe one world."""


class NotAvailableError(AccelfnError, NotImplementedError):
    """The request is valid, but accelfn does not support it yet."""


class MissingExtraError(AccelfnError, ImportError):
    """An optional package is needed and not installed."""


class NonFiniteGradientError(AccelfnError, FloatingPointError):
    """Gradients are infinite or NaN, and a step would ruin the parameters.

    Attributes:
        by_rank: Paths of the parameters whose gradients are not finite, by rank.
    """

    def __init__(self, by_rank: tuple[tuple[str, ...], ...]) -> None:
        """Keep the paths and print the first of them."""
        self.by_rank = by_rank
        paths = list(dict.fromkeys(path for one in by_rank for path in one))
        lines = ["optimizer_step: gradients are infinite or NaN, and nothing was changed."]
        for path in paths[:_MAX_ROWS]:
            ranks = ", ".join(str(rank) for rank, one in enumerate(by_rank) if path in one)
            lines.append(f"  {path}  on rank {ranks}")
        if len(paths) > _MAX_ROWS:
            lines.append(f"  ... and {len(paths) - _MAX_ROWS} more")
        lines.append(
            "Look at the loss and the data of this step; clip gradients, or lower the learning rate."
        )
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type["NonFiniteGradientError"], tuple[tuple[tuple[str, ...], ...]]]:
        """Pickle by the arguments, so that the error can cross a process boundary."""
        return type(self), (self.by_rank,)


class DoesNotFitError(AccelfnError, ValueError):
    """A part of a model that can't be split fits into none of the places that are left for it."""


class CheckpointError(AccelfnError):
    """A checkpoint can't be written, found or taken up. What was there before is still there."""


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """There is no committed checkpoint in the directory."""


class DamagedCheckpointError(CheckpointError, ValueError):
    """A file of a checkpoint isn't what was written. Nothing of it was taken up.

    Attributes:
        file: Its name in the checkpoint; "" where no single file is to blame.
    """

    def __init__(self, message: str, file: str = "") -> None:
        """Keep the file's name."""
        self.file = file
        super().__init__(message)

    def __reduce__(self) -> tuple[type["DamagedCheckpointError"], tuple[str, str]]:
        """Pickle by the arguments, so that the error can cross a process boundary."""
        return type(self), (str(self), self.file)


class Misfit(NamedTuple):
    """One row of a :class:`CheckpointMismatchError`: a leaf that can't be loaded."""

    path: str  # such as "model.0.weight"
    stored: str  # what the checkpoint has: dtype and shape, a type, or "nothing"
    wanted: str  # what the tree to load into has


class CheckpointMismatchError(CheckpointError, ValueError):
    """A checkpoint holds another tree than the one to load into. Nothing was changed.

    Attributes:
        rows: Each leaf that is missing, extra, misshapen or of another dtype.
    """

    def __init__(self, message: str, rows: Sequence[Misfit]) -> None:
        """Keep the rows and print the first of them as a table."""
        self.message = message
        self.rows: tuple[Misfit, ...] = tuple(Misfit(*row) for row in rows)
        shown = [Misfit("leaf", "checkpoint", "wanted"), *self.rows[:_MAX_ROWS]]
        widths = [max(len(row[column]) for row in shown) for column in range(2)]
        lines = [
            f"  {path:<{widths[0]}}  {stored:<{widths[1]}}  {wanted}".rstrip()
            for path, stored, wanted in shown
        ]
        if len(self.rows) > _MAX_ROWS:
            lines.append(f"  ... and {len(self.rows) - _MAX_ROWS} more")
        super().__init__("\n".join([message, *lines]))

    def __reduce__(self) -> tuple[type["CheckpointMismatchError"], tuple[object, ...]]:
        """Pickle by the arguments, so that the error can cross a process boundary."""
        return type(self), (self.message, self.rows)


class DistributedError(AccelfnError, RuntimeError):
    """Something went wrong between ranks; each rank of the world raises."""


class Disagreement(NamedTuple):
    """One row of a :class:`MismatchError`: where one rank differs from the others."""

    rank: int
    path: str  # of the leaf, such as "tree['x'][0]"; empty when the whole call differs
    expected: str  # what most ranks have
    found: str  # what this rank has


class Caller(NamedTuple):
    """What one rank called, and from where."""

    rank: int
    operation: str
    site: str  # such as "train.py:41 in main"


class MismatchError(DistributedError):
    """Ranks called different operations, or the same one on different trees, or from different places.

    Attributes:
        operation: Name of the operation, as most ranks called it.
        rows: What differs, by rank and tree path.
        callers: What each rank called, in rank order; empty where only the rows are known.
        hint: What to do.
    """

    def __init__(
        self,
        operation: str,
        rows: Sequence[Disagreement],
        hint: str = "",
        callers: Sequence[Caller] = (),
    ) -> None:
        """Keep the rows and print them as a table."""
        self.operation = operation
        self.rows: tuple[Disagreement, ...] = tuple(Disagreement(*row) for row in rows)
        self.hint = hint
        self.callers: tuple[Caller, ...] = tuple(Caller(*caller) for caller in callers)
        super().__init__(
            "\n".join([self._headline(), *_table(self.rows, self.callers), *([hint] if hint else [])])
        )

    def _headline(self) -> str:
        return f"{self.operation}: the ranks disagree."

    def __reduce__(self) -> tuple[type["MismatchError"], tuple[object, ...]]:
        """Pickle by the arguments, so that the error can cross a process boundary."""
        return type(self), (self.operation, self.rows, self.hint, self.callers)


class UnevenDataError(MismatchError):
    """Ranks have different numbers of batches, and would wait for each other for ever.

    Attributes:
        counts: Batches by rank: what each has, or what it has taken so far.
    """

    def __init__(
        self,
        operation: str,
        rows: Sequence[Disagreement],
        hint: str = "",
        callers: Sequence[Caller] = (),
        counts: Sequence[int] = (),
    ) -> None:
        """Keep the counts beside the rows."""
        self.counts: tuple[int, ...] = tuple(counts)
        super().__init__(operation, rows, hint, callers)

    def _headline(self) -> str:
        return (
            f"{self.operation}: the ranks have different numbers of batches: "
            f"{', '.join(map(str, self.counts))} by rank."
        )

    def __reduce__(self) -> tuple[type["MismatchError"], tuple[object, ...]]:
        """Pickle by the arguments."""
        return type(self), (self.operation, self.rows, self.hint, self.callers, self.counts)


class RemoteTraceback(Exception):  # noqa: N818 -- shown as a cause, never raised by itself
    """The traceback of an exception of another rank, as text."""

    def __init__(self, text: str) -> None:
        """Keep the text."""
        self.text = text
        super().__init__(text)

    def __str__(self) -> str:
        """Show the traceback below a line of its own."""
        return f"\n{self.text}"


class Drift(NamedTuple):
    """One row of a :class:`ReplicaDriftError`: a leaf that isn't what it is on the reference rank."""

    rank: int
    path: str  # of the leaf, such as "tree['weight']"
    reference: int  # a rank that has what most ranks have
    num_elements: int
    num_differing: int | None = None  # elements of which any bit differs; None: the leaf wasn't compared
    # Greatest absolute difference: 0 where only signs of zeros differ, NaN where a NaN met something else,
    # None where torch can't compute with the dtype.
    largest: float | None = None
    position: tuple[int, ...] | None = None  # of the element that differs most


class ReplicaDriftError(DistributedError):
    """Ranks hold different values of what should be the same on all of them.

    Attributes:
        operation: Name of the operation that found it.
        rows: Each leaf on each rank that differs from what most ranks have.
    """

    def __init__(self, operation: str, rows: tuple[Drift, ...]) -> None:
        """Keep ``rows`` and print the first of them as a table."""
        self.operation = operation
        self.rows = rows
        num_leaves = len({row.path for row in rows})
        subject = "1 leaf differs" if num_leaves == 1 else f"{num_leaves} leaves differ"
        lines = [f"{operation}: {subject} between ranks."]
        lines += [f"  rank {row.rank}  {row.path}  {_amount(row)}" for row in rows[:_MAX_ROWS]]
        if len(rows) > _MAX_ROWS:
            lines.append(f"  ... and {len(rows) - _MAX_ROWS} more")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type["ReplicaDriftError"], tuple[str, tuple[Drift, ...]]]:
        """Pickle by the arguments, so that the error can cross a process boundary."""
        return type(self), (self.operation, self.rows)


class RemoteRankError(DistributedError):
    """Another rank failed, so the operation can't be carried out on this one.

    Its cause (``__cause__``) shows the traceback of the other rank, where it is known.

    Attributes:
        rank: The rank that failed.
        cause: Name of its exception's class.
        message: Its exception's message.
        operation: What it was doing: the operation across ranks, or the block or loader that failed.
        traceback: Its traceback as text, or "".
    """

    def __init__(self, rank: int, cause: str, message: str, operation: str = "", traceback: str = "") -> None:
        """Name the rank and repeat its message."""
        self.rank = rank
        self.cause = cause
        self.message = message
        self.operation = operation
        self.traceback = traceback
        where = f" in {operation}" if operation else ""
        super().__init__(f"rank {rank} failed{where}: {cause}: {message}")
        if traceback:
            self.__cause__: BaseException | None = RemoteTraceback(traceback)

    def __reduce__(self) -> tuple[type["RemoteRankError"], tuple[int, str, str, str, str]]:
        """Pickle by the arguments, so that the error can cross a process boundary."""
        return type(self), (self.rank, self.cause, self.message, self.operation, self.traceback)


class MissingRankError(DistributedError):
    """A rank ended its work while others still wait for it in a collective."""


class CollectiveTimeoutError(DistributedError, TimeoutError):
    """A rank did not arrive at a collective within the time allowed."""


def _table(rows: Sequence[Disagreement], callers: Sequence[Caller]) -> list[str]:
    """Format the rows in columns, and below them what each rank called."""
    by_rank = {caller.rank: caller for caller in callers}
    titles = ("rank", "operation", "call site", "leaf", "found", "expected")
    cells: list[tuple[str, ...]] = []
    for row in rows:
        caller = by_rank.get(row.rank, Caller(row.rank, "", ""))
        cells.append((str(row.rank), caller.operation, caller.site, row.path, row.found, row.expected))
    used = [column for column in range(len(titles)) if any(cell[column] for cell in cells)]
    widths = {column: max(len(line[column]) for line in (titles, *cells)) for column in used}
    lines = [
        "  " + "  ".join(line[column].ljust(widths[column]) for column in used).rstrip()
        for line in ((titles, *cells) if cells else ())
    ]
    calls: dict[tuple[str, str], list[int]] = {}
    for caller in callers:
        calls.setdefault((caller.operation, caller.site), []).append(caller.rank)
    if len(calls) > 1 or (calls and not cells):
        lines += [
            f"  rank{'s' if len(ranks) > 1 else ''} {_ranges(ranks)} called {operation} at {site}"
            for (operation, site), ranks in calls.items()
        ]
    return lines


def _ranges(ranks: list[int]) -> str:
    """Write ranks briefly.

    >>> _ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1] = [parts[-1][0], rank]
        else:
            parts.append([rank])
    return ", ".join("-".join(map(str, part)) for part in parts)


def _amount(row: Drift) -> str:
    """Return how much a leaf differs."""
    if row.num_differing is None:
        return f"differs from rank {row.reference}"
    text = f"{row.num_differing} of {row.num_elements} elements differ from rank {row.reference}"
    if row.largest is not None and math.isnan(row.largest):
        text += ", NaN among them"
    elif row.largest == 0:
        text += ", in the sign of zero"
    elif row.largest is not None:
        text += f", by at most {row.largest:.3g}"
    return f"{text}, at {list(row.position)}" if row.position else text
