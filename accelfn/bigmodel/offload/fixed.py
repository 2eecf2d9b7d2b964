"""A model whose weights stay where they were put: what would move all of them is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accelfn.bigmodel.load.mapped import mapped_from
from accelfn.bigmodel.offload.blocks import slots_of

__all__ = ("fix", "unfix")

_MOVES = ("cpu", "cuda", "xpu", "mtia", "ipu", "to_empty")


def fix(model: nn.Module) -> None:
    """Refuse to move a model, and to change the dtype of weights on the disk, until :func:`unfix`.

    A move is refused to whatever device, also to the one where the weights are: a program then does the same
    on a laptop as on a machine with accelerators. Copies of the model refuse it, too.

    Args:
        model: Effect: its own ``to``, ``cuda`` and the like. Its submodules' stay as they are.
    """
    vars(model)["_apply"] = _Apply(model)
    vars(model)["to"] = _To(model)
    for name in _MOVES:
        if hasattr(type(model), name):
            vars(model)[name] = _Move(model, name)


def unfix(model: nn.Module) -> None:
    """Undo :func:`fix`; a model that wasn't fixed is left alone."""
    for name in ("_apply", "to", *_MOVES):
        if isinstance(vars(model).get(name), (_Apply, _To, _Move)):
            del vars(model)[name]


@dataclass(frozen=True, slots=True, eq=False)
class _Move:
    """Stands for a method that moves a whole model, or throws its weights away."""

    model: nn.Module
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Module:
        raise _refusal(self.model, f"{self.name}()")


@dataclass(frozen=True, slots=True, eq=False)
class _To:
    """Stands for a model's ``to``, which moves it or changes its dtype."""

    model: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> nn.Module:
        parse: Any = getattr(vars(torch)["_C"]._nn, "_parse_to")  # noqa: B009 - as torch's own to() reads them
        device = parse(*args, **kwargs)[0]
        if device is not None:
            raise _refusal(self.model, f"to({str(device)!r})")
        to: Any = type(self.model).to
        return to(self.model, *args, **kwargs)


@dataclass(frozen=True, slots=True, eq=False)
class _Apply:
    """Stands for a model's ``_apply``: whatever changes all tensors of a model goes through it."""

    model: nn.Module

    def __call__(self, function: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        tensors = [(name, slot.read()) for name, slot in slots_of(self.model)]
        on_disk = {one.dtype: name for name, one in tensors if mapped_from(one) is not None}
        for device, dtype in dict.fromkeys((one.device, one.dtype) for _, one in tensors):
            result = function(torch.empty(0, device=device, dtype=dtype))
            if result.device != device:
                raise _refusal(self.model, str(result.device))
            if result.dtype != dtype and dtype in on_disk:
                raise RuntimeError(
                    f"this {type(self.model).__name__} has weights on the disk, which can't become "
                    f"{result.dtype} without being read as a whole: {on_disk[dtype]!r}, say. Pass dtype= "
                    "where they are loaded, or call accelfn.bigmodel.undispatch(model) first."
                )
        apply: Any = getattr(type(self.model), "_apply")  # noqa: B009 - torch has no public name for it
        return apply(self.model, function, recurse)


def _refusal(model: nn.Module, what: str) -> RuntimeError:
    return RuntimeError(
        f"this {type(model).__name__}'s weights are spread by a device map or offloaded, so it can't be "
        f"moved as a whole: {what}. It runs where it is: leave the call out, or dispatch it anew with "
        "another map. accelfn.bigmodel.undispatch(model) makes it a plain model again, with its weights "
        "where they lie."
    )
