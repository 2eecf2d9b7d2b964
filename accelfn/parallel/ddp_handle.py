"""The handle of a model that torch's ``DistributedDataParallel`` keeps equal on all ranks."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from accelfn.errors import ConfigurationError
from accelfn.parallel.handle import BY_HAND, IN_NO_SYNC, Communication, Handle, register

__all__ = ("DDPHandle",)


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
        watched = [one for name, one in named if one.requires_grad and name not in ignored]
        super().__init__(model, watched)
        self._watch(watched)
        model.register_forward_hook(self.after_forward)

    def _watch(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = [weakref.ref(one) for one in parameters]
        self._backward = -1  # torch's number of the latest one
        self._is_announced = False  # by a forward pass whose backward pass is to come
        self._unreduced: str | None = BY_HAND
        for one in parameters:
            cast("Any", one).register_post_accumulate_grad_hook(self._on_gradient)

    def __deepcopy__(self, memo: dict[int, Any]) -> DDPHandle:
        """Watch the copy of the model, which averages too."""
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        model = self._model()
        twin._model = weakref.ref(cast("Any", copy.deepcopy(model, memo)))
        found = [reference() for reference in self._parameters]
        watched = [copy.deepcopy(one, memo) for one in found if one is not None]
        register(twin, watched)
        twin._watch(watched)
        twin._unreduced = self._unreduced  # gradients are copied with the parameters
        return twin

    def __reduce__(self) -> Any:
        """Leave no world in a pickle: prepare what is loaded from it."""
        return DDPHandle._of_nothing, ()

    @classmethod
    def _of_nothing(cls) -> DDPHandle:
        handle = object.__new__(cls)
        handle._model = weakref.ref(cast("Any", nn.Module()))  # gone at once
        handle._parameters = []
        return handle

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
