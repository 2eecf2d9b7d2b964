"""The world: which process this is, among which others, on which device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from accelfn.errors import ConfigurationError

__all__ = ("GroupOwner", "Owned", "World")

_CPU = torch.device("cpu")


class GroupOwner:
    """Keeps a process group alive until it is told to let go: one that torch's registry doesn't know."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Keep ``group``."""
        self._group: dist.ProcessGroup | None = group

    def let_go(self) -> None:
        """Give up the group, and with it its connections and threads."""
        self._group = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """What ``init_context`` set up and ``close_context`` takes down again.

    Attributes:
        group: It initialised torch.distributed.
        side_group: A gloo group of its own, for what precedes each operation, that torch keeps.
        previous_device: The accelerator that was current before.
        excepthooks: ``sys.excepthook`` before, and the one that torch put around it.
        opened: ``init_context`` opened this world, so that closing it is told to the other ranks.
        hosts_store: The key-value store of this world lives in this process.
        at_exit: What tells the others if the program ends without closing.
        end_watch: Ends the watchdog's thread.
    """

    group: bool = False
    side_group: weakref.ref[dist.ProcessGroup] | None = None
    previous_device: torch.device | None = None
    excepthooks: tuple[Callable[..., object], Callable[..., object]] | None = None
    opened: bool = False
    hosts_store: bool = False
    at_exit: Callable[[], None] | None = None
    end_watch: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Who this process is. The default is a world of one on the CPU.

    Attributes:
        rank: Global rank, from 0.
        size: Number of ranks.
        local_rank: Rank among those of this node.
        local_size: Number of ranks on this node.
        node_rank: Number of this node, from 0.
        num_nodes: Number of nodes.
        device: Device of this rank.
        backend: ``"gloo"``, ``"nccl"``, ..., ``"memory"`` for ranks that are threads, None for a world of
            one.
        group_ref: Leads to torch's process group; None for a world of one, or ranks in memory. Only torch
            keeps the group alive, so that closing it really ends its threads.
        keeper: Keeps a group of accelfn's own for as long as any variant of the context is used.
        made: What ``init_context`` set up and ``close_context`` undoes.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    num_nodes: int = 1
    device: torch.device = _CPU
    backend: str | None = None
    group_ref: weakref.ref[dist.ProcessGroup] | None = None
    keeper: GroupOwner | None = field(default=None, compare=False, repr=False)
    made: Owned = field(default_factory=Owned)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Torch's process group; None where there is none, or when it has been destroyed."""
        return None if self.group_ref is None else self.group_ref()

    def __post_init__(self) -> None:
        """Refuse a rank outside its world, and nodes that don't fit in it."""
        for name, value, size in (
            ("rank", self.rank, self.size),
            ("local_rank", self.local_rank, self.local_size),
            ("node_rank", self.node_rank, self.num_nodes),
        ):
            if size < 1 or not 0 <= value < size:
                raise ConfigurationError(f"World: {name} must lie in 0..{size - 1}, got {value}.")
        if self.local_size + self.num_nodes - 1 > self.size:
            raise ConfigurationError(
                f"World: {self.local_size} ranks on this node and at least one on every other of "
                f"{self.num_nodes} nodes do not fit a world of {self.size}."
            )
