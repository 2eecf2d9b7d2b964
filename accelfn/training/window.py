"""One accumulation window as a train step sees it: a batch in pieces, and what their losses tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch

from accelfn.comm import Call, agree, catch, reduce
from accelfn.comm.agreement import layout_call
from accelfn.context import Context
from accelfn.parallel.exact import OrderedSum
from accelfn.training.backward import Loss
from accelfn.training.scaler import inverse_of_weight
from accelfn.tree import (
    TreeSpec,
    count_rows,
    find_batch_size,
    flatten,
    map_tensors,
    plan_layout,
    slice_tensors,
)

F = TypeVar("F", bound=Callable[..., Any])


class StepMetrics(NamedTuple):
    """Metrics of one optimizer step. Tensors, equal on every rank; reading them on the host waits.

    Attributes:
        loss: Mean over the window and all ranks, of parameters as they were before the step; shape ``()``,
            float32, or float64 where the loss is. Zero where all weights are, NaN where one is.
        grad_norm: Norm of the whole gradient before it was clipped, shape ``()``; None without ``max_norm``.
        skipped: Whether a float16 gradient overflowed, so that nothing was changed; bool, shape ``()``.
        aux: The tree that came with the losses, averaged as they are; None without one.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor | None
    skipped: torch.Tensor
    aux: Any


class Piece(NamedTuple):
    """One piece of a batch.

    Attributes:
        batch: As the whole, with fewer rows.
        share: Its rows over those of a piece of mean size; 1 where all have equally many.
    """

    batch: Any
    share: float


class Terms(NamedTuple):
    """What is added up over pieces and averaged over ranks: all means, or all sums with a weight."""

    loss: torch.Tensor
    weight: torch.Tensor | None
    aux: Any


def cut_window(batch: Any, num_steps: int, *, equally: bool = False) -> list[Piece]:
    """Cut the batch of a window along the first dimension of its tensors. The pieces are views.

    They differ by at most one row, and a batch of fewer rows than ``num_steps`` gives fewer pieces. 0-d
    tensors go to each of them. One piece is the batch itself, whatever it is.

    Raises:
        ValueError: A leaf is no tensor, the tensors have different numbers of rows, or there is no row; or
            the pieces have different numbers of rows, and are to be cut ``equally``.
    """
    if num_steps == 1:
        return [Piece(batch, 1.0)]
    reason = f"make_train_step: with gradient_accumulation_steps={num_steps} a batch is cut into pieces"
    rows = count_rows(batch, "batch", reason)
    count = min(num_steps, rows)
    least, longer = divmod(rows, count)
    if equally and (longer or count < num_steps):
        raise ValueError(
            f"make_train_step: in exact mode the rows of a batch are cut into {num_steps} equal microbatches "
            "on each rank, and these can't be. Pass a multiple of as many rows, or drop the last batch."
        )
    pieces: list[Piece] = []
    start = 0
    for index in range(count):
        size = least + (index < longer)
        share = 1.0 if longer == 0 else size * count / rows
        pieces.append(Piece(slice_tensors(batch, slice(start, start + size)), share))
        start += size
    return pieces


def terms_of(loss: Loss, piece: Piece, num_pieces: int) -> Terms:
    """Return what a piece adds to the metrics of its window, without gradients.

    Raises:
        TypeError: A leaf of ``aux`` is neither a tensor nor a number.
    """
    if loss.aux is None and loss.weight is None and num_pieces == 1:  # the most common by far
        return Terms(_plain(loss.value, loss.value.device).reshape(()), None, None)
    leaves, structure = flatten(loss.aux)
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, (torch.Tensor, int, float)):
            raise TypeError(
                f"make_train_step: {structure.paths('aux')[index]} is of type {type(leaf).__name__}, which "
                "has no average. Loss.aux takes tensors and numbers."
            )
    device = loss.value.device
    value = _plain(loss.value, device).reshape(())
    aux = [_plain(leaf, device) for leaf in leaves]
    if loss.weight is not None:
        return Terms(value, _plain(loss.weight, device).reshape(()), structure.unflatten(aux))
    if num_pieces > 1:
        factor = piece.share / num_pieces
        value, aux = value * factor, [leaf * factor for leaf in aux]
    return Terms(value, None, structure.unflatten(aux))


def _plain(value: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return torch.full((), float(value), dtype=torch.float32, device=device)
    value = value.detach()
    return value if value.dtype in (torch.float32, torch.float64) else value.float()


def add_terms(pieces: Sequence[Terms]) -> Terms:
    """Add what the pieces of a window have.

    Raises:
        ValueError: One has a weight and another none, or their ``aux`` have different forms.
    """
    total = pieces[0]
    for piece in pieces[1:]:
        structure = _common_structure(total, piece)
        leaves = zip(flatten(total)[0], flatten(piece)[0], strict=True)
        total = cast("Terms", structure.unflatten([left + right for left, right in leaves]))
    return total


def _common_structure(before: Terms, new: Terms) -> TreeSpec:
    """Return the structure of the terms of two pieces.

    Raises:
        ValueError: They don't fit together.
    """
    if (before.weight is None) != (new.weight is None):
        raise ValueError(
            "make_train_step: loss_fn gave a weight for one piece of the batch and none for another. Give "
            "each loss its weight, or none."
        )
    left, structure = flatten(before)
    right, other = flatten(new)
    if other != structure or any(a.shape != b.shape for a, b in zip(left, right, strict=True)):
        raise ValueError(
            "make_train_step: what loss_fn gave as aux has another structure or other shapes for one piece "
            "of the batch than for another, so it can't be averaged. Let it depend on no row count."
        )
    return structure


def average(ctx: Context, terms: Terms, *more: Any) -> tuple[Terms, tuple[Any, ...]]:
    """Average the terms of a window over all ranks, and with them ``more`` trees, in one reduction.

    Ranks: every rank of ``ctx``.

    Returns:
        The terms, divided by the weight where they are sums with one, which is then that of all ranks
        together divided by their number; and the other trees, not divided by it.

    Raises:
        MismatchError: Some ranks have weights and some none, or their ``aux`` differ.
    """
    if ctx.num_processes > 1:
        terms, more = reduce(ctx.tagged("make_train_step"), (terms, more), "mean")
    return _divided(terms), more


def average_in_order(
    ctx: Context, compute: Callable[[], Sequence[tuple[Terms, Sequence[torch.Tensor]]]]
) -> tuple[Terms, list[torch.Tensor]]:
    """Average what the pieces of all ranks gave as :func:`average` does, in the order of the microbatches.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: In exact mode.
        compute: Gives the terms of this rank's pieces, not divided by their number, and more tensors of each.

    Returns:
        As :func:`average`; the same bits on every rank.

    Raises:
        Exception: What ``compute`` raises, and RemoteRankError on the other ranks.
        ValueError: The terms of the pieces don't fit together.
    """

    def read() -> tuple[TreeSpec, list[list[torch.Tensor]]]:
        pieces = compute()
        first = pieces[0][0]
        structure = flatten(first)[1]
        for terms, _ in pieces:
            _common_structure(first, terms)
        return structure, [[*cast("list[torch.Tensor]", flatten(terms)[0]), *more] for terms, more in pieces]

    found, error = catch(read)
    structure, rows = found or (None, [])
    means = mean_of_microbatches(ctx.tagged("make_train_step"), rows, error)
    assert structure is not None  # without an error
    number = structure.num_leaves
    return _divided(cast("Terms", structure.unflatten(means[:number]))), means[number:]


def _divided(terms: Terms) -> Terms:
    """Divide sums by their weight."""
    if terms.weight is None:
        return terms
    share = inverse_of_weight(terms.weight)
    leaves, structure = flatten((terms.loss, terms.aux))
    loss, aux = structure.unflatten([leaf * share for leaf in leaves])
    return Terms(loss, terms.weight, aux)


def not_compiled(function: F) -> F:
    """Leave a function out of what ``torch.compile`` makes of a step: one that communicates."""
    return cast("F", cast("Any", torch.compiler).disable(function))


# Sums of these are formed in float32 and rounded once.
_NARROW = (torch.float16, torch.bfloat16)


def cut_into_microbatches(ctx: Context, arguments: Any) -> list[Any]:
    """Cut each tensor with the batch's number of rows into one part for each batch of a window. Pure.

    Args:
        ctx: Says how many.
        arguments: Of a loss function: any tree. The first tensor with a dimension tells the number of rows;
            tensors with other numbers, and what is no tensor, are in every part as they are.

    Raises:
        ValueError: There is no such tensor, or its rows can't be cut into equal parts.
    """
    number = ctx.gradient_accumulation_steps
    size = find_batch_size(arguments)
    if size % number or not size:
        raise ValueError(
            f"value_and_grad: a batch of {size} rows can't be cut into {number} equal microbatches, which "
            f"{number * ctx.num_processes} microbatches on {ctx.num_processes} ranks ask for. Pass a "
            f"multiple of {number} rows on each rank."
        )
    rows = size // number

    def cut(start: int) -> Any:
        def take(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[start : start + rows] if tensor.dim() and tensor.shape[0] == size else tensor

        return map_tensors(take, arguments)

    return [cut(start) for start in range(0, size, rows)]


def mean_of_microbatches(
    ctx: Context, microbatches: Sequence[Sequence[torch.Tensor]], error: Exception | None = None
) -> list[torch.Tensor]:
    """Average tensors over the microbatches of all ranks, added in rank order and in this rank's order.

    What float16 and bfloat16 become is formed in float32 and rounded once.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        microbatches: Of each of this rank's microbatches the same tensors; as many on every rank.
        error: Why this rank has none.

    Returns:
        The means; the same bits on every rank.

    Raises:
        Exception: ``error`` itself, and RemoteRankError on the other ranks.
        MismatchError: The tensors differ in shape or dtype between ranks.
    """
    if error is not None:
        if ctx.num_processes > 1:
            agree(ctx, Call("value_and_grad"), error=error)
        raise error
    own = microbatches[0]
    wide = [[one.float() if one.dtype in _NARROW else one for one in each] for each in microbatches]
    layout = plan_layout(wide[0], flatten(wide[0])[1])
    call = layout_call("value_and_grad", f"{len(wide)} microbatches a rank", layout)
    total = OrderedSum(ctx, wide[0])
    with torch.no_grad():
        total.add(call, wide)
        sums = cast("list[torch.Tensor]", total.close())
        number = len(wide) * ctx.num_processes
        return [one.div_(number).to(like.dtype) for one, like in zip(sums, own, strict=True)]
