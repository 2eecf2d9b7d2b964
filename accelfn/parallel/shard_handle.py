"""The handle of a model that torch's ``fully_shard`` has sharded."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any, ClassVar, Literal, cast

import torch
from torch import nn

from accelfn.errors import ConfigurationError
from accelfn.parallel.handle import HANDLE, IN_NO_SYNC, Communication, Handle
from accelfn.tree import is_dtensor


class ShardHandle(Handle):
    """Of a model whose parameters are shards, and whose gradients FSDP averages in the backward pass.

    FSDP puts gradients on its shards itself. Those that autograd would put there come from a loss that has
    used shards outside of a forward pass, and nobody averages them: they are refused.
    """

    engine: ClassVar[Literal["none", "ddp", "shard", "pipeline"]] = "shard"
    has_whole_parameters: ClassVar[bool] = False
    holds_gradients: ClassVar[bool] = True

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[nn.Module],
        device: torch.device,
        unshared: Collection[str] = (),
    ) -> None:
        """Watch the shards of ``model``, whose units (the model is the last one) are sharded.

        Args:
            model: Sharded.
            units: Its sharded modules.
            device: Where it computes.
            unshared: Names of the parameters of experts that FSDP leaves out: their gradients are autograd's.
        """
        super().__init__(model, model.parameters())
        self._waits = device.type == "cpu"  # else a forward pass goes on, and its streams wait
        self._units = [weakref.ref(unit) for unit in units]
        self._depth = 0  # of calls inside of each other: a registered method may call the model
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and is_dtensor(parameter) and name not in unshared:
                cast("Any", parameter).register_hook(_refusal_of(name))

    def _set_syncs(self, syncs: bool) -> None:
        if syncs == self._syncs:
            return
        self._syncs = syncs
        for reference in self._units:
            unit = cast("Any", reference())
            if unit is not None:
                unit.set_requires_gradient_sync(syncs, recurse=False)
        model = cast("Any", self._model())
        if model is not None:
            model.set_is_last_backward(syncs)

    def reduce(self) -> None:
        """Average gradients that have added up under :meth:`without_sync`, with no backward pass to come."""
        model = cast("Any", self._model())
        with self._syncing(True):
            # As torch's own pipelines do it, which has no public way; a test holds these names.
            state = model._get_fsdp_state()
            for one in state._state_ctx.all_states:
                for group in one._fsdp_param_groups:
                    group.post_backward()
            state._root_post_backward_final_callback()

    def compute(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call what computes with gathered parameters, and free them where no backward pass will.

        Torch keeps the last unit, and with ``reshard`` off all of them, gathered until the backward pass.
        After an evaluation they would stay: ``parameters()`` would list them in the place of the shards, and
        the next forward pass would not see what was written into the shards meanwhile.
        """
        self._depth += 1
        try:
            output = call(*args, **kwargs)
        finally:
            self._depth -= 1
        if self._depth == 0 and not _has_backward(output):
            for reference in self._units:
                unit = cast("Any", reference())
                if unit is not None:
                    unit.reshard()
        return output

    def communicates(self) -> Communication:
        """Return what the next forward pass and its backward pass communicate."""
        gradients = self._syncs and torch.is_grad_enabled()
        return Communication(gradients=gradients, parameters=True, at_once=self._waits)

    def why_unreduced(self) -> str | None:
        """Return why the current gradients are those of this rank alone; None where they are averaged."""
        return IN_NO_SYNC if any(True for _ in self._unreduced()) else None

    def discard(self) -> None:
        """Release gradients that have added up and were not averaged yet."""
        for parameter in self._unreduced():
            parameter.unsharded_accumulated_grad = None
            parameter._unsharded_param.grad = None

    def _unreduced(self) -> Generator[Any, None, None]:
        """Return FSDP's records of the parameters that hold whole gradients."""
        for reference in self._units:
            unit = cast("Any", reference())
            if unit is None:
                continue
            # Torch has no public way to ask; a test holds these names.
            for group in unit._get_fsdp_state()._fsdp_param_groups:
                for one in group.fsdp_params:
                    whole = getattr(one, "_unsharded_param", None)
                    if one.unsharded_accumulated_grad is not None or (
                        whole is not None and whole.grad is not None
                    ):
                        yield one


def _has_backward(output: Any) -> bool:
    """Whether a backward pass may follow; for an output of a class that torch can't look into, it may."""
    if not torch.is_grad_enabled():
        return False
    from torch.utils._pytree import tree_leaves

    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
    return not tensors or any(one.requires_grad for one in tensors)


def _refusal_of(name: str) -> Callable[[torch.Tensor], None]:
    def refuse(gradient: torch.Tensor) -> None:
        del gradient
        raise ConfigurationError(
            f"backward: the loss has used {name}, a shard, outside of the forward pass of its model, where "
            "it isn't gathered and nobody averages its gradient over the ranks. Compute the loss in the "
            "model's forward, or in a method that register_forward_method(model, name) was told of."
        )

    return refuse


class _NamedCall:
    """A model's call, whose errors say which of the ranks that it waits for are lost.

    It keeps nothing alive, and belongs to the model that it is stored in: that of a copy calls the copy.
    """

    def __init__(self, model: nn.Module, translate_error: Callable[[Exception], Exception]) -> None:
        self._model = weakref.ref(model)
        self._translate_error = translate_error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = cast("Any", self._model())
        kind = cast("Any", type(own))
        handle = getattr(own, HANDLE, None)
        try:
            if isinstance(handle, ShardHandle):
                return handle.compute(kind._call_impl, own, *args, **kwargs)
            return kind._call_impl(own, *args, **kwargs)
        except RuntimeError as error:
            explained = self._translate_error(error)
            if explained is error:
                raise
            raise explained from (explained.__cause__ or error)

    def __deepcopy__(self, memo: dict[int, Any]) -> _NamedCall:
        return _NamedCall(cast("nn.Module", copy.deepcopy(self._model(), memo)), self._translate_error)


def with_named_errors(model: nn.Module, translate_error: Callable[[Exception], Exception]) -> None:
    """Let calls of a model that wait for other ranks say which of them are lost. Writes into ``model``."""
    # FSDP waits in hooks, around and inside of ``forward``; this is what a call runs all of them in.
    vars(model)["_call_impl"] = _NamedCall(model, translate_error)
