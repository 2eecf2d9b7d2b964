"""The loop that fills one place after the other with a model's parts, from the first to the last."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from accelfn.bigmodel.places import Place
from accelfn.bigmodel.plan.units import Node, Units, largest_from
from accelfn.tree.sizes import size_text

__all__ = ("Filled", "NoRoom", "Room", "fill")


class Room(NamedTuple):
    """A place to be filled.

    Attributes:
        place: Which.
        num_bytes: That it may hold; None without a limit.
        reserves: Whether room is kept in it for the largest layer that comes later.
    """

    place: Place
    num_bytes: int | None
    reserves: bool


class Filled(NamedTuple):
    """What the loop has decided.

    Attributes:
        entries: Names of modules and bare tensors with the numbers of their rooms, as they were placed.
        room_of: Of each unit, the number of its room.
        used: Bytes in each room.
        reserved: Of each room, the bytes that are kept free in it.
    """

    entries: list[tuple[str, int]]
    room_of: list[int]
    used: list[int]
    reserved: list[int]


class NoRoom(NamedTuple):
    """Something can't be split, and fits into none of the rooms that were left for it.

    Attributes:
        message: What it is and what it needs, and what each room has.
    """

    message: str


def fill(
    units: Units,
    rooms: Sequence[Room],
    *,
    fallback: bool = False,
    whole_owners: bool = True,
    say: Callable[[str], object] | None = None,
) -> Filled | NoRoom:
    """Fill the rooms, one after the other. Pure.

    A module goes as a whole into the room that is being filled. If it doesn't fit, it is split and its parts
    are tried in order; if it can't be split, the next room is filled, and no earlier one is looked at again.

    Modules that share a tensor go together. A later one comes as a whole if it fits, and is split otherwise,
    until only the layer comes that has the tensor. So what comes along with more room could be in the way of
    something larger. Where that is so the room is filled as with a lower limit: it never gets less for more.

    Args:
        units: Of the model.
        rooms: In the order to fill them, at least one.
        fallback: Where the first part for a room is too large for it, put the first one there that isn't.
        whole_owners: Otherwise what comes along is split in any case.
        say: Is told each decision.
    """
    filling = _Filling(units, rooms, fallback, whole_owners, say is not None)
    state = _State(list(reversed(units.top)), list(units.layer_bytes), [-1] * len(units.nodes))
    used: list[int] = []
    reserved: list[int] = []
    tried: list[str] = []
    for number, room in enumerate(rooms):
        state = filling.fill_room(state, number)
        if say is not None:
            for line in state.told:
                say(line)
        reserve = state.rest[state.stack[-1].start] if state.stack and room.reserves else 0
        used.append(state.used)
        reserved.append(reserve if state.used + reserve <= (room.num_bytes or 0) else 0)
        if state.stack:
            tried.append(filling.account(state, room, state.stack[-1]))
    if state.stack:
        return NoRoom(filling.refuse(state, tried))
    return Filled(state.entries, state.room_of, used, reserved)


class _State:
    """What has been decided so far."""

    __slots__ = (
        *("entries", "layers", "needs", "paid", "rest", "room_of", "split", "stack", "stale", "told"),
        "used",
    )

    def __init__(self, stack: list[Node], layers: list[int], room_of: list[int]) -> None:
        self.stack = stack
        self.split: set[Node] = set()  # whose parts stand for it, also where it is in the stack still
        self.room_of = room_of  # of each unit; -1 without
        self.layers = layers  # bytes of each unit; 0 of those that were placed before their turn
        self.rest = largest_from(layers)
        self.stale = 0  # what is kept free for a layer that has come along with something since
        self.entries: list[tuple[str, int]] = []
        self.begin_room()

    def begin_room(self) -> None:
        self.used = 0
        self.paid: set[int] = set()  # what may have copies, and lies in this room
        self.needs: list[int] = []  # limits below which something would be split that came as a whole
        self.told: list[str] = []

    def copy(self) -> _State:
        made = _State(list(self.stack), list(self.layers), list(self.room_of))
        made.split, made.rest, made.entries = set(self.split), list(self.rest), list(self.entries)
        made.stale = self.stale
        return made

    def reserve(self, node: Node) -> int:
        """Return the bytes of the largest layer that comes after a node.

        As documented: where that has come along with something before its turn, its room is only given up
        when the next module is split.
        """
        return max(self.rest[node.stop], self.stale)

    def split_up(self, node: Node) -> None:
        self.split.add(node)
        self.stale = 0

    def forget_layers(self, node: Node, first: int) -> None:
        """Keep no more room for a node that is placed before its turn; it comes after the unit ``first``."""
        self.layers[node.start : node.stop] = [0] * (node.stop - node.start)
        for unit in range(node.stop - 1, first - 1, -1):
            largest = max(self.layers[unit], self.rest[unit + 1])
            if unit < node.start and largest == self.rest[unit]:
                break
            self.rest[unit] = largest


class _Filling:
    def __init__(
        self, units: Units, rooms: Sequence[Room], fallback: bool, whole_owners: bool, tells: bool
    ) -> None:
        self._units = units
        self._rooms = rooms
        self._fallback = fallback
        self._whole_owners = whole_owners
        self._tells = tells

    def fill_room(self, state: _State, number: int) -> _State:
        """Fill a room with the next parts; the first of those that are left is on top of the stack."""
        state.begin_room()
        room = self._rooms[number]
        is_compared = room.reserves and self._units.has_ties and self._whole_owners and not self._fallback
        if not is_compared or room.num_bytes is None:
            self._run(state, number, room.num_bytes)
            return state
        start = state.copy()
        self._run(state, number, room.num_bytes)
        # Only there a lower limit can be better: just below what those needed.
        limits = [-limit for limit in state.needs]
        seen: set[int] = set()
        heapq.heapify(limits)
        while limits:
            lower = -heapq.heappop(limits) - 1
            if lower <= state.used:
                break
            if lower not in seen:
                seen.add(lower)
                other = start.copy()
                self._run(other, number, lower)
                for limit in other.needs:
                    heapq.heappush(limits, -limit)
                state = other if other.used > state.used else state
        return state

    def _run(self, state: _State, number: int, limit: int | None) -> None:
        stack = state.stack
        while stack:
            node = stack.pop()
            if node in state.split:
                stack.extend(reversed(node.parts))
                continue
            if state.room_of[node.start] >= 0:
                continue
            together, size, left, split = self._gather(state, number, node, limit)
            if left is None or size <= left:
                was_stale = state.stale > state.rest[node.stop]
                self._place(state, number, together, size)
                # With less room it, or what came along, would be split, and something else might fit.
                is_stale = was_stale or state.stale > state.rest[node.stop]
                could_split = split or (node.parts and is_stale) or any(one.parts for one in together[1:])
                if limit is not None and left is not None and could_split:
                    state.needs.append(size + limit - left)
            elif node.parts:
                # With a part of this one they may come as a whole again.
                state.split.difference_update(split)
                state.split_up(node)
                self._tell(state, number, node, size, "is split")
                stack.extend(reversed(node.parts))
            else:
                if self._fallback and limit is not None and self._rooms[number].place != "disk":
                    self._place_smaller(state, number, node, limit - max(state.reserve(node), size))
                self._tell(state, number, node, size, "isn't split")
                stack.append(node)
                return

    def _gather(
        self, state: _State, number: int, node: Node, limit: int | None
    ) -> tuple[list[Node], int, int | None, list[Node]]:
        """Return a node with all that has to lie where it does, and what was split so that they fit.

        Returns:
            These nodes; their bytes; the bytes that are left for them; what was split.
        """
        units = self._units
        split: list[Node] = []
        while True:
            together, is_direct = self._together(state, node)
            size = units.bytes_of(together, state.paid)
            left = self._left(state, number, node, limit)
            if left is None or not units.bytes_of((node,), state.paid) <= left < size:
                break
            other = next((one for one in together[1:] if one.parts), None)
            if other is None:
                break
            if is_direct:
                state.stale = 0  # as after any split
                left = self._left(state, number, node, limit)
                self._shrink(state, node, size - (left or 0), split)
            else:
                state.split_up(other)
                split.append(other)
        return together, size, left, split

    def _left(self, state: _State, number: int, node: Node, limit: int | None) -> int | None:
        """Return the bytes that a room has left for a node; None without a limit."""
        if limit is None:
            return None
        return limit - state.used - (state.reserve(node) if self._rooms[number].reserves else 0)

    def _together(self, state: _State, node: Node) -> tuple[list[Node], bool]:
        """Return a node and all that must be on its device, and whether that is tied to the node itself."""
        found = {node: None}
        left = [node] if self._units.has_ties else []
        num_direct = 1
        for number, one in enumerate(left):  # which grows
            for other in self._tied_to(state, one, node):
                if other not in found:
                    found[other] = None
                    left.append(other)
            if not number:
                num_direct = len(found)
        return list(found), len(found) == num_direct

    def _tied_to(self, state: _State, one: Node, node: Node) -> Iterator[Node]:
        """Return what is tied to ``one``, and neither in it nor in ``node``."""
        for unit in self._units.tied_outside(one):
            if not node.start <= unit < node.stop:
                yield self._entry_of(state, unit)

    def _shrink(self, state: _State, node: Node, excess: int, split: list[Node]) -> None:
        """Split what is tied to a node itself, at least one, until that has ``excess`` bytes less.

        One after the other, as they come by the names of tensors. The bytes are only followed as long as
        nothing else is tied to what remains; so the caller looks again.
        """
        tied = list(self._units.tied_outside(node))
        coming: dict[Node, list[int]] = {}  # and the tied units by which it comes
        for place, unit in enumerate(tied):
            coming.setdefault(self._entry_of(state, unit), []).append(place)
        queue = [(places[0], one) for one, places in coming.items() if one.parts]
        heapq.heapify(queue)
        while queue:
            _, other = heapq.heappop(queue)
            state.split_up(other)
            split.append(other)
            parts: dict[Node, list[int]] = {}
            for place in coming.pop(other):
                parts.setdefault(self._entry_of(state, tied[place]), []).append(place)
            coming.update(parts)
            excess -= self._units.bytes_of((other,), ()) - self._units.bytes_of(parts, ())
            for one, places in parts.items():
                if one.parts:
                    heapq.heappush(queue, (places[0], one))
                if any(new not in coming for new in self._tied_to(state, one, node)):
                    return
            if excess <= 0:
                return

    def _entry_of(self, state: _State, unit: int) -> Node:
        """Return the largest node with a unit that isn't split."""
        found = self._units.nodes[unit]
        up = found.parent if self._whole_owners else None
        while up is not None:
            if up not in state.split:
                found = up
            up = up.parent
        return found

    def _place(
        self, state: _State, number: int, nodes: Sequence[Node], size: int, in_turn: bool = True
    ) -> None:
        first = nodes[0]
        reserve = state.reserve(first)
        state.used += size
        state.paid.update(self._units.copied_in(nodes))
        for node in nodes:
            state.room_of[node.start : node.stop] = [number] * (node.stop - node.start)
            state.entries.append((node.name, number))
            if node is not first or not in_turn:
                if in_turn and reserve in state.layers[node.start : node.stop]:
                    state.stale = reserve
                state.forget_layers(node, first.stop if in_turn else 0)
            up = node.parent
            while up is not None and up not in state.split:
                state.split.add(up)
                up = up.parent
        if self._tells:
            names = " and ".join(node.name for node in nodes)
            state.told.append(f"{names} ({size_text(size)}) on {self._rooms[number].place!r}")

    def _place_smaller(self, state: _State, number: int, node: Node, limit: int) -> None:
        """Place the first of all that comes after a node that takes no more than ``limit``."""
        left = list(state.stack)
        while left and not state.used:
            other = left.pop()
            if other in state.split:
                left.extend(reversed(other.parts))
            elif state.room_of[other.start] < 0:
                together, _ = self._together(state, other)
                size = self._units.bytes_of(together, state.paid)
                if node not in together and size <= limit:
                    self._place(state, number, together, size, in_turn=False)
                else:
                    left.extend(reversed(other.parts))

    # --- what is said -----------------------------------------------------------------------------

    def _tell(self, state: _State, number: int, node: Node, size: int, what: str) -> None:
        if self._tells:
            account = self.account(state, self._rooms[number], node)
            state.told.append(f"{node.name} ({size_text(size)}) {what}: {account}")

    def account(self, state: _State, room: Room, node: Node) -> str:
        """Return what a room has for a node."""
        reserve = state.reserve(node) if room.reserves else 0
        taken = [f"{size_text(state.used)} taken"] if state.used else []
        if reserve:
            taken.append(f"{size_text(reserve)} kept free for the largest layer that comes later")
        said = f"{room.place!r} has {size_text(room.num_bytes or 0)}"
        return f"{said} ({', '.join(taken)})" if taken else said

    def refuse(self, state: _State, tried: Sequence[str]) -> str:
        """Return what fits nowhere."""
        together, _ = self._together(state, state.stack[-1])
        size = self._units.bytes_of(together, ())
        first, *others = (node.name for node in together)
        tied = f" with {', '.join(others)}, to which it is tied," if others else ""
        exact = "1 byte" if size == 1 else f"{size} bytes"
        return (
            f"the model doesn't fit: {first}{tied} needs {size_text(size)} ({exact}) in one place, and "
            f"{'; '.join(tried)}. Raise a budget, name another place ('cpu', 'disk'), or load with a smaller "
            "dtype."
        )
