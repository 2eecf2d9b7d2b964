"""The blocks that are on a device, or underway to it: what begins to come, and what goes."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

import torch

from accelfn.bigmodel.load.mapped import mapped_from
from accelfn.bigmodel.offload.blocks import Block
from accelfn.bigmodel.offload.gradients import Refetched, Saved
from accelfn.bigmodel.offload.held import (
    Held,
    Layout,
    is_stale,
    packed_hosts,
    plan_layout,
    read_hosts,
    receive,
    take_down,
    versions_of,
)
from accelfn.bigmodel.offload.link import Link, let_pages_go
from accelfn.bigmodel.offload.packing import lasting_tensors

__all__ = ("Residents", "mapped_sizes_of", "sizes_of")


def mapped_sizes_of(blocks: Sequence[Block]) -> list[int]:
    """Return for each block the bytes of its tensors that are mapped from files, tied ones once."""
    mapped = [
        {id(host): host.nbytes for host in _now(block) if host is not None and mapped_from(host) is not None}
        for block in blocks
    ]
    return [sum(sizes.values()) for sizes in mapped]


def sizes_of(blocks: Sequence[Block]) -> list[int]:
    """Return the bytes of each block, as they are packed."""
    return [plan_layout([slot.peek() for slot in block.slots]).packing.num_bytes for block in blocks]


class Residents:
    """Which blocks are on a device, or underway. Every method but :meth:`arrive` needs the lock.

    What ends something can be done again, and then does the rest of it: a KeyboardInterrupt may come
    anywhere.

    A block comes when it is taken, or wanted by one who will probably need it next. It goes as soon as nobody
    uses it or wants it.

    Args:
        blocks: All of them.
        link: Carries them.
        cache_bytes: As of :class:`Stream`.

    Attributes:
        lock: Of all that is here.
        link: As given.
        stays: Positions of the blocks whose mapped weights stay in the host's memory after use.
        peak_blocks: Most blocks that were there at a time.
        peak_bytes: Most bytes of them.
    """

    def __init__(self, blocks: Sequence[Block], link: Link, cache_bytes: int) -> None:
        self.lock: threading.RLock = threading.RLock()
        self.link = link
        self.stays: frozenset[int] = _first_within(mapped_sizes_of(blocks), cache_bytes)
        self.peak_blocks: int = 0
        self.peak_bytes: int = 0
        self._blocks = blocks
        self._held: dict[int, Held] = {}
        self._users: dict[int, frozenset[object]] = {}
        self._wanted: dict[object, tuple[int, ...]] = {}
        self._addresses: dict[int, int] = {}  # of memory on the device: the block
        self._layouts: dict[int, Layout] = {}
        self._was_read: set[int] = set()  # of those that stay and are used in place

    @property
    def positions(self) -> tuple[int, ...]:
        """Of the blocks that are there or underway."""
        return tuple(self._held)

    @property
    def is_used(self) -> bool:
        """Whether any block is in use."""
        return bool(self._users)

    # --- who needs what ---

    def use(self, block: int, user: object) -> None:
        """Keep a block for somebody until :meth:`unuse`."""
        self._users[block] = self._users.get(block, frozenset()) | {user}

    def unuse(self, block: int, user: object) -> None:
        """End a use of a block. With the last one, its modules hold their weights at rest again."""
        others = self._users.get(block, frozenset()) - {user}
        if others:
            self._users[block] = others
            return
        held = self._held.get(block)
        if held is not None and held.hung:
            take_down(held)
        self._users.pop(block, None)

    def is_wanting(self, wanter: object) -> bool:
        """Whether somebody has said what it wants."""
        return wanter in self._wanted

    def want(self, wanter: object, blocks: tuple[int, ...] | None) -> None:
        """Return which blocks somebody needs next, and let go what nobody uses or wants any more.

        Args:
            wanter: Who.
            blocks: In the order of their use; None for nothing more.
        """
        if blocks is None:
            self._wanted.pop(wanter, None)
        else:
            self._wanted[wanter] = blocks
        if self._held:
            keep = {one for wanted in self._wanted.values() for one in wanted} | self._users.keys()
            for block in [block for block in self._held if block not in keep]:
                self._let_go(block)

    # --- what comes and goes ---

    def take(self, block: int) -> Held:
        """Begin to carry a block and then those that are wanted, as far as they aren't there.

        Raises:
            RuntimeError: It has weights without values. Whatever the link raises.
        """
        held = self._held.get(block)
        if held is None:
            held = self._begin(block)
        elif not held.hung and not self.link.in_place and is_stale(held, _now(held.block)):
            self._let_go(block)
            held = self._begin(block)
        self._take_ahead()
        return held

    def take_again(self, part: Refetched) -> Held:
        """Begin to carry a block as it was when forward used it, and those that are wanted.

        Raises:
            RuntimeError: As :meth:`take` does.
        """
        held = self._held.get(part.block)
        if held is not None and is_stale(held, part.hosts):
            if held.hung:  # a forward pass uses it as it is now
                return self._carry(part.block, part.hosts)
            self._let_go(part.block)
            held = None
        if held is None:
            held = self._begin(part.block, part.hosts)
        self._take_ahead()
        return held

    def _take_ahead(self) -> None:
        for block in [one for wanted in self._wanted.values() for one in wanted]:
            if block not in self._held:
                # What can't be fetched ahead fails where it is needed, if it is.
                with suppress(Exception):
                    self._begin(block)

    def _begin(self, block: int, lasting: Sequence[torch.Tensor | None] | None = None) -> Held:
        held = self._held[block] = self._carry(block, lasting)
        if self.link.in_place and block in self.stays:
            self._was_read.add(block)
        cached = sum(self._layouts[one].packing.num_bytes for one in self._was_read - self._held.keys())
        self.peak_blocks = max(self.peak_blocks, len(self._held))
        self.peak_bytes = max(self.peak_bytes, sum(one.num_bytes for one in self._held.values()) + cached)
        return held

    def _carry(self, block: int, lasting: Sequence[torch.Tensor | None] | None) -> Held:
        hosts = read_hosts(self._blocks[block], lasting)
        layout = self._layouts[block] = plan_layout(hosts, self._layouts.get(block))
        device = self.link.device
        held = Held(block=self._blocks[block], hosts=hosts, layout=layout, versions=(), device=device)
        packed = packed_hosts(held)
        held.versions = versions_of(packed)
        with lasting_tensors():
            if block not in self._was_read:
                held.arrival = self.link.begin([host.detach() for host in packed], layout.packing)
            alone = {
                place: host
                for place, (host, position) in enumerate(zip(hosts, layout.positions, strict=True))
                if host is not None and position < 0
            }
            if alone:  # seldom, and a KeyboardInterrupt amid no_grad could leave gradients off
                with torch.no_grad():
                    held.moved = {place: host.to(device, non_blocking=True) for place, host in alone.items()}
        return held

    def _let_go(self, block: int) -> None:
        held = self._held[block]
        if held.memory is not None:
            self._addresses.pop(held.memory.untyped_storage().data_ptr(), None)
        del self._held[block]
        hosts = [host for host in held.hosts if host is not None]
        self.link.release(hosts)
        if block not in self.stays:
            let_pages_go(hosts)

    def arrive(self, block: int, held: Held) -> torch.Tensor:
        """Wait for a block that was taken; of several threads one waits, and the others for it.

        The lock mustn't be held, so that others go on meanwhile.

        Raises:
            Whatever the link raises. The block isn't there then.
        """
        with held.guard:
            assert held.arrival is not None
            try:
                memory = held.arrival()
            except BaseException:
                with self.lock:
                    if self._held.get(block) is held:
                        self._let_go(block)
                raise
            if held.memory is None:
                receive(held, memory)
                with self.lock:
                    if self._held.get(block) is held and memory.numel():
                        self._addresses[memory.untyped_storage().data_ptr()] = block
            return memory

    def find(self, address: int, start: int) -> Saved | None:
        """Return whose memory on the device has this address; None if it is no block's.

        Args:
            address: Of the memory.
            start: A byte in it, from there.
        """
        block = self._addresses.get(address)
        if block is None:
            return None
        held = self._held[block]
        weight = held.position_at(start)
        version = None if held.is_written(weight) else held.versions[weight]
        return Saved(block, weight, version, held.lasting)


def _now(block: Block) -> list[torch.Tensor | None]:
    return [slot.peek() for slot in block.slots]


def _first_within(sizes: Sequence[int], limit: int) -> frozenset[int]:
    """Return the positions of the first blocks that fit together, and of smaller later ones."""
    found: set[int] = set()
    total = 0
    for position, size in enumerate(sizes):
        if total + size <= limit:
            found.add(position)
            total += size
    return frozenset(found)
