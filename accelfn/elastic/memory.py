"""Snapshots of the state of a run in the memory of its ranks: two per rank, so that one is always whole.

What only one rank has, such as its shards, a neighbour keeps too. It is sent in the background.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from accelfn.checkpoint.background import HostMemory, views_in
from accelfn.checkpoint.collect import Collected, collect_state, held_of, parse_boxes, parse_held
from accelfn.checkpoint.document.compare import match
from accelfn.checkpoint.manifest import Json
from accelfn.checkpoint.plan import Boxes, Held, has_copies
from accelfn.comm import Call, catch, count_call, gather_bytes
from accelfn.context import Context, World, takes_context
from accelfn.context.world import GroupOwner
from accelfn.errors import CheckpointMismatchError, DistributedError, MissingRankError
from accelfn.tree import local_of
from accelfn.weights.dtypes import dtype_from_name

# Members of a new world know each other, and connect at once unless one of them is lost. If the others have
# its address by then, Gloo waits for it five times as long.
CONNECT = timedelta(seconds=15)
_LOOK_S = 0.002


class Key(NamedTuple):
    """Identifies a snapshot among those of a run. Newer ones are greater.

    Attributes:
        step: Number of calls of ``snapshot``.
        generation: The world that took it.
    """

    step: int
    generation: int


class Share(NamedTuple):
    """What one rank held when a snapshot was taken.

    Attributes:
        key: Of the snapshot.
        owner: The rank, in the world that took it.
        size: Number of ranks of that world.
        is_copy: Whether this is a neighbour's copy, of the tensors that no other rank held.
        needs_all: Whether the state can't be put together without the shares of all ranks.
        stages: The ranks along "pp" of the owner.
        tree: Document of the tree.
        random: Document of the random states.
        held: The tensors that it held, or held parts of.
        boxes: Which parts, by layout.
        tensors: The tensors, on the host; of a sharded one the part that it held.
    """

    key: Key
    owner: int
    size: int
    is_copy: bool
    needs_all: bool
    stages: tuple[int, ...]
    tree: Json
    random: Json
    held: Mapping[str, Held]
    boxes: Boxes
    tensors: Mapping[str, torch.Tensor]


class Regroup(BaseException):
    """Ends the training function at a snapshot, so that processes that wait can join.

    Not an ``Exception``, so that handlers in the training function let it pass.
    """


class _Slot:
    """The memory of one snapshot."""

    def __init__(self) -> None:
        self.own: Share | None = None
        self.copy: Callable[[], Share] | None = None  # parses it
        self.shared = HostMemory()  # of tensors that other ranks hold too
        self.alone = HostMemory()  # of tensors that only this rank holds
        self.incoming: torch.Tensor = torch.empty(0, dtype=torch.uint8)


class Memory:
    """The snapshots of a process, which outlive the worlds that it is in.

    Attributes:
        step: Number of calls of ``snapshot`` that led to the present state.
    """

    def __init__(self, has_newcomers: Callable[[], bool] = lambda: False) -> None:
        """Start without snapshots.

        Args:
            has_newcomers: Returns whether processes wait to join.
        """
        self.step: int = 0
        self._has_newcomers = has_newcomers
        self._slots: tuple[_Slot, ...] = (_Slot(), _Slot())
        self._turn = 0
        self._generation = 0
        self._exchange = _Exchange()
        self._side: Context | None = None
        self._owner: GroupOwner | None = None

    def shares(self) -> tuple[Share, ...]:
        """Return what this process holds of all snapshots."""
        own = [slot.own for slot in self._slots if slot.own is not None]
        return (*own, *(slot.copy() for slot in self._slots if slot.copy is not None))

    def go_on_from(self, key: Key) -> None:
        """Count steps from a snapshot that was restored, and keep it until the next one is whole."""
        self.step = key.step
        for number, slot in enumerate(self._slots):
            if slot.own is not None and slot.own.key == key:
                self._turn = 1 - number

    def enter(self, ctx: Context, generation: int) -> None:
        """Use a new world from now on; its snapshots need a group of their own, for the background.

        Ranks: every rank of ``ctx``.

        Raises:
            MissingRankError: Another one was lost meanwhile.
        """
        self._generation = generation
        self._exchange = _Exchange()
        group = [tuple(range(ctx.num_processes))]
        try:
            part = ctx.collectives.split(group, CONNECT)[0]
        except RuntimeError as error:
            if isinstance(error, DistributedError):
                raise
            # Torch's: nothing else ends the wait for a member that is lost while the others connect to it.
            raise MissingRankError(
                f"snapshot: a member of the new world could not be reached: {error}"
            ) from error
        self._owner = part.group_owner
        world = World(rank=ctx.rank, size=ctx.num_processes, local_size=ctx.num_processes)
        world = dataclasses.replace(world, local_rank=ctx.rank)
        self._side = dataclasses.replace(ctx, world=world, collectives=part.collectives, mesh=None)
        ctx.world.background.snapshots = self

    def leave(self) -> None:
        """Release the group of the world that was entered last."""
        self._exchange.settle()
        if self._owner is not None:
            self._owner.release()
        self._side = self._owner = None

    def settle(self) -> None:
        """Wait until the copy in the background has ended, even with an error."""
        self._exchange.settle()

    def snapshot(self, ctx: Context, state: Any, every: int) -> None:
        """Count a step, and take a snapshot if its turn has come.

        Raises:
            Regroup: Processes wait to join, and this snapshot is whole.
        """
        self.step += 1
        if self.step % every:
            return
        regroups = self._exchange.result() or (ctx.num_processes == 1 and self._has_newcomers())
        self.take(ctx, state)
        if regroups:
            self._exchange.result()
            raise Regroup

    def take(self, ctx: Context, state: Any) -> None:
        """Take a snapshot of the present step.

        Ranks: every rank of the world that was entered. Returns when the tensors are copied to the host.
        """
        self._exchange.result()  # until then the other snapshot may not be whole
        side, slot = self._side, self._slots[self._turn]
        assert side is not None
        found = collect_state(ctx, state, "snapshot")
        self._check_form(state, self._slots[1 - self._turn].own)
        slot.own = slot.copy = None
        alone, shared = _split(ctx, found)
        copies = dict(zip(shared, slot.shared.copies(list(shared.values())), strict=True))
        copies |= dict(zip(alone, slot.alone.copies(list(alone.values())), strict=True))
        mesh = None if ctx.mesh is None else ctx.mesh.plan
        held, boxes = held_of({**found.tensors, **found.random_tensors}, {})
        slot.own = Share(
            key=Key(self.step, self._generation),
            owner=ctx.rank,
            size=ctx.num_processes,
            is_copy=False,
            needs_all=ctx.axis_size("pp") > 1,
            stages=(ctx.rank,) if mesh is None else mesh.group(ctx.rank, "pp"),
            tree=found.tree,
            random=found.random,
            held=held,
            boxes=boxes,
            tensors=copies,
        )
        self._turn = 1 - self._turn
        if side.num_processes > 1:
            shift = neighbour_shift(ctx.num_processes, ctx.world.num_nodes)
            flag = self._has_newcomers()
            names = tuple(alone)
            self._exchange.start(side, lambda: _exchange(side, slot, names, shift, newcomers=flag))

    def _check_form(self, state: Any, before: Share | None) -> None:
        """Check that a snapshot could be loaded into a state like that of the snapshot before."""
        if before is None or before.key.generation != self._generation:
            return
        rows = match(before.tree, before.held, state).rows
        if rows:
            raise CheckpointMismatchError(
                f"snapshot: the state has another form than at step {before.key.step}, so it could not be "
                "restored. Tensors and objects keep their number, dtypes and shapes; what grows can be a "
                "list of numbers, or an object with a state_dict.",
                rows,
            )


@takes_context
def snapshot(ctx: Context, state: Any, *, every: int = 10) -> None:
    """Keep a snapshot of the state in memory, from which the run goes on if a rank is lost.

    Call it after each optimizer step. Each ``every``-th call copies the state to host memory; what other
    ranks don't hold is sent to a neighbour in the background, on another node if there are several. A call
    waits only for the copy of the snapshot before. Nothing is written to disk.

    Without :func:`accelfn.run_elastic` it does nothing, so the same loop runs on its own.

    Ranks: every rank of ``ctx``, equally often.

    Args:
        ctx: The context that ``run_elastic`` passes to the training function, or a variant of it.
        state: The state, of the same form as that of ``make_state``; see :func:`accelfn.save_state`.
        every: Calls per snapshot: at most so many steps are repeated after a loss.

    Raises:
        TypeError: Leaves of the state have no plain form, or ``every`` isn't an int.
        ValueError: ``every`` isn't positive.
        CheckpointMismatchError: Leaves have another form than at the snapshot before.
        MismatchError: A rank has called it less often, as the next operation of all ranks finds.
        DistributedError: Another rank was lost.
    """
    if not isinstance(cast("object", every), int):
        raise TypeError(f"snapshot: every must be an int, got {every!r}.")
    if every < 1:
        raise ValueError(f"snapshot: every must be at least 1, got {every!r}.")
    memory = ctx.world.background.snapshots
    if isinstance(memory, Memory):
        count_call(ctx, Call("snapshot"))
        memory.snapshot(ctx, state, every)


def neighbour_shift(size: int, num_nodes: int) -> int:
    """Return how far the neighbour is that keeps a rank's copy: on another node, if there are several. Pure.

    >>> neighbour_shift(8, 1), neighbour_shift(8, 2)
    (1, 4)
    """
    return max(1, size // num_nodes) if num_nodes > 1 else 1


def _split(ctx: Context, found: Collected) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the tensors that only this rank may hold, and those that others hold too."""
    # Along "pp", other ranks have other layers.
    replicated = found.replicated if ctx.axis_size("pp") == 1 else frozenset[str]()
    alone: dict[str, torch.Tensor] = dict(found.random_tensors)
    shared: dict[str, torch.Tensor] = {}
    for name, tensor in found.tensors.items():
        local = local_of(tensor)
        is_elsewhere = name in replicated or has_copies(tensor) or not local.numel()
        (shared if is_elsewhere else alone)[name] = local
    return alone, shared


# --- the copy in the background --------------------------------------------------------------------


class _Exchange:
    """At most one exchange of copies at a time."""

    def __init__(self) -> None:
        self._is_done = True
        self._error: Exception | None = None
        self._newcomers = False
        self._side = Context()

    def start(self, side: Context, work: Callable[[], bool]) -> None:
        """Begin it in a thread; ``work`` returns whether processes wait to join."""
        self._side, self._is_done = side, False

        def run() -> None:
            found, self._error = catch(work)
            self._newcomers = bool(found)
            self._is_done = True

        if side.collectives.threads.may_communicate:
            side.collectives.threads.start("snapshot", run)
        else:
            run()

    def settle(self) -> None:
        """Wait for its end."""
        if not self._is_done:
            self._side.collectives.threads.wait(self._look, None, "the copy of a snapshot")

    def result(self) -> bool:
        """Wait for it, and return whether processes wait to join.

        Raises:
            Exception: It has failed.
        """
        self.settle()
        if self._error is not None:
            raise self._error
        return self._newcomers

    def _look(self, seconds: float) -> bool:
        if not self._is_done:
            time.sleep(min(seconds, _LOOK_S))
        return self._is_done


def _exchange(side: Context, slot: _Slot, names: Sequence[str], shift: int, *, newcomers: bool) -> bool:
    """Send what only this rank has to its neighbour, and keep that of the neighbour on the other side."""
    own = slot.own
    assert own is not None
    # In the order of all, so that a copy of all has the same digest as the original.
    alone = frozenset(names)
    held = {name: one for name, one in own.held.items() if name in alone}
    described = json.dumps([own._replace(held=held, tensors={}), *names])
    header = torch.frombuffer(bytearray(described.encode()), dtype=torch.uint8)
    outgoing = slot.alone.used
    sizes = json.dumps([header.numel(), outgoing.numel(), newcomers]).encode()
    rows = [json.loads(row) for row in gather_bytes(side, Call("snapshot", "sizes"), sizes)]
    to, source = (side.rank + shift) % side.num_processes, (side.rank - shift) % side.num_processes
    text = torch.empty(rows[source][0], dtype=torch.uint8)
    side.collectives.permute(header, text, to, source)
    if any(row[1] for row in rows):
        if slot.incoming.numel() < rows[source][1]:
            slot.incoming = torch.empty(rows[source][1], dtype=torch.uint8)
        side.collectives.permute(outgoing, slot.incoming[: rows[source][1]], to, source)
    # When this has ended, every rank's copy is complete.
    gather_bytes(side, Call("snapshot", "copied"), b"")
    slot.copy = partial(_parse, text, slot.incoming)
    return any(row[2] for row in rows)


def _parse(text: torch.Tensor, memory: torch.Tensor) -> Share:
    """Return the share of a neighbour, from its JSON in bytes and the memory of its tensors."""
    described = json.loads(bytes(text.numpy()))
    (key, owner, size, _, needs_all, stages, tree, random, held, boxes, _), *names = described
    described, boxes = parse_held(held), parse_boxes(boxes)
    like = [_like(described[name], boxes) for name in names]
    tensors = dict(zip(names, views_in(memory, like), strict=True))
    return Share(
        Key(*key),
        owner,
        size,
        is_copy=True,
        needs_all=needs_all,
        stages=tuple(stages),
        tree=tree,
        random=random,
        held=described,
        boxes=boxes,
        tensors=tensors,
    )


def _like(one: Held, boxes: Boxes) -> torch.Tensor:
    """Return a tensor without data, of the shape that a rank holds."""
    own = () if one.layout is None else boxes[one.layout]
    shape = own[0].shape if own else one.shape
    return torch.empty(shape, dtype=dtype_from_name(one.dtype), device="meta")
