"""Transfer each block of a model to its device while it is used, and prefetch the next one.

All state of offloading between calls is here. Modules hold copies on the device between
:meth:`BlockPrefetcher.enter` and :meth:`BlockPrefetcher.leave` of their block, unless the weights are used in
place, and their real weights otherwise.
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

from accelfn.bigmodel.blocks import (
    Block,
    BlockCopy,
    HostWeights,
    Layout,
    begin_copy,
    hosts_of,
    plan_layout,
)
from accelfn.bigmodel.offload_autograd import (
    Refetched,
    Saved,
    after_backward,
    is_in_backward,
    is_innermost,
    refetching,
)
from accelfn.bigmodel.transfer import Link, open_link, pin, release_pages
from accelfn.weights.places import Place
from accelfn.weights.stored import mapped_from


def caller_of_hook() -> FrameType:
    """Return the frame that called a hook: it is on the stack while the hook's module runs."""
    return sys._getframe(2)  # pyright: ignore[reportPrivateUsage]


def is_within(frame: FrameType) -> bool:
    """Check whether a frame is on this thread's stack."""
    current: FrameType | None = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None


@dataclass(slots=True, eq=False)
class _Call:
    """A running call of a module.

    Attributes:
        block: The block's position; None for a module with blocks below it.
        module: The module.
        frame: The frame that runs it, if known.
        uses_block: Whether it keeps the block on the device.
        grads: Whether the block's copies are connected for gradients.
        saving: The hooks for tensors that autograd saves.
    """

    block: int | None
    module: nn.Module
    frame: FrameType | None
    uses_block: bool = False
    grads: bool = False
    saving: saved_tensors_hooks | None = None


class StreamFacts(NamedTuple):
    """What is transferred to a device.

    Attributes:
        place: The device.
        num_blocks: Number of blocks.
        num_bytes: Size of all blocks.
        bound_bytes: The most bytes that are on the device at once for one thread.
        peak_blocks: The most blocks that were on the device or in flight at once so far.
        peak_bytes: The most bytes of them.
    """

    place: Place
    num_blocks: int
    num_bytes: int
    bound_bytes: int
    peak_blocks: int
    peak_bytes: int


class _Thread(threading.local):
    """The running calls of a thread, the innermost last."""

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.last = -1  # the block that it entered last


_Pass = tuple[int, bool]  # a thread's forward pass, or its backward pass


def _current_pass(*, is_backward: bool = False) -> _Pass:
    return threading.get_ident(), is_backward


class BlockPrefetcher:
    """Transfers the blocks of a model to a device while they are used.

    Any number of threads may run the model at once. The device holds the blocks in use, and at most
    ``num_ahead`` more for each thread; none when no forward or backward pass is running.

    The order of prefetching is at first that of the blocks, and then that of the last forward pass: the
    prefetcher records the successor and predecessor of each block.

    Args:
        blocks: In their expected order of use.
        place: Where they are used.
        num_ahead: How many blocks are prefetched while one is used.
        cache_bytes: How many bytes of mapped weights stay in host memory after use. The first blocks stay,
            so that the next pass finds them.
        link: The transfer backend; None opens that of the place. Copies of the prefetcher do that too.

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
        self._init_state()
        self._open(open_link(place, num_ahead) if link is None else link)

    def _init_state(self) -> None:
        self._lock = threading.RLock()  # protects all that follows
        self._thread = _Thread()
        self._link: Link | None = None
        self._copies: dict[int, BlockCopy] = {}  # blocks on the device or in flight
        self._users: dict[int, set[_Call]] = {}
        self._wanted: dict[_Pass, tuple[int, ...]] = {}
        self._layouts: dict[int, Layout] = {}
        self._cached: frozenset[int] = frozenset()  # blocks whose mapped weights stay in host memory
        self._was_read: set[int] = set()  # cached blocks that are in memory already
        self._peak_blocks = self._peak_bytes = 0

    # --- copies of the model ---

    def __getstate__(self) -> dict[str, Any]:
        if self._drop_interrupted():
            raise RuntimeError(
                "the model held copies of its weights on a device, since a forward pass was interrupted. It "
                "holds its own weights now: copy or pickle it again."
            )
        if self._users:
            raise RuntimeError(
                "the model can't be copied or pickled during a forward pass, while it holds copies of its "
                "weights on a device. Copy it between two passes."
            )
        lasting = ("blocks", "place", "num_ahead", "cache_bytes", "_next", "_previous")
        return {name: getattr(self, name) for name in lasting}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._init_state()

    # --- state ---

    @property
    def link(self) -> Link:
        """The transfer backend.

        A copy opens it on first use, since its machine may lack the device, and while unpickling the modules
        aren't complete.
        """
        with self._lock:
            return self._link or self._open(open_link(self.place, self.num_ahead))

    def _open(self, link: Link) -> Link:
        if link.needs_pinned:
            for block in self.blocks:
                pin(hosts_of(block))
        total, cached = 0, set[int]()
        for position, block in enumerate(self.blocks):
            hosts = [host for host in hosts_of(block) if host is not None]
            mapped = {id(host): host.nbytes for host in hosts if mapped_from(host)}
            if total + sum(mapped.values()) <= self.cache_bytes:
                total += sum(mapped.values())
                cached.add(position)
        self._cached, self._link = frozenset(cached), link
        return link

    @property
    def resident(self) -> tuple[int, ...]:
        """Positions of the blocks on the device or in flight."""
        self._drop_interrupted()
        return tuple(self._copies)

    def facts(self) -> StreamFacts:
        """Return statistics of the transfers."""
        self._drop_interrupted()
        sizes = [plan_layout(hosts_of(block)).packing.num_bytes for block in self.blocks]
        outer = _outer_blocks(self.blocks)
        outer_bytes = sum(sizes[block] for block in outer)
        inner_sizes = sorted(size for block, size in enumerate(sizes) if block not in outer)
        cached = sum(sizes[block] for block in self._cached) if self.link.in_place else 0
        bound = min(sum(sizes), outer_bytes + sum(inner_sizes[-self.num_ahead - 1 :]) + cached)
        return StreamFacts(self.place, len(sizes), sum(sizes), bound, self._peak_blocks, self._peak_bytes)

    # --- forward ---

    def enter(self, block: int | None, module: nn.Module, frame: FrameType | None = None) -> None:
        """Transfer a block to the device, and assign the copies to its modules.

        Args:
            block: Its position. None for a module with blocks below it, within which they are prefetched.
            module: The module that is called.
            frame: The frame that runs the call, if known. torch calls no hooks after a KeyboardInterrupt, so
                a call whose frame isn't on the stack any more has ended.

        Raises:
            RuntimeError: A weight is on the meta device.
        """
        calls = self._thread.calls
        if calls or block is None:
            self._drop_interrupted()
        call = _Call(block, module, frame)
        if block is None:
            calls.append(call)
            return
        grads = torch.is_grad_enabled()
        outer_calls = [outer for outer in calls if outer.block == block]
        if any(outer.grads or not grads for outer in outer_calls):  # it is assigned already
            is_recursive = any(outer.module is module for outer in outer_calls)
            if is_recursive or (grads and not self._is_refetching()):
                calls.append(call)
                if grads:
                    self._start_refetching(call)
            return  # leave() ignores calls that weren't recorded
        calls.append(call)
        link = self.link
        with self._lock:
            call.uses_block = True
            self._users.setdefault(block, set()).add(call)
            self._record_order(block)
            if is_in_backward() and not self._is_scoped:  # recomputing checkpointed activations
                self._want_in_backward(block)
            else:
                self._want(_current_pass(), self._ahead(block))
            copy = self._fetch(block)
        if link.in_place:
            return
        self._wait_for(block, copy)
        with self._lock:
            copy.assign(grads=grads)
        call.grads = grads
        if grads:
            self._start_refetching(call)

    def leave(self, block: int | None, module: nn.Module) -> None:
        """End a call, whether it succeeded or failed.

        Args:
            block: As in :meth:`enter`.
            module: As in :meth:`enter`. Nothing happens if its call wasn't entered.
        """
        # If another pre-hook failed, torch calls our forward hook without our pre-hook.
        for call in reversed(self._thread.calls):
            if call.block == block and call.module is module:
                while any(running is call for running in self._thread.calls):
                    self._leave_last()
                return

    def abandon(self) -> None:
        """Leave all calls of this thread, such as after an interrupt during a forward pass."""
        while self._thread.calls:
            self._leave_last()

    def _leave_last(self) -> None:
        # A KeyboardInterrupt may come at any step. Each can be repeated, and the call is removed last.
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
                    self._want(_current_pass(), None)
                elif call.block is not None and call.uses_block:
                    # The block stays until the next one is entered, which may be the same.
                    self._want(_current_pass(), (call.block, *self._ahead(self._thread.last)))
        except Exception:
            calls.pop()
            raise
        calls.pop()

    def _drop_interrupted(self) -> bool:
        """Leave the interrupted calls of this thread, and return whether there were any."""
        calls = self._thread.calls
        was_interrupted = False
        while calls and calls[-1].frame is not None and not is_within(calls[-1].frame):
            self._leave_last()
            was_interrupted = True
        backward_pass = _current_pass(is_backward=True)
        if not calls and backward_pass in self._wanted and not is_in_backward():
            self._end_backward(backward_pass)
        return was_interrupted

    def _record_order(self, block: int) -> None:
        last = self._thread.last
        if last >= 0 and last != block:
            self._next[last] = block
            self._previous[block] = last
        self._thread.last = block

    def _ahead(self, block: int) -> tuple[int, ...]:
        return self._following(self._next, block) if self._is_scoped else ()

    @property
    def _is_scoped(self) -> bool:
        """Whether this thread runs a module with several blocks, so that another one may follow."""
        return bool(self._thread.calls) and self._thread.calls[0].block is None

    def _following(self, order: dict[int, int], block: int) -> tuple[int, ...]:
        following: list[int] = []
        successor = order.get(block)
        while successor is not None and successor != block and successor not in following:
            if len(following) == self.num_ahead:
                break
            following.append(successor)
            successor = order.get(successor)
        return tuple(following)

    # --- transfers; all methods but _wait_for need the lock ---

    def _want(self, user: _Pass, blocks: tuple[int, ...] | None) -> None:
        """Set the blocks that a pass needs next, and release those that aren't used or needed any more."""
        if blocks is None:
            self._wanted.pop(user, None)
        else:
            self._wanted[user] = blocks
        if self._copies:
            needed = {block for wanted in self._wanted.values() for block in wanted} | self._users.keys()
            for block in [block for block in self._copies if block not in needed]:
                self._drop(block)

    def _release(self, block: int, call: _Call) -> None:
        """End a use of a block. After the last use, its modules hold their own weights again."""
        users = self._users.get(block, set())
        if users - {call}:
            users.discard(call)
            return
        copy = self._copies.get(block)
        if copy is not None and copy.assigned:
            copy.restore()
        self._users.pop(block, None)

    def _fetch(self, block: int, saved: HostWeights | None = None) -> BlockCopy:
        """Start the transfers of a block and of the wanted ones that aren't on the device.

        Args:
            block: The block.
            saved: Its stored tensors in the forward pass, for backward; None for the current ones.
        """
        copy = self._copies.get(block)
        hosts = hosts_of(self.blocks[block]) if saved is None else saved
        can_be_stale = saved is not None or not self.link.in_place
        if copy is not None and copy.assigned:  # in use by a forward pass
            if saved is not None and copy.is_stale(hosts):
                return self._transfer(block, hosts)
        elif copy is not None and can_be_stale and copy.is_stale(hosts):
            self._drop(block)
            copy = None
        if copy is None:
            copy = self._begin(block, hosts)
        for wanted in [wanted for blocks in self._wanted.values() for wanted in blocks]:
            if wanted not in self._copies:
                # An error of prefetching is raised when the block is needed.
                with suppress(Exception):
                    self._begin(wanted, hosts_of(self.blocks[wanted]))
        return copy

    def _begin(self, block: int, hosts: HostWeights) -> BlockCopy:
        copy = self._copies[block] = self._transfer(block, hosts)
        if self.link.in_place and block in self._cached:
            self._was_read.add(block)
        idle = self._was_read - self._copies.keys()
        cached = sum(self._layouts[other].packing.num_bytes for other in idle)
        self._peak_blocks = max(self._peak_blocks, len(self._copies))
        num_bytes = sum(copy.num_bytes for copy in self._copies.values())
        self._peak_bytes = max(self._peak_bytes, num_bytes + cached)
        return copy

    def _transfer(self, block: int, hosts: HostWeights) -> BlockCopy:
        layout = self._layouts[block] = plan_layout(hosts, self._layouts.get(block))
        return begin_copy(self.blocks[block], hosts, layout, self.link, block in self._was_read)

    def _drop(self, block: int) -> None:
        hosts = [host for host in self._copies.pop(block).hosts if host is not None]
        self.link.release(hosts)
        if block not in self._cached:
            release_pages(hosts)

    def _wait_for(self, block: int, copy: BlockCopy) -> torch.Tensor:
        """Wait for a transfer.

        Raises:
            Exception: Whatever the transfer raises; the block isn't on the device then.
        """
        with copy.guard:
            try:
                memory = copy.arrival()
            except BaseException:
                with self._lock:
                    if self._copies.get(block) is copy:
                        self._drop(block)
                raise
            if copy.memory is None:
                copy.receive(memory)
            return memory

    # --- backward ---

    def _is_refetching(self) -> bool:
        """Check whether autograd saves descriptions of weights now."""
        calls = reversed(self._thread.calls)
        innermost = next((call.saving for call in calls if call.saving is not None), None)
        return innermost is not None and is_innermost(innermost)

    def _start_refetching(self, call: _Call) -> None:
        """Let autograd save descriptions of weights until the call ends."""
        if not self._is_refetching():
            call.saving = refetching(self._find, self._refetch)
            call.saving.__enter__()

    def _find(self, address: int, start: int) -> Saved | None:
        """Return the weight at an address of memory on the device and a byte in it."""
        with self._lock:
            for block, copy in self._copies.items():
                if address and copy.address == address:
                    weight = copy.position_at(start)
                    version = None if copy.is_written(weight) else copy.versions[weight]
                    return Saved(block, weight, version, copy.hosts)
        return None

    def _refetch(self, view: Refetched) -> torch.Tensor:
        block = view.saved.block
        try:
            with self._lock:
                self._want_in_backward(block)
                copy = self._fetch(block, view.saved.hosts)
            if copy.versions[view.saved.weight] != view.saved.version:
                raise RuntimeError(
                    f"a weight of block {self.blocks[block].name!r} was modified between forward and "
                    "backward, which needs its value from the forward pass. Modify weights after backward()."
                )
            return view.within(self._wait_for(block, copy))
        finally:
            if not is_in_backward():  # a saved tensor is read outside of backward
                self._end_backward(_current_pass(is_backward=True))

    def _want_in_backward(self, block: int) -> None:
        """Set the block that a backward pass has reached, and those that it will probably reach next."""
        user = _current_pass(is_backward=True)
        if user not in self._wanted:
            after_backward(partial(self._end_backward, user))
        self._want(user, (block, *self._following(self._previous, block)))

    def _end_backward(self, user: _Pass) -> None:
        with self._lock:
            self._want(user, None)


def _outer_blocks(blocks: Sequence[Block]) -> set[int]:
    """Return the blocks whose modules contain modules of other blocks, which run while they are in use."""
    users: dict[nn.Module, set[int]] = {}
    for position, block in enumerate(blocks):
        for ref in block.refs:
            users.setdefault(ref.owner, set()).add(position)
    return {
        position
        for position, block in enumerate(blocks)
        if any(users.get(module, set()) - {position} for module in block.module.modules())
    }
