"""Read batches that nobody has planned: of data that was sharded already, or that come as they are."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from itertools import islice
from typing import Any, Generic, TypeVar, cast

from torch.utils.data import DataLoader

from accelfn.comm import Call, gather_bytes
from accelfn.context import Context
from accelfn.data.reading import EVENED, Pass, Share
from accelfn.tree import find_batch_size

__all__ = ("OwnReader", "rows_of", "with_rows")

T = TypeVar("T")


class OwnReader(Generic[T]):
    """Hands out what the user's loader gives."""

    def __init__(self, ctx: Context, source: DataLoader[T], seed: int) -> None:
        """Read ``source``."""
        self.length: int | None = None
        self.seed = seed
        self.even_batches = False  # each rank has what it was given
        self._ctx = ctx
        self._source = source
        size = getattr(source, "batch_size", None)
        self.batch_size: int | None = None if size is None else size * ctx.num_processes

    def plan(self, start: int) -> None:
        """Know nothing of how it was shared out."""
        del start

    def count(self, start: int) -> int | None:
        """Count this rank's batches, where the loader has a length and nothing is read yet."""
        try:
            return max(0, len(cast("Sized", self._source)) - start)
        except TypeError:
            return None

    def begin(self, epoch: int, start: int) -> Pass[T]:
        """Begin a pass; what comes before ``start``, here a number of batches, is read and thrown away."""
        del epoch
        own = self.count(start)
        blobs = [b"" if own is None else str(own).encode()]
        if self._ctx.num_processes > 1:
            blobs = gather_bytes(self._ctx, Call("a pass over data"), blobs[0])
        counts = tuple(int(blob) for blob in blobs if blob)
        return Pass(counts if len(counts) == len(blobs) else None, self._read(start))

    def _read(self, start: int) -> Iterator[tuple[T, Share]]:
        for number, batch in enumerate(islice(self._source, start, None), start + 1):
            yield batch, Share(num_rows=rows_of(batch), consumed=number)


def rows_of(batch: Any) -> int | None:
    """Count the rows of a batch that nobody has planned."""
    try:
        return find_batch_size(batch)
    except ValueError:  # no tensor in it: the batch is the user's own kind
        return None


def with_rows(begun: Pass[T]) -> Pass[T]:
    """Give a pass over batches of the user's own, whose rows only the batches themselves tell."""
    return Pass(begun.counts, _counted(begun.batches), evened_by=EVENED)


def _counted(batches: Iterator[tuple[T, Share]]) -> Iterator[tuple[T, Share]]:
    for batch, share in batches:
        own_valid = None if share.own_valid else 0
        known = Share(
            num_rows=rows_of(batch), own_valid=own_valid, is_last=share.is_last, consumed=share.consumed
        )
        yield batch, known
