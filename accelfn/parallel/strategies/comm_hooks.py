"""Communication hooks of DistributedDataParallel: compressed reductions, and those that watch other ranks."""

# No postponed annotations: torch looks at those of the hook.

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from accelfn.config import DDPCommunicationHookType, DistributedDataParallelKwargs, GuardMode
from accelfn.context import Context
from accelfn.errors import ConfigurationError, NotAvailableError


class Reductions:
    """A communication hook that reduces gradients as torch does, but watches other ranks while waiting.

    Torch waits inside of C++, where neither another rank's exception nor a rank that never comes to its
    backward pass is noticed. Here the reductions start when torch wants them, and are awaited at the end of
    the backward pass. For tensors on the CPU: accelerators wait on their streams.

    They have a group of their own, since operations of one group pair by their order: where two models are
    trained together, and one rank's leaves a layer out, gradients of one would be averaged with the other's.
    """

    def __init__(self, ctx: Context) -> None:
        """Reduce in the world of ``ctx``, which has a process group."""
        self._ctx = ctx
        self._group = ctx.collectives.apart()
        self._backward = -1  # torch's id of the backward pass that they belong to
        self._begun: list[tuple[dist.Work, torch.Tensor, torch.futures.Future[torch.Tensor]]] = []

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle without the group: torch registers no hook on a copy."""
        return {**vars(self), "_group": None, "_begun": []}

    def begin(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Start the reduction of a bucket: torch's hook.

        Args:
            bucket: Gradients in one buffer, which is averaged over the ranks in place.
        """
        group = self._group
        assert group is not None  # ranks of DistributedDataParallel are processes
        # A product, as in torch's own hook: a quotient may differ in the last bit.
        buffer = bucket.buffer().mul_(1.0 / self._ctx.num_processes)
        work = group.allreduce([buffer])
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        number: int = torch._C._current_graph_task_id()  # pyright: ignore[reportPrivateUsage]
        if number < 0:  # no backward pass: torch's Join stands in for a rank without data
            self._ctx.collectives.finish(work, buffer.device)
            future.set_result(buffer)
            return future
        if number != self._backward:  # drop the reductions of a failed backward pass
            self._backward, self._begun = number, []
            # Runs before torch's callback that waits for these futures, which comes with the last bucket.
            cast("Any", torch.autograd.Variable)._execution_engine.queue_callback(self._finish)
        self._begun.append((work, buffer, future))
        return future

    def _finish(self) -> None:
        begun, self._begun = self._begun, []
        call_log = self._ctx.collectives.call_log
        call_log.inside = "the backward pass of"
        try:
            for work, buffer, future in begun:
                self._ctx.collectives.finish(work, buffer.device)
                future.set_result(buffer)
        finally:
            call_log.inside = ""
        call_log.reductions += 1


class CommHook(NamedTuple):
    """A communication hook of torch, with its state."""

    state: Any
    hook: Callable[..., Any]


def choose_comm_hook(ctx: Context) -> CommHook | None:
    """Return the hook that ``comm_hook`` and its companions select; None without compression.

    Ranks: local; the same on every rank.

    Raises:
        ConfigurationError: ``comm_state_option`` doesn't fit.
        NotAvailableError: Ranks are threads, or this torch can't run the hook.
    """
    options: DistributedDataParallelKwargs = ctx.strategy.ddp
    kinds = DDPCommunicationHookType
    if options.comm_hook == kinds.NO:
        return None
    if ctx.world.group is None:
        raise NotAvailableError(
            f"comm_hook={str(options.comm_hook)!r} compresses the messages of DistributedDataParallel, which "
            "ranks that are threads don't send. Leave it out there, or use processes."
        )
    hooks: dict[DDPCommunicationHookType, Callable[..., Any]] = {
        kinds.FP16: default_hooks.fp16_compress_hook,
        kinds.BF16: default_hooks.bf16_compress_hook,
        kinds.POWER_SGD: powerSGD_hook.powerSGD_hook,
        kinds.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
    }
    wrappers: dict[DDPCommunicationHookType, Callable[..., Any]] = {
        kinds.FP16: default_hooks.fp16_compress_wrapper,
        kinds.BF16: default_hooks.bf16_compress_wrapper,
    }
    hook = hooks[DDPCommunicationHookType(options.comm_hook)]
    state: Any = ctx.world.group
    if options.comm_hook == kinds.BATCHED_POWER_SGD and not _batched_power_sgd_works():
        raise NotAvailableError(
            f"comm_hook='batched_power_sgd' fails in torch {torch.__version__} as soon as it begins to "
            "compress. Use comm_hook='power_sgd'."
        )
    if options.comm_hook in (kinds.POWER_SGD, kinds.BATCHED_POWER_SGD):
        try:
            state = powerSGD_hook.PowerSGDState(
                process_group=ctx.world.group, **dict(options.comm_state_option)
            )
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"comm_state_option takes options of torch's PowerSGDState, got "
                f"{dict(options.comm_state_option)}: {error}"
            ) from error
    if options.comm_wrapper != kinds.NO:
        hook = wrappers[DDPCommunicationHookType(options.comm_wrapper)](hook)
    return CommHook(state, hook)


def _batched_power_sgd_works() -> bool:
    try:
        cast("Any", powerSGD_hook)._orthogonalize(torch.ones(2, 1))
    except AssertionError:
        return False
    return True


def register_comm_hook(ctx: Context, model: DistributedDataParallel, comm_hook: CommHook | None) -> None:
    """Register ``comm_hook``, or without one a reduction that watches other ranks, on a model.

    Ranks: every rank of ``ctx``.

    Raises:
        ConfigurationError: Torch has no such hook for this backend.
    """
    ddp: Any = model
    if comm_hook is None:
        # With a static graph torch waits for the first reductions before any callback runs.
        if ctx.guard.mode != GuardMode.OFF and ctx.device.type == "cpu" and not ddp.static_graph:
            ddp.register_comm_hook(Reductions(ctx), Reductions.begin)
        return
    try:
        ddp.register_comm_hook(comm_hook.state, comm_hook.hook)
    except TypeError as error:
        raise ConfigurationError(
            f"comm_hook={str(ctx.strategy.ddp.comm_hook)!r} is not supported by torch for backend "
            f"{ctx.world.backend}: {error}"
        ) from error
