"""The loop that spreads a model over places as it is documented: slow, and with the faults that are known."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from accelfn.bigmodel.plan.shape import LeafShape, ModelShape, ModuleShape

Entry = ModuleShape | LeafShape


def documented_map(
    shape: ModelShape,
    budgets: Mapping[int | str, int],
    no_split: Collection[str] = (),
    fallback: bool = False,
    flags=frozenset(),
) -> dict[str, int | str]:
    """Give the map of modules to places, not cleaned. Pure."""
    sizes = sizes_of(shape)
    devices = [*budgets, *(("disk",) if "disk" not in budgets else ())]
    accelerators = [device for device in devices if device not in ("cpu", "disk")]
    main = ["mps"] if "mps" in accelerators else [*accelerators[:1], "cpu"]
    queue = [*parts(shape.root), *shape.root.buffers]
    big, names = largest(queue, sizes, no_split)
    used = dict.fromkeys(devices, 0)
    found: dict[str, int | str] = {}
    current = 0
    while queue:
        entry = queue.pop(0)
        name = entry.name
        names = [one for one in names if one != name and not one.startswith(f"{name}.")]
        if not names:
            big, names = largest([one for one in queue if isinstance(one, ModuleShape)], sizes, no_split)
        size = sizes[name]
        tied = tied_outside(shape, name)
        device = devices[current]
        limit = None if device == "disk" else budgets[device] - (big if device in main else 0)
        owners, with_ties = pulled(tied, queue, sizes, size)
        if limit is None or used[device] + with_ties <= limit:
            used[device] += with_ties
            found[name] = device
            for owner in owners:
                if owner in queue:
                    queue.remove(owner)
                    found[owner.name] = device
            continue
        if tied and used[device] + size <= limit:
            splittable = [one for one in owners if can_split(one, no_split)]
            if splittable:
                where = queue.index(splittable[0])
                queue[where : where + 1] = parts(splittable[0])
                queue.insert(0, entry)
                big, names = largest(modules_of(queue), sizes, no_split)
                continue
        if (limit is not None and used[device] + size >= limit) and can_split(entry, no_split):
            queue[:0] = parts(entry)
            big, names = largest(modules_of(queue), sizes, no_split)
            continue
        if fallback and used[device] == 0 and device != "disk":
            room = budgets[device] - max(big, with_ties) - used[device]
            path = search(queue, room, shape, sizes, no_split)
            if path:
                for parent in path[:-1]:
                    where = queue.index(parent)
                    queue[where : where + 1] = parts(parent)
                queue.remove(path[-1])
                queue[:0] = [path[-1], entry]
                continue
        used[device] += big if device in main else 0
        current += 1
        queue.insert(0, entry)
    return found


def modules_of(queue):
    return [one for one in queue if isinstance(one, ModuleShape)]


def sizes_of(shape: ModelShape) -> dict[str, int]:
    """Bytes below each name; what has several counts under the first, at the others nothing."""
    sizes: dict[str, int] = {"": 0}
    seen: set[int] = set()
    for leaf in shape.root.leaves():
        size = 0 if leaf.tie in seen else leaf.num_bytes
        if leaf.tie is not None:
            seen.add(leaf.tie)
        path = leaf.name.split(".")
        for end in range(len(path) + 1):
            prefix = ".".join(path[:end])
            sizes[prefix] = sizes.get(prefix, 0) + size
    for module in shape.root.modules():
        sizes.setdefault(module.name, 0)
    return sizes


def parts(module: ModuleShape) -> list[Entry]:
    return [*module.parameters, *module.children]


def can_split(entry: Entry, no_split: Collection[str]) -> bool:
    return isinstance(entry, ModuleShape) and bool(entry.children) and entry.class_name not in no_split


def largest(queue: list[Entry], sizes: Mapping[str, int], no_split: Collection[str]) -> tuple[int, list[str]]:
    big, names, left = 0, list[str](), list(queue)
    while left:
        entry = left.pop(0)
        if can_split(entry, no_split):
            left[:0] = entry.children
        elif sizes[entry.name] > big:
            big, names = sizes[entry.name], [entry.name]
        elif sizes[entry.name] == big:
            names.append(entry.name)
    return big, names


def tied_outside(shape: ModelShape, name: str) -> list[str]:
    found: list[str] = []
    for group in shape.ties:
        inside = [one for one in group if f"{one}.".startswith(f"{name}.")]
        if inside and len(inside) < len(group):
            found += sorted(one for one in group if one not in inside)
    return found


def pulled(tied, queue, sizes, size):
    owners = []
    for one in tied:
        owner = next(entry for entry in queue if one.startswith(f"{entry.name}."))
        owners.append(owner)
        size += sizes[owner.name] - sizes[one]
    return owners, size


def search(queue, room, shape, sizes, no_split):
    for entry in queue:
        tied = tied_outside(shape, entry.name)
        try:
            _, with_ties = pulled(tied, queue, sizes, sizes[entry.name])
        except StopIteration:
            with_ties = None
        if with_ties is not None and with_ties <= room:
            return [entry]
        if can_split(entry, no_split):
            below = search(parts(entry), room, shape, sizes, no_split)
            if below:
                return [entry, *below]
    return None
