"""Loss and metrics of a window: added over its pieces, and averaged over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch

from accelfn.comm import Call, agree, catch, reduce
from accelfn.comm.agreement import layout_call
from accelfn.context import Context
from accelfn.parallel.strategies.exact import OrderedSum
from accelfn.training.loss import Loss
from accelfn.training.pieces import Piece
from accelfn.training.scaler import inverse_of_weight
from accelfn.tree import TreeSpec, flatten, plan_layout


class StepMetrics(NamedTuple):
    """Metrics of one optimizer step. Tensors, equal on every rank; reading them on the host waits.

    Attributes:
        loss: Mean over the window and all ranks, for parameters before the step; shape ``()``, float32, or
            float64 if the loss is. Zero if the total weight is, NaN if a weight is.
        grad_norm: Norm of the total gradient before clipping, shape ``()``; None without ``max_norm``.
        skipped: Whether a float16 gradient overflowed, so that nothing changed; bool, shape ``()``.
        aux: The ``aux`` of the losses, averaged; None without one.
    """

    loss: torch.Tensor
    grad_norm: torch.Tensor | None
    skipped: torch.Tensor
    aux: Any


class Terms(NamedTuple):
    """Loss and ``aux`` of a piece or a window: all means, or all sums that are to be divided by a weight.

    They are added over the pieces of a window, and averaged over ranks.

    Attributes:
        loss: Shape ``()``.
        weight: Of sums; None for means.
        aux: A tree of tensors.
        rows: Of means on several ranks, which are multiplied by it: the rank's number of rows, relative to
            that of other ranks. None for sums, and on one rank.
    """

    loss: torch.Tensor
    weight: torch.Tensor | None
    aux: Any
    rows: torch.Tensor | None = None

    @property
    def divisor(self) -> torch.Tensor | None:
        """By what loss, ``aux`` and gradients are divided; None for nothing, or where it is known to be 1."""
        number = self.rows if self.weight is None else self.weight
        is_one = number is not None and number.device.type == "cpu" and float(number) == 1.0
        return None if is_one else number


def first_number(ctx: Context) -> torch.Tensor:
    """Return the number of windows before the first; on the host where each window reads it."""
    is_read = ctx.reduction is not None or ctx.guard.check_replicas_every is not None
    return torch.zeros((), dtype=torch.int64, device="cpu" if is_read else ctx.device)


def terms_of(
    loss: Loss,
    piece: Piece,
    num_pieces: int,
    rows: float | None = None,
    operation: str = "make_train_step",
) -> Terms:
    """Return the terms of a piece in its window, without gradients.

    Args:
        loss: Of the piece.
        piece: The piece.
        num_pieces: Of the window, whose mean is computed.
        rows: Weight of a mean among the ranks, as of :func:`splitter`; None for no weight.
        operation: Name of the operation in errors.

    Raises:
        TypeError: A leaf of ``aux`` is neither a tensor nor a number.
    """
    if loss.aux is None and loss.weight is None and num_pieces == 1 and rows is None:  # fast path
        return Terms(_plain(loss.value, loss.value.device).reshape(()), None, None)
    leaves, structure = flatten(loss.aux)
    for index, leaf in enumerate(leaves):
        if not isinstance(leaf, (torch.Tensor, int, float)):
            raise TypeError(
                f"{operation}: {structure.paths('aux')[index]} is of type {type(leaf).__name__}, which "
                "can't be averaged. Loss.aux takes tensors and numbers."
            )
    device = loss.value.device
    value = _plain(loss.value, device).reshape(())
    aux = [_plain(leaf, device) for leaf in leaves]
    if loss.weight is not None:
        return Terms(value, _plain(loss.weight, device).reshape(()), structure.unflatten(aux))
    relative = None if rows is None else torch.full_like(value, rows / num_pieces)
    if rows == 0:  # the mean of nothing is NaN
        value, aux = torch.zeros_like(value), [torch.zeros_like(leaf) for leaf in aux]
    elif num_pieces > 1 or rows not in (None, 1):
        factor = piece.share * (1 if rows is None else rows) / num_pieces
        value, aux = value * factor, [leaf * factor for leaf in aux]
    return Terms(value, None, structure.unflatten(aux), relative)


def _plain(value: torch.Tensor | float, device: torch.device) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        return torch.full((), float(value), dtype=torch.float32, device=device)
    value = value.detach()
    return value if value.dtype in (torch.float32, torch.float64) else value.float()


def join_losses(parts: Sequence[Loss]) -> Loss:
    """Return the loss of a batch from those of its equally large parts: tensors without gradients.

    Raises:
        ValueError: Some have a weight and some have none, or their ``aux`` differ in structure or shape.
    """
    whole, operation = Piece(None, 1.0), "forward_backward"
    terms = [terms_of(part, whole, len(parts), operation=operation) for part in parts]
    return Loss(*add_terms(terms, operation)[:3])


def add_terms(pieces: Sequence[Terms], operation: str = "make_train_step") -> Terms:
    """Add the terms of the pieces of a window; ``operation`` is named in errors.

    Raises:
        ValueError: Some have a weight and some have none, or their ``aux`` differ in structure or shape.
    """
    total = pieces[0]
    for piece in pieces[1:]:
        structure = _common_structure(operation, total, piece)
        leaves = zip(flatten(total)[0], flatten(piece)[0], strict=True)
        total = cast("Terms", structure.unflatten([left + right for left, right in leaves]))
    return total


def _common_structure(operation: str, before: Terms, new: Terms) -> TreeSpec:
    """Return the structure of the terms of two pieces.

    Raises:
        ValueError: They don't fit together.
    """
    if (before.weight is None) != (new.weight is None):
        raise ValueError(
            f"{operation}: loss_fn returned a weight for one piece of the batch and none for another. "
            "Return a weight with each loss, or with none."
        )
    left, structure = flatten(before)
    right, other = flatten(new)
    if other != structure or any(a.shape != b.shape for a, b in zip(left, right, strict=True)):
        raise ValueError(
            f"{operation}: the aux that loss_fn returned has another structure or other shapes for one "
            "piece of the batch than for another, so it can't be averaged. It must not depend on the number "
            "of rows."
        )
    return structure


def average(ctx: Context, terms: Terms, *more: Any) -> tuple[Terms, tuple[Any, ...]]:
    """Average the terms of a window over all ranks, and with them ``more`` trees, in one reduction.

    Ranks: every rank of ``ctx``.

    Returns:
        The terms, divided by their weight if they are sums and by the ranks' rows if they are means, with the
        mean of these over the ranks; and the other trees, not divided.

    Raises:
        MismatchError: Some ranks have weights and some none, or their ``aux`` differ.
    """
    if ctx.num_processes > 1:
        terms, more = reduce(ctx.tagged("make_train_step"), (terms, more), "mean")
    return _divided(terms), more


def average_in_order(
    ctx: Context,
    compute: Callable[[], Sequence[tuple[Terms, Sequence[torch.Tensor]]]],
    *,
    by_place: bool = False,
) -> tuple[Terms, list[torch.Tensor]]:
    """Average the pieces of all ranks like :func:`average`, in the order of the microbatches.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: In exact mode.
        compute: Returns the terms of this rank's pieces, not divided by their number, and more tensors of
            each.
        by_place: As of :func:`mean_of_microbatches`.

    Returns:
        As :func:`average`; the same bits on every rank.

    Raises:
        Exception: Raised by ``compute``, and RemoteRankError on the other ranks.
        ValueError: The terms of the pieces don't fit together.
    """

    def read() -> tuple[TreeSpec, list[list[torch.Tensor]]]:
        pieces = compute()
        first = pieces[0][0]
        structure = flatten(first)[1]
        for terms, _ in pieces:
            _common_structure("make_train_step", first, terms)
        return structure, [[*cast("list[torch.Tensor]", flatten(terms)[0]), *more] for terms, more in pieces]

    found, error = catch(read)
    structure, rows = found or (None, [])
    means = mean_of_microbatches(ctx.tagged("make_train_step"), rows, error, by_place=by_place)
    assert structure is not None  # without an error
    number = structure.num_leaves
    return _divided(cast("Terms", structure.unflatten(means[:number]))), means[number:]


def _divided(terms: Terms) -> Terms:
    """Divide sums by their weight, and means by the ranks' rows."""
    divisor = terms.divisor
    if divisor is None:
        return terms
    share = inverse_of_weight(divisor)
    leaves, structure = flatten((terms.loss, terms.aux))
    loss, aux = structure.unflatten([leaf * share for leaf in leaves])
    return terms._replace(loss=loss, aux=aux)


# Sums of these dtypes are computed in float32 and rounded once.
_NARROW = (torch.float16, torch.bfloat16)


def mean_of_microbatches(
    ctx: Context,
    microbatches: Sequence[Sequence[torch.Tensor]],
    error: Exception | None = None,
    *,
    by_place: bool = False,
) -> list[torch.Tensor]:
    """Average tensors over the microbatches of all ranks, added in one order.

    Float16 and bfloat16 are averaged in float32 and rounded once.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        microbatches: The same tensors for each of this rank's microbatches; as many on every rank.
        error: The exception that left this rank without any.
        by_place: Add the first microbatch of each rank, then the second, as loaders read the data; otherwise
            all of one rank, then those of the next, as a batch is split.

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
    likes = microbatches[0]
    wide = [[tensor.float() if tensor.dtype in _NARROW else tensor for tensor in row] for row in microbatches]
    layout = plan_layout(wide[0], flatten(wide[0])[1])
    call = layout_call("value_and_grad", f"{len(wide)} microbatches a rank", layout)
    total = OrderedSum(ctx, wide[0])
    with torch.no_grad():
        for part in [[row] for row in wide] if by_place else [wide]:
            total.add(call, part)
        sums = cast("list[torch.Tensor]", total.close())
        number = len(wide) * ctx.num_processes
        return [tensor.div_(number).to(like.dtype) for tensor, like in zip(sums, likes, strict=True)]
