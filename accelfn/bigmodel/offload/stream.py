"""The stream of blocks: each is where it is used while it is used, and the next is underway meanwhile.

This is the one place of offloading that remembers something between calls. At rest every module holds its
real weights. Between :meth:`Stream.enter` and :meth:`Stream.leave` of a block its modules hold copies on the
device that computes; where the weights can be used as they lie, nothing is exchanged at all.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from accelfn.bigmodel.offload.blocks import Block, Slot
from accelfn.bigmodel.offload.gradients import Refetched, connect, refetching
from accelfn.bigmodel.offload.link import Arrival, Link
from accelfn.bigmodel.offload.links import open_link
from accelfn.bigmodel.offload.packing import Packing, is_packable, is_packed, pack, plan_packing, unpack
from accelfn.bigmodel.places import Place

__all__ = ("Stream", "StreamFacts")


_NOTHING = Packing(0, ())
_LASTING = (
    "blocks",
    "place",
    "num_ahead",
    "cache_bytes",
    "peak_blocks",
    "peak_bytes",
    "_next",
    "_previous",
)


@dataclass(slots=True, kw_only=True, eq=False)
class _Held:
    """A block on its way to the device, or there."""

    hosts: tuple[torch.Tensor, ...]  # by slot, as they hang at rest
    positions: tuple[int, ...] = ()  # by slot: of the tensor among the packed ones, or -1
    packing: Packing = _NOTHING
    packed: tuple[torch.Tensor, ...] = ()  # each once
    opaque: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])  # by slot: not packed
    arrival: Arrival | None = None
    versions: tuple[int, ...] = ()
    memory: torch.Tensor | None = None
    copies: tuple[torch.Tensor, ...] = ()  # of the packed ones
    counts: tuple[int, ...] = ()  # of changes of the copies, when they were made
    hung: tuple[torch.Tensor, ...] = ()  # by slot: what hangs there now; empty at rest
    rest: tuple[torch.Tensor, ...] = ()  # by slot: what hung there before
    guard: threading.Lock = field(default_factory=threading.Lock)


@dataclass(slots=True, eq=False)
class _Entered:
    block: int  # or -1 for a scope
    module: nn.Module
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
        cache_bytes: Where weights are used as they lie in files: how many bytes of them stay in memory after
            use. The first blocks stay, so that a pass over all finds them there again.
        link: Carries the blocks; None opens the one to the place.

    Attributes:
        peak_blocks: Most blocks that were on the device, or underway, at a time.
        peak_bytes: Most bytes of them.
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
        if num_ahead < 0:
            raise ValueError(f"num_ahead must not be negative, got {num_ahead}. 0 fetches nothing ahead.")
        self.blocks = tuple(blocks)
        self.place = place
        self.num_ahead = num_ahead
        self.cache_bytes = cache_bytes
        self.peak_blocks = 0
        self.peak_bytes = 0
        last = len(self.blocks) - 1
        self._next = {block: block + 1 for block in range(last)}
        self._previous = {block + 1: block for block in range(last)}
        self._begin_life(link)
        self._make_ready()

    def _begin_life(self, link: Link | None) -> None:
        self._link = link if link is not None else open_link(self.place, self.num_ahead)
        self._lock = threading.RLock()
        self._thread = _Thread()
        self._held: dict[int, _Held] = {}
        self._users: Counter[int] = Counter()
        self._scopes = 0
        self._wanted: dict[int, tuple[int, ...]] = {}  # by thread: blocks that it will need next
        self._addresses: dict[int, int] = {}  # of memory on the device: the block
        self._stays = frozenset[int]()
        self._was_read: set[int] = set()  # of those that stay
        self._is_ready = False

    def _make_ready(self) -> None:
        """Do what needs the modules, which a copy of this stream doesn't have yet while it is made."""
        if self._link.in_place:
            self._stays = self._plan_cache()
        if self._link.needs_pinned:
            for block in self.blocks:
                _pin(block)
        self._is_ready = True

    # --- copies of the model ---

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            if self._users:
                raise RuntimeError(
                    "the model can't be copied or pickled while a forward pass runs: its modules hold copies "
                    "of their weights on a device. Do it between two passes."
                )
            return {name: getattr(self, name) for name in _LASTING}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._begin_life(None)

    # --- forward ---

    @property
    def link(self) -> Link:
        """What carries the blocks."""
        return self._link

    @property
    def resident(self) -> tuple[int, ...]:
        """Positions of the blocks that are on the device or underway now."""
        with self._lock:
            return tuple(self._held)

    def _plan_cache(self) -> frozenset[int]:
        stays: set[int] = set()
        total = 0
        for position, size in enumerate(self._sizes()):
            total += size
            if total <= self.cache_bytes:
                stays.add(position)
        return frozenset(stays)

    def _sizes(self) -> list[int]:
        return [
            plan_packing([tensor for tensor in map(Slot.read, block.slots) if is_packable(tensor)]).num_bytes
            for block in self.blocks
        ]

    def facts(self) -> StreamFacts:
        """Say what travels, and how much of it was underway or there at a time."""
        sizes = self._sizes()
        around = [self._is_around(block) for block in self.blocks]
        own = sum(size for size, is_around in zip(sizes, around, strict=True) if is_around)
        others = sorted(size for size, is_around in zip(sizes, around, strict=True) if not is_around)
        cached = sum(sizes[block] for block in self._stays)
        bound = min(sum(sizes), own + sum(others[-self.num_ahead - 1 :]) + cached)
        return StreamFacts(self.place, len(self.blocks), sum(sizes), bound, self.peak_blocks, self.peak_bytes)

    def _is_around(self, block: Block) -> bool:
        inner = {other.module for other in self.blocks if other is not block}
        return any(module in inner for module in block.module.modules())

    def enter_scope(self, module: nn.Module) -> None:
        """Begin the forward pass of a module that has blocks below it: they are fetched ahead within it."""
        self._thread.entered.append(_Entered(-1, module))
        with self._lock:
            self._scopes += 1

    def leave_scope(self) -> None:
        """End what :meth:`enter_scope` began, whether or not it went well."""
        self._forget_after(-1)
        with self._lock:
            self._scopes -= 1
        self._rest()

    def enter(self, block: int) -> None:
        """Bring a block to the device, and hang its tensors into its modules.

        Args:
            block: Its position.

        Raises:
            RuntimeError: It has weights that aren't loaded, or that couldn't get their gradients.
        """
        entered = _Entered(block, self.blocks[block].module)
        grads = torch.is_grad_enabled()
        again = any(one.block == block and one.saving is not None for one in self._thread.entered)
        self._thread.entered.append(entered)
        with self._lock:
            self._users[block] += 1
            if not self._is_ready:
                self._make_ready()
            if grads:
                self._require_leaves(self.blocks[block])
            self._learn(block)
            self._tend(self._following(self._next, block) if self._scopes else (), block)
            held = self._held[block]
        if self._link.in_place or again:
            return
        self._arrive(block, held)
        with self._lock:
            self._hang(block, held, grads)
        if grads:
            entered.saving = refetching(self._find, self._fetch_again)
            entered.saving.__enter__()

    def leave(self, block: int) -> None:
        """End the use of a block that :meth:`enter` began, whether or not it went well.

        Args:
            block: Its position.
        """
        entered = self._forget_after(block)
        if entered.saving is not None:
            entered.saving.__exit__(None, None, None)
        with self._lock:
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                held = self._held.get(block)
                if held is not None and held.hung:
                    self._take_down(block, held)
            self._tend(self._following(self._next, block) if self._scopes else ())
        self._rest()

    def abandon(self) -> None:
        """Forget what this thread has entered and never left, as after an interrupt amid a forward pass."""
        while self._thread.entered:
            self._leave_last()

    @property
    def mark(self) -> object:
        """What this thread has entered last, to come back to by :meth:`abandon_since`; None if nothing."""
        return self._thread.entered[-1] if self._thread.entered else None

    def abandon_since(self, mark: object) -> None:
        """Forget what this thread has entered since a :attr:`mark` was the last, and that too.

        Nothing happens if it was left already.
        """
        while any(one is mark for one in self._thread.entered):
            self._leave_last()

    def _leave_last(self) -> None:
        left = self._thread.entered[-1].block
        if left < 0:
            self.leave_scope()
        else:
            self.leave(left)

    @property
    def entered_last(self) -> nn.Module | None:
        """The module whose forward pass this thread is in the midst of, the innermost one."""
        return self._thread.entered[-1].module if self._thread.entered else None

    def while_idle(self, work: Callable[[], None]) -> None:
        """Do something if no pass runs, and keep passes from beginning meanwhile."""
        with self._lock:
            if not self._users and not self._scopes:
                work()

    def _forget_after(self, block: int) -> _Entered:
        entered = self._thread.entered
        found = entered.pop()
        assert found.block == block  # passes end in the reverse order of their beginnings
        return found

    def _rest(self) -> None:
        """Let everything go at the end of a thread's pass."""
        if self._thread.entered:
            return
        self._thread.last = -1
        with self._lock:
            self._wanted.pop(threading.get_ident(), None)
            self._tend(None)

    def _learn(self, block: int) -> None:
        last = self._thread.last
        if last >= 0 and last != block:
            self._next[last] = block
            self._previous[block] = last
        self._thread.last = block

    def _following(self, order: dict[int, int], block: int) -> tuple[int, ...]:
        found: list[int] = []
        at: int | None = order.get(block)
        while at is not None and len(found) < self.num_ahead and at not in found:
            found.append(at)
            at = order.get(at)
        return tuple(found)

    def _tend(self, wanted: Sequence[int] | None, now: int | None = None) -> None:
        """Let go what nobody uses or wants, then begin what this thread needs now, and what it wants next."""
        if wanted is not None:
            self._wanted[threading.get_ident()] = tuple(wanted)
        keep = {block for blocks in self._wanted.values() for block in blocks} | set(self._users)
        for block in [block for block in self._held if block not in keep]:
            self._let_go(block)
        for block in (*(() if now is None else (now,)), *(wanted or ())):
            if block not in self._held:
                self._begin(block)

    def _let_go(self, block: int) -> None:
        held = self._held.pop(block)
        if held.memory is not None:
            self._addresses.pop(held.memory.untyped_storage().data_ptr(), None)
        if block not in self._stays:
            self._link.release(held.hosts)

    def _begin(self, block: int) -> _Held:
        """Begin to carry a block; the lock is held."""
        one = self.blocks[block]
        hosts = tuple(
            one.sources[place]() if place in one.sources else slot.read()
            for place, slot in enumerate(one.slots)
        )
        for slot, host in zip(one.slots, hosts, strict=True):
            if host.is_meta:
                raise RuntimeError(
                    f"{slot.key!r} of block {one.name!r} has no values: it is on the meta device. Load the "
                    "weights before the model runs (load_checkpoint_in_model)."
                )
        if block in self._stays:
            if block in self._was_read:
                held = self._held[block] = _Held(hosts=hosts)
                return held
            self._was_read.add(block)
        packed: list[torch.Tensor] = []
        opaque: dict[int, torch.Tensor] = {}
        positions: list[int] = []
        seen: dict[int, int] = {}
        for place, host in enumerate(hosts):
            if not is_packable(host):
                opaque[place] = host
                positions.append(-1)
                continue
            if id(host) not in seen:
                seen[id(host)] = len(packed)
                packed.append(host.detach())
            positions.append(seen[id(host)])
        packing = plan_packing(packed)
        held = _Held(
            hosts=hosts,
            positions=tuple(positions),
            packing=packing,
            packed=tuple(packed),
            opaque={place: host.to(self._link.device, non_blocking=True) for place, host in opaque.items()},
            arrival=self._link.begin(packed, packing),
            versions=_versions(hosts),
        )
        self._held[block] = held
        self.peak_blocks = max(self.peak_blocks, len(self._held))
        self.peak_bytes = max(self.peak_bytes, sum(one.packing.num_bytes for one in self._held.values()))
        return held

    def _arrive(self, block: int, held: _Held) -> torch.Tensor:
        """Wait for a block; of several threads one waits, and the others for it."""
        with held.guard:
            if held.memory is None:
                try:
                    assert held.arrival is not None
                    memory = held.arrival()
                except BaseException:
                    with self._lock:
                        if self._held.get(block) is held:
                            del self._held[block]
                    raise
                held.copies = unpack(memory, held.packing)
                held.counts = _versions(held.copies)
                held.memory = memory
                with self._lock:
                    if self._held.get(block) is held and memory.numel():
                        self._addresses[memory.untyped_storage().data_ptr()] = block
            return held.memory

    def _hang(self, block: int, held: _Held, grads: bool) -> None:
        if held.hung and not grads:
            return
        leaves: dict[int, torch.Tensor] = {}
        for place, position in enumerate(held.positions):
            if position >= 0:
                leaves.setdefault(position, held.hosts[place])
        copies = held.copies
        if grads:
            copies = connect(copies, [leaves[position] for position in range(len(copies))])
        held.hung = tuple(
            held.opaque[place] if position < 0 else copies[position]
            for place, position in enumerate(held.positions)
        )
        if not held.rest:
            held.rest = tuple(slot.read() for slot in self.blocks[block].slots)
        for slot, tensor in zip(self.blocks[block].slots, held.hung, strict=True):
            slot.write(tensor)

    def _take_down(self, block: int, held: _Held) -> None:
        """Hang the tensors at rest back, with what the forward pass has written into its copies."""
        one = self.blocks[block]
        for place, (slot, hung) in enumerate(zip(one.slots, held.hung, strict=True)):
            if slot.read() is hung:  # else the module has hung something of its own there, which stays
                slot.write(held.rest[place] if place in one.sources else held.hosts[place])
        held.hung = held.rest = ()
        first = {
            position: held.hosts[place] for place, position in reversed(tuple(enumerate(held.positions)))
        }
        # Batch normalisation writes into its buffers without counting it as a change.
        uncounted = {
            position
            for slot, position in zip(one.slots, held.positions, strict=True)
            if not slot.is_parameter and slot.owner.training
        }
        for position, (copy, count) in enumerate(zip(held.copies, held.counts, strict=True)):
            host = first[position]
            if copy._version != count or (
                position in uncounted and not torch.equal(copy.to(host.device), host)
            ):
                # As little counted as it was there: autograd minds if a buffer that it keeps has changed.
                target = host if copy._version != count else host.data
                with torch.no_grad():
                    target.copy_(copy)

    def _require_leaves(self, block: Block) -> None:
        for place in block.sources:
            slot = block.slots[place]
            if slot.is_parameter and slot.read().requires_grad:
                raise RuntimeError(
                    f"{slot.key!r} of block {block.name!r} requires a gradient, and its values come anew "
                    "from weights_map at each pass, so that there is nothing to keep the gradient. Run the "
                    "model under torch.no_grad(), call requires_grad_(False) on it, or load its "
                    "weights into the model (load_checkpoint_and_dispatch)."
                )

    # --- backward ---

    def _find(self, address: int) -> tuple[int, tuple[int, ...]] | None:
        with self._lock:
            block = self._addresses.get(address)
            return None if block is None else (block, self._held[block].versions)

    def _fetch_again(self, part: Refetched) -> torch.Tensor:
        block = part.block
        with self._lock:
            if block not in self._held:
                self._tend((block, *self._following(self._previous, block)))
            held = self._held[block]
            if not _after_backward(self._end_backward):  # someone reads a saved tensor by hand
                self._end_backward()
        if _has_changed(held, part):
            self._end_backward()
            raise RuntimeError(
                f"a weight of block {self.blocks[block].name!r} was changed between forward and backward, "
                "which needs its value from the forward pass. Change weights after backward()."
            )
        return part.within(self._arrive(block, held))

    def _end_backward(self) -> None:
        with self._lock:
            if not self._thread.entered:
                self._wanted.pop(threading.get_ident(), None)
            self._tend(None)


def _after_backward(work: Callable[[], None]) -> bool:
    """Do something at the end of the backward pass that runs; False if none does."""
    engine: Any = vars(torch.autograd.Variable)["_execution_engine"]  # as DDP and FSDP do
    try:
        engine.queue_callback(work)
    except RuntimeError:
        return False
    return True


def _has_changed(held: _Held, part: Refetched) -> bool:
    """Whether the tensor that a part belongs to was changed since. Others of the block may be: buffers."""
    first = part.offset * part.dtype.itemsize
    for place, position in enumerate(held.positions):
        if position >= 0 and held.versions[place] != part.versions[place]:
            start = held.packing.pieces[position].start
            if start <= first < start + max(1, held.packed[position].nbytes):
                return True
    return False


def _versions(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple(0 if tensor.is_inference() else tensor._version for tensor in tensors)


def _pin(block: Block) -> None:
    """Lay a block's tensors that lie in plain memory side by side in pinned memory."""
    hosts: dict[int, torch.Tensor] = {}
    for slot in block.slots:
        host = slot.read()
        if is_packable(host) and not host.is_meta and host.device.type == "cpu":
            hosts.setdefault(id(host), host)
    tensors = tuple(hosts.values())
    packing = plan_packing(tensors)
    if not tensors or (is_packed(tensors, packing) and tensors[0].is_pinned()):
        return
    memory = torch.empty(packing.num_bytes, dtype=torch.uint8, pin_memory=True)
    with torch.no_grad():
        pack([host.detach() for host in tensors], packing, memory)
    for host, view in zip(tensors, unpack(memory, packing), strict=True):
        host.data = view
