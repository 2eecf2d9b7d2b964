"""Data parallelism: every rank holds the whole model, and gradients are averaged."""

from __future__ import annotations

import copy
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from accelfn.comm import Call, broadcast, check, check_later, reduce, verify_structure
from accelfn.context import Context
from accelfn.context.config import DDPCommunicationHookType, DistributedDataParallelKwargs, GuardMode
from accelfn.errors import ConfigurationError
from accelfn.parallel.reduction import watch_reductions
from accelfn.tree import flatten

__all__ = ("ForwardCheck", "Replica", "is_replicated", "no_sync", "replicate", "unchecked")

M = TypeVar("M", bound=nn.Module)

# Where a module keeps its Replica; a plain attribute, so it is in no state dict.
_ATTRIBUTE = "_accelfn_replica"
# What says of a module that its forward passes are not compared now.
_UNCHECKED = "_accelfn_unchecked"

# Anything else that is no known container may hold the tensor that a backward pass begins with.
_WITHOUT_TENSORS = (str, bytes, int, float, complex, torch.Size, torch.dtype, torch.device)


def replicate(ctx: Context, model: nn.Module) -> nn.Module:
    """Keep ``model`` equal on all ranks: parameters as on rank 0 from now on, gradients averaged in backward.

    On real processes this is torch's DistributedDataParallel, with the options of ``ctx.strategy.ddp``. Ranks
    that are threads have no process group that DDP could use: there the gradients are averaged at the end of
    backward by one packed reduction, and the model itself is returned.

    Ranks: every rank of ``ctx``.

    Args:
        ctx: The world.
        model: On this rank's device. One without trainable parameters has nothing to average and is returned
            as it is.

    Raises:
        MismatchError: The models of the ranks differ in a name, shape or dtype.
    """
    if ctx.num_processes == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return model
    if ctx.world.group is None:
        _check_each_forward(ctx, model)
        Replica(ctx, model)
        return model
    # DDP would hang, or mix parameters up, where the models differ; compared first, the difference has a
    # name.
    verify_structure(ctx, dict(model.named_parameters()))
    wrapped = DistributedDataParallel(
        model,
        device_ids=None if ctx.device.type == "cpu" else [ctx.device],
        process_group=ctx.world.group,
        **ctx.strategy.ddp.to_kwargs(),
    )
    _register_comm_hook(wrapped, ctx)
    _check_each_forward(ctx, wrapped)
    return wrapped


def is_replicated(model: nn.Module) -> bool:
    """Whether :func:`replicate` keeps the model equal on all ranks."""
    return isinstance(model, DistributedDataParallel) or vars(model).get(_ATTRIBUTE) is not None


class ForwardCheck:
    """Lets ranks agree on each forward pass of a model that communicates in it or in its backward.

    Torch's reductions have no names: a rank that is elsewhere would leave the others waiting inside them, or
    would be taken for one that is here.
    """

    def __init__(self, ctx: Context | None) -> None:
        """Check in the world of ``ctx``, or nothing without one."""
        self._ctx = ctx

    def watch(self, model: nn.Module) -> None:
        """Check each forward pass of ``model`` from now on."""
        model.register_forward_pre_hook(self.before)
        model.register_forward_hook(self.after)

    def before(self, model: nn.Module, arguments: Any) -> None:
        """Hook before a forward pass: tell the others that this rank is here."""
        del arguments
        if self._ctx is None or torch.compiler.is_compiling():  # no Python runs in what is compiled
            return
        if vars(model).get(_UNCHECKED):
            return
        gradients, buffers = _will_sync(model)
        if not gradients and not buffers:
            return
        # The first pass may compile kernels, on one rank longer than on others.
        is_first = self._ctx.collectives.journal.count(model) == 1
        text = f"gradients={gradients} buffers={buffers}"
        call = Call("forward", text, lambda: {"model": text}, takes_long=is_first)
        if buffers or _may_rebuild(model):
            check(self._ctx, call)
        else:
            check_later(self._ctx, call)

    def after(self, model: nn.Module, arguments: Any, output: Any) -> None:
        """Hook after a forward pass: hear whether they all are before the first gradient is reduced."""
        del arguments
        if self._ctx is None or torch.compiler.is_compiling() or vars(model).get(_UNCHECKED):
            return
        journal = self._ctx.collectives.journal
        if journal.unsettled is None:
            return

        def before_backward(gradients: Any) -> None:
            del gradients
            journal.settle()

        starts = _starts_of_backward(output)
        if not starts:
            journal.settle()
        for node in starts:
            node.register_prehook(before_backward)

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardCheck:
        """Check a copied model too."""
        return self

    def __reduce__(self) -> tuple[type[ForwardCheck], tuple[None]]:
        """Leave no world in a pickle: the model that is loaded from it belongs to none."""
        return ForwardCheck, (None,)


def _starts_of_backward(output: Any) -> list[Node]:
    """Give the nodes of which a backward pass from ``output`` meets one first; none where that isn't sure."""
    starts: list[Node | None] = []
    for leaf in flatten(output)[0]:
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad:
                starts.append(leaf.grad_fn)
                if leaf._base is not None:  # to change a view in place replaces its node, and leaves this one
                    starts.append(leaf._base.grad_fn)
        elif not isinstance(leaf, _WITHOUT_TENSORS):
            return []
    found = [node for node in starts if node is not None]
    return found if len(found) == len(starts) else []  # a parameter has no node


def _check_each_forward(ctx: Context, model: nn.Module) -> None:
    if ctx.guard.mode != GuardMode.OFF:
        ForwardCheck(ctx).watch(model)


@contextmanager
def unchecked(*models: nn.Module) -> Generator[None, None, None]:
    """Don't compare the forward passes of ``models`` between ranks inside.

    For what lets ranks make different numbers of them, and keeps their reductions in step by itself.

    Ranks: all in the same way; doesn't communicate.
    """
    before = [bool(vars(model).get(_UNCHECKED)) for model in models]
    for model in models:
        setattr(model, _UNCHECKED, True)
    try:
        yield
    finally:
        for model, was in zip(models, before, strict=True):
            setattr(model, _UNCHECKED, was)


def _will_sync(model: nn.Module) -> tuple[bool, bool]:
    """Whether a forward pass is followed by a reduction of gradients, and begins with one of buffers."""
    if isinstance(model, DistributedDataParallel):
        sync = bool(model.require_backward_grad_sync)
        return sync and torch.is_grad_enabled(), bool(cast("Any", model).will_sync_module_buffers())
    replica = cast("Replica", getattr(model, _ATTRIBUTE))
    return replica.sync and torch.is_grad_enabled(), replica.will_sync_buffers(model)


def _may_rebuild(model: nn.Module) -> bool:
    """Whether torch may broadcast its order of gradients in the next forward pass: once, early on."""
    if not isinstance(model, DistributedDataParallel):
        return False
    ddp = cast("Any", model)
    return not ddp._has_rebuilt_buckets and (ddp.static_graph or not ddp.find_unused_parameters)


@contextmanager
def no_sync(*models: nn.Module) -> Generator[None, None, None]:
    """Leave the gradients of ``models`` unaveraged in backward passes inside; they add up on each rank.

    Ranks: any, but all in the same way; doesn't communicate. Models that nobody averages are let through.
    """
    if not models:
        yield
        return
    with _one_without_sync(models[0]), no_sync(*models[1:]):
        yield


@contextmanager
def _one_without_sync(model: nn.Module) -> Generator[None, None, None]:
    replica = cast("Replica | None", getattr(model, _ATTRIBUTE, None))
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    elif replica is not None:
        before, replica.sync = replica.sync, False
        try:
            yield
        finally:
            replica.sync = before
    else:
        yield


class Replica:
    """Averages the gradients of one model over ranks that are threads.

    Works for any way that a gradient arises (``forward``, another method, a free function), since it hangs on
    the parameters and not on the module's call.
    """

    def __init__(self, ctx: Context, model: nn.Module) -> None:
        """Bring the model to rank 0's values, and watch its parameters."""
        self.sync = True
        self._ctx = ctx.tagged("a replicated model")  # wherever forward and backward are called
        self._backward: int | None = None  # torch's number of the one whose end will average
        self._parameters = {name: item for name, item in model.named_parameters() if item.requires_grad}
        with torch.no_grad():
            self._take({**dict(model.named_parameters()), **dict(model.named_buffers())})
        self._watch()
        if ctx.strategy.ddp.broadcast_buffers:
            model.register_forward_pre_hook(self._on_forward)
        setattr(model, _ATTRIBUTE, self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Replica:
        """Average the gradients of a copied model too, as a copy of DistributedDataParallel does."""
        twin = object.__new__(Replica)
        memo[id(self)] = twin
        twin.sync, twin._ctx, twin._backward = self.sync, self._ctx, None
        twin._parameters = copy.deepcopy(self._parameters, memo)
        twin._watch()  # copies of parameters come without hooks
        return twin

    def __reduce__(self) -> tuple[Callable[[], Replica], tuple[()]]:
        """Leave no world in a pickle: the model that is loaded from it belongs to none."""
        return _replica_of_no_world, ()

    def _watch(self) -> None:
        for parameter in self._parameters.values():
            cast("Any", parameter).register_post_accumulate_grad_hook(self._on_grad)

    def _take(self, tensors: dict[str, torch.Tensor]) -> None:
        """Overwrite ``tensors`` by those of rank 0."""
        received = broadcast(self._ctx, {name: tensor.detach() for name, tensor in tensors.items()})
        for name, tensor in tensors.items():
            if received[name] is not tensor:
                tensor.copy_(received[name])

    def will_sync_buffers(self, module: nn.Module) -> bool:
        """Whether the next forward pass brings the buffers to rank 0's values."""
        options = self._ctx.strategy.ddp
        return (
            options.broadcast_buffers
            and module.training
            and self.sync
            and any(True for _ in module.buffers())
        )

    def _on_forward(self, module: nn.Module, arguments: Any) -> None:
        del arguments
        if self.will_sync_buffers(module):
            with torch.no_grad():
                self._take(dict(module.named_buffers()))

    def _on_grad(self, parameter: torch.Tensor) -> None:
        del parameter
        # By number and not by a flag, which would stay up for ever after a backward that failed half-way.
        number: int = torch._C._current_graph_task_id()  # pyright: ignore[reportPrivateUsage]
        if self.sync and self._backward != number:
            self._backward = number
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


def _replica_of_no_world() -> Replica:
    # The hook that brings it to rank 0's buffers comes with a model from a pickle, and finds one rank.
    return Replica(Context(), nn.Module())


def _register_comm_hook(model: DistributedDataParallel, ctx: Context) -> None:
    """Compress gradients on the wire, as ``comm_hook`` and its companions ask."""
    options: DistributedDataParallelKwargs = ctx.strategy.ddp
    kinds = DDPCommunicationHookType
    if options.comm_hook == kinds.NO:
        # With a static graph torch waits for the first reductions before any callback could.
        if ctx.guard.mode != GuardMode.OFF and ctx.device.type == "cpu" and not options.static_graph:
            watch_reductions(ctx, model)
        return
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
    if options.comm_hook in (kinds.POWER_SGD, kinds.BATCHED_POWER_SGD):
        state = powerSGD_hook.PowerSGDState(process_group=ctx.world.group, **dict(options.comm_state_option))
    if options.comm_wrapper != kinds.NO:
        hook = wrappers[DDPCommunicationHookType(options.comm_wrapper)](hook)
    try:
        cast("Any", model).register_comm_hook(state, hook)
    except TypeError as error:
        raise ConfigurationError(
            f"comm_hook={str(options.comm_hook)!r} is not supported by torch for backend "
            f"{ctx.world.backend}: {error}"
        ) from error
