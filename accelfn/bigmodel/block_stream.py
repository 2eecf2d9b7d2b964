"""The stream of blocks: each is where it is used while it is used, and the next is underway meanwhile.

This is the one place of offloading that remembers something between calls. At rest every module holds its
real weights. Between :meth:`Stream.enter` and :meth:`Stream.leave` of a block its modules hold copies on the
device that computes; where the weights can be used as they lie, nothing is exchanged at all.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from accelfn.bigmodel.blocks import Block, Residents, hang, sizes_of
from accelfn.bigmodel.devices import Place
from accelfn.bigmodel.offload_autograd import (
    Refetched,
    Saved,
    after_backward,
    is_in_backward,
    is_innermost,
    refetching,
)
from accelfn.bigmodel.transfer import Link, open_link, pin


def caller_of_hook() -> FrameType:
    """Return the frame that called the function that calls this: it exists as long as its module runs."""
    return sys._getframe(2)  # pyright: ignore[reportPrivateUsage]


def is_within(frame: FrameType) -> bool:
    """Whether this thread is within the frame at this moment."""
    now: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while now is not None and now is not frame:
        now = now.f_back
    return now is not None


_LASTING = (
    "blocks",
    "place",
    "num_ahead",
    "cache_bytes",
    "_next",
    "_previous",
)
_SCOPE = -1


@dataclass(slots=True, eq=False)
class _Entered:
    """A call that is running.

    Attributes:
        block: That it entered, or -1 for a scope.
        module: Whose call it is.
        frame: Within which it runs, if a hook of torch says so.
        is_user: The block stays until the call ends.
        grads: Gradients are kept of what it computes.
        saving: How autograd saves weights meanwhile.
    """

    block: int
    module: nn.Module
    frame: FrameType | None
    is_user: bool = False
    grads: bool = False
    saving: saved_tensors_hooks | None = None


class StreamFacts(NamedTuple):
    """What travels to a device.

    Attributes:
        place: The device.
        num_blocks: How many blocks the weights are.
        num_bytes: Of all of them.
        bound_bytes: Most bytes that are on the device at a time for one thread.
        peak_blocks: Most blocks that were there, or underway, at a time until now.
        peak_bytes: Most bytes of them.
    """

    place: Place
    num_blocks: int
    num_bytes: int
    bound_bytes: int
    peak_blocks: int
    peak_bytes: int


class _Thread(threading.local):
    """What a thread is in the midst of."""

    def __init__(self) -> None:
        self.entered: list[_Entered] = []
        self.last = -1  # block that it entered last


class Stream:
    """Blocks of a model, and where they are used.

    Any number of threads may run the model at a time. At each moment there are on the device: the blocks that
    are in use, and at most ``num_ahead`` more for each thread. Nothing stays there when no forward pass or
    backward pass runs.

    The order is that of the blocks at first, and then what forward passes do: each block remembers which one
    came after it, and which before.

    Args:
        blocks: In the order in which they will probably be used.
        place: Where they are used.
        num_ahead: How many blocks are fetched ahead while one is used.
        cache_bytes: Of weights that are mapped from files: how many bytes of them stay in the host's memory
            after use. The first blocks stay, so that a pass over all finds them there again.
        link: Carries the blocks; None opens the one to the place. Copies of the stream do that, too.

    Raises:
        ValueError: ``num_ahead`` or ``cache_bytes`` is negative, or this machine has no such device.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        place: Place,
        *,
        num_ahead: int = 1,
        cache_bytes: int = 0,
        link: Link | None = None,
    ) -> None:
        check_options(num_ahead, cache_bytes)
        self.blocks: tuple[Block, ...] = tuple(blocks)
        self.place = place
        self.num_ahead = num_ahead
        self.cache_bytes = cache_bytes
        last = len(self.blocks) - 1
        self._next = {block: block + 1 for block in range(last)}
        self._previous = {block + 1: block for block in range(last)}
        self._begin_life()
        self._open(open_link(place, num_ahead) if link is None else link)

    def _begin_life(self) -> None:
        self._opened: Residents | None = None
        self._opening = threading.Lock()
        self._thread = _Thread()

    # --- copies of the model ---

    def __getstate__(self) -> dict[str, Any]:
        if self._drop_interrupted():
            raise RuntimeError(
                "a forward pass was interrupted, and its modules still held copies of their weights on a "
                "device. They hold their own weights again now: copy or pickle the model again."
            )
        if self._opened is not None and self._opened.is_used:
            raise RuntimeError(
                "the model can't be copied or pickled while a forward pass runs: its modules hold copies "
                "of their weights on a device. Do it between two passes."
            )
        return {name: getattr(self, name) for name in _LASTING}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin_life()

    # --- what there is ---

    @property
    def residents(self) -> Residents:
        """The blocks on the device.

        A copy of the stream opens the way to them when it is needed: the device may not be there, and at
        first nor are the modules.
        """
        found = self._opened
        if found is None:
            with self._opening:
                found = self._opened or self._open(open_link(self.place, self.num_ahead))
        return found

    def _open(self, link: Link) -> Residents:
        if link.needs_pinned:
            for block in self.blocks:
                pin(slot.peek() for slot in block.slots)
        self._opened = Residents(self.blocks, link, self.cache_bytes)
        return self._opened

    @property
    def resident(self) -> tuple[int, ...]:
        """Positions of the blocks that are on the device or underway now."""
        self._drop_interrupted()
        return () if self._opened is None else self._opened.positions

    def facts(self) -> StreamFacts:
        """Return what travels, and how much of it was underway or there at a time."""
        self._drop_interrupted()
        sizes = sizes_of(self.blocks)
        around = _around(self.blocks)
        own = sum(sizes[block] for block in around)
        others = sorted(size for block, size in enumerate(sizes) if block not in around)
        residents = self.residents
        cached = sum(sizes[block] for block in residents.stays) if residents.link.in_place else 0
        bound = min(sum(sizes), own + sum(others[-self.num_ahead - 1 :]) + cached)
        return StreamFacts(
            self.place, len(sizes), sum(sizes), bound, residents.peak_blocks, residents.peak_bytes
        )

    # --- forward ---

    def enter_scope(self, module: nn.Module, frame: FrameType | None = None) -> None:
        """Begin the forward pass of a module that has blocks below it: they are fetched ahead within it.

        Args:
            module: It.
            frame: Within which it runs, for hooks of torch, which doesn't tell them of a KeyboardInterrupt: a
                call whose frame is gone has ended.
        """
        self._drop_interrupted()
        self._thread.entered.append(_Entered(_SCOPE, module, frame))

    def leave_scope(self, module: nn.Module | None = None) -> None:
        """End what :meth:`enter_scope` began, whether or not it went well.

        Args:
            module: It; None for the last one. Nothing happens if it wasn't entered.
        """
        self._leave_down_to(_SCOPE, module)

    def enter(self, block: int, module: nn.Module | None = None, frame: FrameType | None = None) -> None:
        """Bring a block to the device, and hang its tensors into its modules.

        Args:
            block: Its position.
            module: Whose call it is for; None: the block's own.
            frame: As in :meth:`enter_scope`.

        Raises:
            RuntimeError: It has weights that aren't loaded, or that couldn't get their gradients.
        """
        one = self.blocks[block]
        caller = one.module if module is None else module
        calls = self._thread.entered
        grads = torch.is_grad_enabled()
        is_there = is_again = False
        if calls:
            self._drop_interrupted()
            for call in calls:
                if call.block == block:
                    is_there = is_there or call.grads or not grads
                    is_again = is_again or call.module is caller
        if is_there and not is_again and (not grads or self._is_saving_by_place()):
            return  # leave() finds no such call, and does nothing
        call = _Entered(block, caller, frame)
        calls.append(call)
        if is_there:
            if grads:
                self._save_by_place(call)
            return
        residents = self.residents
        with residents.lock:
            call.is_user = True
            residents.use(block, call)
            self._learn(block)
            if is_in_backward() and not self._is_scoped:  # checkpointed activations are computed again
                self._want_backwards(block)
            else:
                residents.want(_me(), self._ahead(block))
            held = residents.take(block)
        if residents.link.in_place:
            return
        residents.arrive(block, held)
        with residents.lock:
            hang(held, grads=grads)
        call.grads = grads
        if grads:
            self._save_by_place(call)

    def _is_saving_by_place(self) -> bool:
        """Whether autograd saves weights as where they lie at this moment."""
        innermost = next(
            (one.saving for one in reversed(self._thread.entered) if one.saving is not None), None
        )
        return innermost is not None and is_innermost(innermost)

    def _save_by_place(self, call: _Entered) -> None:
        """Let autograd save weights as where they lie, unless it does already."""
        if not self._is_saving_by_place():
            call.saving = refetching(self._find, self._fetch_again)
            call.saving.__enter__()

    def leave(self, block: int, module: nn.Module | None = None) -> None:
        """End the use of a block that :meth:`enter` began, whether or not it went well.

        Args:
            block: Its position.
            module: As in :meth:`enter`. Nothing happens if it wasn't entered for it.
        """
        self._leave_down_to(block, self.blocks[block].module if module is None else module)

    def abandon(self) -> None:
        """Forget what this thread has entered and never left, as after an interrupt amid a forward pass."""
        while self._thread.entered:
            self._leave_last()

    def _leave_down_to(self, block: int, module: nn.Module | None) -> None:
        # A hook before ours may have failed, and then torch calls ours of the end, without that of the start.
        for call in reversed(self._thread.entered):
            if call.block == block and (module is None or call.module is module):
                while any(one is call for one in self._thread.entered):
                    self._leave_last()
                return

    def _leave_last(self) -> None:
        # A KeyboardInterrupt may come at any step. Each can be done again, and the call stays until all are.
        calls = self._thread.entered
        call = calls[-1]
        if call.saving is not None and is_innermost(call.saving):
            call.saving.__exit__(None, None, None)
        try:
            self._end(call, is_last=len(calls) == 1)
        except Exception:
            calls.pop()
            raise
        calls.pop()

    def _end(self, call: _Entered, is_last: bool) -> None:
        if self._opened is None:
            return
        with self._opened.lock:
            if call.is_user:
                self._opened.unuse(call.block, call)
            if is_last:
                self._thread.last = -1
                self._opened.want(_me(), None)
            elif call.is_user:
                # What was used stays until the next one comes: it may be the same once more.
                self._opened.want(_me(), (call.block, *self._ahead(self._thread.last)))

    def _drop_interrupted(self) -> bool:
        """Forget what was interrupted in this thread, and say whether forward passes were among it."""
        calls = self._thread.entered
        found = False
        while calls and calls[-1].frame is not None and not is_within(calls[-1].frame):
            self._leave_last()
            found = True
        if not calls and self._opened is not None and not is_in_backward():
            wanter = _me(is_backward=True)
            if self._opened.is_wanting(wanter):
                self._end_backward(wanter)
        return found

    def _learn(self, block: int) -> None:
        last = self._thread.last
        if last >= 0 and last != block:
            self._next[last] = block
            self._previous[block] = last
        self._thread.last = block

    def _ahead(self, block: int) -> tuple[int, ...]:
        return self._following(self._next, block) if self._is_scoped else ()

    @property
    def _is_scoped(self) -> bool:
        """Whether this thread runs a module around blocks, so that others may come after one."""
        return bool(self._thread.entered) and self._thread.entered[0].block == _SCOPE

    def _following(self, order: dict[int, int], block: int) -> tuple[int, ...]:
        found: list[int] = []
        at = order.get(block)
        while at is not None and at != block and len(found) < self.num_ahead and at not in found:
            found.append(at)
            at = order.get(at)
        return tuple(found)

    # --- backward ---

    def _find(self, address: int, start: int) -> Saved | None:
        with self.residents.lock:
            return self.residents.find(address, start)

    def _fetch_again(self, part: Refetched) -> torch.Tensor:
        residents, block = self.residents, part.block
        try:
            with residents.lock:
                self._want_backwards(block)
                held = residents.take_again(part)
            if held.versions[part.weight] != part.version:
                raise RuntimeError(
                    f"a weight of block {self.blocks[block].name!r} was changed between forward and "
                    "backward, which needs its value from the forward pass. Change weights after backward()."
                )
            return part.within(residents.arrive(block, held))
        finally:
            if not is_in_backward():  # someone reads a saved tensor by hand
                self._end_backward(_me(is_backward=True))

    def _want_backwards(self, block: int) -> None:
        """Report that a backward pass has come to a block, and which one it comes to next."""
        wanter = _me(is_backward=True)
        if not self.residents.is_wanting(wanter):
            after_backward(partial(self._end_backward, wanter))
        self.residents.want(wanter, (block, *self._following(self._previous, block)))

    def _end_backward(self, wanter: tuple[int, bool]) -> None:
        with self.residents.lock:
            self.residents.want(wanter, None)


def _me(*, is_backward: bool = False) -> tuple[int, bool]:
    """Who wants blocks: this thread, for its forward pass or its backward pass."""
    return threading.get_ident(), is_backward


def _around(blocks: Sequence[Block]) -> set[int]:
    """Return the blocks within whose use tensors of others are needed."""
    users: dict[nn.Module, set[int]] = {}
    for position, block in enumerate(blocks):
        for slot in block.slots:
            users.setdefault(slot.owner, set()).add(position)
    return {
        position
        for position, block in enumerate(blocks)
        if any(users.get(module, set()) - {position} for module in block.module.modules())
    }


def check_options(num_ahead: int, cache_bytes: int) -> None:
    """Refuse what no stream can be opened with.

    Raises:
        ValueError: One of them is negative.
    """
    if num_ahead < 0:
        raise ValueError(f"num_ahead must not be negative, got {num_ahead}. 0 fetches nothing ahead.")
    if cache_bytes < 0:
        raise ValueError(f"cache_bytes must not be negative, got {cache_bytes}. 0 keeps nothing.")
