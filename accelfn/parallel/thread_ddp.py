"""What keeps a model equal on ranks that have no engine of torch's for it: hooks on its parameters."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from accelfn.comm import broadcast, reduce
from accelfn.context import Context
from accelfn.parallel.handle import BY_HAND, HANDLE, IN_NO_SYNC, Communication, Handle, register

__all__ = ("REPLICA", "ThreadDDP", "is_made_of_others")

REPLICA = HANDLE


def is_made_of_others(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a frozen wrapper subclass, such as a quantised weight of torchao.

    It can't be broadcast; ``prepare_model`` compares it between the ranks instead.
    """
    return is_traceable_wrapper_subclass(tensor) and not tensor.requires_grad


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
        self._parameters = {name: item for name, item in model.named_parameters() if item.requires_grad}
        with torch.no_grad():
            buffers = dict(model.named_buffers()) if ctx.strategy.ddp.broadcast_buffers else {}
            own = {name: one for name, one in model.named_parameters() if not is_made_of_others(one)}
            self._take({**own, **buffers})
        super().__init__(model, self._parameters.values())
        self._watch()
        if ctx.strategy.ddp.broadcast_buffers:
            model.register_forward_pre_hook(self._on_forward)

    def __deepcopy__(self, memo: dict[int, Any]) -> ThreadDDP:
        """Average the gradients of a copied model too, as a copy of DistributedDataParallel does."""
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin._syncs, twin._ctx, twin._backward, twin._unreduced = (
            self._syncs,
            self._ctx,
            None,
            self._unreduced,
        )
        twin._model = weakref.ref(cast("nn.Module", copy.deepcopy(self._model(), memo)))
        twin._parameters = copy.deepcopy(self._parameters, memo)
        register(twin, twin._parameters.values())
        twin._watch()  # copies of parameters come without hooks
        return twin

    def __reduce__(self) -> tuple[Callable[[], ThreadDDP], tuple[()]]:
        """Pickle without the world: a model that is loaded belongs to none."""
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
        if self.will_sync_buffers(module):
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

    @property
    def is_alive(self) -> bool:
        """Whether it has come with its model, and not from a pickle."""
        return bool(self._parameters)

    def why_unreduced(self) -> str | None:
        """Return why the current gradients are those of this rank alone; None where they are averaged."""
        return self._unreduced


def _replica_of_no_world() -> ThreadDDP:
    # The hook that brings it to rank 0's buffers comes with a model from a pickle, and finds one rank.
    return ThreadDDP(Context(), nn.Module())
