"""Differentiable linear maps across ranks, which join, split, sum and send pieces of tensors.

Each :class:`Move` defines its transpose, for the backward pass. Pieces of different lengths are padded to the
longest one. All leaves of one dtype and device are sent in one buffer, except for large ones.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch.autograd import forward_ad

from accelfn.comm.agreement import Call, beneath_transforms, check
from accelfn.comm.tensors import reduce
from accelfn.comm.transfer import ALONE_BYTES, REDUCED_HERE, all_gather_rows, combine
from accelfn.context import Context
from accelfn.errors import NotAvailableError
from accelfn.tree import Buffer, flatten, flatten_group, plan_layout

# Summed on the receiving rank: in float32 and rounded once, or because not every backend can sum them.
_SUMMED_HERE = REDUCED_HERE | {torch.float16, torch.bfloat16, torch.bool, torch.complex64, torch.complex128}


class Pieces(NamedTuple):
    """How a leaf is split into one piece for each rank, or joined from them.

    Attributes:
        dim: The dimension, from 0.
        lengths: Length of each rank's piece.
    """

    dim: int
    lengths: tuple[int, ...]

    @property
    def are_equal(self) -> bool:
        """Whether all pieces are equally long."""
        return len(set(self.lengths)) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Move(ABC):
    """A linear map from leaves on all ranks to leaves on all ranks.

    Attributes:
        ctx: The ranks.
        operation: Name of the public function.
        plans: One for each leaf.
    """

    is_elementwise: ClassVar[bool] = False  # and so maps a batch of leaves like a leaf

    ctx: Context
    operation: str
    plans: tuple[Any, ...]

    @abstractmethod
    def run(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the results for detached ``leaves``, in new memory. Every rank of ``ctx`` calls it."""

    @abstractmethod
    def back(self) -> Move:
        """Return the transpose, which maps gradients."""

    def describe(self) -> str:
        """Return a description that is the same on every rank."""
        return str(self.plans)

    def take(self, indices: Sequence[int]) -> Move:
        """Return the same map for some of the leaves."""
        return dataclasses.replace(self, plans=tuple([self.plans[index] for index in indices]))


def apply_move(move: Move, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run ``move`` on leaves that may require gradients, or have tangents (``torch.func.jvp``).

    Ranks: every rank of the move's context, with the same leaves differentiated.

    Raises:
        NotAvailableError: ``torch.func.vmap`` maps over a leaf of a move between places.
    """
    if any(map(_is_batched, leaves)) and not move.is_elementwise:
        raise _vmap_error(move)
    tracked = [index for index, leaf in enumerate(leaves) if is_differentiated(leaf) or _is_batched(leaf)]
    # Separately: integers have no gradients, and those of frozen leaves must not be sent.
    frozen = [index for index in range(len(leaves)) if index not in set(tracked)]
    results = _run_differentiable(move.take(tracked), [leaves[index] for index in tracked]) if tracked else ()
    with beneath_transforms():
        frozen_results = move.take(frozen).run([leaves[index] for index in frozen]) if frozen else []
    by_index = dict(zip((*tracked, *frozen), (*results, *frozen_results), strict=True))
    return [by_index[index] for index in range(len(leaves))]


def is_differentiated(leaf: torch.Tensor) -> bool:
    """Return whether a leaf requires a gradient, or has a tangent."""
    if leaf.requires_grad:
        return True
    modes = cast("Any", forward_ad)
    # unpack_dual of torch 2.13 needs a level, and no public function tells whether there is one.
    return modes._current_level >= 0 and modes.unpack_dual(leaf).tangent is not None


def _is_batched(leaf: torch.Tensor) -> bool:
    return cast("Any", torch)._C._functorch.is_batchedtensor(leaf)


def _vmap_error(move: Move) -> NotAvailableError:
    return NotAvailableError(
        f"{move.operation}: torch.func.vmap, and jacrev, jacfwd and hessian, which use it, can't map over "
        "communication. Loop over the rows, with torch.func.vjp or torch.func.jvp for derivatives."
    )


def keep(ctx: Context, operation: str, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return leaves that are the same on every rank, whose gradients are the sums of all ranks' gradients.

    Ranks: local; in the backward pass every rank of ``ctx``.
    """
    return list(_run_differentiable(Keep(ctx=ctx, operation=operation, plans=()), leaves))


def average(ctx: Context, operation: str, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the means of the ranks' leaves, which count as one value that all ranks use identically.

    Ranks: every rank of ``ctx``.
    """
    move = Total(ctx=ctx, operation=operation, plans=(), divisor=ctx.num_processes)
    return list(_run_differentiable(move, leaves))


def _run_differentiable(move: Move, leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return cast("Any", _Differentiable).apply(move, *leaves)


class _Differentiable(torch.autograd.Function):
    """Applies a move, whose backward applies a move too, so that it can be differentiated repeatedly."""

    @staticmethod
    def forward(move: Move, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(move.run([leaf.detach() for leaf in leaves]))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        del output
        ctx.move = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        back = cast("Move", ctx.move).back()
        check(back.ctx, Call(f"{back.operation} (backward)", back.describe()))
        return None, *_run_differentiable(back, grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        return _run_differentiable(ctx.move, cast("Sequence[torch.Tensor]", tangents[1:]))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        if not args[0].is_elementwise:
            raise _vmap_error(args[0])
        return _run_differentiable(args[0], args[1:]), in_dims[1:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Total(Move):
    """Sums the leaves of all ranks.

    Attributes:
        divisor: Of the sum.
        is_shared: Whether the result is one value that all ranks use identically, so that their gradients are
            equal; otherwise each rank's gradient is a part of it.
    """

    is_elementwise = True
    divisor: int = 1
    is_shared: bool = True

    def run(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Reduce."""
        return reduce(self.ctx, list(leaves), "sum" if self.divisor == 1 else "mean")

    def back(self) -> Move:
        """Keep the gradient, which is the same on all ranks; or sum the parts of it."""
        if not self.is_shared:
            return self
        return Keep(ctx=self.ctx, operation=self.operation, plans=(), divisor=self.divisor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep(Move):
    """Copies leaves that are the same on every rank.

    Attributes:
        divisor: Of the copies.
    """

    is_elementwise = True
    divisor: int = 1

    def run(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy, without communication."""
        return [leaf / self.divisor if self.divisor > 1 else leaf.clone() for leaf in leaves]

    def back(self) -> Move:
        """Sum the ranks' gradients."""
        return Total(ctx=self.ctx, operation=self.operation, plans=(), divisor=self.divisor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Join(Move):
    """Concatenates the pieces of all ranks, on every rank.

    Attributes:
        plans: Pieces of each leaf.
        is_shared: Whether the result counts as one value that all ranks use identically. Then its gradient is
            the same on all ranks; otherwise the gradients of the ranks are summed.
        divisor: Of the result.
    """

    plans: tuple[Pieces, ...]
    is_shared: bool = False
    divisor: int = 1

    def run(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gather and concatenate."""
        padded = [
            _pad(leaf, plan.dim, max(plan.lengths))[None]
            for leaf, plan in zip(leaves, self.plans, strict=True)
        ]
        joined = [
            _merge(rows, plan) for rows, plan in zip(_transfer(padded, self._gather), self.plans, strict=True)
        ]
        return joined if self.divisor == 1 else [tensor.div_(self.divisor) for tensor in joined]

    def _gather(self, rows: torch.Tensor) -> torch.Tensor:
        if not rows.numel():
            return rows.new_empty(self.ctx.num_processes, 0)
        return all_gather_rows(self.ctx, rows.view(-1))

    def back(self) -> Move:
        """Split a shared gradient; otherwise sum the ranks' gradients."""
        if self.is_shared:
            return Split(ctx=self.ctx, operation=self.operation, plans=self.plans)
        return SumPieces(ctx=self.ctx, operation=self.operation, plans=self.plans, divisor=self.divisor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Split(Move):
    """Keeps this rank's piece of tensors that are the same on every rank."""

    plans: tuple[Pieces, ...]

    def run(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy this rank's piece."""
        rank = self.ctx.rank
        return [
            # Copied, so that the full tensor can be freed.
            torch.split(leaf, list(plan.lengths), plan.dim)[rank].clone(memory_format=torch.contiguous_format)
            for leaf, plan in zip(leaves, self.plans, strict=True)
        ]

    def back(self) -> Move:
        """Concatenate the pieces of the gradient."""
        return Join(ctx=self.ctx, operation=self.operation, plans=self.plans, is_shared=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SumPieces(Move):
    """Sums the tensors of all ranks, and keeps this rank's piece of the sum.

    Attributes:
        plans: Pieces of each leaf.
        divisor: Of the sum.
    """

    plans: tuple[Pieces, ...]
    divisor: int = 1

    def run(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Reduce and scatter."""
        blocks = [split_blocks(leaf, plan) for leaf, plan in zip(leaves, self.plans, strict=True)]
        rank = self.ctx.rank
        return [
            piece.narrow(dim, 0, lengths[rank]).clone(memory_format=torch.contiguous_format)
            for piece, (dim, lengths) in zip(_transfer(blocks, self._sum), self.plans, strict=True)
        ]

    def _sum(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.numel() == 0:
            return rows[0]
        if rows.dtype in _SUMMED_HERE:
            return combine(_all_to_all(self.ctx, rows), "sum", self.divisor)
        piece = self.ctx.collectives.reduce_scatter(rows.view(-1))
        return piece if self.divisor == 1 else piece.div_(self.divisor)

    def back(self) -> Move:
        """Concatenate the pieces of the gradient."""
        return Join(ctx=self.ctx, operation=self.operation, plans=self.plans, divisor=self.divisor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange(Move):
    """Sends pieces along one dimension to all ranks, and concatenates the received ones along another.

    Attributes:
        plans: For each leaf, the pieces that this rank sends, and those that it receives.
    """

    plans: tuple[tuple[Pieces, Pieces], ...]

    def run(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send all pieces at once."""
        rank = self.ctx.rank
        blocks: list[torch.Tensor] = []
        for leaf, (outgoing, incoming) in zip(leaves, self.plans, strict=True):
            if outgoing.dim == incoming.dim:
                longest = max(*outgoing.lengths, *incoming.lengths)
                blocks.append(split_blocks(leaf, outgoing, longest))
            else:
                blocks.append(split_blocks(_pad(leaf, incoming.dim, max(incoming.lengths)), outgoing))
        results: list[torch.Tensor] = []
        for pieces, (outgoing, incoming) in zip(_transfer(blocks, self._exchange), self.plans, strict=True):
            if outgoing.dim != incoming.dim:
                pieces = pieces.narrow(outgoing.dim + 1, 0, outgoing.lengths[rank])
            results.append(_merge(pieces, incoming))
        return results

    def _exchange(self, rows: torch.Tensor) -> torch.Tensor:
        return _all_to_all(self.ctx, rows) if rows.numel() else rows

    def back(self) -> Move:
        """Send the pieces back."""
        plans = tuple([(incoming, outgoing) for outgoing, incoming in self.plans])
        return Exchange(ctx=self.ctx, operation=self.operation, plans=plans)

    def describe(self) -> str:
        """Return a description without the lengths that may differ between ranks."""
        return str(
            [
                (outgoing.dim, incoming.dim, max(*outgoing.lengths, *incoming.lengths))
                for outgoing, incoming in self.plans
            ]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Permute(Move):
    """Sends each rank's leaves to another rank.

    Attributes:
        plans: Shapes of the leaves.
        sources: The rank from which each rank receives.
    """

    plans: tuple[tuple[int, ...], ...]
    sources: tuple[int, ...]

    def run(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send and receive."""
        rank = self.ctx.rank
        source, to = self.sources[rank], self.sources.index(rank)
        results: list[Any] = [None] * len(leaves)
        for group in _plan_groups(leaves):
            outgoing = flatten_group(group, list(leaves))
            incoming = torch.empty_like(outgoing)
            if outgoing.numel():
                self.ctx.collectives.permute(
                    outgoing.view(torch.uint8), incoming.view(torch.uint8), to, source
                )
            for index, part in zip(group.leaves, torch.split(incoming, list(group.sizes)), strict=True):
                results[index] = part.clone().view(self.plans[index]) if len(group.leaves) > 1 else part
        return [part.view(shape) for part, shape in zip(results, self.plans, strict=True)]

    def back(self) -> Move:
        """Return the inverse permutation."""
        inverse = tuple([self.sources.index(rank) for rank in range(len(self.sources))])
        return dataclasses.replace(self, sources=inverse)


def _plan_groups(leaves: Sequence[torch.Tensor]) -> tuple[Buffer, ...]:
    """Return the leaves of each buffer: the same on every rank, since padded leaves have the same shapes."""
    flat, structure = flatten(list(leaves))
    return plan_layout(flat, structure, ALONE_BYTES).groups


def _pad(leaf: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Pad ``dim`` to ``length`` with zeros."""
    missing = length - leaf.shape[dim]
    if not missing:
        return leaf
    shape = list(leaf.shape)
    shape[dim] = missing
    return torch.cat([leaf, leaf.new_zeros(shape)], dim)


def split_blocks(leaf: torch.Tensor, plan: Pieces, length: int | None = None) -> torch.Tensor:
    """Split a leaf into one piece for each rank, padded to ``length``: shape (P, ...)."""
    longest = max(plan.lengths) if length is None else length
    if plan.are_equal and longest == plan.lengths[0]:
        shape = (*leaf.shape[: plan.dim], len(plan.lengths), longest, *leaf.shape[plan.dim + 1 :])
        return torch.movedim(leaf.reshape(shape), plan.dim, 0)
    pieces = torch.split(leaf, list(plan.lengths), plan.dim)
    return torch.stack([_pad(piece, plan.dim, longest) for piece in pieces])


def _merge(pieces: torch.Tensor, plan: Pieces) -> torch.Tensor:
    """Concatenate padded pieces, shape (P, ...)."""
    if plan.are_equal and pieces.shape[plan.dim + 1] == plan.lengths[0]:
        # Copies, unless the pieces are contiguous already.
        return pieces.movedim(0, plan.dim).flatten(plan.dim, plan.dim + 1)
    parts = zip(pieces.unbind(), plan.lengths, strict=True)
    return torch.cat([part.narrow(plan.dim, 0, length) for part, length in parts], plan.dim)


def _transfer(
    blocks: Sequence[torch.Tensor], send: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """Send blocks of shape (P, ...) in as few tensors of shape (P, n) as possible.

    Args:
        blocks: With the same P.
        send: Maps such a tensor, which is contiguous, to one of shape (Q, n) or (n,).

    Returns:
        What was received for each block, of shape (Q, ...) or (...).
    """
    results: list[Any] = [None] * len(blocks)
    for group in _plan_groups(blocks):
        size = len(blocks[group.leaves[0]])
        flat = [
            blocks[index].reshape(size, -1) if count else blocks[index].new_empty(size, 0)
            for index, count in zip(group.leaves, group.sizes, strict=True)
        ]
        # A single element counts as contiguous whatever its stride, but can't be viewed as bytes.
        joined = flat[0] if len(flat) == 1 and flat[0].stride(-1) == 1 else torch.cat(flat, dim=1)
        received = send(joined.contiguous().resolve_conj().resolve_neg())
        parts = torch.split(received, [count // size for count in group.sizes], dim=-1)
        for index, part in zip(group.leaves, parts, strict=True):
            results[index] = part.reshape(*received.shape[:-1], *blocks[index].shape[1:])
    return results


def _all_to_all(ctx: Context, rows: torch.Tensor) -> torch.Tensor:
    received = ctx.collectives.all_to_all(rows.view(-1).view(torch.uint8))
    return received.view(rows.dtype).view(rows.shape)
