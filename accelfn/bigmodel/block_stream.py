"""Bring each block of a model to where it is used while it is used, and the next one meanwhile.

This is the one place of offloading that remembers something between calls. Otherwise every module holds its
real weights. Between :meth:`BlockPrefetcher.enter` and :meth:`BlockPrefetcher.leave` of a block its modules
hold copies on the device that computes; where the weights can be used as they lie, nothing is exchanged.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from accelfn.bigmodel.block_copy import BlockCopy, HostWeights, Layout, begin_copy, hosts_of, plan_layout
from accelfn.bigmodel.blocks import Block
from accelfn.bigmodel.devices import Place
from accelfn.bigmodel.offload_autograd import (
    Refetched,
    Saved,
    after_backward,
    is_in_backward,
    is_innermost,
    refetching,
)
from accelfn.bigmodel.transfer import Link, let_pages_go, open_link, pin
from accelfn.bigmodel.weight_files import mapped_from


def caller_of_hook() -> FrameType:
    """Return the frame that called the function that calls this: it exists as long as its module runs."""
    return sys._getframe(2)  # pyright: ignore[reportPrivateUsage]


def is_within(frame: FrameType) -> bool:
    """Whether this thread is within the frame at this moment."""
    now: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while now is not None and now is not frame:
        now = now.f_back
    return now is not None


@dataclass(slots=True, eq=False)
class _Call:
    """A call that is running.

    Attributes:
        block: That it entered; None for a module that has blocks below it.
        module: Whose call it is.
        frame: Within which it runs, if a hook of torch says so.
        uses_block: The block stays until the call ends.
        grads: Gradients are kept of what it computes.
        saving: How autograd saves weights meanwhile.
    """

    block: int | None
    module: nn.Module
    frame: FrameType | None
    uses_block: bool = False
    grads: bool = False
    saving: saved_tensors_hooks | None = None


class StreamFacts(NamedTuple):
    """What travels to a device.

    Attributes:
        place: The device.
        num_blocks: How many blocks the weights are.
        num_bytes: Of all of them.
        bound_bytes: Most bytes that are on the device at a time for one thread.
        peak_blocks: Most blocks that were there, or in flight, at a time until now.
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
        self.calls: list[_Call] = []
        self.last = -1  # block that it entered last


_Wanter = tuple[int, bool]  # a thread's forward pass, or its backward pass


def _me(*, is_backward: bool = False) -> _Wanter:
    return threading.get_ident(), is_backward


class BlockPrefetcher:
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
        link: Carries the blocks; None opens the one to the place. Copies of the prefetcher do that, too.

    Raises:
        ValueError: This machine has no such device.
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
        self._lock = threading.RLock()  # of all that follows
        self._thread = _Thread()
        self._link: Link | None = None
        self._copies: dict[int, BlockCopy] = {}  # blocks that are there or in flight
        self._users: dict[int, set[_Call]] = {}
        self._wanted: dict[_Wanter, tuple[int, ...]] = {}
        self._layouts: dict[int, Layout] = {}
        self._stays: frozenset[int] = frozenset()  # whose mapped weights stay in the host's memory after use
        self._was_read: set[int] = set()  # of those that stay and are used in place
        self._peak_blocks = self._peak_bytes = 0

    # --- copies of the model ---

    def __getstate__(self) -> dict[str, Any]:
        if self._drop_interrupted():
            raise RuntimeError(
                "a forward pass was interrupted, and its modules still held copies of their weights on a "
                "device. They hold their own weights again now: copy or pickle the model again."
            )
        if self._users:
            raise RuntimeError(
                "the model can't be copied or pickled while a forward pass runs: its modules hold copies "
                "of their weights on a device. Do it between two passes."
            )
        lasting = ("blocks", "place", "num_ahead", "cache_bytes", "_next", "_previous")
        return {name: getattr(self, name) for name in lasting}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin_life()

    # --- what there is ---

    @property
    def link(self) -> Link:
        """What carries the blocks.

        A copy opens it when it is needed: the device may not be there, and at first nor are the modules.
        """
        with self._lock:
            return self._link or self._open(open_link(self.place, self.num_ahead))

    def _open(self, link: Link) -> Link:
        if link.needs_pinned:
            for block in self.blocks:
                pin(hosts_of(block))
        total, stays = 0, set[int]()
        for position, block in enumerate(self.blocks):
            mapped = {id(one): one.nbytes for one in hosts_of(block) if one is not None and mapped_from(one)}
            if total + sum(mapped.values()) <= self.cache_bytes:
                total += sum(mapped.values())
                stays.add(position)
        self._stays, self._link = frozenset(stays), link
        return link

    @property
    def resident(self) -> tuple[int, ...]:
        """Positions of the blocks that are on the device or in flight now."""
        self._drop_interrupted()
        return tuple(self._copies)

    def facts(self) -> StreamFacts:
        """Return what travels, and how much of it was in flight or there at a time."""
        self._drop_interrupted()
        sizes = [plan_layout(hosts_of(block)).packing.num_bytes for block in self.blocks]
        around = _around(self.blocks)
        own = sum(sizes[block] for block in around)
        others = sorted(size for block, size in enumerate(sizes) if block not in around)
        cached = sum(sizes[block] for block in self._stays) if self.link.in_place else 0
        bound = min(sum(sizes), own + sum(others[-self.num_ahead - 1 :]) + cached)
        return StreamFacts(self.place, len(sizes), sum(sizes), bound, self._peak_blocks, self._peak_bytes)

    # --- forward ---

    def enter(self, block: int | None, module: nn.Module, frame: FrameType | None = None) -> None:
        """Bring a block to the device, and let its modules hold the copies.

        Args:
            block: Its position. None for a module that has blocks below it: they are fetched ahead within it.
            module: Whose call it is for.
            frame: Within which it runs, for hooks of torch, which doesn't tell them of a KeyboardInterrupt: a
                call whose frame is gone has ended.

        Raises:
            RuntimeError: It has weights that aren't loaded, or that couldn't get their gradients.
        """
        calls = self._thread.calls
        if calls or block is None:
            self._drop_interrupted()
        call = _Call(block, module, frame)
        if block is None:
            calls.append(call)
            return
        grads = torch.is_grad_enabled()
        inside = [one for one in calls if one.block == block]
        if any(one.grads or not grads for one in inside):  # it is there already
            is_again = any(one.module is module for one in inside)
            if is_again or (grads and not self._is_saving_by_place()):
                calls.append(call)
                if grads:
                    self._save_by_place(call)
            return  # leave() does nothing for a call that isn't known
        calls.append(call)
        link = self.link
        with self._lock:
            call.uses_block = True
            self._users.setdefault(block, set()).add(call)
            self._learn(block)
            if is_in_backward() and not self._is_scoped:  # checkpointed activations are computed again
                self._want_backwards(block)
            else:
                self._want(_me(), self._ahead(block))
            copy = self._take(block)
        if link.in_place:
            return
        self._arrive(block, copy)
        with self._lock:
            copy.assign(grads=grads)
        call.grads = grads
        if grads:
            self._save_by_place(call)

    def leave(self, block: int | None, module: nn.Module) -> None:
        """End what :meth:`enter` began, whether or not it went well.

        Args:
            block: As in :meth:`enter`.
            module: As in :meth:`enter`. Nothing happens if it wasn't entered for it.
        """
        # A hook before ours may have failed, and then torch calls ours of the end, without that of the start.
        for call in reversed(self._thread.calls):
            if call.block == block and call.module is module:
                while any(one is call for one in self._thread.calls):
                    self._leave_last()
                return

    def abandon(self) -> None:
        """Forget what this thread has entered and never left, as after an interrupt amid a forward pass."""
        while self._thread.calls:
            self._leave_last()

    def _leave_last(self) -> None:
        # A KeyboardInterrupt may come at any step. Each can be done again, and the call stays until all are.
        calls = self._thread.calls
        call = calls[-1]
        if call.saving is not None and is_innermost(call.saving):
            call.saving.__exit__(None, None, None)
        try:
            with self._lock:
                if call.block is not None and call.uses_block:
                    self._release(call.block, call)
                if len(calls) == 1:
                    self._thread.last = -1
                    self._want(_me(), None)
                elif call.block is not None and call.uses_block:
                    # What was used stays until the next one comes: it may be the same once more.
                    self._want(_me(), (call.block, *self._ahead(self._thread.last)))
        except Exception:
            calls.pop()
            raise
        calls.pop()

    def _drop_interrupted(self) -> bool:
        """Forget what was interrupted in this thread, and say whether forward passes were among it."""
        calls = self._thread.calls
        found = False
        while calls and calls[-1].frame is not None and not is_within(calls[-1].frame):
            self._leave_last()
            found = True
        if not calls and _me(is_backward=True) in self._wanted and not is_in_backward():
            self._end_backward(_me(is_backward=True))
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
        return bool(self._thread.calls) and self._thread.calls[0].block is None

    def _following(self, order: dict[int, int], block: int) -> tuple[int, ...]:
        found: list[int] = []
        at = order.get(block)
        while at is not None and at != block and len(found) < self.num_ahead and at not in found:
            found.append(at)
            at = order.get(at)
        return tuple(found)

    # --- what comes and goes; every method but _arrive needs the lock ---

    def _want(self, wanter: _Wanter, blocks: tuple[int, ...] | None) -> None:
        """Note the blocks that a forward pass needs next, and release those that nobody uses or needs."""
        if blocks is None:
            self._wanted.pop(wanter, None)
        else:
            self._wanted[wanter] = blocks
        if self._copies:
            keep = {one for wanted in self._wanted.values() for one in wanted} | self._users.keys()
            for block in [block for block in self._copies if block not in keep]:
                self._let_go(block)

    def _release(self, block: int, call: _Call) -> None:
        """End a use of a block. With the last one, its modules hold their own weights again."""
        users = self._users.get(block, set())
        if users - {call}:
            users.discard(call)
            return
        copy = self._copies.get(block)
        if copy is not None and copy.assigned:
            copy.restore()
        self._users.pop(block, None)

    def _take(self, block: int, lasting: HostWeights | None = None) -> BlockCopy:
        """Begin to carry a block and then those that are wanted, as far as they aren't there.

        Args:
            block: Which.
            lasting: Its tensors when forward used it, for backward; None for those that it has now.
        """
        copy = self._copies.get(block)
        hosts = hosts_of(self.blocks[block]) if lasting is None else lasting
        can_be_stale = lasting is not None or not self.link.in_place
        if copy is not None and copy.assigned:  # a forward pass uses it as it is now
            if lasting is not None and copy.is_stale(hosts):
                return self._carry(block, hosts)
        elif copy is not None and can_be_stale and copy.is_stale(hosts):
            self._let_go(block)
            copy = None
        if copy is None:
            copy = self._begin(block, hosts)
        for one in [one for wanted in self._wanted.values() for one in wanted]:
            if one not in self._copies:
                # What can't be fetched ahead fails where it is needed, if it is.
                with suppress(Exception):
                    self._begin(one, hosts_of(self.blocks[one]))
        return copy

    def _begin(self, block: int, hosts: HostWeights) -> BlockCopy:
        copy = self._copies[block] = self._carry(block, hosts)
        if self.link.in_place and block in self._stays:
            self._was_read.add(block)
        cached = sum(self._layouts[one].packing.num_bytes for one in self._was_read - self._copies.keys())
        self._peak_blocks = max(self._peak_blocks, len(self._copies))
        self._peak_bytes = max(self._peak_bytes, sum(one.num_bytes for one in self._copies.values()) + cached)
        return copy

    def _carry(self, block: int, hosts: HostWeights) -> BlockCopy:
        layout = self._layouts[block] = plan_layout(hosts, self._layouts.get(block))
        return begin_copy(self.blocks[block], hosts, layout, self.link, block in self._was_read)

    def _let_go(self, block: int) -> None:
        hosts = [host for host in self._copies.pop(block).hosts if host is not None]
        self.link.release(hosts)
        if block not in self._stays:
            let_pages_go(hosts)

    def _arrive(self, block: int, copy: BlockCopy) -> torch.Tensor:
        """Wait for a block that was taken; of several threads one waits, and the others for it.

        Raises:
            Whatever the link raises. The block isn't there then.
        """
        with copy.guard:
            try:
                memory = copy.arrival()
            except BaseException:
                with self._lock:
                    if self._copies.get(block) is copy:
                        self._let_go(block)
                raise
            if copy.memory is None:
                copy.receive(memory)
            return memory

    # --- backward ---

    def _is_saving_by_place(self) -> bool:
        """Whether autograd saves weights as where they lie at this moment."""
        calls = reversed(self._thread.calls)
        innermost = next((one.saving for one in calls if one.saving is not None), None)
        return innermost is not None and is_innermost(innermost)

    def _save_by_place(self, call: _Call) -> None:
        """Let autograd save weights as where they lie, unless it does already."""
        if not self._is_saving_by_place():
            call.saving = refetching(self._find, self._fetch_again)
            call.saving.__enter__()

    def _find(self, address: int, start: int) -> Saved | None:
        """Return whose memory on the device has this address, and this byte; None if it is no block's."""
        with self._lock:
            for block, copy in self._copies.items():
                if address and copy.address == address:
                    weight = copy.position_at(start)
                    version = None if copy.is_written(weight) else copy.versions[weight]
                    return Saved(block, weight, version, copy.hosts)
        return None

    def _fetch_again(self, part: Refetched) -> torch.Tensor:
        block = part.saved.block
        try:
            with self._lock:
                self._want_backwards(block)
                copy = self._take(block, part.saved.hosts)
            if copy.versions[part.saved.weight] != part.saved.version:
                raise RuntimeError(
                    f"a weight of block {self.blocks[block].name!r} was changed between forward and "
                    "backward, which needs its value from the forward pass. Change weights after backward()."
                )
            return part.within(self._arrive(block, copy))
        finally:
            if not is_in_backward():  # someone reads a saved tensor by hand
                self._end_backward(_me(is_backward=True))

    def _want_backwards(self, block: int) -> None:
        """Report that a backward pass has come to a block, and which one it comes to next."""
        wanter = _me(is_backward=True)
        if wanter not in self._wanted:
            after_backward(partial(self._end_backward, wanter))
        self._want(wanter, (block, *self._following(self._previous, block)))

    def _end_backward(self, wanter: _Wanter) -> None:
        with self._lock:
            self._want(wanter, None)


def _around(blocks: Sequence[Block]) -> set[int]:
    """Return the blocks within whose use tensors of others are needed."""
    users: dict[nn.Module, set[int]] = {}
    for position, block in enumerate(blocks):
        for ref in block.refs:
            users.setdefault(ref.owner, set()).add(position)
    return {
        position
        for position, block in enumerate(blocks)
        if any(users.get(module, set()) - {position} for module in block.module.modules())
    }
