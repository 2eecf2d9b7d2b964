"""Hooks of torch by which a model's blocks and inputs come to their device before a module runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Generic, TypeVar, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accelfn.bigmodel.assign import has_forward
from accelfn.bigmodel.block_stream import BlockPrefetcher, caller_of_hook
from accelfn.tree import find_device, send_to_device
from accelfn.tree.structure import flatten, is_packed_sequence

F = TypeVar("F", bound=FunctionType)
T = TypeVar("T")


class CallStack(Generic[T]):
    """Values of the forwards that are running, the innermost last; each thread has its own.

    Copies and pickles are empty: a copy isn't running.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    @property
    def values(self) -> list[T]:
        """This thread's: one for each forward that has begun and not ended."""
        return vars(self._local).setdefault("values", list[T]())

    def pop(self) -> T | None:
        """Take the value of the forward that ends; None if none has begun."""
        return self.values.pop() if self.values else None

    def __reduce__(self) -> tuple[Any, ...]:
        return (CallStack, ())


def uncompiled(function: F) -> F:
    """Keep torch.compile out of a function and of all that it calls.

    As ``torch.compiler.disable`` does, which would import the compiler here, and that takes seconds.
    """
    frames: Any = getattr(vars(torch)["_C"]._dynamo, "eval_frame", None)
    set_strategy = getattr(frames, "set_code_exec_strategy", None)
    if set_strategy is None:  # a torch without it: hooks are traced, and only cost more compiling
        return function
    skip = frames._FrameAction.SKIP
    set_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    vars(function)["_torchdynamo_disable"] = True
    return function


def input_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """Return the device of the first tensor among a module's inputs; None without any."""
    return find_device((args, kwargs))


def moved(value: Any, device: torch.device, skip_keys: Iterable[str] | None = None) -> Any:
    """Move the tensors of a value, which is given back itself if nothing is to move.

    The host waits for what comes to it from a device; what goes the other way is ordered by the device.

    Args:
        value: Any tree.
        device: Where to.
        skip_keys: Keys of mappings, at any depth, below which nothing is moved.
    """
    ahead = device.type != "cpu"  # else the host could read memory that the copy has yet to fill
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device, non_blocking=ahead)
    # Most often all is there already, and a look is cheaper than taking the tree apart.
    kind = cast("Any", type(value))
    if kind in (tuple, list, dict):
        parts = value.values() if kind is dict else value
        if all(_is_there(part, device) for part in parts):
            return value
    # What holds state (a cache of keys and values, say) has to stay the same object.
    leaves, _ = flatten(value, is_packed_sequence)
    if all(
        (isinstance(leaf, torch.Tensor) and leaf.device == device) or not hasattr(leaf, "to")
        for leaf in leaves
    ):
        return value
    return send_to_device(value, device, non_blocking=ahead, skip_keys=skip_keys)


def _is_there(part: Any, device: torch.device) -> bool:
    if isinstance(part, torch.Tensor):
        return part.device == device
    return part is None or type(part) in (bool, int, float, str)


def attach_prefetcher(model: nn.Module, prefetcher: BlockPrefetcher) -> list[RemovableHandle]:
    """Let a model's blocks come before their modules run, and go afterwards.

    Args:
        model: Whose blocks the prefetcher has.
        prefetcher: Of its blocks.

    Returns:
        Handles of torch's hooks, by which they are removed.
    """
    handles: list[RemovableHandle] = []
    blocks = {block.module for block in prefetcher.blocks}
    for position, block in enumerate(prefetcher.blocks):
        handles += _around(block.module, _Enter(prefetcher, position), _Leave(prefetcher, position))
        # Others may call a module within the block without calling the block's own.
        for module in dict.fromkeys(ref.owner for ref in block.refs):
            if module not in blocks and has_forward(module):
                before, after = _EnterWithin(prefetcher, position), _LeaveWithin(prefetcher, position)
                handles += _around(module, before, after)
    # Last, so that a module's scope begins before its own tensors come, and ends after they went.
    for module in reversed(list(model.modules())):
        if has_forward(module) and any(one in blocks for one in module.modules() if one is not module):
            handles += _around(module, _Enter(prefetcher, None), _Leave(prefetcher, None))
    return handles


def _around(
    module: nn.Module, before: Callable[..., Any], after: Callable[..., Any]
) -> tuple[RemovableHandle, RemovableHandle]:
    return (
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
        _with_equal_id(module, module.register_forward_hook(after, always_call=True)),
    )


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


def attach_moves(module: nn.Module, device: torch.device, skip_keys: tuple[str, ...]) -> RemovableHandle:
    """Move the inputs of a module to a device."""
    return module.register_forward_pre_hook(_Move(device, skip_keys), prepend=True, with_kwargs=True)


def attach_return(module: nn.Module, skip_keys: tuple[str, ...]) -> tuple[RemovableHandle, RemovableHandle]:
    """Return a module's outputs on the device of its first input. To be attached last."""
    origins = CallStack[torch.device | None]()
    return _around(module, _Remember(origins), _Return(origins, skip_keys))


@dataclass(frozen=True, slots=True)
class _AtBlock:
    """A hook of a block's module; without a position, of a module with blocks below it."""

    prefetcher: BlockPrefetcher
    block: int | None


class _Enter(_AtBlock):
    """Before the forward of a block, whose tensors come."""

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.prefetcher.enter(self.block, module, caller_of_hook())


class _Leave(_AtBlock):
    """After it, whether it went well or not."""

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self.prefetcher.leave(self.block, module)


class _EnterWithin(_AtBlock):
    """Before a module within a block: its tensors come, in case that nobody calls the block's own module.

    What is compiled as a whole runs without: it would be split into pieces at each module.
    """

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self.prefetcher.enter(self.block, module, caller_of_hook())


class _LeaveWithin(_AtBlock):
    """After it, whether it went well or not."""

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.prefetcher.leave(self.block, module)


@dataclass(frozen=True, slots=True)
class _Move:
    """Before the forward of a module: its inputs come to its device."""

    device: torch.device
    skip_keys: tuple[str, ...]

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return moved(args, self.device, self.skip_keys), moved(kwargs, self.device, self.skip_keys)


@dataclass(frozen=True, slots=True)
class _Remember:
    """Before the inputs of a module move: remember where they came from."""

    origins: CallStack[torch.device | None]

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.origins.values.append(input_device(args, kwargs))


@dataclass(frozen=True, slots=True)
class _Return:
    """After the forward of a module: its outputs go where its inputs were before they were moved."""

    origins: CallStack[torch.device | None]
    skip_keys: tuple[str, ...]

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        device = self.origins.pop()
        return output if device is None else moved(output, device, self.skip_keys)
