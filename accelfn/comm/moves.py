"""Linear maps across ranks that autograd can turn around: how pieces of tensors are joined, summed and sent.

Each :class:`Move` knows the one that goes back. Pieces of one tensor needn't be equally long: they travel
padded to the longest. All leaves of one dtype and device travel together, large ones by themselves.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch.autograd import forward_ad

from accelfn.comm.agreement import Call, check
from accelfn.comm.transfer import ALONE_BYTES, REDUCED_HERE, all_gather_rows, combine
from accelfn.context import Context
from accelfn.errors import NotAvailableError
from accelfn.tree import Buffer, flatten, flatten_group, plan_layout

# Added in float32 and rounded once, on the rank that gets them; or not added by every backend.
_SUMMED_HERE = REDUCED_HERE | {torch.float16, torch.bfloat16, torch.bool, torch.complex64, torch.complex128}


class Pieces(NamedTuple):
    """How a leaf is cut into one piece for each rank, or joined from them.

    Attributes:
        dim: Along which dimension, from 0.
        lengths: Of each rank's piece.
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
        plans: What is to be done with each leaf.
    """

    ctx: Context
    operation: str
    plans: tuple[Any, ...]

    @abstractmethod
    def run(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the results for detached ``leaves``, in new memory. Every rank of ``ctx`` calls it."""

    @abstractmethod
    def back(self) -> Move:
        """Return the map that gradients take."""

    def describe(self) -> str:
        """Return what is to be done, in text that is the same on every rank."""
        return str(self.plans)

    def take(self, indices: Sequence[int]) -> Move:
        """Return the same map for some of the leaves."""
        return dataclasses.replace(self, plans=tuple([self.plans[index] for index in indices]))


def beneath_transforms() -> AbstractContextManager[None]:
    """Return a block in which ``torch.func`` doesn't wrap new tensors: what ranks exchange has real bytes."""
    return cast("Any", torch)._C._DisableFuncTorch()


def apply_move(move: Move, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Run ``move`` on leaves that may require gradients, or have tangents (``torch.func.jvp``).

    Ranks: every rank of the move's context; the same leaves are differentiated on each of them.

    Raises:
        NotAvailableError: A leaf is one of many that ``torch.func.vmap`` maps over.
    """
    if any(map(_is_batched, leaves)):
        raise _without_vmap(move)
    is_tracked = list(map(is_differentiated, leaves))
    tracked = [index for index, is_so in enumerate(is_tracked) if is_so]
    if not tracked:
        return move.run(leaves)
    # Apart from the others: integers have no gradients, and those of frozen leaves shall not travel.
    rest = [index for index, is_so in enumerate(is_tracked) if not is_so]
    results = _run_differentiable(move.take(tracked), [leaves[index] for index in tracked])
    frozen = move.take(rest).run([leaves[index] for index in rest])
    by_index = dict(zip((*tracked, *rest), (*results, *frozen), strict=True))
    return [by_index[index] for index in range(len(leaves))]


def is_differentiated(leaf: torch.Tensor) -> bool:
    """Return whether a leaf requires a gradient, or has a tangent."""
    if leaf.requires_grad:
        return True
    modes = cast("Any", forward_ad)
    # No public function says whether there is a level, without which torch 2.13 can't be asked for tangents.
    return modes._current_level >= 0 and modes.unpack_dual(leaf).tangent is not None


def _is_batched(leaf: torch.Tensor) -> bool:
    return cast("Any", torch)._C._functorch.is_batchedtensor(leaf)


def _without_vmap(move: Move) -> NotAvailableError:
    return NotAvailableError(
        f"{move.operation}: torch.func.vmap, and jacrev, jacfwd and hessian, which are made of it, can't map "
        "over what ranks exchange. Loop over the rows, with torch.func.vjp or torch.func.jvp for derivatives."
    )


def _run_differentiable(move: Move, leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return cast("Any", _Differentiable).apply(move, *leaves)


class _Differentiable(torch.autograd.Function):
    """A move whose backward is a move too, so that it can be differentiated as often as one likes."""

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
        with beneath_transforms():
            check(back.ctx, Call(f"{back.operation} (backward)", back.describe()))
        return None, *_run_differentiable(back, grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        return _run_differentiable(ctx.move, cast("Sequence[torch.Tensor]", tangents[1:]))

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise _without_vmap(args[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Join(Move):
    """Each rank's piece to the whole, on every rank.

    Attributes:
        plans: Pieces of each leaf.
        is_shared: Whether the whole counts as one value, which all ranks compute the same with. Then its
            gradient is the same on all ranks too; otherwise each rank has a share of it, and they add up.
        divisor: Of the result.
    """

    plans: tuple[Pieces, ...]
    is_shared: bool = False
    divisor: int = 1

    def run(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Gather, and join what came."""
        padded = [
            _padded(leaf, plan.dim, max(plan.lengths))[None]
            for leaf, plan in zip(leaves, self.plans, strict=True)
        ]
        wholes = [
            _merged(rows, plan)
            for rows, plan in zip(_transfer(padded, self._gather), self.plans, strict=True)
        ]
        return wholes if self.divisor == 1 else [whole.div_(self.divisor) for whole in wholes]

    def _gather(self, rows: torch.Tensor) -> torch.Tensor:
        if not rows.numel():
            return rows.new_empty(self.ctx.num_processes, 0)
        return all_gather_rows(self.ctx, rows.view(-1))

    def back(self) -> Move:
        """Cut the gradient where it is shared, else sum it."""
        if self.is_shared:
            return Cut(ctx=self.ctx, operation=self.operation, plans=self.plans)
        return SumPieces(ctx=self.ctx, operation=self.operation, plans=self.plans, divisor=self.divisor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut(Move):
    """The whole, which is the same on every rank, to this rank's piece."""

    plans: tuple[Pieces, ...]

    def run(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy this rank's piece."""
        rank = self.ctx.rank
        return [
            # Copied, so that the whole can be freed.
            torch.split(leaf, list(plan.lengths), plan.dim)[rank].clone(memory_format=torch.contiguous_format)
            for leaf, plan in zip(leaves, self.plans, strict=True)
        ]

    def back(self) -> Move:
        """Join the pieces of the gradient."""
        return Join(ctx=self.ctx, operation=self.operation, plans=self.plans, is_shared=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class SumPieces(Move):
    """Every rank's whole to this rank's piece of their sum.

    Attributes:
        plans: Pieces of each leaf.
        divisor: Of the sum.
    """

    plans: tuple[Pieces, ...]
    divisor: int = 1

    def run(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Sum on the rank that keeps the piece."""
        blocks = [_blocks(leaf, plan) for leaf, plan in zip(leaves, self.plans, strict=True)]
        rank = self.ctx.rank
        return [
            own.narrow(dim, 0, lengths[rank]).clone(memory_format=torch.contiguous_format)
            for own, (dim, lengths) in zip(_transfer(blocks, self._sum), self.plans, strict=True)
        ]

    def _sum(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.numel() == 0:
            return rows[0]
        if rows.dtype in _SUMMED_HERE:
            return combine(_all_to_all(self.ctx, rows), "sum", self.divisor)
        own = self.ctx.collectives.reduce_scatter(rows.view(-1))
        return own if self.divisor == 1 else own.div_(self.divisor)

    def back(self) -> Move:
        """Join the pieces of the gradient."""
        return Join(ctx=self.ctx, operation=self.operation, plans=self.plans, divisor=self.divisor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange(Move):
    """Pieces along one dimension go to the ranks, and what comes is joined along another.

    Attributes:
        plans: Of each leaf, how this rank cuts it, and how it joins what comes.
    """

    plans: tuple[tuple[Pieces, Pieces], ...]

    def run(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send all pieces at once."""
        rank = self.ctx.rank
        blocks: list[torch.Tensor] = []
        for leaf, (goes, comes) in zip(leaves, self.plans, strict=True):
            if goes.dim == comes.dim:
                longest = max(*goes.lengths, *comes.lengths)
                blocks.append(_blocks(leaf, goes, longest))
            else:
                blocks.append(_blocks(_padded(leaf, comes.dim, max(comes.lengths)), goes))
        results: list[torch.Tensor] = []
        for pieces, (goes, comes) in zip(_transfer(blocks, self._exchange), self.plans, strict=True):
            if goes.dim != comes.dim:
                pieces = pieces.narrow(goes.dim + 1, 0, goes.lengths[rank])
            results.append(_merged(pieces, comes))
        return results

    def _exchange(self, rows: torch.Tensor) -> torch.Tensor:
        return _all_to_all(self.ctx, rows) if rows.numel() else rows

    def back(self) -> Move:
        """Send them back."""
        plans = tuple([(comes, goes) for goes, comes in self.plans])
        return Exchange(ctx=self.ctx, operation=self.operation, plans=plans)

    def describe(self) -> str:
        """Return what is to be done; lengths along one dimension alone differ between ranks."""
        return str([(goes.dim, comes.dim, max(*goes.lengths, *comes.lengths)) for goes, comes in self.plans])


@dataclass(frozen=True, slots=True, kw_only=True)
class Permute(Move):
    """Each rank's leaves to another rank.

    Attributes:
        plans: Shapes of the leaves.
        sources: Whose leaves each rank gets.
    """

    plans: tuple[tuple[int, ...], ...]
    sources: tuple[int, ...]

    def run(self, leaves: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Send and receive."""
        rank = self.ctx.rank
        source, to = self.sources[rank], self.sources.index(rank)
        results: list[Any] = [None] * len(leaves)
        for group in _groups(leaves):
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
        """Permute the other way round."""
        inverse = tuple([self.sources.index(rank) for rank in range(len(self.sources))])
        return dataclasses.replace(self, sources=inverse)


def _groups(leaves: Sequence[torch.Tensor]) -> tuple[Buffer, ...]:
    """Return which leaves travel together: the same on every rank, since padded leaves have one shape."""
    flat, structure = flatten(list(leaves))
    return plan_layout(flat, structure, ALONE_BYTES).groups


def _padded(leaf: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    """Lengthen ``dim`` to ``length`` with zeros."""
    missing = length - leaf.shape[dim]
    if not missing:
        return leaf
    shape = list(leaf.shape)
    shape[dim] = missing
    return torch.cat([leaf, leaf.new_zeros(shape)], dim)


def _blocks(leaf: torch.Tensor, plan: Pieces, length: int | None = None) -> torch.Tensor:
    """Cut a leaf into one piece for each rank, padded to ``length``: shape (P, ...)."""
    longest = max(plan.lengths) if length is None else length
    if plan.are_equal and longest == plan.lengths[0]:
        shape = (*leaf.shape[: plan.dim], len(plan.lengths), longest, *leaf.shape[plan.dim + 1 :])
        return torch.movedim(leaf.reshape(shape), plan.dim, 0)
    pieces = torch.split(leaf, list(plan.lengths), plan.dim)
    return torch.stack([_padded(piece, plan.dim, longest) for piece in pieces])


def _merged(pieces: torch.Tensor, plan: Pieces) -> torch.Tensor:
    """Join padded pieces, shape (P, ...)."""
    if plan.are_equal and pieces.shape[plan.dim + 1] == plan.lengths[0]:
        # Copies, unless the pieces are end to end already.
        return pieces.movedim(0, plan.dim).flatten(plan.dim, plan.dim + 1)
    parts = zip(pieces.unbind(), plan.lengths, strict=True)
    return torch.cat([part.narrow(plan.dim, 0, length) for part, length in parts], plan.dim)


def _transfer(
    blocks: Sequence[torch.Tensor], send: Callable[[torch.Tensor], torch.Tensor]
) -> list[torch.Tensor]:
    """Send blocks of shape (P, ...) side by side, as few tensors of shape (P, n), and part what came.

    Args:
        blocks: Of one size P.
        send: Is given such a tensor, contiguous, and gives one of shape (Q, n) or (n,).

    Returns:
        Of each block what came for it, of shape (Q, ...) or (...).
    """
    results: list[Any] = [None] * len(blocks)
    for group in _groups(blocks):
        size = len(blocks[group.leaves[0]])
        flat = [
            blocks[index].reshape(size, -1) if count else blocks[index].new_empty(size, 0)
            for index, count in zip(group.leaves, group.sizes, strict=True)
        ]
        joined = flat[0] if len(flat) == 1 else torch.cat(flat, dim=1)
        came = send(joined.contiguous().resolve_conj().resolve_neg())
        parts = torch.split(came, [count // size for count in group.sizes], dim=-1)
        for index, part in zip(group.leaves, parts, strict=True):
            results[index] = part.reshape(*came.shape[:-1], *blocks[index].shape[1:])
    return results


def _all_to_all(ctx: Context, rows: torch.Tensor) -> torch.Tensor:
    received = ctx.collectives.all_to_all(rows.view(-1).view(torch.uint8))
    return received.view(rows.dtype).view(rows.shape)
