"""Bring what was computed from batches together over ranks, without the rows that are padding."""

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
    """Bring what was computed from data together over all ranks, without the rows that are padding.

    Batch by batch, the results of an epoch are exactly one row for each sample, in the order of the epoch.
    Or collect the rows of a pass and gather them once, with the ``micro`` of the last batch that was read,
    whether the loop ended there or was left: ``gather_for_metrics(ctx, torch.cat(rows), micro)`` gives one
    row for each sample that was read in this pass, first all of rank 0, then all of rank 1, and so on.

    What a leaf is, its number of rows tells, on all ranks together:

    - as many as the batch: one row for each sample of the batch;
    - as many as all batches of the pass up to this one: one row for each sample of the pass;
    - ``k`` times as many as the batch: ``k`` rows for each sample, those of one sample side by side. Alone,
      with the ``k``-th batch of a pass, it is taken for the rows of the pass: gather it beside a leaf that
      has one row for each sample, or with the shape ``(rows, k, ...)``;
    - any other number, and all 0-d tensors: it is unknown, so all of it is kept. A loss of the whole batch
      that is repeated to be counted by samples has to be repeated ``micro.num_rows`` times, not as many times
      as a full batch has samples; or gather it as it is, beside its weight.

    On a mesh, rows are joined along ``"dp"``: ranks that work on one batch together have the same ones. To
    gather what has nothing to do with rows, use :func:`accelfn.gather`.

    Ranks: every rank of ``ctx``. One packed gather of the tensors; one more exchange where the tree holds
    other things, where rows may be padding, and where nobody has planned how many there are.

    Args:
        ctx: The world.
        tree: Tensors of any dtype, shape ``(rows, ...)`` or ``()``. A list or tuple with no tensor in it is
            one leaf: an object for each row. Any other object, such as a number or a string, is one for each
            rank; ``None`` stays ``None``.
        micro: Of the batch that ``tree`` was computed from, or of the last one of the pass.

    Returns:
        The same tree on every rank; of an object that is one for each rank, a list of them.

    Raises:
        TypeError: A leaf is a sparse tensor or an array that is no tensor (``RemoteRankError`` on the ranks
            where all is well).
        MismatchError: The trees differ between ranks, as they do where a ``collate_fn`` has left out samples
            of the batch of one of them.

    >>> from accelfn.data import microbatches
    >>> ((batch, micro),) = microbatches(Context(), [torch.ones(2)])
    >>> gather_for_metrics(Context(), {"x": batch, "name": ["a", "b"], "loss": batch.sum()}, micro)
    {'x': tensor([1., 1.]), 'name': ['a', 'b'], 'loss': tensor([2.])}
    """
    check_context("gather_for_metrics", ctx)
    check_micro("gather_for_metrics", micro)
    return gather_valid(ctx, tree, micro)


def gather_objects_for_metrics(ctx: Context, obj: Any, micro: MicroBatch | None) -> list[Any]:
    """Bring Python objects of all ranks together; of a list with one for each row, without those of padding.

    As :func:`accelfn.gather_for_metrics` does, but objects may hold tensors.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        obj: A list is joined with those of the other ranks; anything else is one item.
        micro: Of the batch that the objects were computed from; None keeps all.

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
    """Gather as :func:`gather_for_metrics` does, with what else may be known.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        tree: As there.
        micro: Of the current batch; None where there is none.
        earlier: The last ones of other passes, whose rows ``tree`` may hold.
        as_objects: The whole tree is one list of objects, or one object.

    Raises:
        ValueError: A leaf has as many rows as several of these, which differ in what is padding.
    """
    ctx = ctx.along("dp")  # others have the same rows
    leaves, structure = flatten(tree, _is_anything if as_objects else _is_rows_of_objects)
    tensors = [isinstance(leaf, torch.Tensor) and not as_objects for leaf in leaves]
    lengths = [_length(leaf, as_objects) for leaf in leaves]
    known = [*earlier] if micro is None else [micro, *earlier]
    have_no_padding = all(one.pass_is_full for one in known) or all(length is None for length in lengths)
    if have_no_padding and all(tensors):  # so it is on all ranks
        return _gather(ctx, tree, micro)
    own = _Told(
        batch=(None, None) if micro is None else (micro.num_rows, micro.own_valid),
        passes=[(one.pass_rows, one.pass_valid) for one in known],
        lengths=lengths,
        objects=[None if tensor else leaf for leaf, tensor in zip(leaves, tensors, strict=True)],
    )
    told = _tell_all(ctx, structure, own, as_objects)
    valid = _valid_by_leaf(told)
    if any(tensors):
        longest = [max(one.lengths[index] or 0 for one in told) for index in range(len(leaves))]
        sent = [
            (leaf if keep is None else _lengthened(leaf, most)) if tensor else None
            for leaf, tensor, keep, most in zip(leaves, tensors, valid, longest, strict=True)
        ]
        gathered = iter(flatten(_gather(ctx, structure.unflatten(sent), micro))[0])
        leaves = [next(gathered) if tensor else leaf for leaf, tensor in zip(leaves, tensors, strict=True)]
    return structure.unflatten(
        [
            _cut(leaf, keep) if tensor else _joined(told, index, keep)
            for index, (leaf, tensor, keep) in enumerate(zip(leaves, tensors, valid, strict=True))
        ]
    )


class _Told(NamedTuple):
    """What one rank sends to the others.

    Attributes:
        batch: Rows of its batch, and how many of them, the first ones, are no padding; None for unknown, and
            for all.
        passes: The same of passes whose rows may have been collected.
        lengths: Rows of each leaf; None where it has none.
        objects: The leaves that are no tensors.
    """

    batch: tuple[int | None, int | None]
    passes: list[tuple[int | None, int | None]]
    lengths: list[int | None]
    objects: list[Any]


def _is_rows_of_objects(node: Any) -> bool:
    return type(node) in (list, tuple) and find_device(node) is None


def _is_anything(node: Any) -> bool:
    del node
    return True


def _length(leaf: Any, as_objects: bool) -> int | None:
    if isinstance(leaf, torch.Tensor) and not as_objects:
        return leaf.shape[0] if leaf.dim() else None
    holds_rows = type(leaf) is list or (type(leaf) is tuple and not as_objects)
    return len(cast("Sequence[Any]", leaf)) if holds_rows else None


def _tell_all(ctx: Context, structure: TreeSpec, own: _Told, as_objects: bool) -> list[_Told]:
    """Exchange what each rank tells; by rank."""
    if ctx.num_processes == 1:
        _refuse_arrays(structure, own.objects, as_objects)
        return [own]

    def dump() -> bytes:
        _refuse_arrays(structure, own.objects, as_objects)
        return pickle.dumps(tuple(own))

    nothing = "an object" if as_objects else "a tensor"
    kinds = [nothing if one is None else _kind(one) for one in own.objects]
    call = tree_call("gather_for_metrics", "", structure, kinds, pairs=True)
    blob, error = catch(dump)
    return [_Told(*pickle.loads(one)) for one in gather_bytes(ctx, call, blob or b"", error)]


def _refuse_arrays(structure: TreeSpec, objects: Sequence[Any], as_objects: bool) -> None:
    for leaf, path in zip(objects, () if as_objects else structure.paths(), strict=False):
        shape = getattr(leaf, "shape", ())
        if shape:
            raise TypeError(
                f"gather_for_metrics: {path} is a {type(leaf).__name__} of shape {shape}, and must be a "
                "tensor: use torch.as_tensor, or a list with one object for each row."
            )


def _kind(leaf: Any) -> str:
    return f"a {type(leaf).__name__} of objects" if type(leaf) in (list, tuple) else "an object"


def _valid_by_leaf(told: Sequence[_Told]) -> list[list[int] | None]:
    """Return how many rows of each leaf, the first ones by rank, are no padding; None keeps all. Pure.

    All ranks come to the same, since all have heard the same.
    """
    by_leaf = [list(lengths) for lengths in zip(*(one.lengths for one in told), strict=True)]
    batches = [one.batch[0] for one in told]
    is_of_batch = None not in batches and batches in by_leaf
    return [_valid(lengths, told, is_of_batch) for lengths in by_leaf]


def _valid(lengths: list[int | None], told: Sequence[_Told], is_of_batch: bool) -> list[int] | None:
    """Return it for one leaf; ``is_of_batch``: another one certainly belongs to the batch."""
    if None in lengths:
        return None
    rows = cast("list[int]", lengths)
    batches = [one.batch[0] for one in told]
    may_be_pass = rows == batches or not is_of_batch
    passes = zip(*(one.passes for one in told), strict=False) if may_be_pass else ()
    found = [
        [cast("int", valid) for _, valid in one] for one in passes if rows == [number for number, _ in one]
    ]
    if found and rows == batches:
        found.append(
            [number if one.batch[1] is None else one.batch[1] for one, number in zip(told, rows, strict=True)]
        )
    if any(one != found[0] for one in found):
        raise ValueError(
            f"gather_for_metrics: {rows} rows by rank are those of several passes or batches that were read "
            "last, and what is padding differs between them. Pass micro=, the MicroBatch of the last batch "
            "that the rows were computed from, such as accelerator.last_micro at the end of its loop."
        )
    if found:
        return found[0]
    if None in batches:
        repeated = [one.batch[1] == 0 for one in told]
        if not any(repeated) or any(number is not None for number in batches):
            return None
        # Of a batch that is padding throughout nothing counts, though its rows are unknown.
        return [0 if is_padding else number for is_padding, number in zip(repeated, rows, strict=True)]
    known = cast("list[int]", batches)
    times = max(rows) // max(1, *known)
    if rows != [times * number for number in known]:
        return None
    return [
        number if one.batch[1] is None else times * one.batch[1]
        for one, number in zip(told, rows, strict=True)
    ]


def _gather(ctx: Context, tree: T, micro: MicroBatch | None) -> T:
    """Gather, and where trees differ name how many rows were planned, which every rank knows."""
    try:
        return gather(ctx, tree)
    except MismatchError as error:
        if micro is None or micro.max_rows is None or not all(row.path for row in error.rows):
            raise  # nobody has planned the rows, or ranks called different things
        hint = (
            f"{error.hint} By the plan of the data, the longest batch of this step has {micro.max_rows} "
            f"row{'' if micro.max_rows == 1 else 's'}. If collate_fn leaves samples out, filter the dataset "
            "instead, or keep their rows, mark them, and leave them out of what was gathered."
        )
        raise MismatchError(error.operation, error.rows, hint, error.callers) from None


def _lengthened(rows: torch.Tensor, number: int) -> torch.Tensor:
    missing = number - len(rows)
    return rows if missing == 0 else torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])


def _cut(gathered: torch.Tensor, valid: Sequence[int] | None) -> torch.Tensor:
    if valid is None:
        return gathered
    most = len(gathered) // len(valid)
    if all(number == most for number in valid):
        return gathered
    return torch.cat([gathered[most * rank :][:number] for rank, number in enumerate(valid)])


def _joined(told: Sequence[_Told], index: int, valid: Sequence[int] | None) -> Any:
    """Join leaf ``index``, which is no tensor, over all ranks."""
    if told[0].lengths[index] is None:
        return [one.objects[index] for one in told]
    parts = [one.objects[index] for one in told]
    if valid is not None:
        parts = [part[:number] for part, number in zip(parts, valid, strict=True)]
    return type(parts[0])(item for part in parts for item in part)
