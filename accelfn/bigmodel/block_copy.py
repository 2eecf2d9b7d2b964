"""A block's tensors on the device: packed, assigned to its modules, and written back."""

from __future__ import annotations

import bisect
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch

from accelfn.bigmodel.assign import is_packable
from accelfn.bigmodel.blocks import Block
from accelfn.bigmodel.offload_autograd import connect
from accelfn.bigmodel.transfer import Arrival, Link, Packing, Piece, lasting_tensors, plan_packing, unpack

HostWeights = Sequence[torch.Tensor | None]
"""The tensors of a block where they are stored, by ref; None where a module let go of a buffer."""

_UNPACKED = -1


class Layout(NamedTuple):
    """Which tensors of a block are packed, and how.

    Attributes:
        key: What it was planned for.
        positions: By ref: of its tensor among the packed ones; -1 for one that moves by itself, or is None.
        firsts: By packed tensor: the first ref that has it.
        packing: Of the packed tensors.
    """

    key: tuple[object, ...]
    positions: tuple[int, ...]
    firsts: tuple[int, ...]
    packing: Packing


def plan_layout(hosts: HostWeights, before: Layout | None = None) -> Layout:
    """Return how the tensors of a block are packed, tied ones once.

    Args:
        hosts: Of the block.
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
    first_of: dict[int, int] = {}
    for place, host in enumerate(hosts):
        if key[place] is not None:
            first_of.setdefault(id(host), place)
    position_of = {number: position for position, number in enumerate(first_of)}
    positions = [position_of.get(id(host), _UNPACKED) for host in hosts]
    packed = [cast("torch.Tensor", hosts[place]) for place in first_of.values()]
    return Layout(key, tuple(positions), tuple(first_of.values()), plan_packing(packed))


def hosts_of(block: Block) -> list[torch.Tensor | None]:
    """Return what the modules of a block hold now."""
    return [ref.peek() for ref in block.refs]


@dataclass(slots=True, kw_only=True, eq=False)
class BlockCopy:
    """A block on its way to the device, or there.

    Attributes:
        block: It.
        hosts: As the modules hold them otherwise.
        layout: Of the packed ones.
        versions: Of the packed ones on the host, when their values were taken.
        device: Where they are used.
        arrival: Waits for the transfer.
        moved: By ref: tensors that aren't packed, on the device.
        memory: The packed ones on the device.
        copies: The same, one by one.
        counts: Of changes of the copies, when they were as those on the host.
        assigned: By ref: what the modules hold now. Empty while these hold their own.
        guard: Of the thread that waits for the transfer.
    """

    block: Block
    hosts: HostWeights
    layout: Layout
    versions: tuple[int, ...]
    device: torch.device
    arrival: Arrival
    moved: dict[int, torch.Tensor]
    memory: torch.Tensor | None = None
    copies: tuple[torch.Tensor, ...] = ()
    counts: tuple[int, ...] = ()
    assigned: tuple[torch.Tensor | None, ...] = ()
    guard: threading.Lock = field(default_factory=threading.Lock)

    @property
    def num_bytes(self) -> int:
        """Of the packed tensors."""
        return self.layout.packing.num_bytes

    @property
    def address(self) -> int:
        """Of the memory on the device; 0 before it has arrived."""
        return 0 if self.memory is None else self.memory.untyped_storage().data_ptr()

    def position_at(self, start: int) -> int:
        """Return which packed tensor a byte of the memory belongs to."""
        return bisect.bisect_right(self.layout.packing.pieces, start, key=_start) - 1

    def is_written(self, position: int) -> bool:
        """Whether a forward pass has written into the copy of a packed tensor, in a way that counts."""
        return self.copies[position]._version != self.counts[position]

    def is_stale(self, hosts: HostWeights) -> bool:
        """Whether the host's tensors were changed since their values were taken, or these are others."""
        if any(now is not host for host, now in zip(self.hosts, hosts, strict=True)):
            return True
        return _versions_of(self.packed_hosts()) != self.versions

    def packed_hosts(self) -> list[torch.Tensor]:
        """Return the host's tensors that are packed."""
        return [cast("torch.Tensor", self.hosts[place]) for place in self.layout.firsts]

    def receive(self, memory: torch.Tensor) -> None:
        """Take over the memory that has arrived."""
        self.copies = unpack(memory, self.layout.packing)
        self.counts = _versions_of(self.copies)
        self.memory = memory

    def assign(self, *, grads: bool) -> None:
        """Let the block's modules hold the copies.

        Args:
            grads: Connect them with the host's tensors, so that gradients arrive there.
        """
        if self.assigned and not grads:
            return
        copies, moved = self.copies, self.moved
        if grads:
            copies = connect(copies, self.packed_hosts())
            # These know themselves how gradients come back; but not if they were moved in no_grad.
            moved = {
                place: host.to(self.device) if host.requires_grad else moved[place]
                for place, host in enumerate(self.hosts)
                if host is not None and place in moved
            }
        self.assigned = tuple(
            copies[position] if position >= 0 else moved.get(place)
            for place, position in enumerate(self.layout.positions)
        )
        for ref, tensor in zip(self.block.refs, self.assigned, strict=True):
            if tensor is not None:
                ref.write(tensor)

    def restore(self) -> None:
        """Let the modules hold the host's tensors again, with what forward passes wrote into the copies."""
        refs = self.block.refs
        for place, (ref, tensor) in enumerate(zip(refs, self.assigned, strict=False)):
            # Else the module has assigned something of its own, which stays.
            host = self.hosts[place]
            if tensor is not None and host is not None and ref.peek() is tensor:
                ref.write(host)
        written = {position for position in range(len(self.copies)) if self.is_written(position)}
        # Batch normalisation writes into its buffers without counting it as a change.
        uncounted = {
            self.layout.positions[place]
            for place, ref in enumerate(refs)
            if not ref.is_parameter and ref.owner.training
        } - {*written, _UNPACKED}
        if written or uncounted:
            self._write_back(written, uncounted)
        self.assigned = ()

    def _write_back(self, written: set[int], uncounted: set[int]) -> None:
        hosts = self.packed_hosts()
        with torch.no_grad():
            for position in written:
                hosts[position].copy_(self.copies[position])
            for position in uncounted:
                copy, host = self.copies[position], hosts[position]
                if not torch.equal(copy.to(host.device), host):
                    # As little counted as it was there: autograd minds if a buffer that it keeps has changed.
                    host.data.copy_(copy)
        self.counts = _versions_of(self.copies)
        self.versions = _versions_of(hosts)


def begin_copy(block: Block, hosts: HostWeights, layout: Layout, link: Link, is_there: bool) -> BlockCopy:
    """Begin to bring a block to the device.

    Args:
        block: It.
        hosts: Its tensors.
        layout: Of them.
        link: Carries them.
        is_there: Nothing has to be carried: it is used in place, and in memory already.

    Raises:
        RuntimeError: It has weights without values.
    """
    for ref, host in zip(block.refs, hosts, strict=True):
        if host is not None and host.is_meta:
            raise RuntimeError(
                f"{ref.key!r} of block {block.name!r} has no values: it is on the meta device. Load the "
                "weights before the model runs (load_checkpoint_in_model)."
            )
    packed = [cast("torch.Tensor", hosts[place]) for place in layout.firsts]
    versions = _versions_of(packed)
    alone = {
        place: host
        for place, (host, position) in enumerate(zip(hosts, layout.positions, strict=True))
        if host is not None and position < 0
    }
    with lasting_tensors():
        arrival = _nothing if is_there else link.begin([one.detach() for one in packed], layout.packing)
        if alone:  # seldom, and a KeyboardInterrupt amid no_grad could leave gradients off
            with torch.no_grad():
                alone = {place: host.to(link.device, non_blocking=True) for place, host in alone.items()}
    return BlockCopy(
        block=block,
        hosts=tuple(hosts),
        layout=layout,
        versions=versions,
        device=link.device,
        arrival=arrival,
        moved=alone,
    )


def _nothing() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _start(piece: Piece) -> int:
    return piece.start


def _versions_of(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return how often each was changed; what inference mode has made doesn't count it."""
    return tuple([0 if tensor.is_inference() else tensor._version for tensor in tensors])
