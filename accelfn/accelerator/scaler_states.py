"""The scaler states of an Accelerator: one loss scale for all its optimizers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

import accelfn.training as training
from accelfn.accelerator.registry import WeakRegistry
from accelfn.context import Context
from accelfn.errors import ConfigurationError
from accelfn.training import StepState
from accelfn.training.optimizers import parameters_in, parameters_of


class Scaling:
    """Keeps the states of the functions, for optimizers that may step at different times.

    As in torch's GradScaler, all losses are multiplied by one scale, each optimizer skips its own steps, and
    the scale is updated once for all steps since the latest loss.
    """

    def __init__(self, ctx: Context, optimizers: WeakRegistry[Optimizer]) -> None:
        """Start for the optimizers of a registry."""
        self._optimizers = optimizers
        self._state = training.init_scaler(ctx)
        # By optimizer: the state of its unscaled gradients, of its steps since the latest loss, and of its
        # latest step.
        self._unscaled: dict[int, StepState] = {}
        self._stepped: dict[int, StepState] = {}
        self._latest: dict[int, StepState] = {}

    @property
    def state(self) -> StepState:
        """The state of the next loss."""
        return self._state

    def settled(self, ctx: Context) -> StepState:
        """Return the state for the next loss, updated by the steps since the latest one. Changes nothing."""
        if not self._stepped:
            return self._state
        state = self._state
        if ctx.precision.scales_loss:
            found = torch.stack([one.found_inf for one in self._stepped.values()]).max()
            state = training.update_scaler(ctx, state._replace(found_inf=found))
        return state._replace(weight=None)

    def restore(self, state: StepState) -> None:
        """Continue from a saved state, and forget the current gradients."""
        self._state = state
        self._unscaled, self._stepped, self._latest = {}, {}, {}

    def begin_loss(self, ctx: Context) -> StepState:
        """Update the state by the steps since the latest loss, and return it for the next one."""
        if self._stepped:
            before = self._state
            # Other optimizers may be inside a window, with gradients at the old scale.
            waiting = [
                optimizer
                for optimizer in self._optimizers
                if not {id(optimizer)} & {*self._stepped, *self._unscaled}
            ]
            if before.weight is not None and any(map(_has_gradients, waiting)):
                raise ConfigurationError(
                    "backward: an optimizer has stepped while another one still has gradients of losses with "
                    "weights, which are divided once for all. Step all optimizers before the next loss, or "
                    "let losses be means, without weight=."
                )
            self._state = self.settled(ctx)
            if ctx.precision.scales_loss:
                training.rescale_gradients(parameters_in(waiting), before.scale, self._state.scale)
            self._stepped, self._unscaled = {}, {}
        return self._state

    def end_loss(self, state: StepState) -> None:
        """Store the state that ``backward`` returned."""
        # While a window is open, the proxies of optimizers do nothing.
        self._state = state._replace(is_open=None) if state.is_open else state

    def reset(self) -> None:
        """Forget the losses' weight and the current gradients, which were cleared."""
        self.restore(self._state._replace(weight=None))

    def unscale(self, ctx: Context, optimizers: Iterable[Optimizer]) -> StepState:
        """Divide the gradients of optimizers, each once; return the last state."""
        # Each optimizer continues from its own copy of the losses' state.
        state = self._state
        for optimizer in optimizers:
            state = self._unscaled.get(id(optimizer), self._state)._replace()
            self._unscaled[id(optimizer)] = state = training.unscale_gradients(ctx, optimizer, state)
        return state

    def unscale_for(self, ctx: Context, parameters: Sequence[torch.Tensor]) -> StepState:
        """Divide the gradients of the optimizers that have some of the parameters."""
        if not ctx.precision.scales_loss and self._state.weight is None:
            return self._state
        wanted = {id(parameter) for parameter in parameters}
        owners = [optimizer for optimizer in self._optimizers if parameters_of(optimizer) & wanted]
        # Gradients of parameters without an optimizer are not divided.
        return self.unscale(ctx, owners)._replace(unscaled=(id(self),))

    def step(self, ctx: Context, optimizer: Optimizer) -> None:
        """Step an optimizer unless its gradients overflowed; its gradients stay."""
        if not ctx.precision.scales_loss and self._state.weight is None:
            state = training.optimizer_step(ctx, optimizer, self._state, clear_gradients=False)
            self._state = self._latest[id(optimizer)] = state
            return
        state = self._unscaled.pop(id(optimizer), self._state)._replace()
        state = training.optimizer_step(ctx, optimizer, state, clear_gradients=False)
        self._stepped[id(optimizer)] = self._latest[id(optimizer)] = state

    def was_skipped(self, ctx: Context, optimizer: Optimizer) -> bool:
        """Return whether the latest step of an optimizer was skipped."""
        state = self._latest.get(id(optimizer))
        return state is not None and training.step_was_skipped(ctx, state)

    def welcome(self, optimizer: Optimizer) -> None:
        """Forget states under an optimizer's id, which another optimizer may have had."""
        for states in (self._unscaled, self._stepped, self._latest):
            states.pop(id(optimizer), None)


def _has_gradients(optimizer: Optimizer) -> bool:
    groups: list[dict[str, Any]] = optimizer.param_groups
    return any(parameter.grad is not None for group in groups for parameter in group["params"])
