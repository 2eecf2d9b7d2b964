"""The newest scaler states of an Accelerator: one loss scale serves all its optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

import accelfn.training as training
from accelfn.accelerator.registry import WeakRegistry
from accelfn.context import Context
from accelfn.errors import ConfigurationError
from accelfn.training import ScalerState
from accelfn.training.prepare import parameters_of


class Scaling:
    """Keeps what the functions take and return, for optimizers that may step at different times.

    As in torch's GradScaler, the losses of all are multiplied by one scale, each optimizer skips its own
    steps, and the scale moves once for all steps that were made since the latest loss.
    """

    def __init__(self, ctx: Context, optimizers: WeakRegistry[Optimizer]) -> None:
        """Begin for what ``optimizers`` holds."""
        self._optimizers = optimizers
        self._state = training.init_scaler(ctx)
        # By optimizer: the state of its gradients, after its steps since the latest loss, and after its
        # latest step.
        self._unscaled: dict[int, ScalerState] = {}
        self._stepped: dict[int, ScalerState] = {}
        self._latest: dict[int, ScalerState] = {}

    @property
    def state(self) -> ScalerState:
        """The state that the next loss is scaled by."""
        return self._state

    def settled(self, ctx: Context) -> ScalerState:
        """Return the state for another loss, as the steps since the latest one make it. Changes nothing."""
        if not self._stepped:
            return self._state
        state = self._state
        if ctx.precision.scales_loss:
            found = torch.stack([one.found_inf for one in self._stepped.values()]).max()
            state = training.update_scaler(ctx, state._replace(found_inf=found))
        return state._replace(weight=None)

    def restore(self, state: ScalerState) -> None:
        """Go on from a state that was saved. What is known of current gradients is forgotten."""
        self._state = state
        self._unscaled, self._stepped, self._latest = {}, {}, {}

    def begin_loss(self, ctx: Context) -> ScalerState:
        """Follow the steps since the latest loss, and give the state for another one."""
        if self._stepped:  # only where there is something to divide by
            before = self._state
            # Others may be in a window, with gradients at the old scale.
            waiting = [one for one in self._optimizers if not {id(one)} & {*self._stepped, *self._unscaled}]
            if before.weight is not None and any(map(_has_gradients, waiting)):
                raise ConfigurationError(
                    "backward: an optimizer has stepped, and another one still waits with gradients of "
                    "losses that have weights, which are divided once for all. Let all step before the next "
                    "loss, or use the functions, with a ScalerState for each optimizer."
                )
            self._state = self.settled(ctx)
            if ctx.precision.scales_loss:
                training.rescale_gradients(waiting, before, self._state)
            self._stepped, self._unscaled = {}, {}
        return self._state

    def end_loss(self, state: ScalerState) -> None:
        """Store the state that ``backward`` returned."""
        # Where a window is open, the proxies of optimizers do nothing.
        self._state = state._replace(is_open=None)

    def reset(self) -> None:
        """Forget the weight of losses, and what is known of the current gradients, which are gone."""
        self.restore(self._state._replace(weight=None))

    def unscale(self, ctx: Context, optimizers: Iterable[Optimizer]) -> ScalerState:
        """Divide the gradients of some optimizers, each once, and give a state that says so."""
        # Each optimizer continues from the state of the losses by itself: a copy of it.
        state = self._state
        for one in optimizers:
            state = self._unscaled.get(id(one), self._state)._replace()
            self._unscaled[id(one)] = state = training.unscale_gradients(ctx, one, state)
        return state

    def unscale_for(self, ctx: Context, parameters: Sequence[torch.Tensor]) -> ScalerState:
        """Divide the gradients of the optimizers that some parameters belong to."""
        if not ctx.precision.scales_loss and self._state.weight is None:
            return self._state
        wanted = {id(parameter) for parameter in parameters}
        owners = [one for one in self._optimizers if parameters_of(one) & wanted]
        # Without an optimizer, these are nobody's gradients, and taken as they are.
        return self.unscale(ctx, owners)._replace(unscaled=(id(self),))

    def step(self, ctx: Context, optimizer: Optimizer) -> None:
        """Let an optimizer step unless its gradients overflowed; they stay."""
        if not ctx.precision.scales_loss and self._state.weight is None:
            training.optimizer_step(ctx, optimizer, self._state._replace(), clear_gradients=False)
            return
        state = self._unscaled.pop(id(optimizer), self._state)._replace()
        state = training.optimizer_step(ctx, optimizer, state, clear_gradients=False)
        self._stepped[id(optimizer)] = self._latest[id(optimizer)] = state

    def was_skipped(self, ctx: Context, optimizer: Optimizer) -> bool:
        """Return whether the latest step of an optimizer was skipped."""
        state = self._latest.get(id(optimizer))
        return state is not None and training.step_was_skipped(ctx, state)

    def welcome(self, optimizer: Optimizer) -> None:
        """Forget what is stored under an optimizer's id: another one may have had it."""
        for states in (self._unscaled, self._stepped, self._latest):
            states.pop(id(optimizer), None)


def _has_gradients(optimizer: Optimizer) -> bool:
    groups: list[dict[str, Any]] = optimizer.param_groups
    return any(parameter.grad is not None for group in groups for parameter in group["params"])
