"""Run a batch through the stages: micro-batch after micro-batch, all ranks at a time."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.utils import _pytree

from accelfn.comm import Call, agree, broadcast_object_list, catch, gather_bytes
from accelfn.comm.wire import as_bytes, as_tensor
from accelfn.context import Context
from accelfn.parallel import Outline, PipelinePlan, outline_stage, run_stage
from accelfn.tree import find_batch_size, send_to_device

__all__ = ("Pipeline", "cut_batch", "join_results")

_CALL = "pipeline"
_HEADER_BYTES = 256  # of a message: dtype and shape, as text


class Pipeline(nn.Module):
    """A model of which each rank holds a stage. Called like the model, by all ranks at a time.

    The first rank gives the arguments; what the others give is left aside, so they may give none. The last
    rank gets the result, and the others None; with ``gather_output`` all get it. A batch may have any number
    of rows, and any shape that the model takes. It is cut into micro-batches: tensors with as many rows as
    the first one are, and all else comes whole to each.

    For inference: it runs in evaluation mode, and no gradient is kept.

    Ranks: every rank of the context, as often as the others. What goes wrong on one is an error on all.

    Attributes:
        plan: Where the model is cut.
        stage: What this rank holds: the model, with the tensors of its stage; in a world of one with all.
    """

    def __init__(
        self, ctx: Context, plan: PipelinePlan, stage: nn.Module, num_chunks: int, gather_output: bool
    ) -> None:
        """Put together what ``prepare_pipeline`` has made."""
        super().__init__()
        self.plan = plan
        self.stage = stage
        self._ctx = ctx
        self._num_chunks = num_chunks
        self._gather_output = gather_output
        self._outlines: dict[object, list[Outline]] = {}  # by shapes of a micro-batch

    def outlines_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Outline] | None:
        """Return what stages exchange of a micro-batch; None where none of these shapes has been run."""
        return self._outlines.get(_shapes_of((args, kwargs)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch.

        Raises:
            ValueError: The batch has no rows, or a result hasn't as many as its micro-batch.
            ConfigurationError: The model can't run in these stages.
            Exception: What the stage of this rank raised.
            RemoteRankError: What the stage of another rank raised.
        """
        ctx = self._ctx.tagged(_CALL)
        with torch.no_grad():
            if ctx.num_processes == 1:
                return self.stage(*send_to_device(args, ctx.device), **send_to_device(kwargs, ctx.device))
            given = broadcast_object_list(ctx, [send_to_device((args, kwargs), torch.device("cpu"))])
            pieces = cut_batch(send_to_device(given[0], ctx.device), self._num_chunks)
            for _, piece in pieces:
                if _shapes_of(piece) not in self._outlines:
                    self._outlines[_shapes_of(piece)] = self._outline(ctx, *piece)
            results, error = self._run(pieces)
            joined: Any = None
            if len(results) == len(pieces):  # else this rank isn't the last one, or one before it has failed
                joined, error = catch(lambda: join_results(results, [rows for rows, _ in pieces]))
            agree(ctx, Call(_CALL, "end", takes_long=True), error=error)
            if not self._gather_output:
                return joined
            (found,) = broadcast_object_list(
                ctx, [send_to_device(joined, torch.device("cpu"))], ctx.num_processes - 1
            )
        return joined if ctx.is_last_process else send_to_device(found, ctx.device)

    def _run(self, pieces: Sequence[tuple[int, Any]]) -> tuple[list[Any], Exception | None]:
        """Run all micro-batches. A rank whose stage has failed goes on, and hands nothing to the next one.

        So whatever happens, no rank waits for a message that doesn't come, and none is left over.
        """
        rank, last = self._ctx.rank, self._ctx.num_processes - 1
        results: list[Any] = []
        error: Exception | None = None
        received: tuple[torch.Tensor, ...] = ()
        # Of any rank, since all take part in each exchange.
        num_sent = max(len(one.receives) for found in self._outlines.values() for one in found)

        def run(index: int) -> Any:
            args, kwargs = pieces[index][1]
            outlines = self._outlines[_shapes_of((args, kwargs))]
            return run_stage(self.stage, self.plan, rank, outlines, received, args, kwargs)

        for tick in range(len(pieces) + last):
            index = tick - rank
            sent: tuple[torch.Tensor, ...] = ()
            if 0 <= index < len(pieces) and error is None and (rank == 0 or received):
                result, error = catch(lambda: run(index))  # noqa: B023 -- called at once
                if error is None and rank == last:
                    results.append(result)
                elif error is None:
                    sent = cast("tuple[torch.Tensor, ...]", result)
            if tick < len(pieces) + last - 1:
                slots = (*sent, *[None] * (num_sent - len(sent)))
                coming = [self._pass_on(one) for one in slots]
                received = tuple(one for one in coming if one is not None)
        return results, error

    def _outline(self, ctx: Context, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Outline]:
        """Find out what stages exchange of a micro-batch, by running one stage after another."""
        outlines: list[Outline] = []

        def outline() -> bytes:
            one = outline_stage(self.stage, self.plan, ctx.rank, outlines, ctx.device, args, kwargs)[0]
            return pickle.dumps(one)

        for stage in range(len(self.plan.stages)):
            blob, error = catch(outline) if stage == ctx.rank else (b"", None)
            found = gather_bytes(ctx, Call(_CALL, f"stage {stage}", takes_long=True), blob or b"", error)
            outlines.append(pickle.loads(found[stage]))
        return outlines

    def _pass_on(self, sent: torch.Tensor | None) -> torch.Tensor | None:
        """Send the next rank a tensor, and return that of the rank before; either may be none."""
        rank, last = self._ctx.rank, self._ctx.num_processes - 1
        text = "" if sent is None else f"{str(sent.dtype).removeprefix('torch.')} {tuple(sent.shape)}"
        header = as_tensor(text.encode().ljust(_HEADER_BYTES) if rank < last else b"")
        coming = self._exchange(header, _HEADER_BYTES if rank else 0).cpu()
        data = torch.empty(0) if sent is None else sent
        outgoing = data.contiguous().flatten().view(torch.uint8)
        dtype, _, shape = as_bytes(coming).decode().strip().partition(" ")
        if not dtype:
            self._exchange(outgoing, 0)
            return None
        sizes = [int(size) for size in shape.strip("()").split(",") if size.strip()]
        like = torch.empty(sizes, dtype=getattr(torch, dtype), device="meta")
        return self._exchange(outgoing, like.nbytes).view(like.dtype).view(like.shape)

    def _exchange(self, outgoing: torch.Tensor, num_bytes: int) -> torch.Tensor:
        ctx = self._ctx
        rank, last = ctx.rank, ctx.num_processes - 1
        incoming = torch.empty(num_bytes, dtype=torch.uint8, device=ctx.device)
        # To the next rank; the last sends itself nothing, and to the first nothing comes.
        ctx.collectives.permute(outgoing.to(ctx.device), incoming, min(rank + 1, last), max(rank - 1, 0))
        return incoming


def _shapes_of(piece: Any) -> object:
    leaves = _pytree.tree_leaves(piece)
    return tuple((one.shape, one.dtype) for one in leaves if isinstance(one, torch.Tensor))


def cut_batch(batch: Any, num_chunks: int) -> list[tuple[int, Any]]:
    """Cut a batch into micro-batches. Pure.

    Args:
        batch: A tree. Tensors with as many rows as its first one are cut; all else is in each micro-batch.
        num_chunks: How many there are at most; the last one may have fewer rows than the others.

    Returns:
        Of each micro-batch its number of rows, and itself.

    Raises:
        ValueError: There is no tensor with a dimension, or the batch is empty.

    >>> cut_batch((torch.arange(3), "x"), 2)
    [(2, (tensor([0, 1]), 'x')), (1, (tensor([2]), 'x'))]
    """
    try:
        num_rows = find_batch_size(batch)
    except ValueError as error:
        raise ValueError(
            "pipeline: the batch has no batch dimension: no argument is a tensor with a dimension. Pass "
            "arguments as the model takes them, with one row for each sample."
        ) from error
    if not num_rows:
        raise ValueError("pipeline: the batch has no rows. Leave the call out.")
    size = -(-num_rows // num_chunks)

    def piece(start: int, stop: int) -> Any:
        def cut(leaf: Any) -> Any:
            has_rows = isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == num_rows
            return leaf[start:stop] if has_rows else leaf

        return _pytree.tree_map(cut, batch)

    ends = [(start, min(start + size, num_rows)) for start in range(0, num_rows, size)]
    return [(stop - start, piece(start, stop)) for start, stop in ends]


def join_results(results: Sequence[Any], rows: Sequence[int]) -> Any:
    """Put the results of micro-batches together: their tensors; all else is that of the first. Pure.

    Raises:
        ValueError: A tensor hasn't as many rows as its micro-batch.
    """
    leaves, specs = zip(*map(_pytree.tree_flatten, results), strict=True)

    def joined() -> Iterator[Any]:
        for column in zip(*cast("Sequence[list[Any]]", leaves), strict=True):
            if not isinstance(column[0], torch.Tensor):
                yield column[0]
                continue
            for leaf, count in zip(column, rows, strict=True):
                if leaf.dim() == 0 or leaf.shape[0] != count:
                    raise ValueError(
                        f"pipeline: a result of the model has the shape {tuple(leaf.shape)} for {count} rows"
                        ", so what micro-batches give can't be put together. Let the model give one row for "
                        "each row of the batch: a loss without a mean, say."
                    )
            yield torch.cat(column)

    return _pytree.tree_unflatten(joined(), specs[0])
