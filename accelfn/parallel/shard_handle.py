"""The handle of a model that torch's ``fully_shard`` has sharded."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Literal, cast

import torch
from torch import nn

from accelfn.errors import ConfigurationError
from accelfn.parallel.handle import HANDLE, IN_NO_SYNC, Communication, Handle, register
from accelfn.tree import is_dtensor

__all__ = ("ShardHandle", "with_named_errors")


class ShardHandle(Handle):
    """Of a model whose parameters are shards, and whose gradients FSDP averages in the backward pass.

    FSDP puts gradients on its shards itself. Those that autograd would put there come from a loss that has
    used shards outside of a forward pass, and nobody averages them: they are refused.
    """

    engine: ClassVar[Literal["none", "ddp", "shard"]] = "shard"
    has_whole_parameters: ClassVar[bool] = False
    holds_gradients: ClassVar[bool] = True

    def __init__(self, model: nn.Module, units: Sequence[nn.Module], device: torch.device) -> None:
        """Watch the shards of ``model``, whose units (the model is the last one) are sharded.

        Args:
            model: Sharded.
            units: Its sharded modules.
            device: Where it computes.
        """
        self._waits = device.type == "cpu"  # else a forward pass goes on, and its streams wait
        self._model = weakref.ref(model)
        self._units = [weakref.ref(unit) for unit in units]
        self._syncs = True
        register(self, model.parameters())
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and is_dtensor(parameter):
                cast("Any", parameter).register_hook(_refusal_of(name))
        setattr(model, HANDLE, self)

    @property
    def is_alive(self) -> bool:
        """Whether somebody holds the model still."""
        return self._model() is not None

    def without_sync(self) -> AbstractContextManager[None]:
        """Let backward passes inside add up whole gradients on each rank."""
        return self._syncing(False)

    def trigger_sync(self) -> AbstractContextManager[None]:
        """Average gradients in backward passes inside, with all that have added up before."""
        return self._syncing(True)

    @contextmanager
    def _syncing(self, syncs: bool) -> Generator[None, None, None]:
        before = self._syncs
        self._set(syncs)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, syncs: bool) -> None:
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

    def communicates(self) -> Communication:
        """Return what the next forward pass and its backward pass communicate."""
        gradients = self._syncs and torch.is_grad_enabled()
        return Communication(gradients=gradients, parameters=True, at_once=self._waits)

    def why_unreduced(self) -> str | None:
        """Return why the gradients at hand are those of this rank alone; None where they are averaged."""
        return IN_NO_SYNC if any(True for _ in self._unreduced()) else None

    def discard(self) -> None:
        """Let go of gradients that have added up and were not averaged yet."""
        for parameter in self._unreduced():
            parameter.unsharded_accumulated_grad = None
            parameter._unsharded_param.grad = None

    def _unreduced(self) -> Generator[Any, None, None]:
        """Give FSDP's records of the parameters that hold whole gradients."""
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


def _refusal_of(name: str) -> Callable[[torch.Tensor], None]:
    def refuse(gradient: torch.Tensor) -> None:
        del gradient
        raise ConfigurationError(
            f"backward: the loss has used {name}, a shard, outside of the forward pass of its model, where "
            "it isn't gathered and nobody averages its gradient over the ranks. Compute the loss in the "
            "model's forward, or in a method that register_forward_method(model, name) was told of."
        )

    return refuse


def with_named_errors(model: nn.Module, translate_error: Callable[[Exception], Exception]) -> None:
    """Let calls of a model that wait for other ranks say which of them are lost. Writes into ``model``."""
    reference = weakref.ref(model)

    def called(*args: Any, **kwargs: Any) -> Any:
        own = cast("Any", reference())
        kind = cast("Any", type(own))
        try:
            return kind._call_impl(own, *args, **kwargs)
        except RuntimeError as error:
            explained = translate_error(error)
            if explained is error:
                raise
            raise explained from (explained.__cause__ or error)

    # FSDP waits in hooks, around and inside of ``forward``; this is what a call runs all of them in.
    vars(model)["_call_impl"] = called
