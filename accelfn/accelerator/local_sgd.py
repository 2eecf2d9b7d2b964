"""Local SGD for an Accelerator, as a context manager."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType

from torch import nn
from typing_extensions import Self

import accelfn.training as training
from accelfn.accelerator.accelerator import Accelerator
from accelfn.context import Context
from accelfn.errors import ConfigurationError
from accelfn.training.local_sgd import check_local_sgd


class LocalSGD:
    """Let ranks train independently in a ``with`` block, and average their parameters every few steps.

    ::

        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8) as local_sgd:
            for x, y in loader:
                with accelerator.accumulate(model):
                    accelerator.backward(loss_fn(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
                    local_sgd.step()

    Gradients are not averaged inside. The parameters are averaged once more at the end, but not after an
    exception, where other ranks may be elsewhere. The functions are
    :func:`accelfn.training.local_sgd_step` and :func:`accelfn.training.average_parameters`.

    Ranks: every rank of the accelerator's world.
    """

    def __init__(
        self, accelerator: Accelerator, model: nn.Module, local_sgd_steps: int = 8, enabled: bool = True
    ) -> None:
        """Set up local SGD for ``model``; does nothing if ``enabled`` is False.

        Args:
            accelerator: The accelerator that prepared the model.
            model: The prepared model.
            local_sgd_steps: Optimizer steps between two averages.
            enabled: Whether to do anything.

        Raises:
            ValueError: ``local_sgd_steps`` is below 1.
            ConfigurationError: ``Guard.check_replicas_every`` is set, which would fail as ranks differ; or
                the accelerator is in exact mode.
        """
        check_local_sgd("LocalSGD", accelerator.context if enabled else Context(), local_sgd_steps)
        if enabled and accelerator.context.guard.check_replicas_every is not None:
            raise ConfigurationError(
                "LocalSGD: check_replicas_every compares parameters after optimizer steps, and here they "
                "differ on purpose. Use a guard without it, and check_replicas after the block."
            )
        self.enabled: bool = enabled and accelerator.num_processes > 1
        self.local_sgd_steps = local_sgd_steps
        self._accelerator = accelerator
        self._model = model
        self._state = training.LocalSGDState()
        self._without_sync = ExitStack()

    def __enter__(self) -> Self:
        """Stop averaging gradients."""
        if self.enabled:
            self._state = training.LocalSGDState()
            self._without_sync.enter_context(self._accelerator.no_sync(self._model))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Average the parameters, unless there is an exception, and average gradients again."""
        self._without_sync.close()
        if self.enabled and error is None:
            training.average_parameters(self._accelerator.context, self._model)

    def step(self) -> None:
        """Count an optimizer step, where the window closes; see :func:`accelfn.training.local_sgd_step`."""
        if self.enabled and self._accelerator.sync_gradients:
            self._state = training.local_sgd_step(
                self._accelerator.context, self._model, self._state, every=self.local_sgd_steps
            )
