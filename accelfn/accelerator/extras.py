"""The methods of an Accelerator beside the training step: memory, profiles, LOMO, device maps."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

import accelfn.parallel as parallel
import accelfn.tracking as tracking
import accelfn.training as training
from accelfn.accelerator.held import WeakRegistry
from accelfn.accelerator.proxies import Loop
from accelfn.accelerator.scaling import Scaling
from accelfn.context import Context
from accelfn.context.config import ProfileKwargs
from accelfn.data import MicroBatch

__all__ = ("Extras",)


class Extras:
    """What an Accelerator does beside the training step."""

    context: Context
    models: WeakRegistry[nn.Module]
    optimizers: WeakRegistry[Optimizer]
    schedulers: WeakRegistry[Any]
    loaders: WeakRegistry[Any]
    step: int
    loops: dict[Loop, MicroBatch]
    ended: list[MicroBatch]
    last_micro: MicroBatch | None
    window: MicroBatch | None
    sync_gradients: bool
    _scaling: Scaling

    @property
    def has_lomo_optimizer(self) -> bool:
        """Whether an optimizer was prepared that steps inside of backward."""
        return any(training.is_lomo(one) for one in self.optimizers)

    def lomo_backward(self, loss: torch.Tensor, learning_rate: float) -> None:
        """Change parameters while backward runs; see :func:`accelfn.lomo_backward`.

        Raises:
            ValueError: Not exactly one LOMO optimizer was prepared.
        """
        found = [one for one in self.optimizers if training.is_lomo(one)]
        if len(found) != 1:
            raise ValueError(
                f"lomo_backward: needs one prepared optimizer that is Lomo or AdaLomo, got {len(found)}. "
                "Prepare it, and keep what prepare gives back; for several use accelfn.lomo_backward, which "
                "takes the optimizer."
            )
        training.lomo_backward(self.context, loss, learning_rate, found[0], self.window)

    @staticmethod
    def trigger_sync_in_backward(model: nn.Module) -> AbstractContextManager[None]:
        """Average gradients in a backward pass although its forward pass was under ``no_sync``.

        See :func:`accelfn.trigger_sync_in_backward`.
        """
        return parallel.trigger_sync_in_backward(model)

    def verify_device_map(self, model: nn.Module) -> bool:
        """Say whether a device map has spread a model over devices; see :func:`accelfn.verify_device_map`."""
        return training.verify_device_map(model)

    def profile(
        self, profile_handler: ProfileKwargs | None = None
    ) -> AbstractContextManager[torch.profiler.profile]:
        """Run a block under torch's profiler; see :func:`accelfn.profile`."""
        return tracking.profile(self.context, profile_handler)

    def free_memory(self, *objects: Any) -> list[None]:
        """Forget all that was prepared, and free memory; see :func:`accelfn.release_memory`."""
        for held in (self.models, self.optimizers, self.schedulers, self.loaders):
            held.clear()
        self.loops.clear()
        self.ended.clear()
        self.step, self.last_micro = 0, None
        self.sync_gradients = True
        self._scaling.reset()
        return training.release_memory(*objects)

    def clear(self, *objects: Any) -> list[None]:
        """Do what ``free_memory`` does."""
        return self.free_memory(*objects)
