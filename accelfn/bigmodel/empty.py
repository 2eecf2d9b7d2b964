"""Build a model without allocating its weights: they have names, shapes and dtypes, but no values.

torch calls a hook for each parameter that a module registers. The hook moves the parameter if the calling
thread has entered the context, so models that other threads build meanwhile aren't affected. It stays
registered, and does nothing outside of a context.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.overrides import (
    TorchFunctionMode,
    _pop_mode,  # pyright: ignore[reportPrivateUsage]
    _push_mode,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
)
from torch.utils._device import DeviceContext
from torch.utils.weak import WeakTensorKeyDictionary

from accelfn.config.settings import read_settings
from accelfn.weights.places import check_device, is_on, read_place

_VARIABLES = ("ACCELFN_INIT_INCLUDE_BUFFERS", "ACCELERATE_INIT_INCLUDE_BUFFERS")


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Generator[None, None, None]:
    """Build models without memory for their weights: every parameter is on the ``meta`` device.

    A parameter is replaced by one without values when a module registers it, before the module initialises
    it. Until then its memory is only reserved, since the system provides pages when they are written: torch's
    own layers take none, and a parameter made from values, such as ``nn.Parameter(torch.randn(...))``, takes
    its own memory for a moment. Ties, parameter classes, their attributes and ``requires_grad`` are kept.

    Weights draw no random numbers once they are registered, so seeded random buffers may differ from those of
    ordinary construction.

    What a module computes from its weights in ``__init__`` is computed on ``meta`` too, which has shapes but
    no values. Code that needs a value, such as ``weight.item()``, raises torch's own error.

    Effect: on the calling thread, until the context is left. Also usable as a decorator.

    Args:
        include_buffers: Whether buffers are on ``meta`` too; then every tensor that is created inside without
            an explicit device is. By default they are real, since their values may exist nowhere else. None
            reads ``ACCELFN_INIT_INCLUDE_BUFFERS``, then ``ACCELERATE_INIT_INCLUDE_BUFFERS``, and defaults to
            False.

    Raises:
        ConfigurationError: The environment variable is neither true nor false.

    >>> with init_empty_weights():
    ...     model = torch.nn.Linear(20_000, 20_000)
    >>> model.weight.device, model.weight.shape
    (device(type='meta'), torch.Size([20000, 20000]))
    """
    with init_on_device(torch.device("meta"), include_buffers):
        yield


@contextmanager
def init_on_device(
    device: torch.device | str | int, include_buffers: bool | None = None
) -> Generator[None, None, None]:
    """Build models with their parameters on one device.

    A parameter is moved when a module registers it, so the module initialises it on that device. On the CPU
    all values are bit for bit those of ordinary construction with the same seed.

    Effect: on the calling thread, until the context is left. Also usable as a decorator. Of nested contexts
    the innermost applies.

    Args:
        device: ``"meta"``, or any device that :func:`dispatch_model` accepts.
        include_buffers: Whether buffers, and all other tensors that are created inside without an explicit
            device, are on it too. None: as in :func:`init_empty_weights`.

    Raises:
        ValueError: This machine has no such device.
        ConfigurationError: The environment variable is neither true nor false.

    >>> with init_on_device("meta", include_buffers=True):
    ...     norm = torch.nn.BatchNorm1d(3)
    >>> norm.weight.device.type, norm.running_mean.device.type
    ('meta', 'meta')
    """
    if str(device) == "meta":
        target = torch.device("meta")
    else:
        target = check_device(read_place(device, "init_on_device"), "init_on_device")
    if include_buffers is None:
        variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        include_buffers = read_settings(variables).init_include_buffers or False
    # Once: torch's hooks are of the whole process, and another thread may be calling them.
    torch_hooks = cast("Any", nn_module)
    if _move_parameter not in torch_hooks._global_parameter_registration_hooks.values():
        torch_hooks.register_module_parameter_registration_hook(_move_parameter)
    outer, _HERE.mover = _HERE.mover, _ParameterMover(target)
    try:
        with _FactoriesOn(target) if include_buffers else nullcontext():
            yield
    finally:
        _HERE.mover = outer


class _Here(threading.local):
    """The mover of this thread's innermost context."""

    mover: _ParameterMover | None = None


_HERE = _Here()


def _move_parameter(module: nn.Module, name: str, parameter: nn.Parameter) -> torch.Tensor | None:
    del module, name
    return None if _HERE.mover is None else _HERE.mover(parameter)


class _ParameterMover:
    """Moves each parameter to a device when a module registers it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moved: Any = WeakTensorKeyDictionary()  # by original parameter, so that ties are kept

    def __call__(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the parameter on the device, or None if it is there already."""
        if is_on(parameter, self._device):
            return None
        if parameter not in self._moved:
            self._moved[parameter] = self._move(parameter)
        return self._moved[parameter]

    def _move(self, parameter: nn.Parameter) -> torch.Tensor:
        if nn.parameter.is_lazy(parameter):  # uninitialised, without a shape
            data = torch.empty(0, dtype=parameter.dtype, device=self._device)
        else:
            data = parameter.detach().to(self._device)
        if nn.Parameter in type(parameter).__mro__:
            # Not through the constructor, which may quantise, or require other arguments.
            moved = torch.Tensor._make_subclass(type(parameter), data, parameter.requires_grad)
            vars(moved).update(vars(parameter))
            return moved
        moved = nn.Parameter(data, parameter.requires_grad)  # a tensor subclass marked as a parameter
        for key, value in vars(parameter).items():
            vars(moved).setdefault(key, value)
        return moved


class _FactoriesOn(DeviceContext):
    """``torch.device`` as a context, without the global variable in which torch records it.

    Threads that enter and leave such contexts alternately would leave that variable wrong for all others.
    """

    _replaced: DeviceContext | None = None

    def __enter__(self) -> None:
        # As torch does: below all other modes, in place of an existing device context.
        for mode in (*_take_modes(), self)[::-1]:
            if mode is not self and isinstance(mode, DeviceContext):
                self._replaced = mode
            else:
                _push_mode(mode)

    def __exit__(self, *exception: object) -> None:
        above = [mode for mode in _take_modes() if mode is not self]
        for mode in (*above, *(() if self._replaced is None else (self._replaced,)))[::-1]:
            _push_mode(mode)


def _take_modes() -> tuple[TorchFunctionMode, ...]:
    """Pop all modes off this thread's stack, topmost first."""
    size: int = torch._C._len_torch_function_stack()  # pyright: ignore[reportPrivateUsage]
    return tuple(_pop_mode() for _ in range(size))
