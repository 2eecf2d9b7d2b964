"""torch hooks that transfer a module's blocks and move its inputs before it runs."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, Generic, Protocol, TypeVar, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from accelfn.bigmodel.block_stream import BlockPrefetcher, caller_of_hook
from accelfn.tree import find_device, send_to_device
from accelfn.tree.structure import flatten, is_packed_sequence
from accelfn.weights.assign import has_forward
from accelfn.weights.places import Place, PlaceLike, check_device, current_place, read_place

F = TypeVar("F", bound=FunctionType)
T = TypeVar("T")


def read_device(device: PlaceLike | None, what: str = "execution_device") -> tuple[Place, torch.device]:
    """Return the place that a caller passes, and its device; None is the current accelerator, or the CPU.

    Raises:
        ValueError: This machine has no such device.
    """
    place = current_place() if device is None else read_place(device, what)
    return place, check_device(place, what)


class CallStack(Generic[T]):
    """Values of the running forward calls of each thread, the innermost last.

    Copies and pickles are empty.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    @property
    def values(self) -> list[T]:
        """The values of this thread."""
        return vars(self._local).setdefault("values", list[T]())

    def pop(self) -> T | None:
        """Remove and return the value of the innermost call; None if there is none."""
        return self.values.pop() if self.values else None

    def __reduce__(self) -> tuple[Any, ...]:
        return (CallStack, ())


def uncompiled(function: F) -> F:
    """Exclude a function, and all that it calls, from torch.compile.

    As ``torch.compiler.disable``, which would import the compiler, and that takes seconds.
    """
    frames: Any = getattr(vars(torch)["_C"]._dynamo, "eval_frame", None)
    set_strategy = getattr(frames, "set_code_exec_strategy", None)
    if set_strategy is None:  # another version of torch: hooks are traced, which only slows compilation
        return function
    skip = frames._FrameAction.SKIP
    set_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    vars(function)["_torchdynamo_disable"] = True
    return function


def moved(value: Any, device: torch.device, skip_keys: Iterable[str] | None = None) -> Any:
    """Move the tensors of a tree to a device; return the same object if all are there already.

    Copies to the host are synchronous, those to a device are ordered by its stream.

    Args:
        value: Any tree.
        device: The device.
        skip_keys: Keys of mappings, at any depth, below which nothing is moved.
    """
    non_blocking = device.type != "cpu"  # the host could read memory before the copy has ended
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device, non_blocking=non_blocking)
    # Usually nothing has to be moved, and checking is cheaper than rebuilding the tree.
    kind = cast("Any", type(value))
    if kind in (tuple, list, dict):
        items = value.values() if kind is dict else value
        if all(_needs_no_move(item, device) for item in items):
            return value
    # Stateful objects, such as a key-value cache, must stay the same object.
    leaves, _ = flatten(value, is_packed_sequence)
    if all(
        (isinstance(leaf, torch.Tensor) and leaf.device == device) or not hasattr(leaf, "to")
        for leaf in leaves
    ):
        return value
    return send_to_device(value, device, non_blocking=non_blocking, skip_keys=skip_keys)


def _needs_no_move(item: Any, device: torch.device) -> bool:
    if isinstance(item, torch.Tensor):
        return item.device == device
    return item is None or type(item) in (bool, int, float, str)


class Around(Protocol):
    """Two torch hooks of a module: one before forward, and one after it, also if it failed."""

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run before forward; may return other arguments."""

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Run after forward; may return another output."""


def attach(module: nn.Module, hooks: Around) -> tuple[RemovableHandle, RemovableHandle]:
    """Attach hooks around those that a module has. Copies and pickles of it have them too."""
    return (
        module.register_forward_pre_hook(hooks.before, prepend=True, with_kwargs=True),
        _with_equal_id(module, module.register_forward_hook(hooks.after, always_call=True)),
    )


def _with_equal_id(module: nn.Module, handle: RemovableHandle) -> RemovableHandle:
    """Set for an always-called hook an id that is the same in all modules of the same kind.

    torch.compile guards on the ids of such hooks, and would compile each of many equal blocks separately.
    torch's own ids are at least 0, so these are negative.
    """
    hooks: dict[int, Any] = vars(module)["_forward_hooks"]
    always: dict[int, bool] = vars(module)["_forward_hooks_always_called"]
    equal = min(-1, min(hooks) - 1)
    hooks[equal], always[equal] = hooks.pop(handle.id), always.pop(handle.id)
    handle.id = equal
    return handle


def attach_prefetcher(model: nn.Module, prefetcher: BlockPrefetcher) -> list[RemovableHandle]:
    """Attach hooks that transfer a model's blocks before their modules run, and release them afterwards.

    Args:
        model: The model.
        prefetcher: The prefetcher of its blocks.

    Returns:
        The handles of the hooks.
    """
    handles: list[RemovableHandle] = []
    blocks = {block.module for block in prefetcher.blocks}
    for position, block in enumerate(prefetcher.blocks):
        handles += attach(block.module, _Use(prefetcher, position))
        # A module within the block may be called without the block's own module.
        for module in dict.fromkeys(ref.owner for ref in block.refs):
            if module not in blocks and has_forward(module):
                handles += attach(module, _UseWithin(prefetcher, position))
    # Last, so that a module's scope starts before its own tensors are transferred, and ends after.
    for module in reversed(list(model.modules())):
        if has_forward(module) and not blocks.isdisjoint({*module.modules()} - {module}):
            handles += attach(module, _Use(prefetcher, None))
    return handles


@dataclass(frozen=True, slots=True)
class _Use:
    """Keeps a block on the device while its module runs; no block for a module with blocks below it."""

    prefetcher: BlockPrefetcher
    block: int | None

    @uncompiled
    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.prefetcher.enter(self.block, module, caller_of_hook())

    @uncompiled
    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        self.prefetcher.leave(self.block, module)


class _UseWithin(_Use):
    """As :class:`_Use`, for a module within a block.

    Not traced by torch.compile, which would split the block's graph at each module.
    """

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.compiler.is_compiling():
            self.prefetcher.enter(self.block, module, caller_of_hook())

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self.prefetcher.leave(self.block, module)


@dataclass(frozen=True, slots=True)
class Moves:
    """Moves a module's inputs to its device, and its outputs back to the device of the first input.

    Attributes:
        device: The module's device; None leaves the inputs.
        returns: Whether outputs are moved.
        skip_keys: Keys of dicts in inputs and outputs that aren't moved.
        origins: The devices of the inputs of running calls.
    """

    device: torch.device | None
    returns: bool
    skip_keys: tuple[str, ...]
    origins: CallStack[torch.device | None] = field(default_factory=CallStack[torch.device | None])

    @uncompiled
    def before(self, module: nn.Module | None, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Move the inputs."""
        if self.returns:
            self.origins.values.append(find_device((args, kwargs)))
        if self.device is None:
            return args, kwargs
        return moved(args, self.device, self.skip_keys), moved(kwargs, self.device, self.skip_keys)

    @uncompiled
    def after(self, module: nn.Module | None, args: Any, output: Any) -> Any:
        """Move the output; after an exception it is None."""
        device = self.origins.pop()
        return output if device is None else moved(output, device, self.skip_keys)
