"""What a block of code sends between ranks, as torch sees it, and how often it makes the host wait."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import optree
import torch
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode


class Traffic(TorchDispatchMode):
    """A block inside of which collectives are counted, of DTensors too.

    Attributes:
        calls: Collectives by name.
        received: Bytes that this rank needs of others, by the name of the collective: what a ring moves.
        syncs: Times that the host asked for the value of a tensor.
    """

    def __init__(self) -> None:
        super().__init__()  # pyright: ignore[reportUnknownMemberType]
        self.calls: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.syncs = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # and come back with what is in it
        space, name = str(func._schema.name).split("::")
        if name in ("_local_scalar_dense", "is_nonzero", "bincount"):  # its length is a value
            self.syncs += 1
        if "c10d" in space and "wait" not in name and "wrap" not in name:
            name = name.strip("_").removesuffix("_base")
            self.calls[name] += 1
            if name == "all_to_all_single":
                self.received[name] += _from_others(*args)
                return func(*args, **(kwargs or {}))
            leaves: list[Any] = optree.tree_leaves(cast("Any", args))
            tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
            whole, part = max(one.nbytes for one in tensors), min(one.nbytes for one in tensors)
            # Of an all-reduce both are the same, and a ring of two sends each half twice.
            self.received[name] += whole - part if whole > part else whole
        return func(*args, **(kwargs or {}))


def _from_others(rows: torch.Tensor, receive: Sequence[int], send: Sequence[int], group: str) -> int:
    """Return the bytes of the rows that come from other ranks."""
    del send
    own: int = cast("Any", distributed_c10d)._resolve_process_group(group).rank()
    return (sum(receive) - receive[own]) * math.prod(rows.shape[1:]) * rows.itemsize


def traffic_of(step: Callable[[], object]) -> Traffic:
    """Count what a call sends."""
    with Traffic() as seen:
        step()
    return seen


def held(tensors: Sequence[Any]) -> int:
    """Return the bytes of this rank's parts of tensors, each memory once."""
    storages = [getattr(one, "_local_tensor", one).untyped_storage() for one in tensors]
    return sum({one.data_ptr(): one.nbytes() for one in storages}.values())
