"""Replicas on all ranks, whose gradients are averaged: by DistributedDataParallel, or on threads."""

# No postponed annotations: torch looks at those of the hook.

import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from accelfn.comm import broadcast, reduce
from accelfn.context import Context
from accelfn.context.config import DDPCommunicationHookType, DistributedDataParallelKwargs, GuardMode
from accelfn.errors import ConfigurationError, NotAvailableError
from accelfn.parallel.handle import BY_HAND, HANDLE, IN_NO_SYNC, Communication, Handle
from accelfn.parallel.parameters import is_made_of_others


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


class CommHook(NamedTuple):
    """What sends gradients in another form, with the state that torch passes to it."""

    state: Any
    hook: Callable[..., Any]


def choose_comm_hook(ctx: Context) -> CommHook | None:
    """Choose what ``comm_hook`` and its companions ask for; None where nothing is compressed.

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
            f"comm_hook={str(options.comm_hook)!r} compresses what DistributedDataParallel sends, and ranks "
            "that are threads send nothing. Leave it out there, or use processes."
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
            f"comm_hook='batched_power_sgd': torch {torch.__version__} fails in it as soon as it begins to "
            "compress: it hands a matrix to a function that takes a stack of them. Use comm_hook='power_sgd'."
        )
    if options.comm_hook in (kinds.POWER_SGD, kinds.BATCHED_POWER_SGD):
        try:
            state = powerSGD_hook.PowerSGDState(
                process_group=ctx.world.group, **dict(options.comm_state_option)
            )
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"comm_state_option holds options of torch's PowerSGDState, got "
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
    """Let ``comm_hook``, or without one a reduction with an eye on other ranks, carry a model's gradients.

    Ranks: every rank of ``ctx``.

    Raises:
        ConfigurationError: Torch has no such hook for this backend.
    """
    options: DistributedDataParallelKwargs = ctx.strategy.ddp
    if comm_hook is None:
        # With a static graph torch waits for the first reductions before any callback could.
        if ctx.guard.mode != GuardMode.OFF and ctx.device.type == "cpu" and not options.static_graph:
            watch_reductions(ctx, model)
        return
    try:
        cast("Any", model).register_comm_hook(comm_hook.state, comm_hook.hook)
    except TypeError as error:
        raise ConfigurationError(
            f"comm_hook={str(options.comm_hook)!r} is not supported by torch for backend "
            f"{ctx.world.backend}: {error}"
        ) from error


class DDPHandle(Handle):
    """Of a ``DistributedDataParallel``, whose gradients are averaged whatever computed the loss.

    Torch averages what a forward pass of the wrapper has announced. Where a backward pass was not announced
    (its loss came from another method, from a function over the inner model, or it is the second after one
    forward pass), the first parameter that gets a gradient announces it.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        """Watch the parameters that ``model`` averages."""
        ignored: set[str] = cast("Any", model).parameters_to_ignore
        module = cast("nn.Module", cast("Any", model).module)
        named = module.named_parameters()
        watched = {name: one for name, one in named if one.requires_grad and name not in ignored}
        super().__init__(model, watched.values())
        self._unreduced: str | None = BY_HAND
        self._watch(watched)
        model.register_forward_hook(self.after_forward)

    def _watched(self) -> Mapping[str, torch.Tensor]:
        found = {name: reference() for name, reference in self._parameters.items()}
        return {name: one for name, one in found.items() if one is not None}

    def _watch(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = {name: weakref.ref(one) for name, one in parameters.items()}
        self._backward = -1  # torch's number of the latest one
        self._is_announced = False  # by a forward pass whose backward pass is to come
        for one in parameters.values():
            cast("Any", one).register_post_accumulate_grad_hook(self._on_gradient)

    @contextmanager
    def without_sync(self) -> Generator[None, None, None]:
        """Accumulate gradients on each rank in backward passes inside.

        Raises:
            ConfigurationError: DistributedDataParallel has a static graph.
        """
        ddp = cast("Any", self._model())
        if ddp.static_graph and torch.is_grad_enabled():
            raise ConfigurationError(
                "no_sync: torch 2.13 fails in a backward pass that is not averaged when static_graph=True. "
                "Use static_graph=False, or windows of one batch."
            )
        with ddp.no_sync():
            yield

    @contextmanager
    def trigger_sync(self) -> Generator[None, None, None]:
        """Average gradients in backward passes inside, with all that have added up before.

        Raises:
            ConfigurationError: DistributedDataParallel looks for unused parameters, or has a static graph.
        """
        ddp = cast("Any", self._model())
        if ddp.find_unused_parameters or ddp.static_graph:
            option = "static_graph" if ddp.static_graph else "find_unused_parameters"
            raise ConfigurationError(
                f"trigger_sync_in_backward: with {option} DistributedDataParallel must know in the forward "
                "pass that its gradients will be averaged. Run the last forward pass outside of no_sync."
            )
        before = ddp.require_backward_grad_sync, ddp.require_forward_param_sync
        ddp.require_backward_grad_sync = ddp.require_forward_param_sync = True  # `_begin` does the rest
        try:
            yield
        finally:
            ddp.require_backward_grad_sync, ddp.require_forward_param_sync = before

    def communicates(self) -> Communication:
        """Return what the next forward pass and its backward pass send."""
        ddp = cast("Any", self._model())
        buffers = bool(ddp.will_sync_module_buffers())
        # Torch may broadcast its order of gradients in the next forward pass: once, early on.
        may_rebuild = not ddp._has_rebuilt_buckets and (ddp.static_graph or not ddp.find_unused_parameters)
        gradients = bool(ddp.require_backward_grad_sync) and torch.is_grad_enabled()
        return Communication(gradients, buffers, at_once=buffers or may_rebuild)

    # Not torch.compiler.disable, which imports torch's compiler here and now.
    @torch._disable_dynamo  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
    def after_forward(self, model: nn.Module, arguments: Any, output: Any) -> None:
        """Hook after a forward pass: torch expects its backward pass now, if it averages that one."""
        if torch.is_grad_enabled() and cast("Any", model).require_backward_grad_sync:
            self._is_announced = True

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        """Hook after a gradient was added to ``.grad``, and before torch's own that averages it."""
        del parameter
        number: int = torch._C._current_graph_task_id()  # pyright: ignore[reportPrivateUsage]
        if number != self._backward:
            self._backward = number
            self._begin()

    def _begin(self) -> None:
        ddp = cast("Any", self._model())
        if ddp is None:
            return
        # With a static graph, checkpointed blocks have backward passes of their own inside of one.
        is_announced, self._is_announced = self._is_announced, self._is_announced and ddp.static_graph
        if not is_announced and not ddp.require_backward_grad_sync:
            self._unreduced = IN_NO_SYNC
        elif is_announced:
            self._unreduced = None
        elif ddp.find_unused_parameters or ddp.static_graph or self.is_shared:
            option = "static_graph" if ddp.static_graph else "find_unused_parameters"
            self._unreduced = (
                "the loss wasn't computed by a call of the prepared model, of which torch has to know with "
                + ("parameters in two prepared models" if self.is_shared else f"{option}=True")
                + ". Compute it in the model's forward, and call the prepared model"
            )
        else:
            self._unreduced = None
            if _unfinished(ddp) is None:  # else this is a backward pass inside of another
                if ddp.reducer._rebuild_buckets():  # once, as before a forward pass
                    ddp._has_rebuilt_buckets = True
                ddp.reducer.prepare_for_backward([])

    def why_unreduced(self) -> str | None:
        """Return why the current gradients are those of this rank alone; None where they are averaged."""
        ddp = cast("Any", self._model())
        if ddp is None or self._unreduced is not None:
            return self._unreduced
        if ddp.static_graph:
            self._is_announced = False
        unfinished = _unfinished(ddp)
        if unfinished is None:
            return None
        return (
            "not all parameters of the model got one in the latest backward pass, so torch has averaged "
            "none. Let the loss depend on all of them, freeze the others before prepare, or use "
            f"DistributedDataParallelKwargs(find_unused_parameters=True). Torch says: {unfinished}"
        )


def _unfinished(ddp: Any) -> str | None:
    """Return what torch says of a reduction that has started and not ended; None where there is none."""
    try:
        ddp.reducer._check_reducer_finalized()
    except RuntimeError as error:
        return str(error)
    return None


REPLICA = HANDLE


class ThreadDDP(Handle):
    """Averages the gradients of one model over ranks that are threads.

    Works for any way that a gradient arises (``forward``, another method, a free function), since it hangs on
    the parameters and not on the module's call.
    """

    def __init__(self, ctx: Context, model: nn.Module) -> None:
        """Broadcast the model from rank 0, and hook its parameters."""
        self._ctx = ctx.tagged("a replicated model")  # wherever forward and backward are called
        self._backward: int | None = None  # torch's number of the latest one
        self._unreduced: str | None = BY_HAND
        watched = {name: item for name, item in model.named_parameters() if item.requires_grad}
        with torch.no_grad():
            buffers = dict(model.named_buffers()) if ctx.strategy.ddp.broadcast_buffers else {}
            own = {name: one for name, one in model.named_parameters() if not is_made_of_others(one)}
            self._take({**own, **buffers})
        super().__init__(model, watched.values())
        self._watch(watched)
        if ctx.strategy.ddp.broadcast_buffers:
            model.register_forward_pre_hook(self._on_forward)

    def _watched(self) -> Mapping[str, torch.Tensor]:
        return self._parameters

    def _watch(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = parameters
        for parameter in parameters.values():
            cast("Any", parameter).register_post_accumulate_grad_hook(self._on_grad)

    def _take(self, tensors: dict[str, torch.Tensor]) -> None:
        """Overwrite ``tensors`` by those of rank 0."""
        received = broadcast(self._ctx, {name: tensor.detach() for name, tensor in tensors.items()})
        for name, tensor in tensors.items():
            if received[name] is not tensor:
                tensor.copy_(received[name])

    def will_sync_buffers(self, module: nn.Module) -> bool:
        """Return whether the next forward pass brings the buffers to rank 0's values."""
        options = self._ctx.strategy.ddp
        return (
            options.broadcast_buffers
            and module.training
            and self._syncs
            and any(True for _ in module.buffers())
        )

    def _on_forward(self, module: nn.Module, arguments: Any) -> None:
        del arguments
        if self.is_alive and self.will_sync_buffers(module):
            with torch.no_grad():
                self._take(dict(module.named_buffers()))

    def _on_grad(self, parameter: torch.Tensor) -> None:
        del parameter
        # By number and not by a flag, which would stay up for ever after a backward that failed half-way.
        number: int = torch._C._current_graph_task_id()  # pyright: ignore[reportPrivateUsage]
        if self._backward == number:
            return
        self._backward = number
        self._unreduced = IN_NO_SYNC
        if self._syncs:
            self._unreduced = "the latest backward pass has failed. Clear the gradients, and repeat it"
            # Runs once, when the whole backward is done, on the thread that called it.
            engine = cast("Any", torch.autograd.Variable)._execution_engine
            engine.queue_callback(self._average)

    def _average(self) -> None:
        grads = {name: item.grad for name, item in self._parameters.items() if item.grad is not None}
        with torch.no_grad():
            for name, grad in reduce(self._ctx, grads, "mean").items():
                own = self._parameters[name].grad
                assert own is not None
                own.copy_(grad)
        self._unreduced = None

    def communicates(self) -> Communication:
        """Return what the next forward pass and its backward pass send."""
        model = self._model()
        buffers = model is not None and self.will_sync_buffers(model)
        return Communication(self._syncs and torch.is_grad_enabled(), buffers, at_once=buffers)

    def why_unreduced(self) -> str | None:
        """Return why the current gradients are those of this rank alone; None where they are averaged."""
        return self._unreduced
