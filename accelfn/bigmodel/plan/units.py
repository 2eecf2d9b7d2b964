"""A model cut into what can't be cut further, and what these units take and share."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import accumulate

from accelfn.bigmodel.plan.shape import LeafShape, ModelShape, ModuleShape

__all__ = ("Node", "Units", "largest_from")


class Node:
    """A module, or a tensor that stands beside modules: what an entry of a device map may name.

    Attributes:
        name: From the root.
        parent: What it is a part of; None for the parts of the whole model.
        start: Its first unit.
        stop: The unit after its last.
        parts: What it is split into; none of a unit.
    """

    __slots__ = ("name", "parent", "parts", "start", "stop")

    def __init__(self, name: str, parent: Node | None, start: int) -> None:
        self.name: str = name
        self.parent: Node | None = parent
        self.start: int = start
        self.stop: int = start + 1
        self.parts: tuple[Node, ...] = ()


class Units:
    """What a model is cut into: *units*, which are layers and bare tensors, in the order of its tensors.

    Attributes:
        top: Parts of the whole model.
        nodes: Of each unit, what it is.
        leaves: Tensors, unit by unit.
        sizes: Of each tensor.
        ends: Of each unit, the number of tensors up to its last.
        layer_bytes: Of each unit; a bare tensor is no layer. What has several names counts in the first.
        has_ties: Whether some units share a tensor that has to stay one.
        has_copies: Whether some share a tensor that may be copied.
    """

    def __init__(
        self,
        shape: ModelShape,
        no_split: Collection[str],
        size_of: Callable[[LeafShape], int],
        keep_ties: bool = True,
    ) -> None:
        self.nodes: list[Node] = []
        self.leaves: list[LeafShape] = []
        self.ends: list[int] = []
        self.layer_bytes: list[int] = []
        self._is_module: list[bool] = []
        self._no_split = no_split
        self.top: tuple[Node, ...] = self._parts(shape.root, None)
        self.sizes: list[int] = [size_of(leaf) for leaf in self.leaves]
        # Buffers may be copied: that does no harm, and binds no layers to each other.
        kept = frozenset(
            leaf.tie
            for leaf in self.leaves
            if keep_ties and leaf.tie is not None and leaf.kind == "parameter"
        )
        self._sums = [0]
        self._tied: list[tuple[int, int]] = []  # units, and the ties that they have
        self._copied: list[tuple[int, int]] = []
        self._holders: dict[int, list[tuple[str, int]]] = {}  # names and units of each tie
        self._tie_bytes: dict[int, int] = {}
        self._measure(kept)
        self.has_ties: bool = bool(self._tied)
        self.has_copies: bool = bool(self._copied)

    def _parts(self, module: ModuleShape, parent: Node | None) -> tuple[Node, ...]:
        return (
            *(self._unit(leaf.name, parent, (leaf,), False) for leaf in module.parameters),
            *(self._node(child, parent) for child in module.children),
            *(self._unit(leaf.name, parent, (leaf,), False) for leaf in module.buffers),
        )

    def _node(self, module: ModuleShape, parent: Node | None) -> Node:
        if not module.children or module.class_name in self._no_split:
            return self._unit(module.name, parent, module.leaves(), True)
        node = Node(module.name, parent, len(self.nodes))
        node.parts = self._parts(module, node)
        node.stop = len(self.nodes)
        return node

    def _unit(self, name: str, parent: Node | None, leaves: Iterable[LeafShape], is_module: bool) -> Node:
        node = Node(name, parent, len(self.nodes))
        self.nodes.append(node)
        self.leaves.extend(leaves)
        self.ends.append(len(self.leaves))
        self._is_module.append(is_module)
        return node

    def _measure(self, kept: frozenset[int]) -> None:
        total = start = 0
        for unit, end in enumerate(self.ends):
            layer = 0
            for place in range(start, end):
                leaf, size = self.leaves[place], self.sizes[place]
                tie = leaf.tie
                if tie is None:
                    total += size
                    layer += size
                    continue
                is_first = tie not in self._tie_bytes
                if is_first:
                    self._tie_bytes[tie] = size
                    layer += size
                if tie in kept:
                    total += size if is_first else 0
                    self._tied.append((unit, tie))
                    self._holders.setdefault(tie, []).append((leaf.name, unit))
                else:
                    self._copied.append((unit, tie))
            start = end
            self._sums.append(total)
            self.layer_bytes.append(layer if self._is_module[unit] else 0)
        for holders in self._holders.values():
            holders.sort()

    def bytes_of(self, nodes: Iterable[Node], paid: Collection[int]) -> int:
        """Count what nodes add to a place that has the tensors ``paid`` of several names already."""
        nodes = tuple(nodes)
        size = sum(self._sums[node.stop] - self._sums[node.start] for node in nodes)
        if self._copied:
            size += sum(self._tie_bytes[tie] for tie in self.copied_in(nodes) if tie not in paid)
        return size

    def copied_in(self, nodes: Iterable[Node]) -> set[int]:
        """Return the tensors in nodes that may lie in several places, by their ties."""
        return {tie for node in nodes for tie in _slice(self._copied, node)} if self._copied else set()

    def tied_outside(self, node: Node) -> Iterator[int]:
        """Return the units outside of a node that share something with it, in the order of names."""
        for tie in dict.fromkeys(_slice(self._tied, node)):
            for _, unit in self._holders[tie]:
                if not node.start <= unit < node.stop:
                    yield unit


def largest_from(layer_bytes: Sequence[int]) -> list[int]:
    """Return for each unit, and for the end, the bytes of the largest layer from there on.

    >>> largest_from([1, 3, 2])
    [3, 3, 2, 0]
    """
    return [*accumulate(reversed(layer_bytes), max, initial=0)][::-1]


def _slice(pairs: list[tuple[int, int]], node: Node) -> Iterator[int]:
    start, stop = bisect_left(pairs, (node.start,)), bisect_left(pairs, (node.stop,))
    return (tie for _, tie in pairs[start:stop])
