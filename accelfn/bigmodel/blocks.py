"""Blocks of tensors that travel together, and those that are on a device or on their way to it."""

from __future__ import annotations

import bisect
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import nn

from accelfn.bigmodel.assign import Slot, has_forward, is_packable, slots_of, store_of
from accelfn.bigmodel.offload_autograd import Refetched, Saved, connect
from accelfn.bigmodel.transfer import (
    Arrival,
    Link,
    Packing,
    Piece,
    lasting_tensors,
    let_pages_go,
    plan_packing,
    unpack,
)
from accelfn.bigmodel.weight_files import mapped_from

# Modules of torch that use the tensors of those below them without calling these.
_READ_BELOW = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """A module whose tensors travel together.

    Attributes:
        name: Of the module in the model.
        module: It; its forward is what the tensors are needed for.
        slots: Of the tensors that travel: all below the module, or only its own.
    """

    name: str
    module: nn.Module
    slots: tuple[Slot, ...]


class BlockNames(NamedTuple):
    """A block of a plan.

    Attributes:
        name: Of the module.
        leaves: Full names of the tensors that travel with it.
    """

    name: str
    leaves: tuple[str, ...]


def read_block(model: nn.Module, names: BlockNames) -> Block:
    """Find the modules and slots of a block of a plan."""
    slots: list[Slot] = []
    for leaf in names.leaves:
        prefix, _, key = leaf.rpartition(".")
        owner = model.get_submodule(prefix)
        slots.append(Slot(owner, key, key in store_of(owner, True)))
    return Block(name=names.name, module=model.get_submodule(names.name), slots=tuple(slots))


def plan_blocks(
    model: nn.Module, leaves: Collection[str], whole_classes: Collection[str] = ()
) -> tuple[BlockNames, ...]:
    """Choose which tensors travel together: as much as a layer, and no more. Pure.

    A module travels as a whole if its class is said to, if it has no others below it, if it is a layer, or if
    it is at most an eighth of all. Layers are modules of one class, with modules of their own, that stand
    together in a list. What has layers below it is taken apart, but for small layers; its own tensors then
    are a block by themselves, which stays while the module runs. So do those of modules below it that can't
    be called: of a ParameterList, say.

    Args:
        model: Any; only its structure and the sizes of its tensors are read.
        leaves: Full names of the tensors that travel at all, tied ones under each name, as :func:`slots_of`
            gives them.
        whole_classes: Names of classes that aren't taken apart.

    Returns:
        The blocks, in the order of the modules; each leaf is in one of them.
    """
    wanted = set(leaves)
    sizes = {name: slot.read().nbytes for name, slot in slots_of(model) if name in wanted}
    limit = sum(sizes.values()) // 8
    found: list[BlockNames] = []

    def is_whole(module: nn.Module, num_bytes: int, is_layer: bool) -> bool:
        if type(module).__name__ in whole_classes or isinstance(module, _READ_BELOW):
            return True
        if not any(True for _ in module.children()):
            return True
        small = num_bytes <= limit
        return (is_layer and small) if _has_layers(module) else (is_layer or small)

    def visit(module: nn.Module, name: str, is_layer: bool) -> None:
        dot = f"{name}." if name else ""
        # The names of tied tensors depend on the path, so they are made from this module's on.
        below = tuple(f"{dot}{leaf}" for leaf, _ in slots_of(module) if f"{dot}{leaf}" in wanted)
        if not below:
            return
        if has_forward(module) and is_whole(module, sum(sizes[leaf] for leaf in below), is_layer):
            wanted.difference_update(below)
            found.append(BlockNames(name, below))
            return
        own = tuple(leaf for leaf in _own(module, dot) if leaf in wanted)
        if own:
            wanted.difference_update(own)
            found.append(BlockNames(name, own))
        layers = _layers(module)
        for key, child in module.named_children():
            visit(child, f"{dot}{key}", child in layers)

    visit(model, "", False)
    return tuple(found)


def _own(module: nn.Module, dot: str) -> Iterator[str]:
    """Return the tensors of a module, and of those below it that are no more than names for some of them."""
    for is_parameter in (True, False):
        yield from (f"{dot}{key}" for key in store_of(module, is_parameter))
    for key, child in module.named_children():
        if not has_forward(child):
            yield from _own(child, f"{dot}{key}.")


def _layers(module: nn.Module) -> list[nn.Module]:
    """Return what stands in a list together with others of its class, and has modules of its own."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return []
    composite = [child for child in module if next(child.children(), None) is not None]
    counts = Counter(type(child) for child in composite)
    return [child for child in composite if counts[type(child)] > 1]


def _has_layers(module: nn.Module) -> bool:
    return any(_layers(below) for below in module.modules())


_BY_ITSELF = -1


class Layout(NamedTuple):
    """Which tensors of a block are packed, and how.

    Attributes:
        key: What it was planned for.
        positions: By slot: of its tensor among the packed ones; -1 for one that moves by itself, or is None.
        firsts: By packed tensor: the first slot that has it.
        packing: Of the packed tensors.
    """

    key: tuple[object, ...]
    positions: tuple[int, ...]
    firsts: tuple[int, ...]
    packing: Packing


@dataclass(slots=True, kw_only=True, eq=False)
class Held:
    """A block on its way to the device, or there.

    Attributes:
        block: It.
        hosts: By slot, as they hang at rest; None where a module let go of a buffer.
        layout: Of the packed ones.
        versions: Of the packed ones at rest, when their values were taken.
        device: Where they are used.
        arrival: Waits for the transfer; None if nothing is transferred.
        moved: By slot: tensors that aren't packed, on the device.
        memory: The packed ones on the device.
        copies: The same, one by one.
        counts: Of changes of the copies, when they were as those at rest.
        hung: By slot: what hangs there now. Empty at rest.
        guard: Of the thread that waits for the transfer.
    """

    block: Block
    hosts: tuple[torch.Tensor | None, ...]
    layout: Layout
    versions: tuple[int, ...]
    device: torch.device
    arrival: Arrival | None = None
    moved: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor])
    memory: torch.Tensor | None = None
    copies: tuple[torch.Tensor, ...] = ()
    counts: tuple[int, ...] = ()
    hung: tuple[torch.Tensor | None, ...] = ()
    guard: threading.Lock = field(default_factory=threading.Lock)

    @property
    def num_bytes(self) -> int:
        """Of the packed tensors."""
        return self.layout.packing.num_bytes

    def position_at(self, start: int) -> int:
        """Return which packed tensor a byte of the memory belongs to."""
        return bisect.bisect_right(self.layout.packing.pieces, start, key=_start) - 1

    def is_written(self, position: int) -> bool:
        """Whether a forward pass has written into the copy of a packed tensor, in a way that counts."""
        return self.copies[position]._version != self.counts[position]


def _start(piece: Piece) -> int:
    return piece.start


def _read_hosts(
    block: Block, lasting: Sequence[torch.Tensor | None] | None = None
) -> tuple[torch.Tensor | None, ...]:
    """Return the tensors of a block at rest, by slot.

    Args:
        block: It.
        lasting: Those that were at rest another time, instead of what hangs there now.

    Raises:
        RuntimeError: One has no values.
    """
    hosts = tuple(slot.peek() for slot in block.slots) if lasting is None else tuple(lasting)
    for slot, host in zip(block.slots, hosts, strict=True):
        if host is not None and host.is_meta:
            raise RuntimeError(
                f"{slot.key!r} of block {block.name!r} has no values: it is on the meta device. Load the "
                "weights before the model runs (load_checkpoint_in_model)."
            )
    return hosts


def _plan_layout(hosts: Sequence[torch.Tensor | None], before: Layout | None = None) -> Layout:
    """Return how the tensors of a block are packed, tied ones once.

    Args:
        hosts: By slot.
        before: What was planned the last time; given back if it still fits.
    """
    key = tuple(
        [
            None
            if host is None or not is_packable(host)
            else (id(host), host.dtype, host.shape, host.stride())
            for host in hosts
        ]
    )
    if before is not None and before.key == key:
        return before
    positions: list[int] = []
    firsts: list[int] = []
    packed: list[torch.Tensor] = []
    seen: dict[int, int] = {}
    for place, host in enumerate(hosts):
        if host is None or key[place] is None:
            positions.append(_BY_ITSELF)
            continue
        if id(host) not in seen:
            seen[id(host)] = len(packed)
            packed.append(host)
            firsts.append(place)
        positions.append(seen[id(host)])
    return Layout(key, tuple(positions), tuple(firsts), plan_packing(packed))


def _packed_hosts(held: Held) -> list[torch.Tensor]:
    """Return the packed tensors at rest."""
    hosts = held.hosts
    return [cast("torch.Tensor", hosts[place]) for place in held.layout.firsts]


def _versions_of(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return how often each was changed; what inference mode has made doesn't count it."""
    return tuple([0 if tensor.is_inference() else tensor._version for tensor in tensors])


def _is_stale(held: Held, hosts: Sequence[torch.Tensor | None]) -> bool:
    """Whether the tensors at rest were changed since their values were taken, or these are others.

    Args:
        held: A block whose modules don't hold its copies.
        hosts: By slot, those whose values are needed.
    """
    if any(now is not host for host, now in zip(held.hosts, hosts, strict=True)):
        return True
    return _versions_of(_packed_hosts(held)) != held.versions


def _receive(held: Held, memory: torch.Tensor) -> None:
    """Take over the memory that has arrived."""
    held.copies = unpack(memory, held.layout.packing)
    held.counts = _versions_of(held.copies)
    held.memory = memory


def hang(held: Held, *, grads: bool) -> None:
    """Set the copies of a block in its modules.

    Args:
        held: A block that has arrived.
        grads: Connect them with the tensors at rest, so that gradients arrive there.
    """
    if held.hung and not grads:
        return
    copies, moved = held.copies, held.moved
    if grads:
        copies = connect(copies, _packed_hosts(held))
        # These know themselves how gradients come back; but not if they were moved in no_grad.
        moved = {
            place: host.to(held.device) if host.requires_grad else moved[place]
            for place, host in enumerate(held.hosts)
            if host is not None and place in moved
        }
    hung = tuple(
        copies[position] if position >= 0 else moved.get(place)
        for place, position in enumerate(held.layout.positions)
    )
    held.hung = hung
    for slot, tensor in zip(held.block.slots, hung, strict=True):
        if tensor is not None:
            slot.write(tensor)


def _take_down(held: Held) -> None:
    """Restore the tensors at rest, with what forward passes have written into the copies."""
    block = held.block
    for place, (slot, hung) in enumerate(zip(block.slots, held.hung, strict=False)):
        # Else the module has assigned something of its own, which stays.
        back = held.hosts[place]
        if hung is not None and back is not None and slot.peek() is hung:
            slot.write(back)
    written = {position for position in range(len(held.copies)) if held.is_written(position)}
    # Batch normalisation writes into its buffers without counting it as a change.
    uncounted = {
        held.layout.positions[place]
        for place, slot in enumerate(block.slots)
        if not slot.is_parameter and slot.owner.training
    } - written
    if written or uncounted:
        _write_back(held, written, uncounted)
    held.hung = ()


def _write_back(held: Held, written: set[int], uncounted: set[int]) -> None:
    hosts = _packed_hosts(held)
    with torch.no_grad():
        for position in written:
            hosts[position].copy_(held.copies[position])
        for position in uncounted - {_BY_ITSELF}:
            copy, host = held.copies[position], hosts[position]
            if not torch.equal(copy.to(host.device), host):
                # As little counted as it was there: autograd minds if a buffer that it keeps has changed.
                host.data.copy_(copy)
    held.counts = _versions_of(held.copies)
    held.versions = _versions_of(hosts)


def _mapped_sizes_of(blocks: Sequence[Block]) -> list[int]:
    """Return for each block the bytes of its tensors that are mapped from files, tied ones once."""
    mapped = [
        {id(host): host.nbytes for host in _now(block) if host is not None and mapped_from(host) is not None}
        for block in blocks
    ]
    return [sum(sizes.values()) for sizes in mapped]


def sizes_of(blocks: Sequence[Block]) -> list[int]:
    """Return the bytes of each block, as they are packed."""
    return [_plan_layout([slot.peek() for slot in block.slots]).packing.num_bytes for block in blocks]


class Residents:
    """Which blocks are on a device, or underway. Every method but :meth:`arrive` needs the lock.

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
        self.stays: frozenset[int] = _first_within(_mapped_sizes_of(blocks), cache_bytes)
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
            _take_down(held)
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
        elif not held.hung and not self.link.in_place and _is_stale(held, _now(held.block)):
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
        if held is not None and _is_stale(held, part.hosts):
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
        hosts = _read_hosts(self._blocks[block], lasting)
        layout = self._layouts[block] = _plan_layout(hosts, self._layouts.get(block))
        device = self.link.device
        held = Held(block=self._blocks[block], hosts=hosts, layout=layout, versions=(), device=device)
        packed = _packed_hosts(held)
        held.versions = _versions_of(packed)
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
                _receive(held, memory)
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
        return Saved(block, weight, version, held.hosts)


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
