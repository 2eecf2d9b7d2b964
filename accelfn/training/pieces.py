"""Split the batch of a window into pieces, one for each microbatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch

from accelfn.comm import Call, catch, check, reduce
from accelfn.context import Context
from accelfn.data import MicroBatch, Window
from accelfn.parallel.strategies.compilation import not_compiled
from accelfn.tree import count_rows, flatten, slice_tensors


class Piece(NamedTuple):
    """One piece of a batch.

    Attributes:
        batch: The batch, with fewer rows.
        share: Its number of rows relative to the mean of all pieces.
        micro: Its position in the data, if it is a batch of a :class:`accelfn.Window`.
    """

    batch: Any
    share: float
    micro: MicroBatch | None = None


def split_window(
    batch: Any, num_steps: int, *, equally: bool = False, may_be_empty: bool = False
) -> list[Piece]:
    """Split the batch of a window along the first dimension of its tensors. The pieces are views.

    They differ by at most one row; a batch of fewer rows than ``num_steps`` has fewer pieces. 0-d tensors
    go to each of them. A batch without rows, if it ``may_be_empty``, has ``num_steps`` pieces like it. With
    one step, the piece is the batch itself, of any type. The pieces of a :class:`accelfn.Window` are its
    batches.

    Raises:
        ValueError: A leaf is no tensor, the tensors have different numbers of rows, or there is no row; or
            the rows can't be split ``equally``.
    """
    if isinstance(batch, Window):
        window = cast("Window[Any]", batch)
        # In exact mode batches count alike: shares would differ in the last bit with the number of ranks.
        sizes = [1 if equally else rows_in_common(one) for one in window.batches]
        mean = sum(sizes) / len(sizes) or 1.0
        each = zip(window.batches, sizes, window.micros, strict=True)
        return [Piece(one, size / mean, micro) for one, size, micro in each]
    if num_steps == 1:
        return [Piece(batch, 1.0)]
    reason = f"make_train_step: with gradient_accumulation_steps={num_steps} a batch is split into pieces"
    rows = count_rows(batch, "batch", reason, may_be_empty=may_be_empty)
    count = min(num_steps, rows) or num_steps
    least, longer = rows // count, rows % count  # torch.compile can't trace divmod of a size
    if equally and (longer or count < num_steps):
        raise ValueError(
            f"make_train_step: in exact mode the {rows} rows of a batch must be divisible by {num_steps}, "
            "the number of microbatches of each rank. Pass a multiple, or drop the last batch."
        )
    pieces: list[Piece] = []
    start = 0
    for index in range(count):
        size = least + (index < longer)
        share = 1.0 if longer == 0 else size * count / rows
        pieces.append(Piece(slice_tensors(batch, slice(start, start + size)), share))
        start += size
    return pieces


def rows_in_common(batch: Any) -> int:
    """Return the number of rows of a rank's batch: 1 where its tensors have no first dimension in common."""
    if isinstance(batch, Window):
        return sum(map(rows_in_common, cast("Window[Any]", batch).batches))
    tensors = [leaf for leaf in flatten(batch)[0] if isinstance(leaf, torch.Tensor) and leaf.dim()]
    rows = {tensor.shape[0] for tensor in tensors}
    return rows.pop() if len(rows) == 1 else 1


def splitter(ctx: Context) -> Callable[[Any, int], tuple[list[Piece], float | None]]:
    """Return a function that splits this rank's batch of a window into pieces, and returns its weight too.

    A mean over the rank's rows counts by this weight among those of other ranks: its number of rows, divided
    by the largest number of a rank in the first window. It is 1 where all ranks have equally many, as nearly
    always; None in a world of one rank.

    Ranks: local; for the function that is returned, every rank of ``ctx``. It communicates in its first call
    alone, or with an error.

    Raises:
        ValueError: (when called) As :func:`split_window`; on the other ranks RemoteRankError.
    """
    equally, largest = ctx.reduction is not None, 0

    @not_compiled
    def weight(batch: Any, error: Exception | None) -> float:
        nonlocal largest
        if error is not None:
            check(ctx, Call("make_train_step"), error)  # other ranks raise in their next communication
        rows = rows_in_common(batch)
        if not largest:
            largest = max(
                int(reduce(ctx.tagged("make_train_step"), torch.tensor(rows, device="cpu"), "max")), 1
            )
        return rows / largest

    def split(batch: Any, number: int) -> tuple[list[Piece], float | None]:
        if ctx.num_processes == 1:
            return split_window(batch, number, equally=equally), None
        pieces, error = catch(lambda: split_window(batch, number, equally=equally, may_be_empty=True))
        if equally and isinstance(batch, Window) and error is None:
            return pieces or [], None
        return pieces or [], weight(batch, error)

    return split
