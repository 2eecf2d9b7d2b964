"""Names for the random numbers of a batch in exact mode: where its samples are in the data."""

from __future__ import annotations

from accelfn.context import Context
from accelfn.data.reading import BatchInfo

__all__ = ("Draws", "draws_of")


class Draws:
    """Names the random numbers of one batch: the same name on whichever rank, and after a resumption.

    Attributes:
        name: Of the batch's place in the data.
        blocks: Blocks of code so far that have drawn for the batch; each draws other numbers.
    """

    __slots__ = ("blocks", "name")

    def __init__(self, name: str) -> None:
        """Begin with no block."""
        self.name: str = name
        self.blocks: int = 0

    def __repr__(self) -> str:
        """Show the name."""
        return f"Draws({self.name!r})"


def draws_of(ctx: Context, source: str, index: int, share: BatchInfo, before: int, is_own: bool) -> Draws:
    """Name the random numbers of a batch. Pure.

    Args:
        ctx: Says the rank.
        source: What the batch is of, such as ``"epoch 0"``.
        index: Number of the batch in its pass.
        share: What is known of it.
        before: Samples of the epoch that had been read before it.
        is_own: Each rank has data of its own. Together they count as one order: a batch of each rank in turn.
    """
    rank, size, read = ctx.rank, ctx.num_processes, share.consumed - before
    if not share.consumed:  # nobody counts
        return Draws(f"batch {index * size + rank} of {source}")
    if is_own:
        first = before * size + rank * read
    elif share.valid_by_rank is not None:
        first = before + sum(share.valid_by_rank[:rank])
    else:
        rows = -(-read // size) if share.max_rows is None else share.max_rows
        first = before + rank * rows
    return Draws(f"sample {first} of {source}")
