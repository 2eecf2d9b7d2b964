"""The greedy pass that fills one device after the other with a model's parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from accelfn.bigmodel.devices import Place
from accelfn.bigmodel.model_info import LeafShape, ModelShape, ModuleShape
from accelfn.errors import DoesNotFitError
from accelfn.tree.structure import size_text


class Node:
    """A module, or a tensor that stands beside modules: what an entry of a device map may name.

    Attributes:
        name: From the root.
        parent: What it is a part of; None for the parts of the whole model.
        parts: What it is split into; none of a *unit*, which is a layer or a bare tensor.
        start: The number of its first unit.
        stop: The number of the unit after its last.
        leaves: Tensors of a unit.
        layer_bytes: Of a unit; a bare tensor is no layer. What has several names counts in the first.
        own_bytes: Of tensors with one name.
        ties: What it has of tensors with several names, in order.
    """

    def __init__(self, name: str, parent: Node | None, start: int) -> None:
        self.name: str = name
        self.parent: Node | None = parent
        self.parts: tuple[Node, ...] = ()
        self.start: int = start
        self.stop: int = start + 1
        self.leaves: tuple[LeafShape, ...] = ()
        self.layer_bytes: int = 0
        self.own_bytes: int = 0
        self.ties: dict[int, None] = {}


class Units:
    """What a model is split into.

    Attributes:
        top: Parts of the whole model.
        units: Layers and bare tensors, in the order of the model's tensors.
        holders: Of each tensor of several names that has to stay one: these, and their units.
    """

    def __init__(
        self,
        shape: ModelShape,
        no_split: Collection[str],
        size_of: Callable[[LeafShape], int],
        keep_ties: bool = True,
    ) -> None:
        self.units: list[Node] = []
        self.holders: dict[int, list[tuple[str, Node]]] = {}
        self._tie_bytes: dict[int, int] = {}
        self._no_split = no_split
        self._size_of = size_of
        # Buffers may be copied: that does no harm, and binds no layers to each other.
        for leaf in shape.root.leaves() if keep_ties else ():
            if leaf.tie is not None and leaf.kind == "parameter":
                self.holders[leaf.tie] = []
        self.top: tuple[Node, ...] = self._parts(shape.root, None)
        for holders in self.holders.values():
            holders.sort(key=lambda holder: holder[0])

    def _parts(self, module: ModuleShape, parent: Node | None) -> tuple[Node, ...]:
        return (
            *(self._unit(leaf.name, parent, (leaf,), False) for leaf in module.parameters),
            *(self._node(child, parent) for child in module.children),
            *(self._unit(leaf.name, parent, (leaf,), False) for leaf in module.buffers),
        )

    def _node(self, module: ModuleShape, parent: Node | None) -> Node:
        if not module.children or module.class_name in self._no_split:
            return self._unit(module.name, parent, module.leaves(), True)
        node = Node(module.name, parent, len(self.units))
        node.parts = self._parts(module, node)
        node.stop = len(self.units)
        node.own_bytes = sum(part.own_bytes for part in node.parts)
        node.ties = {tie: None for part in node.parts for tie in part.ties}
        return node

    def _unit(self, name: str, parent: Node | None, leaves: Iterable[LeafShape], is_module: bool) -> Node:
        node = Node(name, parent, len(self.units))
        self.units.append(node)
        node.leaves = tuple(leaves)
        first = 0
        for leaf in node.leaves:
            size = self._size_of(leaf)
            if leaf.tie is None:
                node.own_bytes += size
                continue
            if leaf.tie not in self._tie_bytes:
                self._tie_bytes[leaf.tie] = size
                first += size
            node.ties[leaf.tie] = None
            if leaf.tie in self.holders:
                self.holders[leaf.tie].append((leaf.name, node))
        node.layer_bytes = node.own_bytes + first if is_module else 0
        return node

    def bytes_of(self, nodes: Sequence[Node], paid: Collection[int]) -> int:
        """Count what nodes add to a place that has the tensors ``paid`` of several names already."""
        ties = {tie for node in nodes for tie in node.ties if tie not in paid}
        return sum(node.own_bytes for node in nodes) + sum(self._tie_bytes[tie] for tie in ties)


def _largest_from(layer_bytes: Sequence[int]) -> list[int]:
    """Return for each unit, and for the end, the bytes of the largest layer from there on.

    >>> _largest_from([1, 3, 2])
    [3, 3, 2, 0]
    """
    return [*accumulate(reversed(layer_bytes), max, initial=0)][::-1]


class Budget(NamedTuple):
    """A device to be filled.

    Attributes:
        place: Which.
        num_bytes: That it may hold; None without a limit.
        reserves: Whether memory is kept free in it for the largest layer that comes later.
    """

    place: Place
    num_bytes: int | None
    reserves: bool


class Filling:
    """Fill devices one after the other, from the first to the last. Pure but for ``say``.

    A module goes as a whole to the device that is being filled. If it doesn't fit, it is split and its parts
    are tried in order; if it can't be split, the next device is filled, and no earlier one again.

    Modules that share a tensor go together. A later one comes as a whole if it fits, and is split otherwise,
    until only the layer comes that has the tensor.

    Args:
        units: Of the model.
        budgets: In the order to fill them, at least one.
        fallback: Where the first part for a device is too large for it, put the first one there that isn't.
        say: Called with each decision.

    Attributes:
        entries: Names of modules and bare tensors with the numbers of their devices, as they were placed.
        device_of: Of each unit, the number of its device.
        used: Bytes on each device.
        reserved: Of each device, the bytes that are kept free on it.

    Raises:
        DoesNotFitError: With what it is and what it needs, and what each device has.
    """

    def __init__(
        self,
        units: Units,
        budgets: Sequence[Budget],
        fallback: bool = False,
        say: Callable[[str], object] | None = None,
    ) -> None:
        self.entries: list[tuple[str, int]] = []
        self.device_of: list[int] = [-1] * len(units.units)
        self.used: list[int] = []
        self.reserved: list[int] = []
        self._units = units
        self._fallback = fallback
        self._say = say
        self._stack = list(reversed(units.top))
        self._split: set[Node] = set()  # whose parts stand for it, also where it is in the stack still
        self._layers = [unit.layer_bytes for unit in units.units]  # 0 where placed before its turn
        self._largest = _largest_from(self._layers)
        self._stale = 0  # what is kept free for a layer that has come along with something since
        self._paid: set[int] = set()  # what has several names, and is on this device
        tried: list[str] = []
        for budget in budgets:
            self._fill(budget)
            left = self._stack[-1] if self._stack else None
            reserve = self._largest[left.start] if left is not None and budget.reserves else 0
            self.reserved.append(reserve if self.used[-1] + reserve <= (budget.num_bytes or 0) else 0)
            if left is not None:
                tried.append(self._account(budget, left))
        if self._stack:
            raise DoesNotFitError(self._refusal(self._stack[-1], tried))

    def _fill(self, budget: Budget) -> None:
        self.used.append(0)
        self._paid.clear()
        stack = self._stack
        while stack:
            node = stack.pop()
            if node in self._split:
                stack.extend(reversed(node.parts))
                continue
            if self.device_of[node.start] >= 0:
                continue
            together, size = self._gather(node, budget)
            left = self._left(node, budget)
            if left is None or size <= left:
                self._place(together, size, budget)
            elif node.parts:
                self._split_up(node)
                self._tell(node, size, "is split", budget)
                stack.extend(reversed(node.parts))
            else:
                if self._fallback and budget.num_bytes is not None and budget.place != "disk":
                    self._place_smaller(node, budget, budget.num_bytes - max(self._reserve(node), size))
                self._tell(node, size, "isn't split", budget)
                stack.append(node)
                return

    def _left(self, node: Node, budget: Budget) -> int | None:
        """Return the bytes that a device has left for a node; None without a limit."""
        if budget.num_bytes is None:
            return None
        return budget.num_bytes - self.used[-1] - (self._reserve(node) if budget.reserves else 0)

    def _reserve(self, node: Node) -> int:
        """Return the bytes of the largest layer that comes after a node.

        As documented: where that has come along with something before its turn, its memory is only released
        when the next module is split.
        """
        return max(self._largest[node.stop], self._stale)

    def _split_up(self, node: Node) -> None:
        self._split.add(node)
        self._stale = 0

    def _gather(self, node: Node, budget: Budget) -> tuple[list[Node], int]:
        """Return a node with all that has to be on its device, split as far as needed, and its bytes."""
        while True:
            together = self._together(node)
            size = self._units.bytes_of(together, self._paid)
            left = self._left(node, budget)
            other = next((one for one in together[1:] if one.parts), None)
            if left is None or size <= left or other is None:
                return together, size
            if self._units.bytes_of((node,), self._paid) > left:
                return together, size
            self._split_up(other)

    def _together(self, node: Node) -> list[Node]:
        """Return a node and all that must be on its device, by the tensors that they share."""
        found = {node: None}
        left = [node] if self._units.holders else []
        for one in left:  # which grows
            for unit in (unit for tie in one.ties for _, unit in self._units.holders.get(tie, ())):
                other = self._entry_of(unit)
                if not node.start <= unit.start < node.stop and other not in found:
                    found[other] = None
                    left.append(other)
        return [*found]

    def _entry_of(self, unit: Node) -> Node:
        """Return the largest node with a unit that isn't split."""
        found, up = unit, unit.parent
        while up is not None:
            found = found if up in self._split else up
            up = up.parent
        return found

    def _place(self, nodes: Sequence[Node], size: int, budget: Budget, in_turn: bool = True) -> None:
        first, number = nodes[0], len(self.used) - 1
        reserve = self._reserve(first)
        self.used[-1] += size
        self._paid.update(*(node.ties for node in nodes))
        for node in nodes:
            self.device_of[node.start : node.stop] = [number] * (node.stop - node.start)
            self.entries.append((node.name, number))
            if node is not first or not in_turn:
                if in_turn and reserve in self._layers[node.start : node.stop]:
                    self._stale = reserve
                # No memory is kept free any more for what is placed before its turn.
                self._layers[node.start : node.stop] = [0] * (node.stop - node.start)
            up = node.parent
            while up is not None and up not in self._split:
                self._split.add(up)
                up = up.parent
        if len(nodes) > 1 or not in_turn:
            self._largest = _largest_from(self._layers)
        if self._say is not None:
            self._say(f"{' and '.join(one.name for one in nodes)} ({size_text(size)}) on {budget.place!r}")

    def _place_smaller(self, node: Node, budget: Budget, limit: int) -> None:
        """Place the first of all that comes after a node that takes no more than ``limit``."""
        left = list(self._stack)
        while left and not self.used[-1]:
            other = left.pop()
            if other in self._split:
                left.extend(reversed(other.parts))
            elif self.device_of[other.start] < 0:
                together = self._together(other)
                size = self._units.bytes_of(together, self._paid)
                if node not in together and size <= limit:
                    self._place(together, size, budget, in_turn=False)
                else:
                    left.extend(reversed(other.parts))

    def _tell(self, node: Node, size: int, what: str, budget: Budget) -> None:
        if self._say is not None:
            self._say(f"{node.name} ({size_text(size)}) {what}: {self._account(budget, node)}")

    def _account(self, budget: Budget, node: Node) -> str:
        """Return what a device has for a node."""
        reserve = self._reserve(node) if budget.reserves else 0
        taken = [f"{size_text(self.used[-1])} taken"] if self.used[-1] else []
        if reserve:
            taken.append(f"{size_text(reserve)} kept free for the largest layer that comes later")
        said = f"{budget.place!r} has {size_text(budget.num_bytes or 0)}"
        return f"{said} ({', '.join(taken)})" if taken else said

    def _refusal(self, node: Node, tried: Sequence[str]) -> str:
        together = self._together(node)
        size = self._units.bytes_of(together, ())
        first, *others = (one.name for one in together)
        tied = f" with {', '.join(others)}, to which it is tied," if others else ""
        exact = "1 byte" if size == 1 else f"{size} bytes"
        return (
            f"the model doesn't fit: {first}{tied} needs {size_text(size)} ({exact}) in one place, and "
            f"{'; '.join(tried)}. Raise a budget, name another place ('cpu', 'disk'), or load with a smaller "
            "dtype."
        )
