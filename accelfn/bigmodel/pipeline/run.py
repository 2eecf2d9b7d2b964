"""Run a batch through the stages: micro-batch after micro-batch, all ranks at a time."""

from __future__ import annotations

import hashlib
import struct
from typing import Any, NamedTuple

import torch
from torch import nn

from accelfn.bigmodel.offload.packing import pack, plan_packing, unpack
from accelfn.bigmodel.pipeline.batch import Batch, Example, Result, join_results, micro_batch, read_batch
from accelfn.bigmodel.pipeline.plan import PipelinePlan
from accelfn.bigmodel.pipeline.stage import Stage
from accelfn.comm import Call, agree, broadcast, catch
from accelfn.comm.wire import as_bytes, as_tensor
from accelfn.context import Context
from accelfn.tree import send_to_device

__all__ = ("Form", "Pipeline")

_CALL = "pipeline"
_COUNT = struct.Struct("<Q")


class Form(NamedTuple):
    """How a model is called.

    Attributes:
        example: Its arguments.
        used: Which of their leaves go into the first stage.
        result: What it gives.
        leaves: The tensors of that, of one micro-batch, on the meta device.
    """

    example: Example
    used: tuple[bool, ...]
    result: Result
    leaves: tuple[torch.Tensor, ...]


class Pipeline(nn.Module):
    """A model of which each rank holds a stage. Called like the model, by all ranks at a time.

    The first rank gives the arguments; what the others give is left aside, so they may give none. The last
    rank gets the result, and the others None; with ``gather_output`` all get it. A batch may have any number
    of rows, and must be like the example in all else. It is cut into micro-batches. The last one is filled
    up with its last row, and what becomes of that is cut off again.

    For inference: it runs in evaluation mode, and no gradient is kept.

    Ranks: every rank of the context, as often as the others. What goes wrong on one, such as a batch that
    isn't like the example, is an error on all.

    Attributes:
        plan: Where the model is cut.
        stage: What this rank holds and runs: in a world of one the model itself.
    """

    def __init__(
        self, ctx: Context, plan: PipelinePlan, stage: nn.Module, form: Form | None, gather_output: bool
    ) -> None:
        """Put together what ``prepare_pipeline`` has made; ``form`` is None in a world of one."""
        super().__init__()
        self.plan = plan
        self.stage = stage
        self._ctx = ctx
        self._form = form
        self._gather_output = gather_output
        told = f"{plan!r} {gather_output}"  # names of all tensors are in it
        self._said = hashlib.blake2b(told.encode(), digest_size=16).hexdigest()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch.

        Raises:
            ValueError: The batch isn't like the example (on the first rank; ``RemoteRankError`` elsewhere).
            Exception: What the stage of this rank raised.
            RemoteRankError: What the stage of another rank raised.
        """
        ctx, form, stage = self._ctx, self._form, self.stage
        if form is None or not isinstance(stage, Stage):
            with torch.no_grad():
                return stage(*send_to_device(args, ctx.device), **send_to_device(kwargs, ctx.device))
        batch, error = catch(lambda: read_batch(form.example, args, kwargs) if ctx.rank == 0 else None)
        said = None if batch is None else as_tensor(_COUNT.pack(batch.num_rows))
        rows = agree(ctx, Call(_CALL, self._said, takes_long=True), said, error)
        (num_rows,) = _COUNT.unpack(as_bytes(rows[0], _COUNT.size))
        with torch.no_grad():
            parts, error = self._run(form, stage, batch, num_rows)
            agree(ctx, Call(_CALL, "end", takes_long=True), error=error)
            is_last = ctx.rank == ctx.num_processes - 1
            if not is_last and not self._gather_output:
                return None
            joined = join_results(parts, num_rows) if is_last else self._room(form, num_rows)
            if self._gather_output:
                joined = broadcast(ctx.tagged(_CALL), joined, ctx.num_processes - 1)
        left = iter(joined)
        leaves = [next(left) if one is None else one[0] for one in form.result.constants]
        return form.result.spec.unflatten(leaves)

    def _run(
        self, form: Form, stage: Stage, batch: Batch | None, num_rows: int
    ) -> tuple[list[tuple[torch.Tensor, ...]], Exception | None]:
        """Run all micro-batches. A rank whose stage has failed goes on handing zeros to the next one.

        So whatever happens, no rank waits for a message that doesn't come, and none is left over.
        """
        ctx, rows = self._ctx, self.plan.rows
        count, rank, last = -(-num_rows // rows), ctx.rank, ctx.num_processes - 1
        comes, goes = plan_packing(stage.code.comes_in), plan_packing(stage.code.goes_out)
        parts: list[tuple[torch.Tensor, ...]] = []
        error: Exception | None = None
        incoming = _bytes(0, ctx.device)

        def run(index: int) -> tuple[torch.Tensor, ...]:
            if batch is None:
                return stage(*unpack(incoming, comes))
            leaves = micro_batch(form.example, batch, index, rows, ctx.device)
            return stage(*(leaf for leaf, used in zip(leaves, form.used, strict=True) if used))

        for tick in range(count + last):
            index = tick - rank
            outgoing = _bytes(goes.num_bytes if rank < last and 0 <= index < count else 0, ctx.device)
            if 0 <= index < count and error is None:
                values, error = catch(lambda: run(index))  # noqa: B023 -- called at once
                if values is not None and rank == last:
                    parts.append(values)
                elif values is not None:
                    pack(values, goes, outgoing)
            if tick < count + last - 1:
                comes_now = rank > 0 and 0 <= index + 1 < count
                incoming = _bytes(comes.num_bytes if comes_now else 0, ctx.device)
                # To the next rank; the last sends itself nothing, and to the first nothing comes.
                ctx.collectives.permute(outgoing, incoming, min(rank + 1, last), max(rank - 1, 0))
        return parts, error

    def _room(self, form: Form, num_rows: int) -> list[torch.Tensor]:
        """Give tensors of the form of the result."""
        return [
            torch.empty((num_rows, *leaf.shape[1:]), dtype=leaf.dtype, device=self._ctx.device)
            for leaf in form.leaves
        ]


def _bytes(count: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8, device=device)
