"""The reduction of gradients in torch's DistributedDataParallel, waited for with an eye on other ranks."""

# No postponed annotations: torch looks at those of the hook.

from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from accelfn.context import Context

__all__ = ("Reductions", "watch_reductions")


def watch_reductions(ctx: Context, model: DistributedDataParallel) -> None:
    """Reduce the gradients of ``model`` as torch does by itself, and let the wait notice other ranks.

    By itself torch waits inside of C++, where neither another rank's exception nor one that never comes to
    its backward pass can be noticed. Here all reductions are begun as torch wants them and waited for at the
    end of the backward pass. For tensors on the CPU: accelerators wait on their streams.

    Args:
        ctx: The world, with a process group.
        model: Without a communication hook of its own.
    """
    cast("Any", model).register_comm_hook(Reductions(ctx), Reductions.begin)


class Reductions:
    """The reductions of one model that are under way."""

    def __init__(self, ctx: Context) -> None:
        """Reduce in the world of ``ctx``."""
        self._ctx = ctx
        self._backward = -1  # torch's number of the one they belong to
        self._begun: list[tuple[dist.Work, torch.Tensor, torch.futures.Future[torch.Tensor]]] = []

    def begin(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Begin the reduction of some gradients: torch's hook.

        Args:
            bucket: Of gradients, in one buffer, which is averaged over the ranks in place.
        """
        group = self._ctx.world.group
        assert group is not None  # it carries the model
        # A product, as torch's own: a quotient may differ in the last bit.
        buffer = bucket.buffer().mul_(1.0 / self._ctx.num_processes)
        work = group.allreduce([buffer])
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        number: int = torch._C._current_graph_task_id()  # pyright: ignore[reportPrivateUsage]
        if number < 0:  # no backward pass: torch's Join steps in for a rank that has no more data
            self._ctx.collectives.finish(work, buffer.device)
            future.set_result(buffer)
            return future
        if number != self._backward:  # what a backward pass that failed has left is not waited for
            self._backward, self._begun = number, []
            # Before the callback in which torch waits for these futures, which comes with the last bucket.
            cast("Any", torch.autograd.Variable)._execution_engine.queue_callback(self._finish)
        self._begun.append((work, buffer, future))
        return future

    def _finish(self) -> None:
        begun, self._begun = self._begun, []
        call_log = self._ctx.collectives.call_log
        call_log.reducing = True
        try:
            for work, buffer, future in begun:
                self._ctx.collectives.finish(work, buffer.device)
                future.set_result(buffer)
        finally:
            call_log.reducing = False
        call_log.reductions += 1
