"""A tensor that is split over ranks along a dimension, of which each rank holds a piece."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from typing_extensions import Self

from accelfn.errors import NotAvailableError

# What can be done without the other pieces, and without knowing what they are for.
_KEEPS = ("aten::detach", "aten::clone", "aten::_to_copy")
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class _Chunk(NamedTuple):
    """A part of a tensor, in the words of ``torch.distributed.checkpoint``."""

    offsets: torch.Size
    sizes: torch.Size


class Sharded(torch.Tensor):
    """This rank's piece of a tensor that is split over ranks along a dimension: a leaf that knows its place.

    Its shape is that of the whole tensor. It is a value to keep, save and load, and to update with an
    optimizer of :func:`accelfn.functional`. Nothing else computes with it; what computes takes ``local``, the
    piece. :func:`accelfn.sharded` makes a tree of these, and :func:`accelfn.pieces` takes their pieces.

    Checkpoints store the whole tensor, each element once, so that pieces can be loaded as others, on other
    numbers of ranks, or as the whole.

    Attributes:
        local: The piece.
        split_dim: The dimension, from 0.
        start: Index along it where the piece begins.

    >>> piece = Sharded(torch.arange(2), 0, 1, 5)
    >>> piece, piece.shape
    (Sharded(tensor([0, 1]), split_dim=0, start=1, length=5), torch.Size([5]))
    """

    local: torch.Tensor
    split_dim: int
    start: int

    # Operations come to __torch_dispatch__ alone.
    __torch_function__: Any = cast("Any", torch)._C._disabled_torch_function_impl

    def __new__(cls, local: torch.Tensor, split_dim: int, start: int, length: int) -> Self:
        """Return the piece of a tensor that has ``length`` entries along ``split_dim``."""
        shape = [*local.shape]
        shape[split_dim] = length
        make = cast("Any", torch.Tensor)._make_wrapper_subclass
        piece = cast("Self", make(cls, shape, dtype=local.dtype, device=local.device))
        piece.local, piece.split_dim, piece.start = local, split_dim, start
        return piece

    def like(self, local: torch.Tensor) -> Sharded:
        """Return another tensor's piece at the same place."""
        return Sharded(local, self.split_dim, self.start, self.shape[self.split_dim])

    @property
    def place(self) -> tuple[object, ...]:
        """What two tensors share of which this rank holds the same piece."""
        return self.shape, self.split_dim, self.start, self.local.shape

    _spec = place  # where a DTensor has its layout

    def __create_chunk_list__(self) -> list[_Chunk]:
        """List the parts that this rank holds, as ``torch.distributed.checkpoint`` asks of a DTensor."""
        offsets = [0] * len(self.shape)
        offsets[self.split_dim] = self.start
        return [_Chunk(torch.Size(offsets), self.local.shape)]

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        """Make a copy in another process of the piece and its place."""
        return Sharded, (self.local, self.split_dim, self.start, self.shape[self.split_dim])

    def __repr__(self, *, tensor_contents: object = None) -> str:
        """Show the piece and its place."""
        length = self.shape[self.split_dim]
        return f"Sharded({self.local!r}, split_dim={self.split_dim}, start={self.start}, length={length})"

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Copy the piece; refuse to compute with it."""
        name = str(cast("Any", func)._schema.name)
        if name in _KEEPS:
            return args[0].like(func(args[0].local, *args[1:], **(kwargs or _NOTHING)))
        # No TypeError, which operators of Python take for "try the other operand".
        raise NotAvailableError(
            f"{name.removeprefix('aten::')}: a Sharded is this rank's piece of a tensor, and isn't computed "
            "with. Take the piece, x.local, or those of a tree, accelfn.pieces(tree)."
        )
