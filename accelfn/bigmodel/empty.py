"""Build a model whose weights take no memory: they have names, shapes and dtypes, and no values yet.

torch calls a hook for each parameter that a module registers, and the hook moves it in the thread that has
entered the context: a model that another thread builds at the same time is an ordinary one. The hook stays
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

from accelfn.bigmodel.devices import check_device, is_on, read_place
from accelfn.context.config.settings import read_settings

_VARIABLES = ("ACCELFN_INIT_INCLUDE_BUFFERS", "ACCELERATE_INIT_INCLUDE_BUFFERS")


@contextmanager
def init_empty_weights(include_buffers: bool | None = None) -> Generator[None, None, None]:
    """Build models inside without memory for their weights: every parameter goes to the device ``meta``.

    A parameter is replaced by one without values when a module registers it, before the module initialises
    it. Until then torch reserves its memory, which the system provides where something is written to it: so
    layers of torch take none, and a parameter that is made of values, as ``nn.Parameter(torch.randn(...))``
    is, takes its own memory for that moment. Ties are kept, as are classes of parameters, their attributes
    and ``requires_grad``.

    Weights draw no random numbers once a module holds them, so seeded random buffers may differ from those of
    the plain construction.

    What a module computes from its weights in ``__init__`` is computed on ``meta`` too: shapes come out right
    and there are no values. Code that needs a value, such as ``weight.item()``, gets torch's own error.

    Effect: on the calling thread, until the context is left. Also a decorator of functions that build models.

    Args:
        include_buffers: Whether buffers have no values either: then every tensor that is made inside without
            a device of its own goes to ``meta``. By default they are real, as nothing else may hold their
            values. None reads ``ACCELFN_INIT_INCLUDE_BUFFERS``, then ``ACCELERATE_INIT_INCLUDE_BUFFERS``, and
            is False where neither is set.

    Raises:
        ConfigurationError: The environment variable is set to what is neither true nor false.

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
    """Build models inside with their parameters on one device.

    A parameter is moved when a module gets it, so what the module does to initialise it is done there. On the
    CPU all values are, bit for bit, those of the plain construction with the same seed.

    Effect: on the calling thread, until the context is left. Also a decorator of functions that build models.
    Of nested contexts the innermost counts.

    Args:
        device: Where parameters go: ``"meta"``, or what :func:`dispatch_model` takes for a device.
        include_buffers: Whether buffers, and all other tensors that are made inside without a device of their
            own, go there too. None: as :func:`init_empty_weights` has it.

    Raises:
        ValueError: There is no such device here.
        ConfigurationError: The environment variable is set to what is neither true nor false.

    >>> with init_on_device("meta", include_buffers=True):
    ...     norm = torch.nn.BatchNorm1d(3)
    >>> norm.weight.device.type, norm.running_mean.device.type
    ('meta', 'meta')
    """
    target = _device(device)
    with_buffers = _with_buffers() if include_buffers is None else include_buffers
    _watch_parameters()
    outer, _HERE.moves = _HERE.moves, _ParametersOn(target)
    try:
        with _FactoriesOn(target) if with_buffers else nullcontext():
            yield
    finally:
        _HERE.moves = outer


class _Here(threading.local):
    """What moves the parameters of this thread's models: that of the innermost context."""

    moves: _ParametersOn | None = None


_HERE = _Here()


def _watch_parameters() -> None:
    """Register the hook, once: torch's hooks are of the process, and another thread may be calling them."""
    torchs = cast("Any", nn_module)
    if _move_here not in torchs._global_parameter_registration_hooks.values():
        torchs.register_module_parameter_registration_hook(_move_here)


def _move_here(module: nn.Module, name: str, parameter: nn.Parameter) -> torch.Tensor | None:
    del module, name
    return None if _HERE.moves is None else _HERE.moves(parameter)


class _ParametersOn:
    """Moves each parameter to a device when a module registers it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moved: Any = WeakTensorKeyDictionary()  # one for each parameter, so that ties are kept

    def __call__(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """Return the parameter on the device; None where it is there."""
        if is_on(parameter, self._device):
            return None
        if parameter not in self._moved:
            self._moved[parameter] = self._move(parameter)
        return self._moved[parameter]

    def _move(self, parameter: nn.Parameter) -> torch.Tensor:
        if nn.parameter.is_lazy(parameter):  # it has no shape yet
            data = torch.empty(0, dtype=parameter.dtype, device=self._device)
        else:
            data = parameter.detach().to(self._device)
        if nn.Parameter in type(parameter).__mro__:
            # Not by its constructor: that of a quantised class may want to quantise, or arguments of its own.
            made = torch.Tensor._make_subclass(type(parameter), data, parameter.requires_grad)
            vars(made).update(vars(parameter))
            return made
        made = nn.Parameter(data, parameter.requires_grad)  # a class of tensors that are marked as parameters
        for key, value in vars(parameter).items():
            vars(made).setdefault(key, value)
        return made


class _FactoriesOn(DeviceContext):
    """``torch.device`` as a context, less the note of it that torch keeps for the whole process.

    Threads that enter and leave such contexts in turns would leave that note wrong for all others.
    """

    _replaced: DeviceContext | None = None

    def __enter__(self) -> None:
        # As torch does it: below all other modes, and in place of the one that is there.
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
    """Take all modes off this thread's stack; the topmost comes first."""
    size: int = torch._C._len_torch_function_stack()  # pyright: ignore[reportPrivateUsage]
    return tuple(_pop_mode() for _ in range(size))


def _device(device: torch.device | str | int) -> torch.device:
    if str(device) == "meta":
        return torch.device("meta")
    return check_device(read_place(device, "init_on_device"), "init_on_device")


def _with_buffers() -> bool:
    given = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return read_settings(given).init_include_buffers or False
