"""Whole models that take turns on an accelerator, and wait in the host's memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accelfn.bigmodel.hooks.model_hook import ModelHook, add_hook_to_module, remove_hook_from_module
from accelfn.bigmodel.hooks.moves import (
    MoveModule,
    module_tensors,
    move_module,
)
from accelfn.bigmodel.offload.move import moved
from accelfn.bigmodel.places import (
    Place,
    PlaceLike,
    check_device,
    current_place,
    is_on,
    is_simulated,
    read_place,
)

__all__ = ("CpuOffload", "UserCpuOffloadHook", "cpu_offload_with_hook")


class CpuOffload(ModelHook):
    """Keeps a whole model in the host's memory until it runs, and on its device from then on.

    The parameters stay the same objects, so optimizers keep working and gradients arrive in ``.grad``, which
    moves along. But a backward must come before the model goes back: autograd remembers the parameters, and
    finds them where they are then.

    Args:
        execution_device: Where the model runs: a number, ``"cuda:1"``, ``"cpu"``, or ``"cpu:0"``, which is
            simulated. None is the current accelerator, or the CPU without one.
        prev_module_hook: The model that ran before: it goes back to the host before this one comes. Copies
            and pickles of this hook take that model along.
        move: How a model is brought to a place.

    Raises:
        ValueError: There is no such device here.
    """

    def __init__(
        self,
        execution_device: PlaceLike | None = None,
        prev_module_hook: UserCpuOffloadHook | None = None,
        *,
        move: MoveModule = move_module,
    ) -> None:
        place = (
            current_place() if execution_device is None else read_place(execution_device, "execution_device")
        )
        self.execution_device: torch.device = check_device(place, "execution_device")
        self.prev_module_hook = prev_module_hook
        self._place = place
        self._at: Place = "cpu"
        self._move = move

    def init_hook(self, module: nn.Module) -> nn.Module:
        """Bring the model to the host."""
        self._bring(module, "cpu")
        return module

    def pre_forward(
        self, module: nn.Module, *args: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Send the model before back to the host, and bring this one and its arguments to its device."""
        if self.prev_module_hook is not None:
            self.prev_module_hook.offload()
        self._bring(module, self._place)
        return moved(args, self.execution_device), moved(kwargs, self.execution_device)

    @property
    def is_loaded(self) -> bool:
        """Whether the model was brought to its device and not back since."""
        return self._at == self._place

    def _bring(self, module: nn.Module, place: Place) -> None:
        device = check_device(place)
        # Tensors can't tell whether they are on a device that is simulated.
        is_there = not is_simulated(self._place) or self._at == place
        if not is_there or not all(is_on(tensor, device) for tensor in module_tensors(module)):
            self._move(module, place)
        self._at = place


class UserCpuOffloadHook:
    """A model and its :class:`CpuOffload`: what a user holds in hand to send the model back to the host."""

    def __init__(self, model: nn.Module, hook: CpuOffload) -> None:
        self.model = model
        self.hook = hook

    def offload(self) -> None:
        """Bring the model to the host; nothing happens if it is there."""
        self.hook.init_hook(self.model)

    def remove(self) -> None:
        """Take the hook away. The model stays where it is."""
        remove_hook_from_module(self.model)


def cpu_offload_with_hook(
    model: nn.Module,
    execution_device: PlaceLike | None = None,
    prev_module_hook: UserCpuOffloadHook | None = None,
) -> tuple[nn.Module, UserCpuOffloadHook]:
    """Keep ``model`` in the host's memory until it runs; then it comes to its device as a whole, and stays.

    With several models in a row each one gets the hook of the one before, so that one at a time is on the
    device. Compared with ``cpu_offload``, which brings a model block by block and takes each one away again,
    it needs room for a whole model, and pays once where a model runs several times.

    Args:
        model: Changed: it gets a hook, and is brought to the host.
        execution_device: Where it runs: a number, ``"cuda:1"``, ``"cpu"``, or ``"cpu:0"``, which is
            simulated. None is the current accelerator, or the CPU without one.
        prev_module_hook: What this function gave for the model that runs before this one.

    Returns:
        The model itself, and what sends it back to the host: ``hook.offload()``.

    Raises:
        ValueError: There is no such device here.

    >>> import torch
    >>> first, first_hook = cpu_offload_with_hook(nn.Linear(2, 2), "cpu")
    >>> second, second_hook = cpu_offload_with_hook(nn.Linear(2, 1), "cpu", prev_module_hook=first_hook)
    >>> second(first(torch.zeros(3, 2))).shape
    torch.Size([3, 1])
    >>> second_hook.offload()
    """
    hook = CpuOffload(execution_device, prev_module_hook)
    model = add_hook_to_module(model, hook, append=True)
    return model, UserCpuOffloadHook(model, hook)
