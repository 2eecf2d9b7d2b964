"""All exception classes of accelfn.

::

    AccelfnError
    |-- ConfigurationError        (ValueError)           a record or an option is not valid
    |   `-- EnvironmentPlanError                         the launcher's variables contradict each other
    |-- NotAvailableError         (NotImplementedError)  valid, but not supported yet
    |-- MissingExtraError         (ImportError)          an optional package is not installed
    |-- NonFiniteGradientError    (FloatingPointError)   a gradient is infinite or NaN
    |-- DoesNotFitError           (ValueError)           a model doesn't fit into the memory it may use
    |-- CheckpointError                                  a checkpoint can't be written or loaded
    |   |-- NoCheckpointError     (FileNotFoundError)    the directory has no committed checkpoint
    |   |-- DamagedCheckpointError (ValueError)          a file differs from what was written
    |   `-- CheckpointMismatchError (ValueError)         the checkpoint's tree differs from the target
    `-- DistributedError          (RuntimeError)         several ranks are involved
        |-- MismatchError                                ranks called different operations
        |   `-- UnevenDataError                          ranks have different numbers of batches
        |-- ReplicaDriftError                            replicas differ between ranks
        |-- RemoteRankError                              another rank failed
        |-- MissingRankError                             a rank ended before a collective
        `-- CollectiveTimeoutError (TimeoutError)        a rank did not arrive in time

Wrong arguments of a single call raise a plain ``ValueError`` or ``TypeError``.
"""

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
    """Base class of accelfn's exceptions."""


class ConfigurationError(AccelfnError, ValueError):
    """A configuration record or an option of ``init_context`` is not valid."""


class EnvironmentPlanError(ConfigurationError):
    """A launcher's environment variables are incomplete or contradictory."""


class NotAvailableError(AccelfnError, NotImplementedError):
    """The request is valid, but accelfn does not support it yet."""


class MissingExtraError(AccelfnError, ImportError):
    """A required optional package is not installed."""


class NonFiniteGradientError(AccelfnError, FloatingPointError):
    """Gradients are infinite or NaN, and the optimizer step was not taken.

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
    """A part of a model that can't be split fits on none of the remaining devices."""


class CheckpointError(AccelfnError):
    """A checkpoint can't be written, found or loaded. An earlier checkpoint is unchanged."""


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """The directory has no committed checkpoint."""


class DamagedCheckpointError(CheckpointError, ValueError):
    """A file of a checkpoint differs from what was written. Nothing was loaded.

    Attributes:
        file: Its name in the checkpoint; "" if there is no single such file.
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
    stored: str  # in the checkpoint: dtype and shape, a type, or "nothing"
    wanted: str  # in the target


class CheckpointMismatchError(CheckpointError, ValueError):
    """A checkpoint's tree differs from the target tree. Nothing was loaded.

    Attributes:
        rows: Each leaf that is missing, extra, or of another shape or dtype.
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
    """An error that involves several ranks; every rank raises."""


class Disagreement(NamedTuple):
    """One row of a :class:`MismatchError`: how one rank differs from the others."""

    rank: int
    path: str  # of the leaf, such as "tree['x'][0]"; empty if the whole call differs
    expected: str  # on most ranks
    found: str  # on this rank


class Caller(NamedTuple):
    """The call of one rank."""

    rank: int
    operation: str
    site: str  # such as "train.py:41 in main"


class MismatchError(DistributedError):
    """Ranks called different operations, or one operation with different trees or at different places.

    Attributes:
        operation: Name of the operation on most ranks.
        rows: Differences, by rank and tree path.
        callers: Call of each rank, in rank order; empty if unknown.
        hint: Remedy.
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
    """Ranks have different numbers of batches, so some would wait for ever.

    Attributes:
        counts: Batches of each rank, in total or so far.
    """

    def __init__(
        self,
        operation: str,
        rows: Sequence[Disagreement],
        hint: str = "",
        callers: Sequence[Caller] = (),
        counts: Sequence[int] = (),
    ) -> None:
        """Keep the counts and rows."""
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
        """Show the traceback on its own lines."""
        return f"\n{self.text}"


class Drift(NamedTuple):
    """One row of a :class:`ReplicaDriftError`: a leaf that differs from the reference rank's."""

    rank: int
    path: str  # of the leaf, such as "tree['weight']"
    reference: int  # the lowest rank with the most common value


class ReplicaDriftError(DistributedError):
    """Values that should be equal on all ranks differ.

    Attributes:
        operation: Name of the operation that found the difference.
        rows: Each differing leaf of each rank.
    """

    def __init__(self, operation: str, rows: tuple[Drift, ...]) -> None:
        """Keep ``rows`` and print the first of them as a table."""
        self.operation = operation
        self.rows = rows
        num_leaves = len({row.path for row in rows})
        subject = "1 leaf differs" if num_leaves == 1 else f"{num_leaves} leaves differ"
        lines = [f"{operation}: {subject} between ranks."]
        lines += [
            f"  rank {row.rank}  {row.path}  differs from rank {row.reference}" for row in rows[:_MAX_ROWS]
        ]
        if len(rows) > _MAX_ROWS:
            lines.append(f"  ... and {len(rows) - _MAX_ROWS} more")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[type["ReplicaDriftError"], tuple[str, tuple[Drift, ...]]]:
        """Pickle by the arguments, so that the error can cross a process boundary."""
        return type(self), (self.operation, self.rows)


class RemoteRankError(DistributedError):
    """Another rank failed, so the operation can't complete on this one.

    ``__cause__`` shows the traceback of the other rank, if known.

    Attributes:
        rank: The rank that failed.
        cause: Name of its exception's class.
        message: Its exception's message.
        operation: The operation, block or loader that failed there.
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
    """A rank ended while others wait for it in a collective."""


class CollectiveTimeoutError(DistributedError, TimeoutError):
    """A rank did not arrive at a collective within the timeout."""


def _table(rows: Sequence[Disagreement], callers: Sequence[Caller]) -> list[str]:
    """Format the rows as columns, followed by each rank's call."""
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
    """Format ranks as ranges.

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
