"""Average gradients of a replicated model by hooks on its parameters: on threads, and on XLA's devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from accelfn.comm import broadcast, reduce
from accelfn.context import Context
from accelfn.parallel.gradient_hooks import refuse_hook_of_replica
from accelfn.parallel.handle import BY_HAND, IN_NO_SYNC, Communication, Handle
from accelfn.parallel.values import is_made_of_others


class ThreadDDP(Handle):
    """Averages the gradients of one model over ranks that are threads, or on XLA's devices.

    It hooks the parameters, so it works however a gradient arises: from ``forward``, another method, or a
    free function.
    """

    def __init__(self, ctx: Context, model: nn.Module) -> None:
        """Broadcast the model from rank 0, and hook its parameters."""
        self._ctx = ctx.tagged("a replicated model")  # wherever forward and backward are called
        self._backward: int | None = None  # torch's id of the latest backward pass
        self._unreduced: str | None = BY_HAND
        watched = {name: item for name, item in model.named_parameters() if item.requires_grad}
        with torch.no_grad():
            buffers = dict(model.named_buffers()) if ctx.strategy.ddp.broadcast_buffers else {}
            parameters = {
                name: parameter
                for name, parameter in model.named_parameters()
                if not is_made_of_others(parameter)
            }
            self._take({**parameters, **buffers})
        super().__init__(model, watched.values())
        self._watch(watched)

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

    def _on_grad(self, parameter: Any) -> None:
        if len(parameter._post_accumulate_grad_hooks) > 1:
            refuse_hook_of_replica("backward", parameter)
        # By id and not by a flag, which would stay set after a backward pass that failed half-way.
        number: int = torch._C._current_graph_task_id()  # pyright: ignore[reportPrivateUsage]
        if self._backward == number:
            return
        self._backward = number
        self._unreduced = IN_NO_SYNC
        if self._syncs:
            self._unreduced = "the latest backward pass failed. Clear the gradients and repeat it"
            # Runs once, after the backward pass, on the thread that called it.
            engine = cast("Any", torch.autograd.Variable)._execution_engine
            engine.queue_callback(self._average)

    def _average(self) -> None:
        items = [*self._parameters.values()]
        with torch.no_grad():
            # Ranks may use other parameters: the zeros of one without a gradient count in the mean.
            grads = [torch.zeros_like(item) if item.grad is None else item.grad for item in items]
            forms = [[item.grad is not None, one.is_sparse] for item, one in zip(items, grads, strict=True)]
            dense = [one.to_dense() if one.is_sparse else one for one in grads]
            shares = torch.tensor(forms, device="cpu").to(items[0])
            means, shares = reduce(self._ctx, (dense, shares), "mean")
            for item, mean, share in zip(items, means, shares, strict=True):
                if item.grad is None:
                    if share[0] > 0:
                        item.grad = mean.to_sparse(1) if share[1] > 0 else mean.clone()
                elif item.grad.is_sparse:
                    item.grad = mean.to_sparse(1)
                else:
                    item.grad.copy_(mean)
        self._unreduced = None

    def communicates(self) -> Communication:
        """Return what the next forward pass and its backward pass communicate."""
        buffers = self.buffers is not None and self.buffers.is_due()
        return Communication(self._syncs and torch.is_grad_enabled(), buffers, at_once=buffers)

    def why_unreduced(self) -> str | None:
        """Return why the current gradients are only this rank's own; None where they are averaged."""
        return self._unreduced
