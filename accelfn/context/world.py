"""The world: the rank of this process, the number of ranks and nodes, and its device."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist

from accelfn.context.environment import check_place

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class WorldIdentity:
    """Identity of one world: equal only to itself, not to another world of the same ranks."""

    def __deepcopy__(self, memo: dict[int, object]) -> WorldIdentity:
        """Return self: a copy of a context is in the same world."""
        return self

    def __reduce__(self) -> tuple[Callable[[], WorldIdentity], tuple[()]]:
        """Pickle as the identity of a single process."""
        return _single_process, ()


# Shared by all worlds of one process.
_ALONE = WorldIdentity()


def _single_process() -> WorldIdentity:
    return _ALONE


class Settling(Protocol):
    """A task in the background of a world."""

    def settle(self) -> None:
        """Wait for its end, and raise its error."""
        ...


@dataclass(slots=True, eq=False)
class Background:
    """The background tasks of a world: at most one save, and one copy of a snapshot in memory.

    Attributes:
        task: The latest save, which the next one and closing the context wait for; None before the first.
        snapshots: Takes snapshots of an elastic run; None in other runs.
    """

    task: Settling | None = None
    snapshots: Settling | None = None

    def settle(self) -> None:
        """Wait for the save, and raise its error unless that was raised before."""
        if self.task is not None:
            self.task.settle()


_LATEST = 8


@dataclass(slots=True, eq=False)
class GroupOwner:
    """Keeps process groups alive that aren't registered with torch.

    Attributes:
        group: That of the world, or of a part of it; None once it is released.
        latest: The latest ones of models. They outlive these: a rank that fails drops its models before the
            others, which wait in such a group, have read why.
    """

    group: dist.ProcessGroup | None
    latest: deque[dist.ProcessGroup] = field(default_factory=lambda: deque(maxlen=_LATEST))

    def release(self) -> None:
        """Release the groups, and with them their connections and threads."""
        self.group = None
        self.latest.clear()


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """The resources that ``init_context`` set up and ``close_context`` releases.

    Attributes:
        group: Whether it initialised torch.distributed.
        previous_device: The accelerator that was current before.
        excepthooks: ``sys.excepthook`` before, and torch's wrapper of it.
        opened: Whether ``init_context`` opened this world, so that closing it is announced to other ranks.
        hosts_store: Whether this process hosts the world's key-value store.
        at_exit: Notifies the other ranks if the program ends without closing.
    """

    group: bool = False
    previous_device: torch.device | None = None
    excepthooks: tuple[Callable[..., object], Callable[..., object]] | None = None
    opened: bool = False
    hosts_store: bool = False
    at_exit: Callable[[], None] | None = None


_NUMBERS = ("rank", "size", "local_rank", "local_size", "node_rank", "num_nodes")


def numbers_of(place: object) -> dict[str, Any]:
    """Return where a rank stands, from what has these numbers: a world, or an environment's plan."""
    return {name: getattr(place, name) for name in _NUMBERS}


def numbers_among(rank: int, nodes: Sequence[object]) -> dict[str, Any]:
    """Return where a rank stands, from what identifies the node of every rank.

    >>> numbers_among(2, ["a", "b", "a"])["local_rank"]
    1
    """
    own, known = nodes[rank], list(dict.fromkeys(nodes))
    local_ranks = [other for other, node in enumerate(nodes) if node == own]
    numbers = rank, len(nodes), local_ranks.index(rank), len(local_ranks), known.index(own), len(known)
    return dict(zip(_NUMBERS, numbers, strict=True))


def _from_numbers(numbers: dict[str, Any]) -> World:
    return World(**numbers)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The world, as this process sees it. The default is a world of one on the CPU.

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
        group_ref: Weak reference to torch's process group; None for a world of one, or for threads. Only
            torch keeps the group alive, so that destroying it ends its threads.
        identity: The same object in all contexts of this world, by which they recognise objects that one of
            them has prepared.
        background: The background tasks; closing the context waits for the save.
        group_owner: Keeps accelfn's own group as long as any variant of the context is used.
        owned: What ``init_context`` set up and ``close_context`` releases.
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
    group_owner: GroupOwner | None = field(default=None, compare=False, repr=False)
    owned: Owned = field(default_factory=Owned, compare=False)

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Torch's process group; None if there is none, or it has been destroyed."""
        return None if self.group_ref is None else self.group_ref()

    def __post_init__(self) -> None:
        """Check that the ranks and nodes are consistent."""
        check_place(self)

    def __reduce__(self) -> tuple[Callable[..., World], tuple[dict[str, Any]]]:
        """Pickle the numbers: a copy in another process is on the CPU, and has no group."""
        return _from_numbers, (numbers_of(self),)
