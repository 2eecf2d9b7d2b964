"""Blocks: tensors that are transferred together, as large as a layer, and their copies on the device."""

from __future__ import annotations

import bisect
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import torch
from torch import nn

from accelfn.bigmodel.offload_autograd import connect
from accelfn.bigmodel.transfer import Arrival, Link, Packing, lasting_tensors, plan_packing, unpack
from accelfn.weights.assign import TensorRef, has_forward, is_packable, refs_of, store_of

# Modules of torch that use the tensors of their children without calling these.
READ_BELOW = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """A module whose tensors are transferred together.

    Attributes:
        name: The module's name in the model.
        module: The module, whose forward needs the tensors.
        refs: The transferred tensors: all below the module, or only its own.
    """

    name: str
    module: nn.Module
    refs: tuple[TensorRef, ...]


def plan_blocks(
    model: nn.Module, names: Collection[str], whole_classes: Collection[str] = ()
) -> tuple[Block, ...]:
    """Choose which tensors are transferred together. Pure.

    A module is one block if its class is in ``whole_classes``, if it has no children, if it is a layer, or if
    it has at most an eighth of all bytes. Layers are modules of the same class, with children, in one list.
    A module with layers below it is split, except for small layers; its own tensors are then a block that
    stays on the device while the module runs. They include the tensors of children that can't be called, such
    as those of a ParameterList.

    Args:
        model: Any module; only its structure and the sizes of its tensors are read.
        names: Full names of the offloaded tensors, as yielded by :func:`refs_of`.
        whole_classes: Names of classes that aren't split.

    Returns:
        The blocks in module order; each tensor is in one of them.
    """
    wanted = frozenset(names)
    remaining = {ref: ref.read().nbytes for name, ref in refs_of(model) if name in wanted}
    limit = sum(remaining.values()) // 8
    blocks: list[Block] = []

    def is_block(module: nn.Module, num_bytes: int, is_layer: bool) -> bool:
        if type(module).__name__ in whole_classes or isinstance(module, READ_BELOW):
            return True
        if not any(True for _ in module.children()):
            return True
        is_small = num_bytes <= limit
        has_layers = any(_layers(below) for below in module.modules())
        return (is_layer and is_small) if has_layers else (is_layer or is_small)

    def visit(module: nn.Module, name: str, is_layer: bool) -> None:
        below = [ref for _, ref in refs_of(module) if ref in remaining]
        if not below:
            return
        num_bytes = sum(remaining[ref] for ref in below)
        is_whole = has_forward(module) and is_block(module, num_bytes, is_layer)
        refs = tuple(below if is_whole else [ref for ref in _own_refs(module) if ref in remaining])
        if refs:
            blocks.append(Block(name=name, module=module, refs=refs))
        for ref in refs:
            del remaining[ref]
        if not is_whole:
            layers = _layers(module)
            for key, child in module.named_children():
                visit(child, f"{name}.{key}" if name else key, child in layers)

    visit(model, "", False)
    return tuple(blocks)


def _own_refs(module: nn.Module) -> Iterator[TensorRef]:
    """Yield a module's own tensors, and those of children that can't be called."""
    for is_parameter in (True, False):
        yield from (TensorRef(module, key, is_parameter) for key in store_of(module, is_parameter))
    for child in module.children():
        if not has_forward(child):
            yield from _own_refs(child)


def _layers(module: nn.Module) -> list[nn.Module]:
    """Return the items of a list that have children and the same class as another item."""
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return []
    composite = [child for child in module if next(child.children(), None) is not None]
    counts = Counter(type(child) for child in composite)
    return [child for child in composite if counts[type(child)] > 1]


# --- copies on the device ------------------------------------------------------------------------

HostWeights = Sequence[torch.Tensor | None]
"""The stored tensors of a block, by ref; None for a buffer that its module has deleted."""

_UNPACKED = -1


class Layout(NamedTuple):
    """Which tensors of a block are packed, and how.

    Attributes:
        key: Identifies the tensors that it was planned for.
        positions: By ref: the position among the packed tensors; -1 for others.
        firsts: By packed tensor: its first ref.
        packing: The layout in memory.
    """

    key: tuple[object, ...]
    positions: tuple[int, ...]
    firsts: tuple[int, ...]
    packing: Packing


def plan_layout(hosts: HostWeights, previous: Layout | None = None) -> Layout:
    """Return how the tensors of a block are packed, tied ones once.

    Args:
        hosts: The stored tensors.
        previous: The last layout of the block, which is returned if it is still valid.
    """
    key = tuple(
        [
            None
            if host is None or not is_packable(host)
            else (id(host), host.dtype, host.shape, host.stride())
            for host in hosts
        ]
    )
    if previous is not None and previous.key == key:
        return previous
    first_of: dict[int, int] = {}
    for index, host in enumerate(hosts):
        if key[index] is not None:
            first_of.setdefault(id(host), index)
    position_of = {identity: position for position, identity in enumerate(first_of)}
    positions = [position_of.get(id(host), _UNPACKED) for host in hosts]
    packed = [cast("torch.Tensor", hosts[index]) for index in first_of.values()]
    return Layout(key, tuple(positions), tuple(first_of.values()), plan_packing(packed))


def hosts_of(block: Block) -> list[torch.Tensor | None]:
    """Return the current tensors of a block's modules."""
    return [ref.peek() for ref in block.refs]


@dataclass(slots=True, kw_only=True, eq=False)
class BlockCopy:
    """A block in transfer to the device, or on it.

    Attributes:
        block: The block.
        hosts: Its stored tensors.
        layout: Their layout.
        versions: Versions of the packed tensors on the host when they were transferred.
        arrival: Waits for the transfer.
        moved: By ref: tensors on the device that aren't packed.
        memory: The memory of the packed tensors on the device.
        copies: The packed tensors on the device.
        counts: Versions of the copies when they equalled the tensors on the host.
        assigned: By ref: what the modules hold now. Empty while they hold the stored tensors.
        guard: Held while a thread waits for the transfer.
    """

    block: Block
    hosts: HostWeights
    layout: Layout
    versions: tuple[int, ...]
    arrival: Arrival
    moved: dict[int, torch.Tensor]
    memory: torch.Tensor | None = None
    copies: tuple[torch.Tensor, ...] = ()
    counts: tuple[int, ...] = ()
    assigned: tuple[torch.Tensor | None, ...] = ()
    guard: threading.Lock = field(default_factory=threading.Lock)

    @property
    def num_bytes(self) -> int:
        """Size of the packed tensors."""
        return self.layout.packing.num_bytes

    @property
    def address(self) -> int:
        """Address of the memory on the device; 0 before the transfer has ended."""
        return 0 if self.memory is None else self.memory.untyped_storage().data_ptr()

    def position_at(self, start: int) -> int:
        """Return the position of the packed tensor at a byte of the memory."""
        return bisect.bisect_right(self.layout.packing.pieces, start, key=lambda piece: piece.start) - 1

    def is_written(self, position: int) -> bool:
        """Check whether the copy of a packed tensor was modified, according to its version."""
        return self.copies[position]._version != self.counts[position]

    def is_stale(self, hosts: HostWeights) -> bool:
        """Check whether the stored tensors were modified or replaced since the transfer."""
        if any(current is not host for host, current in zip(self.hosts, hosts, strict=True)):
            return True
        return _versions_of(self.packed_hosts()) != self.versions

    def packed_hosts(self) -> list[torch.Tensor]:
        """Return the stored tensors that are packed."""
        return [cast("torch.Tensor", self.hosts[index]) for index in self.layout.firsts]

    def receive(self, memory: torch.Tensor) -> None:
        """Unpack the memory that was transferred."""
        self.copies = unpack(memory, self.layout.packing)
        self.counts = _versions_of(self.copies)
        self.memory = memory

    def assign(self, *, grads: bool) -> None:
        """Assign the copies to the block's modules.

        Args:
            grads: Connect them with the stored tensors, where gradients arrive.
        """
        if self.assigned and not grads:
            return
        copies, moved = self.copies, self.moved
        if grads:
            copies = connect(copies, self.packed_hosts())
            # These are connected by autograd, but were moved without gradients.
            moved = {
                index: host.to(moved[index].device) if host.requires_grad else moved[index]
                for index, host in enumerate(self.hosts)
                if host is not None and index in moved
            }
        self.assigned = tuple(
            copies[position] if position >= 0 else moved.get(index)
            for index, position in enumerate(self.layout.positions)
        )
        for ref, tensor in zip(self.block.refs, self.assigned, strict=True):
            if tensor is not None:
                ref.write(tensor)

    def restore(self) -> None:
        """Assign the stored tensors again, with what forward passes wrote to the copies."""
        refs = self.block.refs
        for index, (ref, tensor) in enumerate(zip(refs, self.assigned, strict=False)):
            # If the module holds another tensor by now, it has assigned that one itself.
            host = self.hosts[index]
            if tensor is not None and host is not None and ref.peek() is tensor:
                ref.write(host)
        written = {position for position in range(len(self.copies)) if self.is_written(position)}
        # Batch normalisation writes to its buffers without a change of their version.
        unversioned = {
            self.layout.positions[index]
            for index, ref in enumerate(refs)
            if not ref.is_parameter and ref.owner.training
        } - {*written, _UNPACKED}
        if written or unversioned:
            self._write_back(written, unversioned)
        self.assigned = ()

    def _write_back(self, written: set[int], unversioned: set[int]) -> None:
        hosts = self.packed_hosts()
        with torch.no_grad():
            for position in written:
                hosts[position].copy_(self.copies[position])
            for position in unversioned:
                copy, host = self.copies[position], hosts[position]
                if not torch.equal(copy.to(host.device), host):
                    # Without a change of the version here too: autograd refuses modified saved buffers.
                    host.data.copy_(copy)
        self.counts = _versions_of(self.copies)
        self.versions = _versions_of(hosts)


def begin_copy(block: Block, hosts: HostWeights, layout: Layout, link: Link, is_cached: bool) -> BlockCopy:
    """Start to transfer a block to the device.

    Args:
        block: The block.
        hosts: Its stored tensors.
        layout: Their layout.
        link: The transfer backend.
        is_cached: Whether it is used in place and in memory already, so that nothing is transferred.

    Raises:
        RuntimeError: A weight is on the meta device.
    """
    for ref, host in zip(block.refs, hosts, strict=True):
        if host is not None and host.is_meta:
            raise RuntimeError(
                f"{ref.key!r} of block {block.name!r} is on the meta device and has no values. Load the "
                "weights before running the model (load_checkpoint_in_model)."
            )
    packed = [cast("torch.Tensor", hosts[index]) for index in layout.firsts]
    versions = _versions_of(packed)
    unpacked = {
        index: host
        for index, (host, position) in enumerate(zip(hosts, layout.positions, strict=True))
        if host is not None and position < 0
    }
    with lasting_tensors():
        arrival = _no_memory if is_cached else link.begin([host.detach() for host in packed], layout.packing)
        if unpacked:  # rarely; and a KeyboardInterrupt within no_grad could leave gradients disabled
            with torch.no_grad():
                unpacked = {i: host.to(link.device, non_blocking=True) for i, host in unpacked.items()}
    return BlockCopy(
        block=block,
        hosts=tuple(hosts),
        layout=layout,
        versions=versions,
        arrival=arrival,
        moved=unpacked,
    )


def _no_memory() -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8)


def _versions_of(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return the version of each tensor; inference tensors have none."""
    return tuple([0 if tensor.is_inference() else tensor._version for tensor in tensors])
