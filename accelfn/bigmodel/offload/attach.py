"""Streams and moves attached to a model by torch's own hooks, and taken off again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accelfn.bigmodel.offload.blocks import has_forward
from accelfn.bigmodel.offload.move import input_device, moved
from accelfn.bigmodel.offload.running import caller_of_hook
from accelfn.bigmodel.offload.stream import Stream
from accelfn.bigmodel.offload.uncompiled import uncompiled

__all__ = ("Attached", "attach_moves", "attach_return", "attach_stream")


@dataclass(slots=True, eq=False)
class Attached:
    """What hangs on a model's modules, to be taken off again.

    Attributes:
        handles: Of torch's hooks.
    """

    handles: list[RemovableHandle] = field(default_factory=list[RemovableHandle])

    def remove(self) -> None:
        """Take everything off."""
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


def attach_stream(model: nn.Module, stream: Stream) -> Attached:
    """Let a model's blocks come before their modules run, and go afterwards.

    Args:
        model: Whose blocks the stream has.
        stream: Of its blocks.
    """
    attached = Attached()
    blocks = {block.module: position for position, block in enumerate(stream.blocks)}
    for position, block in enumerate(stream.blocks):
        _around(attached, block.module, _Entry(stream, position), _Exit(stream, position))
        # Others may call a module within the block without calling the block's own.
        for module in dict.fromkeys(slot.owner for slot in block.slots):
            if module is not block.module and module not in blocks and has_forward(module):
                _around(attached, module, _Guard(stream, position), _GuardEnd(stream, position))
    # Last, so that a module's scope begins before its own tensors come, and ends after they went.
    for module in _above(model, blocks):
        _around(attached, module, _Scope(stream), _ScopeEnd(stream))
    return attached


def _around(
    attached: Attached, module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]
) -> None:
    attached.handles.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
    attached.handles.append(_with_equal_id(module, module.register_forward_hook(after, always_call=True)))


def _with_equal_id(module: nn.Module, handle: RemovableHandle) -> RemovableHandle:
    """Return a hook that is always called an id that it also has in other modules like this one.

    torch.compile compares the ids of such hooks, and would compile each of many equal blocks anew. torch
    counts ids up from 0, so these count down.
    """
    hooks: dict[int, Any] = vars(module)["_forward_hooks"]
    always: dict[int, bool] = vars(module)["_forward_hooks_always_called"]
    equal = min(-1, min(hooks) - 1)
    hooks[equal], always[equal] = hooks.pop(handle.id), always.pop(handle.id)
    handle.id = equal
    return handle


def _above(model: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Return the modules that run and have blocks below them, outer ones last."""
    inner = set(blocks)
    return [
        module
        for module in reversed(list(model.modules()))
        if has_forward(module) and any(below in inner for below in module.modules() if below is not module)
    ]


def attach_moves(module: nn.Module, device: torch.device, skip_keys: tuple[str, ...]) -> Attached:
    """Move the inputs of a module to a device."""
    hook = _Move(device, skip_keys)
    return Attached([module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)])


def attach_return(module: nn.Module, skip_keys: tuple[str, ...]) -> Attached:
    """Return the outputs of a module back on the device of its first input. To be attached last."""
    origins = _Origins()
    attached = Attached()
    _around(attached, module, _Leave(origins), _Return(origins, skip_keys))
    return attached


@dataclass(frozen=True, slots=True)
class _Scope:
    """Before the forward of a module that has blocks below it."""

    stream: Stream

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.stream.enter_scope(module, caller_of_hook())


@dataclass(frozen=True, slots=True)
class _ScopeEnd:
    """After it, whether it went well or not."""

    stream: Stream

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.stream.leave_scope(module)


@dataclass(frozen=True, slots=True)
class _Entry:
    """Before the forward of a block: its tensors come."""

    stream: Stream
    block: int

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.stream.enter(self.block, module, caller_of_hook())


@dataclass(frozen=True, slots=True)
class _Exit:
    """After the forward of a block, whether it went well or not: its tensors go."""

    stream: Stream
    block: int

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.stream.leave(self.block, module)


@dataclass(frozen=True, slots=True)
class _Guard:
    """Before a module within a block: its tensors come, in case that nobody calls the block's own module.

    What is compiled as a whole runs without: it would be cut into pieces at each module.
    """

    stream: Stream
    block: int

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self.stream.enter(self.block, module, caller_of_hook())


@dataclass(frozen=True, slots=True)
class _GuardEnd:
    """After it, whether it went well or not."""

    stream: Stream
    block: int

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.stream.leave(self.block, module)


@dataclass(frozen=True, slots=True)
class _Move:
    """Before the forward of a module: its inputs come to its device."""

    device: torch.device
    skip_keys: tuple[str, ...]

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return moved(args, self.device, self.skip_keys), moved(kwargs, self.device, self.skip_keys)


class _Origins:
    """Devices from which the inputs of calls came that are running, the innermost last, for each thread."""

    def __init__(self) -> None:
        self._local = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Origins, ())  # a copy isn't running

    @property
    def devices(self) -> list[torch.device | None]:
        """Of this thread."""
        found: list[torch.device | None] = vars(self._local).setdefault("devices", [])
        return found


@dataclass(frozen=True, slots=True)
class _Leave:
    """Before the inputs of a module move: remember where they came from."""

    origins: _Origins

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.origins.devices.append(input_device(args, kwargs))


@dataclass(frozen=True, slots=True)
class _Return:
    """After the forward of a module: its outputs go where its inputs were before they were moved."""

    origins: _Origins
    skip_keys: tuple[str, ...]

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        devices = self.origins.devices
        device = devices.pop() if devices else None
        return output if device is None else moved(output, device, self.skip_keys)
