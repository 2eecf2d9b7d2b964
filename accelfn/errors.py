"""Every exception that accelfn raises on purpose.

::

    AccelfnError
    |-- ConfigurationError        (ValueError)           a record or an option is not valid
    |   `-- EnvironmentPlanError                         the launcher's variables contradict each other
    |-- NotAvailableError         (NotImplementedError)  valid, but this version has no machinery for it
    |-- MissingExtraError         (ImportError)          an optional package is not installed
    `-- DistributedError          (RuntimeError)         several ranks are involved
        |-- MismatchError                                ranks called different things
        |-- ReplicaDriftError                            what should be equal on every rank isn't
        |-- RemoteRankError                              another rank failed
        |-- MissingRankError                             a rank ended without taking part
        `-- CollectiveTimeoutError (TimeoutError)        a rank did not arrive in time

A wrong argument of a single call is a plain ``ValueError`` or ``TypeError``.
"""

from typing import NamedTuple

__all__ = (
    "AccelfnError",
    "CollectiveTimeoutError",
    "ConfigurationError",
    "Disagreement",
    "DistributedError",
    "Drift",
    "EnvironmentPlanError",
    "MismatchError",
    "MissingExtraError",
    "MissingRankError",
    "NotAvailableError",
    "RemoteRankError",
    "ReplicaDriftError",
)


_MAX_ROWS = 20


class AccelfnError(Exception):
    """Base of every exception that accelfn raises on purpose."""


class ConfigurationError(AccelfnError, ValueError):
    """A configuration record or an option of ``init_context`` is not valid."""


class EnvironmentPlanError(ConfigurationError):
    """The variables that a launcher set do not describe one world."""


class NotAvailableError(AccelfnError, NotImplementedError):
    """The request is valid, but this version of accelfn has no machinery for it."""


class MissingExtraError(AccelfnError, ImportError):
    """An optional package is needed and not installed."""


class DistributedError(AccelfnError, RuntimeError):
    """Something went wrong between ranks; each rank of the world raises."""


class Disagreement(NamedTuple):
    """One row of a :class:`MismatchError`: where one rank differs from the others."""

    rank: int
    path: str  # of the leaf, such as "tree['x'][0]"; empty when the whole call differs
    expected: str  # what most ranks have
    found: str  # what this rank has


class MismatchError(DistributedError):
    """Ranks called different operations, or the same one on different trees.

    Attributes:
        operation: Name of the operation, as most ranks called it.
        rows: What differs, by rank and tree path.
    """

    def __init__(self, operation: str, rows: tuple[Disagreement, ...], hint: str = "") -> None:
        """Keep ``rows`` and print them as a table."""
        self.operation = operation
        self.rows = rows
        lines = [f"{operation}: the ranks disagree."]
        lines += [
            f"  rank {row.rank}{_at(row.path)}: found {row.found}, expected {row.expected}" for row in rows
        ]
        if hint:
            lines.append(hint)
        super().__init__("\n".join(lines))
        self._hint = hint

    def __reduce__(self) -> tuple[type["MismatchError"], tuple[str, tuple[Disagreement, ...], str]]:
        """Pickle by the arguments, so that the error can cross a process boundary."""
        return type(self), (self.operation, self.rows, self._hint)


class Drift(NamedTuple):
    """One row of a :class:`ReplicaDriftError`: a leaf that isn't what it is on the reference rank."""

    rank: int
    path: str  # of the leaf, such as "tree['weight']"
    reference: int  # a rank that has what most ranks have
    num_elements: int
    num_differing: int | None = None  # elements of which any bit differs; None: the leaf wasn't compared
    largest: float | None = None  # greatest absolute difference; NaN where a NaN met something else
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

    Attributes:
        rank: The rank that failed.
        cause: Name of its exception's class.
    """

    def __init__(self, rank: int, cause: str, message: str, operation: str = "") -> None:
        """Name the rank and repeat its message."""
        self.rank = rank
        self.cause = cause
        self.message = message
        self.operation = operation
        where = f" in {operation}" if operation else ""
        super().__init__(f"rank {rank} failed{where}: {cause}: {message}")

    def __reduce__(self) -> tuple[type["RemoteRankError"], tuple[int, str, str, str]]:
        """Pickle by the arguments, so that the error can cross a process boundary."""
        return type(self), (self.rank, self.cause, self.message, self.operation)


class MissingRankError(DistributedError):
    """A rank ended its work while others still wait for it in a collective."""


class CollectiveTimeoutError(DistributedError, TimeoutError):
    """A rank did not arrive at a collective within the time allowed."""


def _at(path: str) -> str:
    return f", {path}" if path else ""


def _amount(row: Drift) -> str:
    """Say how much a leaf differs."""
    if row.num_differing is None:
        return f"differs from rank {row.reference}"
    text = (
        f"{row.num_differing} of {row.num_elements} elements differ from rank {row.reference}, "
        f"by at most {row.largest:.3g}"
    )
    return f"{text}, at {list(row.position)}" if row.position else text
