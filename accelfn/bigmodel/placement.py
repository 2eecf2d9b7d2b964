"""The greedy algorithm of :func:`plan_device_map`: fill one device after another with a model's parts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from accelfn.bigmodel.model_info import LeafShape, ModelShape, ModuleShape
from accelfn.errors import DoesNotFitError
from accelfn.tree.structure import size_text
from accelfn.weights.places import Place


class Node:
    """A module or a bare tensor: what an entry of a device map may name.

    Attributes:
        name: Full name.
        parent: The node that contains it; None for the children of the root.
        parts: The nodes that it splits into; none for a *unit*, which is a layer or a bare tensor.
        start: Index of its first unit.
        stop: Index after its last unit.
        leaves: The tensors of a unit.
        layer_bytes: Size of a unit that is a layer, counting tied tensors in their first unit.
        own_bytes: Size of its untied tensors.
        ties: Its tied tensors, in order.
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
    """A model as a tree of nodes.

    Attributes:
        top: The children of the root.
        units: Layers and bare tensors, in planning order.
        holders: For each tied tensor that must not be copied, its names and their units.
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
        # Buffers may be copied, so they don't force layers onto one place.
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

    def _unit(self, name: str, parent: Node | None, leaves: Iterable[LeafShape], is_layer: bool) -> Node:
        node = Node(name, parent, len(self.units))
        self.units.append(node)
        node.leaves = tuple(leaves)
        first_bytes = 0
        for leaf in node.leaves:
            size = self._size_of(leaf)
            if leaf.tie is None:
                node.own_bytes += size
                continue
            if leaf.tie not in self._tie_bytes:
                self._tie_bytes[leaf.tie] = size
                first_bytes += size
            node.ties[leaf.tie] = None
            if leaf.tie in self.holders:
                self.holders[leaf.tie].append((leaf.name, node))
        node.layer_bytes = node.own_bytes + first_bytes if is_layer else 0
        return node

    def bytes_of(self, nodes: Sequence[Node], present: Collection[int]) -> int:
        """Return what nodes add to a place that has the tied tensors ``present`` already."""
        ties = {tie for node in nodes for tie in node.ties if tie not in present}
        return sum(node.own_bytes for node in nodes) + sum(self._tie_bytes[tie] for tie in ties)


def _suffix_maxima(layer_bytes: Sequence[int]) -> list[int]:
    """Return the size of the largest layer from each unit on.

    >>> _suffix_maxima([1, 3, 2])
    [3, 3, 2, 0]
    """
    return [*accumulate(reversed(layer_bytes), max, initial=0)][::-1]


class Budget(NamedTuple):
    """The capacity of a device.

    Attributes:
        place: The device.
        num_bytes: Its capacity; None without a limit.
        reserves: Whether it reserves memory for the largest later layer.
    """

    place: Place
    num_bytes: int | None
    reserves: bool


class Allocation:
    """Fill devices one after another. Pure but for ``log``.

    A module is allocated to the current device as a whole. If it doesn't fit, it is split and its parts are
    tried in order; if it can't be split, the next device becomes the current one.

    Modules that share a tensor are allocated together. A later one is allocated as a whole if it fits, and
    split otherwise, down to the layer with the tensor.

    Args:
        units: The parts of the model.
        budgets: At least one device, in the order to fill them.
        fallback: If the first part for a device is too large for it, use the first later part that fits.
        log: Called with each decision.

    Attributes:
        entries: Names of modules and bare tensors, and their device's index, in the order of allocation.
        device_of: The device's index of each unit.
        used: Bytes used on each device.
        reserved: Bytes reserved on each device.

    Raises:
        DoesNotFitError: With the part's size and the capacity of each device.
    """

    def __init__(
        self,
        units: Units,
        budgets: Sequence[Budget],
        fallback: bool = False,
        log: Callable[[str], object] | None = None,
    ) -> None:
        self.entries: list[tuple[str, int]] = []
        self.device_of: list[int] = [-1] * len(units.units)
        self.used: list[int] = []
        self.reserved: list[int] = []
        self._units = units
        self._fallback = fallback
        self._log = log
        self._stack = list(reversed(units.top))
        self._split: set[Node] = set()  # replaced by their parts, also while they are on the stack
        self._layers = [unit.layer_bytes for unit in units.units]  # 0 if allocated before its turn
        self._largest = _suffix_maxima(self._layers)
        self._present: set[int] = set()  # tied tensors on the current device
        tried: list[str] = []
        for budget in budgets:
            self._fill(budget)
            rest = self._stack[-1] if self._stack else None
            reserve = self._largest[rest.start] if rest is not None and budget.reserves else 0
            self.reserved.append(reserve if self.used[-1] + reserve <= (budget.num_bytes or 0) else 0)
            if rest is not None:
                tried.append(self._capacity_text(budget, rest))
        if self._stack:
            raise DoesNotFitError(self._error_text(self._stack[-1], tried))

    def _fill(self, budget: Budget) -> None:
        self.used.append(0)
        self._present.clear()
        stack = self._stack
        while stack:
            node = stack.pop()
            if node in self._split:
                stack.extend(reversed(node.parts))
                continue
            if self.device_of[node.start] >= 0:
                continue
            nodes, size = self._gather(node, budget)
            free = self._free(node, budget)
            if free is None or size <= free:
                self._allocate(nodes, size, budget)
            elif node.parts:
                self._split.add(node)
                self._log_refusal(node, size, "is split", budget)
                stack.extend(reversed(node.parts))
            else:
                if self._fallback and budget.num_bytes is not None and budget.place != "disk":
                    limit = budget.num_bytes - max(self._largest[node.stop], size)
                    self._allocate_smaller(node, budget, limit)
                self._log_refusal(node, size, "isn't split", budget)
                stack.append(node)
                return

    def _free(self, node: Node, budget: Budget) -> int | None:
        """Return the bytes that are free on a device for a node; None without a limit."""
        if budget.num_bytes is None:
            return None
        return budget.num_bytes - self.used[-1] - (self._largest[node.stop] if budget.reserves else 0)

    def _gather(self, node: Node, budget: Budget) -> tuple[list[Node], int]:
        """Return a node with all that must be on its device, split as far as needed, and their size."""
        while True:
            nodes = self._tied_nodes(node)
            size = self._units.bytes_of(nodes, self._present)
            free = self._free(node, budget)
            other = next((tied for tied in nodes[1:] if tied.parts), None)
            if free is None or size <= free or other is None:
                return nodes, size
            if self._units.bytes_of((node,), self._present) > free:
                return nodes, size
            self._split.add(other)

    def _tied_nodes(self, node: Node) -> list[Node]:
        """Return a node and all nodes that share tensors with it, directly or indirectly."""
        nodes = {node: None}
        ties = [*node.ties] if self._units.holders else []
        seen = set(ties)
        for tie in ties:  # which grow
            for _, unit in self._units.holders.get(tie, ()):
                other = self._unsplit_node(unit)
                if not node.start <= unit.start < node.stop and other not in nodes:
                    nodes[other] = None
                    ties += [one for one in other.ties if one not in seen]
                    seen.update(other.ties)
        return [*nodes]

    def _unsplit_node(self, unit: Node) -> Node:
        """Return the largest unsplit node that contains a unit."""
        node, parent = unit, unit.parent
        while parent is not None:
            node = node if parent in self._split else parent
            parent = parent.parent
        return node

    def _allocate(self, nodes: Sequence[Node], size: int, budget: Budget, in_turn: bool = True) -> None:
        first, device = nodes[0], len(self.used) - 1
        self.used[-1] += size
        self._present.update(*(node.ties for node in nodes))
        for node in nodes:
            self.device_of[node.start : node.stop] = [device] * (node.stop - node.start)
            self.entries.append((node.name, device))
            if node is not first or not in_turn:
                self._drop_layers(node)
            parent = node.parent
            while parent is not None and parent not in self._split:
                self._split.add(parent)
                parent = parent.parent
        if self._log is not None:
            names = " and ".join(node.name for node in nodes)
            self._log(f"{names} ({size_text(size)}) on {budget.place!r}")

    def _drop_layers(self, node: Node) -> None:
        """Don't count the layers of a node, which was allocated before its turn, among the later ones."""
        self._layers[node.start : node.stop] = [0] * (node.stop - node.start)
        for unit in range(node.stop - 1, -1, -1):
            largest = max(self._layers[unit], self._largest[unit + 1])
            if unit < node.start and largest == self._largest[unit]:
                return  # nor does anything change before it
            self._largest[unit] = largest

    def _allocate_smaller(self, node: Node, budget: Budget, limit: int) -> None:
        """Allocate the first node after ``node`` that takes at most ``limit`` bytes."""
        stack = list(self._stack)
        while stack and not self.used[-1]:
            other = stack.pop()
            if other in self._split:
                stack.extend(reversed(other.parts))
            elif self.device_of[other.start] < 0:
                nodes = self._tied_nodes(other)
                size = self._units.bytes_of(nodes, self._present)
                if node not in nodes and size <= limit:
                    self._allocate(nodes, size, budget, in_turn=False)
                else:
                    stack.extend(reversed(other.parts))

    def _log_refusal(self, node: Node, size: int, what: str, budget: Budget) -> None:
        if self._log is not None:
            self._log(f"{node.name} ({size_text(size)}) {what}: {self._capacity_text(budget, node)}")

    def _capacity_text(self, budget: Budget, node: Node) -> str:
        """Describe what a device has for a node."""
        reserve = self._largest[node.stop] if budget.reserves else 0
        taken = [f"{size_text(self.used[-1])} used"] if self.used[-1] else []
        if reserve:
            taken.append(f"{size_text(reserve)} reserved for the largest later layer")
        text = f"{budget.place!r} has {size_text(budget.num_bytes or 0)}"
        return f"{text} ({', '.join(taken)})" if taken else text

    def _error_text(self, node: Node, tried: Sequence[str]) -> str:
        nodes = self._tied_nodes(node)
        size = self._units.bytes_of(nodes, ())
        first, *tied = (node.name for node in nodes)
        with_tied = f" with {', '.join(tied)}, which share tensors with it," if tied else ""
        exact = "1 byte" if size == 1 else f"{size} bytes"
        return (
            f"the model doesn't fit: {first}{with_tied} needs {size_text(size)} ({exact}) on one place, but "
            f"{'; '.join(tried)}. Increase a budget, add a place ('cpu', 'disk'), or load with a smaller "
            "dtype."
        )
