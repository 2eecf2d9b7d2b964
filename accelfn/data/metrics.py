"""Gather what was computed from batches over all ranks, without the padding rows."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch

from accelfn.comm import catch, gather, gather_bytes
from accelfn.comm.agreement import tree_call
from accelfn.context import Context, check_context
from accelfn.data.microbatch import MicroBatch, check_micro
from accelfn.errors import MismatchError
from accelfn.tree import TreeSpec, find_device, flatten

__all__ = ("gather_for_metrics", "gather_objects_for_metrics", "gather_valid")

T = TypeVar("T")


def gather_for_metrics(ctx: Context, tree: T, micro: MicroBatch) -> T:
    """Gather what was computed from data over all ranks, without the padding rows.

    If every batch is gathered, the results of an epoch have exactly one row per sample, in the order of the
    epoch. Or collect the rows of a pass and gather them once, with the ``micro`` of the last batch, even
    after a ``break``: ``gather_for_metrics(ctx, torch.cat(rows), micro)`` returns one row for each sample
    that was read in this pass, first all rows of rank 0, then all of rank 1, and so on.

    The number of rows of a leaf, on all ranks together, determines what its rows are:

    - as many as the batch has: one row for each sample of the batch;
    - as many as all batches of the pass have up to this one: one row for each sample of the pass;
    - ``k`` times as many as the batch has: ``k`` consecutive rows for each sample. With the ``k``-th batch of
      a pass, these may also be the rows of the pass: they are those of the batch if earlier batches of the
      pass were gathered with ``k`` rows per sample, or beside a leaf that has one row per sample. If earlier
      batches were gathered with several other numbers, it is an error;
    - any other number, and 0-d tensors: unknown, so all rows are kept. To weight a batch's loss by samples,
      repeat it ``micro.num_rows`` times, not as many times as a full batch has samples; or gather the loss
      and its weight.

    On a mesh, rows are joined along ``"dp"``: ranks that share a batch have the same rows. To gather values
    that aren't rows, use :func:`accelfn.gather`.

    Ranks: every rank of ``ctx``. One packed gather of the tensors, and one more exchange if the tree holds
    other objects, if rows may be padding, or if the number of rows wasn't planned.

    Args:
        ctx: The world.
        tree: Tensors of any dtype, of shape ``(rows, ...)`` or ``()``. A list or tuple without tensors is one
            leaf with an object per row. Any other object, such as a number or a string, is one value per
            rank; ``None`` stays ``None``.
        micro: The MicroBatch of the batch that ``tree`` was computed from, or of the last batch of the pass.

    Returns:
        The same tree on every rank; for one value per rank, a list of the values.

    Raises:
        TypeError: A leaf is a sparse tensor or an array that isn't a tensor (``RemoteRankError`` on the other
            ranks).
        MismatchError: The trees differ between ranks, for example because a ``collate_fn`` dropped samples on
            one of them.
        ValueError: A leaf may have the rows of the batch or those of the pass, whose padding differs.

    >>> from accelfn.data import microbatches
    >>> ((batch, micro),) = microbatches(Context(), [torch.ones(2)])
    >>> gather_for_metrics(Context(), {"x": batch, "name": ["a", "b"], "loss": batch.sum()}, micro)
    {'x': tensor([1., 1.]), 'name': ['a', 'b'], 'loss': tensor([2.])}
    """
    check_context("gather_for_metrics", ctx)
    check_micro("gather_for_metrics", micro)
    return gather_valid(ctx, tree, micro)


def gather_objects_for_metrics(ctx: Context, obj: Any, micro: MicroBatch | None) -> list[Any]:
    """Gather Python objects from all ranks; from a list with one object per row, without those of padding.

    As :func:`accelfn.gather_for_metrics`, but the objects may contain tensors.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        obj: A list is concatenated with the lists of the other ranks; anything else is one item.
        micro: The MicroBatch that the objects were computed from; None keeps all objects.

    Returns:
        One list, the same on every rank.
    """
    check_context("gather_objects_for_metrics", ctx)
    check_micro("gather_objects_for_metrics", micro)
    return gather_valid(ctx, obj, micro, as_objects=True)


def gather_valid(
    ctx: Context,
    tree: Any,
    micro: MicroBatch | None,
    earlier: Sequence[MicroBatch] = (),
    as_objects: bool = False,
) -> Any:
    """Gather as :func:`gather_for_metrics` does, with the micro-batches of several passes.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        tree: As for :func:`gather_for_metrics`.
        micro: The current micro-batch, if there is one.
        earlier: The last micro-batches of other passes, whose rows ``tree`` may hold.
        as_objects: The tree is one list of objects, or one object.

    Raises:
        ValueError: The rows of a leaf match several micro-batches, which differ in their padding.
    """
    ctx = ctx.along("dp")  # the ranks along other axes have the same rows
    leaves, structure = flatten(tree, _is_any if as_objects else _is_object_list)
    is_tensor = [isinstance(leaf, torch.Tensor) and not as_objects for leaf in leaves]
    lengths = [_length(leaf, as_objects) for leaf in leaves]
    known = [*earlier] if micro is None else [micro, *earlier]
    have_no_padding = all(other.pass_is_full for other in known) or all(length is None for length in lengths)
    if have_no_padding and all(is_tensor):  # on all ranks alike
        _note_multiples(micro, lengths, known)
        return _gather(ctx, tree, micro)
    report = _RankReport(
        batch=(None, None) if micro is None else (micro.num_rows, micro.own_valid),
        passes=[(other.pass_rows, other.pass_valid) for other in known],
        lengths=lengths,
        objects=[None if tensor else leaf for leaf, tensor in zip(leaves, is_tensor, strict=True)],
        multiples=sorted(micro.multiples.seen) if micro is not None and micro.multiples is not None else [],
    )
    reports = _exchange_reports(ctx, structure, report, as_objects)
    valid = _valid_rows_by_leaf(reports)
    _note_multiples(micro, lengths, known)
    if any(is_tensor):
        longest = [max(report.lengths[index] or 0 for report in reports) for index in range(len(leaves))]
        padded = [
            (leaf if counts is None else _pad_rows(leaf, most)) if tensor else None
            for leaf, tensor, counts, most in zip(leaves, is_tensor, valid, longest, strict=True)
        ]
        gathered = iter(flatten(_gather(ctx, structure.unflatten(padded), micro))[0])
        leaves = [next(gathered) if tensor else leaf for leaf, tensor in zip(leaves, is_tensor, strict=True)]
    return structure.unflatten(
        [
            _drop_padding(leaf, counts) if tensor else _join_objects(reports, index, counts)
            for index, (leaf, tensor, counts) in enumerate(zip(leaves, is_tensor, valid, strict=True))
        ]
    )


class _RankReport(NamedTuple):
    """What one rank sends to the others.

    Attributes:
        batch: Rows of its batch (None if unknown), and how many of the first rows aren't padding (None for
            all).
        passes: The same for each pass whose rows may have been collected.
        lengths: Number of rows of each leaf; None for a leaf without rows.
        objects: The leaves that aren't tensors.
        multiples: The numbers of rows per sample in earlier batches of the pass, where several.
    """

    batch: tuple[int | None, int | None]
    passes: list[tuple[int | None, int | None]]
    lengths: list[int | None]
    objects: list[Any]
    multiples: list[int]


def _note_multiples(
    micro: MicroBatch | None, lengths: Sequence[int | None], known: Sequence[MicroBatch]
) -> None:
    """Note how many rows per sample leaves have, where several, and where they can't be those of a pass."""
    if micro is None or micro.multiples is None or not micro.num_rows or micro.num_rows in lengths:
        return
    for length in lengths:
        times, rest = divmod(length or 0, micro.num_rows)
        if times > 1 and not rest and all(length != one.pass_rows for one in known):
            micro.multiples.seen.add(times)


def _is_object_list(node: Any) -> bool:
    return type(node) in (list, tuple) and find_device(node) is None


def _is_any(node: Any) -> bool:
    del node
    return True


def _length(leaf: Any, as_objects: bool) -> int | None:
    if isinstance(leaf, torch.Tensor) and not as_objects:
        return leaf.shape[0] if leaf.dim() else None
    holds_rows = type(leaf) is list or (type(leaf) is tuple and not as_objects)
    return len(cast("Sequence[Any]", leaf)) if holds_rows else None


def _exchange_reports(
    ctx: Context, structure: TreeSpec, report: _RankReport, as_objects: bool
) -> list[_RankReport]:
    """Return the reports of all ranks, by rank."""
    if ctx.num_processes == 1:
        _refuse_arrays(structure, report.objects, as_objects)
        return [report]

    def dump() -> bytes:
        _refuse_arrays(structure, report.objects, as_objects)
        return pickle.dumps(tuple(report))

    without_object = "an object" if as_objects else "a tensor"
    kinds = [without_object if leaf is None else _describe(leaf) for leaf in report.objects]
    call = tree_call("gather_for_metrics", "", structure, kinds, pairs=True)
    message, error = catch(dump)
    messages = gather_bytes(ctx, call, message or b"", error)
    return [_RankReport(*pickle.loads(message)) for message in messages]


def _refuse_arrays(structure: TreeSpec, objects: Sequence[Any], as_objects: bool) -> None:
    for leaf, path in zip(objects, () if as_objects else structure.paths(), strict=False):
        shape = getattr(leaf, "shape", ())
        if shape:
            raise TypeError(
                f"gather_for_metrics: {path} is a {type(leaf).__name__} of shape {shape} and must be a "
                "tensor. Use torch.as_tensor, or a list with one object for each row."
            )


def _describe(leaf: Any) -> str:
    return f"a {type(leaf).__name__} of objects" if type(leaf) in (list, tuple) else "an object"


def _valid_rows_by_leaf(reports: Sequence[_RankReport]) -> list[list[int] | None]:
    """Return for each leaf how many of the first rows of each rank aren't padding; None keeps all rows. Pure.

    All ranks get the same result, since all have the same reports.
    """
    by_leaf = [list(lengths) for lengths in zip(*(report.lengths for report in reports), strict=True)]
    batches = [report.batch[0] for report in reports]
    has_batch_leaf = None not in batches and batches in by_leaf
    return [_valid_rows(lengths, reports, has_batch_leaf) for lengths in by_leaf]


def _valid_rows(
    lengths: list[int | None], reports: Sequence[_RankReport], has_batch_leaf: bool
) -> list[int] | None:
    """Return it for one leaf; ``has_batch_leaf``: some leaf has exactly the rows of the batch."""
    if None in lengths:
        return None
    rows = cast("list[int]", lengths)
    batches = [report.batch[0] for report in reports]
    may_be_pass = rows == batches or not has_batch_leaf
    passes = zip(*(report.passes for report in reports), strict=False) if may_be_pass else ()
    matches = [
        [cast("int", valid) for _, valid in by_rank]
        for by_rank in passes
        if rows == [number for number, _ in by_rank]
    ]
    if matches and rows == batches:
        matches.append(
            [_valid_of_batch(report, number) for report, number in zip(reports, rows, strict=True)]
        )
    if any(match != matches[0] for match in matches):
        raise ValueError(
            f"gather_for_metrics: {rows} rows by rank match several passes or batches, whose padding "
            "differs. Pass micro=, the MicroBatch of the last batch that the rows were computed from: "
            "accelerator.last_micro at the end of its loop."
        )
    of_batch = None if None in batches else _repeated(rows, cast("list[int]", batches), reports)
    if matches and of_batch not in (None, matches[0]):  # several rows per sample, or those of the pass
        seen, times = reports[0].multiples, max(rows) // max(cast("list[int]", batches))
        if times in seen:
            return of_batch
        if len(seen) > 1:
            raise ValueError(
                f"gather_for_metrics: {rows} rows by rank may be {times} for each sample of the batch, or "
                "one for each sample of the pass, and earlier batches had "
                f"{' and '.join(map(str, seen))} for each. Gather them beside a tensor that has one row "
                f"for each sample of the batch, or with shape (samples, {times}, ...)."
            )
    if matches:
        return matches[0]
    if None in batches:
        is_padding = [report.batch[1] == 0 for report in reports]
        if not any(is_padding) or any(number is not None for number in batches):
            return None
        # A repeated batch counts for nothing, although its number of rows is unknown.
        return [0 if padding else number for padding, number in zip(is_padding, rows, strict=True)]
    return of_batch


def _repeated(rows: list[int], batches: list[int], reports: Sequence[_RankReport]) -> list[int] | None:
    """Return it for equally many rows for each sample of the batches; None if there are other numbers."""
    times = max(rows) // max(1, *batches)
    if rows != [times * number for number in batches]:
        return None
    return [times * _valid_of_batch(report, number) for report, number in zip(reports, batches, strict=True)]


def _valid_of_batch(report: _RankReport, rows: int) -> int:
    return rows if report.batch[1] is None else report.batch[1]


def _gather(ctx: Context, tree: T, micro: MicroBatch | None) -> T:
    """Gather; if the trees differ, add the planned number of rows to the error."""
    try:
        return gather(ctx, tree)
    except MismatchError as error:
        if micro is None or micro.max_rows is None or not all(row.path for row in error.rows):
            raise  # the rows weren't planned, or the ranks called different operations
        hint = (
            f"{error.hint} According to the plan of the data, the longest batch of this step has "
            f"{micro.max_rows} row{'' if micro.max_rows == 1 else 's'}. If collate_fn drops samples, filter "
            "the dataset instead, or keep their rows, mark them, and drop them after gathering."
        )
        raise MismatchError(error.operation, error.rows, hint, error.callers) from None


def _pad_rows(rows: torch.Tensor, number: int) -> torch.Tensor:
    missing = number - len(rows)
    return rows if missing == 0 else torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])


def _drop_padding(gathered: torch.Tensor, valid: Sequence[int] | None) -> torch.Tensor:
    if valid is None:
        return gathered
    most = len(gathered) // len(valid)
    if all(number == most for number in valid):
        return gathered
    return torch.cat([gathered[most * rank :][:number] for rank, number in enumerate(valid)])


def _join_objects(reports: Sequence[_RankReport], index: int, valid: Sequence[int] | None) -> Any:
    """Join leaf ``index``, which isn't a tensor, over all ranks."""
    parts = [report.objects[index] for report in reports]
    if reports[0].lengths[index] is None:
        return parts
    if valid is not None:
        parts = [part[:number] for part, number in zip(parts, valid, strict=True)]
    return type(parts[0])(item for part in parts for item in part)
