"""Modes of torch, for one thread, that put on a device what modules are built of."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.overrides import (
    TorchFunctionMode,
    _pop_mode,  # pyright: ignore[reportPrivateUsage]
    _push_mode,  # pyright: ignore[reportPrivateUsage, reportUnknownVariableType]
)
from torch.utils._device import DeviceContext
from torch.utils.weak import WeakTensorKeyDictionary

from accelfn.bigmodel.late import LateFills, tensors_in
from accelfn.bigmodel.places import is_on

__all__ = ("FactoriesOn", "ParametersOn")

# Functions that hand no memory out. Those among them that look at values, or write them, do so by operations
# that LateFills sees.
_NO_LOOK = frozenset(
    (
        *("normal_", "uniform_", "zero_", "fill_", "random_", "bernoulli_", "exponential_", "log_normal_"),
        *("cauchy_", "requires_grad_", "size", "dim", "ndimension", "numel", "nelement", "stride"),
        *("storage_offset", "element_size", "is_floating_point", "is_complex", "is_contiguous", "__get__"),
    )
)


class FactoriesOn(DeviceContext):
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


class _Receiving(dict[str, Any]):
    """Stands for a module's table of parameters until it gets one, and then lets it have another instead.

    A module that registers a parameter writes it down after it was looked at, and there is no later moment
    at which that could be undone before anybody has read it.
    """

    def __init__(self, module: nn.Module, old: torch.Tensor, new: torch.Tensor) -> None:
        self._module = module
        self._table = cast("dict[str, Any]", vars(module)["_parameters"])
        self._old, self._new = old, new
        super().__init__(self._table)

    def __setitem__(self, name: str, value: Any) -> None:
        vars(self._module)["_parameters"] = self._table
        self._table[name] = self._new if value is self._old else value


class ParametersOn(TorchFunctionMode):
    """While entered, every parameter that a module of this thread gets is on the device from then on.

    A module that gets a parameter asks torch whether it is a result of other tensors, and so is seen here. A
    parameter that was made inside is turned into one of the device as it is: whoever holds it holds the new
    one. One that was there before stays as it is for its owners, and the module gets another instead.
    """

    def __init__(self, device: torch.device, fills: LateFills) -> None:
        super().__init__()
        self._device = device
        self._fills = fills
        self._storages: WeakKeyDictionary[torch.UntypedStorage, torch.UntypedStorage] = WeakKeyDictionary()
        self._twins: Any = WeakTensorKeyDictionary()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = dict(kwargs or {})
        of = getattr(func, "__self__", None)
        name = getattr(func, "__name__", "")
        if of is torch.Tensor.grad_fn:
            module = _registering(args[0])
            if module is not None:
                return self._register(args[0], module)
        elif of is torch.Tensor.data and name == "__set__":
            args = (args[0], self._data_for(args[0], args[1]))
        elif func is torch.empty_like and self._has(args[0]) and _is_skipping_init():
            keywords["device"] = self._device
        elif name not in _NO_LOOK and getattr(func, "__module__", "") != "torch.nn.init":
            self._fills.fill(tensors_in(args, keywords))
        return func(*args, **keywords)

    def _register(self, parameter: torch.Tensor, module: nn.Module) -> Any:
        # Modes further out aren't asked: of nested contexts the innermost counts.
        with torch._C.DisableTorchFunction():  # pyright: ignore[reportPrivateUsage]
            grad_fn = parameter.grad_fn
            if grad_fn is not None or is_on(parameter, self._device):
                return grad_fn
            is_plain = _is_plain(parameter)
            twin: torch.Tensor | None = self._twins.get(parameter)
            if twin is None:
                twin = self._plain_twin(parameter) if is_plain else self._twin(parameter)
                if is_plain and self._fills.is_new(parameter) and _swap(parameter, twin):
                    return None
                self._twins[parameter] = twin
            vars(module)["_parameters"] = _Receiving(module, parameter, twin)
        return None

    def _plain_twin(self, parameter: torch.Tensor) -> torch.Tensor:
        # Not by its constructor: that of a quantised class may want to quantise, or arguments of its own.
        twin: torch.Tensor = torch.Tensor._make_subclass(
            type(parameter), self._moved(parameter), parameter.requires_grad
        )
        vars(twin).update(vars(parameter))
        return twin

    def _twin(self, parameter: torch.Tensor) -> torch.Tensor:
        twin = nn.Parameter(parameter.detach().to(self._device), parameter.requires_grad)
        for key, value in vars(parameter).items():
            vars(twin).setdefault(key, value)
        return twin

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor's data on the device."""
        if nn.parameter.is_lazy(tensor):  # it has no shape yet
            return torch.empty(0, dtype=tensor.dtype, device=self._device)
        if self._device.type != "meta" or tensor.layout is not torch.strided:
            return tensor.detach().to(self._device)
        if tensor.is_conj() or tensor.is_neg():
            return tensor.detach().to(self._device)
        # By its memory, which isn't looked at: tensors that share it still do so afterwards.
        storage = tensor.untyped_storage()
        if storage not in self._storages:
            self._storages[storage] = torch.UntypedStorage(storage.nbytes(), device=self._device)
        moved: Any = torch.empty(0, dtype=tensor.dtype, device=self._device)
        return moved.set_(
            self._storages[storage], tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
        )

    def _data_for(self, tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
        if self._has(tensor) and not is_on(data, self._device):
            return self._moved(data)
        # The memory now is that of a parameter which may have been there before.
        self._fills.disown(data)
        return data

    def _has(self, value: object) -> bool:
        return isinstance(value, nn.Parameter) and is_on(value, self._device)


def _registering(parameter: torch.Tensor) -> nn.Module | None:
    """Return the module that is getting a parameter at this moment; None if nothing of the kind happens."""
    frame: FrameType | None = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_code.co_name == "register_parameter" and frame.f_locals.get("param") is parameter:
            return frame.f_locals["self"]
        # Between the module and this mode there may be other modes.
        if frame.f_code.co_name != "__torch_function__":
            return None
        frame = frame.f_back
    return None


def _is_skipping_init() -> bool:
    """Whether ``torch.nn.utils.skip_init`` gives a module its memory: on the host by default."""
    frame: FrameType | None = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_code is nn.utils.skip_init.__code__:  # pyright: ignore[reportUnknownMemberType]
            return True
        frame = frame.f_back
    return False


def _is_plain(parameter: torch.Tensor) -> bool:
    """Whether its class is one of parameters, and not one of tensors that are marked to be parameters."""
    return nn.Parameter in type(parameter).__mro__


def _swap(parameter: torch.Tensor, twin: torch.Tensor) -> bool:
    try:
        torch.utils.swap_tensors(parameter, twin)  # pyright: ignore[reportUnknownMemberType]
    except RuntimeError:  # it is held by something that would not notice, such as a graph
        return False
    return True
