"""Weights at rest in pinned memory, laid out as they travel."""

from __future__ import annotations

import torch

from accelfn.bigmodel.load.mapped import mapped_from
from accelfn.bigmodel.offload.blocks import Block
from accelfn.bigmodel.offload.packing import is_packable, pack, plan_packing, unpack

__all__ = ("pin",)


def pin(block: Block) -> None:
    """Pack a block's tensors side by side in pinned memory. They stay the same objects.

    What is mapped from files stays there, and what another block has pinned already.

    Args:
        block: Of any weights.
    """
    hosts: dict[int, torch.Tensor] = {}
    for place, slot in enumerate(block.slots):
        host = slot.peek()
        if host is not None and place not in block.sources and _is_plain(host):
            hosts.setdefault(id(host), host)
    tensors = tuple(hosts.values())
    if not tensors or any(host.is_pinned() for host in tensors):
        return
    packing = plan_packing(tensors)
    memory = torch.empty(packing.num_bytes, dtype=torch.uint8, pin_memory=True)
    with torch.no_grad():
        pack([host.detach() for host in tensors], packing, memory)
    for host, view in zip(tensors, unpack(memory, packing), strict=True):
        host.data = view


def _is_plain(host: torch.Tensor) -> bool:
    return (
        is_packable(host)
        and not host.is_meta
        and host.device.type == "cpu"
        and host.numel() > 0
        and mapped_from(host) is None
    )
