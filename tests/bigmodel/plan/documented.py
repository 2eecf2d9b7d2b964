"""The loop that spreads a model over places, as it is documented: slow, and with the faults that are known.

``odd`` collects where it does what :func:`accelfn.plan_device_map` doesn't do on purpose:

- ``"bare"``: room is kept for a tensor of the root itself, until something is split.
- ``"skipped"``: a module that would fit alone isn't split, and the whole place is left for it.
- ``"twice"``: a module that comes along is counted for each tensor that it shares.
- ``"unseen"``: a tensor of several names counts nothing, since its first name comes later.
- ``"crashed"``: a tensor is tied to one that is no module's of those that are left.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, TypeAlias

from accelfn.bigmodel.devices import Place
from accelfn.bigmodel.model_info import LeafShape, ModelShape, ModuleShape

__all__ = ("Odd", "documented_map", "sizes_of_names")

Entry: TypeAlias = ModuleShape | LeafShape
Odd: TypeAlias = Literal["bare", "skipped", "twice", "unseen", "crashed"]


class CrashedError(Exception):
    """The loop ends with an IndexError."""


def documented_map(
    shape: ModelShape,
    budgets: Mapping[Place, int],
    no_split: Collection[str] = (),
    fallback: bool = False,
) -> tuple[dict[str, Place], set[Odd]]:
    """Give the map of modules to places, not cleaned, and what is odd about it."""
    odd: set[Odd] = set()
    try:
        return Loop(shape, budgets, no_split, fallback, odd).run(), odd
    except CrashedError:
        odd.add("crashed")
        return {}, odd


class Loop:
    def __init__(
        self,
        shape: ModelShape,
        budgets: Mapping[Place, int],
        no_split: Collection[str],
        fallback: bool,
        odd: set[Odd],
    ) -> None:
        self.shape = shape
        self.budgets = budgets
        self.no_split = no_split
        self.fallback = fallback
        self.odd = odd
        self.sizes = sizes_of_names(shape)
        self.queue: list[Entry] = [*parts(shape.root), *shape.root.buffers]
        self.found: dict[str, Place] = {}

    def run(self) -> dict[str, Place]:
        places: list[Place] = [*self.budgets, *(("disk",) if "disk" not in self.budgets else ())]
        accelerators = [place for place in places if place not in ("cpu", "disk")]
        main = ["mps"] if "mps" in accelerators else [*accelerators[:1], "cpu"]
        queue, sizes = self.queue, self.sizes
        used = dict.fromkeys(places, 0)
        big, names = self.largest(queue)
        if any(one.name in names for one in queue if isinstance(one, LeafShape)):
            self.odd.add("bare")
        current = 0
        while queue:
            entry = queue.pop(0)
            name, place = entry.name, places[current]
            names = [one for one in names if one != name and not one.startswith(f"{name}.")]
            if not names:
                big, names = self.largest(modules_of(queue))
            tied = self.tied_outside(name)
            size = sizes[name]
            if size == 0 and any(leaf.num_bytes for leaf in leaves_of(entry)):
                self.odd.add("unseen")
            limit = None if place == "disk" else self.budgets[place] - (big if place in main else 0)
            owners, with_ties = self.pull(tied, size)
            if limit is None or used[place] + with_ties <= limit:
                used[place] += with_ties
                self.found[name] = place
                for owner in owners:
                    if owner in queue:
                        queue.remove(owner)
                        self.found[owner.name] = place
                continue
            if tied and used[place] + size <= limit:
                splittable = [one for one in owners if self.can_split(one)]
                if splittable:
                    where = queue.index(splittable[0])
                    queue[where : where + 1] = parts(splittable[0])
                    queue.insert(0, entry)
                    big, names = self.largest(modules_of(queue))
                    continue
                if self.can_split(entry):
                    self.odd.add("skipped")
            if used[place] + size >= limit and self.can_split(entry):
                queue[:0] = parts(entry)
                big, names = self.largest(modules_of(queue))
                continue
            if self.fallback and used[place] == 0 and place != "disk":
                path = self.search(queue, self.budgets[place] - max(big, with_ties))
                if path:
                    for parent in path[:-1]:
                        where = queue.index(parent)
                        queue[where : where + 1] = parts(parent)
                    queue.remove(path[-1])
                    queue[:0] = [path[-1], entry]
                    continue
            used[place] += big if place in main else 0
            current += 1
            queue.insert(0, entry)
        return self.found

    def largest(self, entries: Sequence[Entry]) -> tuple[int, list[str]]:
        big, names, left = 0, list[str](), list(reversed(entries))
        while left:
            entry = left.pop()
            if isinstance(entry, ModuleShape) and self.can_split(entry):
                left.extend(reversed(entry.children))
            elif self.sizes[entry.name] > big:
                big, names = self.sizes[entry.name], [entry.name]
            elif self.sizes[entry.name] == big:
                names.append(entry.name)
        return big, names

    def can_split(self, entry: Entry) -> bool:
        return (
            isinstance(entry, ModuleShape) and bool(entry.children) and entry.class_name not in self.no_split
        )

    def tied_outside(self, name: str) -> list[str]:
        found: list[str] = []
        for group in self.shape.ties:
            inside = [one for one in group if f"{one}.".startswith(f"{name}.")]
            if inside:
                found += sorted(one for one in group if one not in inside)
        return found

    def pull(self, tied: Sequence[str], size: int) -> tuple[list[Entry], int]:
        owners: list[Entry] = []
        for one in tied:
            owner = next((entry for entry in self.queue if one.startswith(f"{entry.name}.")), None)
            if owner is None:
                raise CrashedError
            if owner in owners and self.sizes[owner.name]:
                self.odd.add("twice")
            owners.append(owner)
            size += self.sizes[owner.name] - self.sizes[one]
        return owners, size

    def search(self, entries: Sequence[Entry], room: int) -> list[Entry]:
        for entry in entries:
            try:
                _, with_ties = self.pull(self.tied_outside(entry.name), self.sizes[entry.name])
            except CrashedError:
                with_ties = room + 1
                self.odd.add("crashed")  # it may be found, or not
            if with_ties <= room:
                return [entry]
            if isinstance(entry, ModuleShape) and self.can_split(entry):
                below = self.search(parts(entry), room)
                if below:
                    return [entry, *below]
        return []


def sizes_of_names(shape: ModelShape) -> dict[str, int]:
    """Count bytes below each name; what has several names counts under the first, and nothing elsewhere."""
    sizes: dict[str, int] = {module.name: 0 for module in shape.root.modules()}
    seen: set[int] = set()
    for leaf in shape.root.leaves():
        size = 0 if leaf.tie in seen else leaf.num_bytes
        if leaf.tie is not None:
            seen.add(leaf.tie)
        path = leaf.name.split(".")
        for end in range(len(path) + 1):
            prefix = ".".join(path[:end])
            sizes[prefix] = sizes.get(prefix, 0) + size
    return sizes


def leaves_of(entry: Entry) -> list[LeafShape]:
    return list(entry.leaves()) if isinstance(entry, ModuleShape) else [entry]


def parts(module: Entry) -> list[Entry]:
    """What a module is split into: its own buffers are lost."""
    assert isinstance(module, ModuleShape)
    return [*module.parameters, *module.children]


def modules_of(entries: Sequence[Entry]) -> list[ModuleShape]:
    return [one for one in entries if isinstance(one, ModuleShape)]
