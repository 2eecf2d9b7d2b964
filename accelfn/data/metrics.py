"""Gather what was computed from batches over all ranks, without the padding rows."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch

from accelfn.comm import catch, gather, gather_bytes
from accelfn.comm.agreement import tree_call
from accelfn.context import Context, takes_context
from accelfn.data.microbatch import MicroBatch, check_micro
from accelfn.errors import MismatchError
from accelfn.tree import TreeSpec, find_device, flatten

__all__ = ("gather_for_metrics", "gather_objects_for_metrics", "gather_valid")

T = TypeVar("T")


@takes_context
def gather_for_metrics(
    ctx: Context, tree: T, micro: MicroBatch, *, of: Literal["batch", "pass"] | None = None
) -> T:
    """Gather what was computed from data over all ranks, without the padding rows.

    If every batch is gathered, the results of an epoch have exactly one row per sample, in the order of the
    epoch. Or collect the rows of a pass and gather them once, with the ``micro`` of the last batch, even
    after a ``break``: ``gather_for_metrics(ctx, torch.cat(rows), micro, of="pass")`` returns one row for each
    sample that was read in this pass, first all rows of rank 0, then all of rank 1, and so on.

    A leaf that has on every rank ``k`` times as many rows as the batch, or with ``of="pass"`` as all batches
    of the pass up to this one, has ``k`` consecutive rows for each sample; usually ``k`` is 1. Any other
    number of rows, and 0-d tensors, are unknown, so all rows are kept. To weight a batch's loss by samples,
    repeat it ``micro.num_rows`` times, not as many times as a full batch has samples; or gather the loss and
    its weight.

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
        of: What the rows belong to: ``"batch"``, or ``"pass"`` for all batches of the pass up to this one.
            None means the batch too, but refuses rows that may be those of the pass.

    Returns:
        The same tree on every rank; for one value per rank, a list of the values.

    Raises:
        TypeError: A leaf is a sparse tensor or an array that isn't a tensor (``RemoteRankError`` on the other
            ranks).
        MismatchError: The trees differ between ranks, for example because a ``collate_fn`` dropped samples on
            one of them.
        ValueError: A leaf has as many rows as the pass, whose padding differs, and ``of`` is None.

    >>> from accelfn.data import microbatches
    >>> ((batch, micro),) = microbatches(Context(), [torch.ones(2)])
    >>> gather_for_metrics(Context(), {"x": batch, "name": ["a", "b"], "loss": batch.sum()}, micro)
    {'x': tensor([1., 1.]), 'name': ['a', 'b'], 'loss': tensor([2.])}
    """
    return gather_valid(ctx, tree, micro, of)


@takes_context
def gather_objects_for_metrics(
    ctx: Context, obj: Any, micro: MicroBatch | None, *, of: Literal["batch", "pass"] | None = None
) -> list[Any]:
    """Gather Python objects from all ranks; from a list with one object per row, without those of padding.

    As :func:`accelfn.gather_for_metrics`, but the objects may contain tensors.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        obj: A list is concatenated with the lists of the other ranks; anything else is one item.
        micro: The MicroBatch that the objects were computed from; None keeps all objects.
        of: As for :func:`accelfn.gather_for_metrics`.

    Returns:
        One list, the same on every rank.
    """
    return gather_valid(ctx, obj, micro, of, as_objects=True, function="gather_objects_for_metrics")


def gather_valid(
    ctx: Context,
    tree: Any,
    micro: MicroBatch | None,
    of: Literal["batch", "pass"] | None = None,
    ended: Sequence[MicroBatch] = (),
    *,
    as_objects: bool = False,
    function: str = "gather_for_metrics",
) -> Any:
    """Gather as :func:`gather_for_metrics` does, what belongs to a batch or to one of several passes.

    Rows belong to what has exactly as many; if there is none, to what has the ``k``-th part of them.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        tree: As for :func:`gather_for_metrics`.
        micro: As for :func:`gather_for_metrics`, if there is one.
        of: As for :func:`gather_for_metrics`.
        ended: The last micro-batch of each pass whose rows they may be instead of those of a batch.
        as_objects: The tree is one list of objects, or one object.
        function: For messages.

    Raises:
        TypeError: ``micro`` isn't a MicroBatch.
        ValueError: ``of`` is something else; or the rows of a leaf match several of these, whose padding
            differs, or may be those of the pass that the batch is in.
    """
    check_micro(function, micro)
    if of not in ("batch", "pass", None):
        raise ValueError(f'{function}: of must be "batch" or "pass", got {of!r}.')
    batch, passes = (None, [micro]) if of == "pass" and micro is not None else (micro, ended)
    ctx = ctx.along("dp")  # the ranks along other axes have the same rows
    leaves, structure = flatten(tree, (lambda _: True) if as_objects else _is_object_list)
    is_tensor = [isinstance(leaf, torch.Tensor) and not as_objects for leaf in leaves]
    lengths = [_length(leaf, as_objects) for leaf in leaves]
    known = [*passes] if batch is None else [batch, *passes]
    have_no_padding = all(other.pass_is_full for other in known) or all(length is None for length in lengths)
    if have_no_padding and all(is_tensor):  # on all ranks alike
        return _gather(ctx, tree, batch)
    report = _RankReport(
        parts=[
            (None, None) if batch is None else (batch.num_rows, batch.own_valid),
            (None, None) if batch is None or of is not None else (batch.pass_rows, batch.pass_valid),
            *((other.pass_rows, other.pass_valid) for other in passes),
        ],
        lengths=lengths,
        objects=[None if tensor else leaf for leaf, tensor in zip(leaves, is_tensor, strict=True)],
    )
    reports = _exchange_reports(ctx, structure, report, as_objects)
    by_leaf = zip(*(report.lengths for report in reports), strict=True)
    valid = [_valid_rows(list(lengths), reports) for lengths in by_leaf]
    if any(is_tensor):
        longest = [max(report.lengths[index] or 0 for report in reports) for index in range(len(leaves))]
        padded = [
            (leaf if counts is None else _pad_rows(leaf, most)) if tensor else None
            for leaf, tensor, counts, most in zip(leaves, is_tensor, valid, longest, strict=True)
        ]
        gathered = iter(flatten(_gather(ctx, structure.unflatten(padded), batch))[0])
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
        parts: Rows of its batch (None if unknown), and how many of the first rows aren't padding (None for
            all); the same for the pass of the batch, up to it, if they may be its rows; and for each pass
            whose rows may have been collected.
        lengths: Number of rows of each leaf; None for a leaf without rows.
        objects: The leaves that aren't tensors.
    """

    parts: list[tuple[int | None, int | None]]
    lengths: list[int | None]
    objects: list[Any]


def _is_object_list(node: Any) -> bool:
    return type(node) in (list, tuple) and find_device(node) is None


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


def _valid_rows(lengths: list[int | None], reports: Sequence[_RankReport]) -> list[int] | None:
    """Return how many of the first rows of each rank aren't padding, in one leaf; None keeps all. Pure.

    All ranks get the same result, since all have the same reports.
    """
    if None in lengths:
        return None
    rows = cast("list[int]", lengths)
    batches, within, *passes = zip(*(report.parts for report in reports), strict=False)
    found = [match for part in (batches, *passes) if (match := _match(rows, part)) is not None]
    matches = [valid for times, valid in found if times <= 1] or [valid for _, valid in found]
    if any(match != matches[0] for match in matches):
        raise ValueError(
            f"gather_for_metrics: {rows} rows by rank match several passes or batches, whose padding "
            "differs. Pass micro=, the MicroBatch of the batch that they were computed from; for the rows of "
            'a pass, that of its last batch (accelerator.last_micro at the end of its loop) and of="pass".'
        )
    around = _match(rows, within)
    is_exact = any(times <= 1 for times, _ in found)
    if not is_exact and around is not None and around[0] == 1 and [around[1]] != (matches[:1] or [rows]):
        raise ValueError(
            f"gather_for_metrics: the batches of this pass have {rows} rows by rank so far, some of them "
            'padding. To gather what was collected over the pass, use of="pass"; what belongs to the batch, '
            'of="batch"; for values that aren\'t rows, gather.'
        )
    if matches:
        return matches[0]
    if any(number is not None for number, _ in batches) or all(valid != 0 for _, valid in batches):
        return None
    # A repeated batch counts for nothing, although its number of rows is unknown.
    return [0 if valid == 0 else number for (_, valid), number in zip(batches, rows, strict=True)]


def _match(rows: list[int], parts: Sequence[tuple[int | None, int | None]]) -> tuple[int, list[int]] | None:
    """Return how many rows a leaf has for each of the ranks' ``parts``, and how many of them aren't padding.

    None if its rows aren't the same multiple on all ranks.
    """
    numbers = [number for number, _ in parts]
    if None in numbers:
        return None
    times = max(rows) // max(1, *cast("list[int]", numbers))
    wanted = [(number or 0) * times for number in numbers]
    valid = [times * ((number or 0) if of_it is None else of_it) for number, of_it in parts]
    return (times, valid) if rows == wanted else None


def _gather(ctx: Context, tree: T, batch: MicroBatch | None) -> T:
    """Gather; if the trees differ, add the planned number of rows to the error."""
    try:
        return gather(ctx, tree)
    except MismatchError as error:
        if batch is None or batch.max_rows is None or not all(row.path for row in error.rows):
            raise  # the rows weren't planned, or the ranks called different operations
        hint = (
            f"{error.hint} According to the plan of the data, the longest batch of this step has "
            f"{batch.max_rows} row{'' if batch.max_rows == 1 else 's'}. If collate_fn drops samples, filter "
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
