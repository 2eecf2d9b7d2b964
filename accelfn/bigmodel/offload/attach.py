"""Streams and moves attached to a model by torch's own hooks, and taken off again."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accelfn.bigmodel.offload.blocks import has_forward
from accelfn.bigmodel.offload.move import input_device, moved
from accelfn.bigmodel.offload.stream import Stream
from accelfn.bigmodel.offload.uncompiled import uncompiled

__all__ = ("Attached", "attach_moves", "attach_return", "attach_stream")


@dataclass(slots=True, eq=False)
class Attached:
    """What hangs on a model's modules, to be taken off again.

    Attributes:
        handles: Of torch's hooks.
        guards: Handles at the modules within a block, by its position, until it was seen to run as a whole.
        whole: Blocks that were seen to run as a whole.
    """

    handles: list[RemovableHandle] = field(default_factory=list[RemovableHandle])
    guards: dict[int, list[RemovableHandle]] = field(default_factory=dict[int, list[RemovableHandle]])
    whole: set[int] = field(default_factory=set[int])

    def remove(self) -> None:
        """Take everything off."""
        for handle in (*self.handles, *(one for handles in self.guards.values() for one in handles)):
            handle.remove()
        self.handles.clear()
        self.guards.clear()

    def remove_needless_guards(self) -> None:
        """Take off what isn't needed any more, so that it costs nothing. No pass must run."""
        for block in self.whole & self.guards.keys():
            for handle in self.guards.pop(block):
                handle.remove()


def attach_stream(model: nn.Module, stream: Stream) -> Attached:
    """Let a model's blocks come before their modules run, and go afterwards.

    Args:
        model: Whose blocks the stream has.
        stream: Of its blocks.
    """
    attached = Attached()
    hooks = attached.handles
    blocks = {block.module: position for position, block in enumerate(stream.blocks)}
    for position, block in enumerate(stream.blocks):
        entry = _Entry(stream, position, attached.whole)
        hooks.append(block.module.register_forward_pre_hook(entry, prepend=True, with_kwargs=True))
        hooks.append(block.module.register_forward_hook(_Exit(stream, position), always_call=True))
        attached.guards[position] = [
            handle
            for module in dict.fromkeys(slot.owner for slot in block.slots)
            if module is not block.module and module not in blocks
            for handle in (
                module.register_forward_pre_hook(_Guard(stream, position), prepend=True, with_kwargs=True),
                module.register_forward_hook(_Exit(stream, position), always_call=True),
            )
        ]
    # Last, so that a module's scope begins before its own tensors come, and ends after they went.
    for module in _above(model, blocks):
        hooks.append(
            module.register_forward_pre_hook(_Scope(stream, attached), prepend=True, with_kwargs=True)
        )
        hooks.append(module.register_forward_hook(_ScopeEnd(stream, attached), always_call=True))
    return attached


def _above(model: nn.Module, blocks: Iterable[nn.Module]) -> list[nn.Module]:
    """Give the modules that run and have blocks below them, outer ones last."""
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
    """Give the outputs of a module back on the device of its first input."""
    return Attached([module.register_forward_hook(_Return(skip_keys), with_kwargs=True)])


@dataclass(frozen=True, slots=True)
class _Scope:
    """Before the forward of a module that has blocks below it."""

    stream: Stream
    attached: Attached

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        # torch runs no hooks after a KeyboardInterrupt. Then this thread still seems to be amid that pass.
        last = self.stream.entered_last
        if last is not None and not _is_running(last, 2 if last is module else 1):
            self.stream.abandon()
        self.stream.enter_scope(module)


@dataclass(frozen=True, slots=True)
class _ScopeEnd:
    """After it, whether it went well or not."""

    stream: Stream
    attached: Attached

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.stream.leave_scope()
        if self.attached.whole and self.attached.guards:
            self.stream.while_idle(self.attached.remove_needless_guards)


@dataclass(frozen=True, slots=True)
class _Entry:
    """Before the forward of a block: its tensors come."""

    stream: Stream
    block: int
    whole: set[int]

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.whole.add(self.block)
        self.stream.enter(self.block)


@dataclass(frozen=True, slots=True)
class _Exit:
    """After the forward of a block, whether it went well or not: its tensors go."""

    stream: Stream
    block: int

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.stream.leave(self.block)


@dataclass(frozen=True, slots=True)
class _Guard:
    """Before a module within a block: its tensors come, in case that nobody calls the block's own module."""

    stream: Stream
    block: int

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.stream.enter(self.block)


@dataclass(frozen=True, slots=True)
class _Move:
    """Before the forward of a module: its inputs come to its device."""

    device: torch.device
    skip_keys: tuple[str, ...]

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return moved(args, self.device, self.skip_keys), moved(kwargs, self.device, self.skip_keys)


@dataclass(frozen=True, slots=True)
class _Return:
    """After the forward of a module: its outputs go where its inputs came from."""

    skip_keys: tuple[str, ...]

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        device = input_device(args, kwargs)
        return output if device is None else moved(output, device, self.skip_keys)


def _is_running(module: nn.Module, times: int) -> bool:
    """Whether the module is being called at this moment by this thread, at least so many times."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and times:
        name = frame.f_code.co_name
        if name.startswith("torch_dynamo_resume"):  # what was compiled doesn't show whom it runs
            return True
        times -= name == "_call_impl" and frame.f_locals.get("self") is module
        frame = frame.f_back
    return not times
