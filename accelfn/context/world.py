"""The world: which process this is, among which others, on which device."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from accelfn.context.environment import check_place

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class WorldIdentity:
    """Identity of one world: equal to nothing but itself, not even to a world of the same ranks."""

    def __deepcopy__(self, memo: dict[int, object]) -> WorldIdentity:
        """Return self: a copy of a context is in the same world."""
        return self

    def __reduce__(self) -> tuple[Callable[[], WorldIdentity], tuple[()]]:
        """Pickle as that of no world: what is loaded elsewhere isn't in this one."""
        return _no_world, ()


# Of worlds that nobody has made a group for: one process is the same world, whichever context says so.
_ALONE = WorldIdentity()


def _no_world() -> WorldIdentity:
    return _ALONE


class Settling(Protocol):
    """Something that goes on in the background of a world."""

    def settle(self) -> None:
        """Wait for its end, and raise what stopped it."""
        ...


class Background:
    """What goes on beside the operations of a world: one save at most.

    Attributes:
        task: What the next save settles first, and so does closing the context; None before the first.
    """

    def __init__(self) -> None:
        """Begin with nothing."""
        self.task: Settling | None = None

    def settle(self) -> None:
        """Wait for its end, and raise its error unless that was raised already."""
        if self.task is not None:
            self.task.settle()


class GroupOwner:
    """Keeps a process group alive until it is told to let go: one that torch's registry doesn't know."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Keep ``group``."""
        self._group: dist.ProcessGroup | None = group

    def let_go(self) -> None:
        """Release the group, and with it its connections and threads."""
        self._group = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """What ``init_context`` set up and ``close_context`` takes down again.

    Attributes:
        group: It initialised torch.distributed.
        previous_device: The accelerator that was current before.
        excepthooks: ``sys.excepthook`` before, and the one that torch put around it.
        opened: ``init_context`` opened this world, so that closing it is reported to the other ranks.
        hosts_store: The key-value store of this world lives in this process.
        at_exit: What notifies the others if the program ends without closing.
        end_watch: Ends the watchdog's thread.
    """

    group: bool = False
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
        identity: The same object in all contexts over this world, so that what one of them has prepared is
            known by the others, and by those of no other world.
        background: What goes on beside the operations, and is waited for when the context is closed.
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
    identity: WorldIdentity = field(default=_ALONE, repr=False)
    background: Background = field(default_factory=Background, compare=False, repr=False)
    keeper: GroupOwner | None = field(default=None, compare=False, repr=False)
    made: Owned = field(default_factory=Owned, compare=False)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Torch's process group; None where there is none, or when it has been destroyed."""
        return None if self.group_ref is None else self.group_ref()

    def __post_init__(self) -> None:
        """Refuse a rank outside its world, and nodes that don't fit in it."""
        check_place(self)
