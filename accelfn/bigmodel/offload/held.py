"""A block on its way to where it is used, or there; and its tensors hung into its modules."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch

from accelfn.bigmodel.offload.blocks import Block
from accelfn.bigmodel.offload.gradients import connect
from accelfn.bigmodel.offload.link import Arrival
from accelfn.bigmodel.offload.packing import Packing, Piece, is_packable, plan_packing, unpack

__all__ = (
    "Held",
    "Layout",
    "hang",
    "is_stale",
    "packed_hosts",
    "plan_layout",
    "read_hosts",
    "receive",
    "take_down",
    "versions_of",
)


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
        replaced: By slot: what hung there while ``hung`` takes its place. Empty otherwise.
        rest: By slot: what hung there before.
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
    replaced: tuple[torch.Tensor | None, ...] = ()
    rest: tuple[torch.Tensor | None, ...] = ()
    guard: threading.Lock = field(default_factory=threading.Lock)

    @property
    def lasting(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors at rest; None where their values come anew each time."""
        sources = self.block.sources
        return tuple(None if place in sources else host for place, host in enumerate(self.hosts))

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


def read_hosts(
    block: Block, lasting: Sequence[torch.Tensor | None] | None = None
) -> tuple[torch.Tensor | None, ...]:
    """Return the tensors of a block at rest, by slot.

    Args:
        block: It.
        lasting: Those that were at rest another time, instead of what hangs there now.

    Raises:
        RuntimeError: One has no values.
    """
    hosts = tuple(
        block.sources[place]()
        if place in block.sources
        else slot.peek()
        if lasting is None
        else lasting[place]
        for place, slot in enumerate(block.slots)
    )
    for slot, host in zip(block.slots, hosts, strict=True):
        if host is not None and host.is_meta:
            raise RuntimeError(
                f"{slot.key!r} of block {block.name!r} has no values: it is on the meta device. Load the "
                "weights before the model runs (load_checkpoint_in_model)."
            )
    return hosts


def plan_layout(hosts: Sequence[torch.Tensor | None], before: Layout | None = None) -> Layout:
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


def packed_hosts(held: Held) -> list[torch.Tensor]:
    """Return the packed tensors at rest."""
    hosts = held.hosts
    return [cast("torch.Tensor", hosts[place]) for place in held.layout.firsts]


def versions_of(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return how often each was changed; what inference mode has made doesn't count it."""
    return tuple([0 if tensor.is_inference() else tensor._version for tensor in tensors])


def is_stale(held: Held, hosts: Sequence[torch.Tensor | None]) -> bool:
    """Whether the tensors at rest were changed since their values were taken, or these are others.

    Args:
        held: A block whose modules don't hold its copies.
        hosts: By slot, those whose values are needed; what comes anew each time doesn't count.
    """
    for place, (host, now) in enumerate(zip(held.hosts, hosts, strict=True)):
        if now is not host and place not in held.block.sources:
            return True
    return versions_of(packed_hosts(held)) != held.versions


def receive(held: Held, memory: torch.Tensor) -> None:
    """Take over the memory that has arrived."""
    held.copies = unpack(memory, held.layout.packing)
    held.counts = versions_of(held.copies)
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
        copies = connect(copies, packed_hosts(held))
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
    if held.hung:
        held.replaced = held.hung
    else:
        held.rest = tuple(slot.peek() for slot in held.block.slots)
    held.hung = hung
    for slot, tensor in zip(held.block.slots, hung, strict=True):
        if tensor is not None:
            slot.write(tensor)
    held.replaced = ()


def take_down(held: Held) -> None:
    """Restore the tensors at rest, with what forward passes have written into the copies.

    It can be done again if it was interrupted, as :func:`hang` may have been before.
    """
    block = held.block
    for ours in (held.hung, held.replaced):
        for place, (slot, hung) in enumerate(zip(block.slots, ours, strict=False)):
            # Else the module has hung something of its own there, which stays.
            if hung is not None and slot.peek() is hung:
                back = held.rest[place] if place in block.sources else held.hosts[place]
                assert back is not None
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
    held.hung = held.replaced = held.rest = ()


def _write_back(held: Held, written: set[int], uncounted: set[int]) -> None:
    hosts = packed_hosts(held)
    with torch.no_grad():
        for position in written:
            hosts[position].copy_(held.copies[position])
        for position in uncounted - {_BY_ITSELF}:
            copy, host = held.copies[position], hosts[position]
            if not torch.equal(copy.to(host.device), host):
                # As little counted as it was there: autograd minds if a buffer that it keeps has changed.
                host.data.copy_(copy)
    held.counts = versions_of(held.copies)
    held.versions = versions_of(hosts)
