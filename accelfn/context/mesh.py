"""A mesh of ranks: named axes with sizes, and the process groups along them.

The plan is pure; :func:`build_mesh` creates its groups once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from accelfn.config.parallelism import AXES, ParallelismConfig
from accelfn.context.collectives import Collectives, Part, disconnected
from accelfn.context.failure import announce_end
from accelfn.context.process_group import gather_number, is_registered
from accelfn.context.world import World, WorldIdentity, numbers_among
from accelfn.errors import ConfigurationError, NotAvailableError

JOINED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "dp": ("dp_replicate", "dp_shard"),
        "shard": ("dp_shard", "cp", "sp"),
        "loss": ("dp_replicate", "dp_shard", "cp", "sp"),
        "seq": ("cp", "sp"),
        "eshard": ("edp", "cp", "sp"),
    }
)
_MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "pp": "stages of one model",
        "dp_replicate": "copies of the model, which average their gradients",
        "dp_shard": "ranks that share the parameters of one copy",
        "cp": "ranks that share each sequence, by context parallelism",
        "sp": "ranks that share each sequence, by sequence parallelism",
        "tp": "ranks that share each layer",
        "ep": "ranks that experts are distributed over, the inner part of dp_shard",
    }
)
# dp_shard is split in two: experts are distributed over the inner part, and replicated over the outer.
_PARTS = ("pp", "dp_replicate", "edp", "ep", "cp", "sp", "tp")
_ROOT = ("pp", "dp_replicate", "shard", "tp")
_EXPERTS = ("pp", "dp_replicate", "eshard", "ep", "tp")
_MAX_ROWS = 16
_MAX_COLUMNS = 8
_MAX_NAMED = 8


class MeshPlan(NamedTuple):
    """The coordinates of the ranks. The last axis varies fastest: its ranks are consecutive.

    An axis is one of :data:`AXES`, a joined axis (``"dp"``, ``"shard"``, ``"loss"``, ``"seq"``), or ``"ep"``
    or ``"edp"``, the inner and the outer part of ``"dp_shard"``. Ranks along ``"eshard"``, which is
    ``"edp"`` with ``"cp"`` and ``"sp"``, have the same experts. Methods that take several axes treat them as
    one, in the order of the mesh. ``print(plan)`` draws it.

    Attributes:
        sizes: Number of ranks along each of :data:`AXES`.
        ep_size: Number of ranks that experts are distributed over; divides the size of ``"dp_shard"``.

    >>> plan = plan_mesh(ParallelismConfig(dp_shard_size=2, tp_size=2), 4)
    >>> plan.size("tp"), plan.coordinate(2, "dp_shard"), plan.group(2, "tp")
    (2, 1, (2, 3))
    """

    sizes: tuple[int, ...]
    ep_size: int = 1

    @property
    def num_ranks(self) -> int:
        """Number of ranks."""
        return prod(self.sizes)

    def size(self, *axes: str) -> int:
        """Return the number of ranks along ``axes``.

        Raises:
            ConfigurationError: No axis has that name.
        """
        sizes = self._sizes()
        return prod(sizes[name] for name in _expand(axes))

    def coordinate(self, rank: int, *axes: str) -> int:
        """Return the coordinate of ``rank`` along ``axes``, from 0.

        Raises:
            ConfigurationError: No axis has that name, or the mesh doesn't have that rank.
        """
        if not 0 <= rank < self.num_ranks:
            raise ConfigurationError(
                f"a mesh of {self.num_ranks} ranks has ranks 0 to {self.num_ranks - 1}, got {rank}."
            )
        sizes, selected = self._sizes(), _expand(axes)
        result, stride = 0, 1
        for name in reversed(_PARTS):
            rank, coordinate = divmod(rank, sizes[name])
            if name in selected:
                result += coordinate * stride
                stride *= sizes[name]
        return result

    def group(self, rank: int, *axes: str) -> tuple[int, ...]:
        """List the ranks that differ from ``rank`` only along ``axes``, in the order of their coordinates.

        Raises:
            ConfigurationError: As :meth:`coordinate`.
        """
        offsets = self._offsets(axes, self.num_ranks)
        first = rank - offsets[self.coordinate(rank, *axes)]
        return tuple(first + offset for offset in offsets)

    def count_near(self, num_near: int, *axes: str) -> int:
        """Return how many ranks of rank 0's group along ``axes`` are among the first ``num_near`` ranks.

        Raises:
            ConfigurationError: No axis has that name.

        >>> plan = plan_mesh(ParallelismConfig(dp_shard_size=1024, tp_size=4), 4096)
        >>> plan.count_near(8, "tp"), plan.count_near(8, "dp_shard")
        (4, 2)
        """
        return sum(offset < num_near for offset in self._offsets(axes, num_near))

    def active(self, *axes: str) -> tuple[str, ...]:
        """List the axes of more than one rank among ``axes`` (by default all), outermost first.

        Raises:
            ConfigurationError: No axis has that name.

        >>> plan_mesh(ParallelismConfig(dp_shard_size=2, tp_size=2), 4).active("loss")
        ('dp_shard',)
        """
        wanted = _expand(axes or AXES)
        return tuple(axis for axis in AXES if self.size(axis) > 1 and _expand((axis,)) <= wanted)

    def parts(self, *axes: str) -> tuple[str, ...]:
        """List the parts of ``axes`` with more than one rank, outermost first.

        Joined axes are split into their parts, and ``"dp_shard"`` into ``"edp"`` and ``"ep"``.

        Raises:
            ConfigurationError: No axis has that name.
        """
        sizes, wanted = self._sizes(), _expand(axes)
        return tuple(name for name in _PARTS if name in wanted and sizes[name] > 1)

    def restrict(self, *axes: str) -> MeshPlan:
        """Return the plan of the ranks along ``axes``, in which every other axis has one rank."""
        wanted = _expand(axes)
        sizes = {name: size if name in wanted else 1 for name, size in self._sizes().items()}
        sizes["dp_shard"] = sizes["edp"] * sizes["ep"]
        return MeshPlan(tuple(sizes[name] for name in AXES), sizes["ep"])

    def _sizes(self) -> dict[str, int]:
        pp, replicate, shard, cp, sp, tp = self.sizes
        return dict(
            zip(_PARTS, (pp, replicate, shard // self.ep_size, self.ep_size, cp, sp, tp), strict=True)
        )

    def _offsets(self, axes: Sequence[str], below: int) -> list[int]:
        """Return the ranks of rank 0's group along ``axes``, at least all those ``below`` a rank."""
        sizes, selected = self._sizes(), _expand(axes)
        members, stride = [0], 1
        for name in reversed(_PARTS):
            if name in selected:
                most = min(sizes[name], -(-below // stride))
                members = [place * stride + member for place in range(most) for member in members]
            stride *= sizes[name]
        return members

    def __str__(self) -> str:
        """Draw the mesh: a row for each coordinate of the outer axes, a column for each of the innermost."""
        sizes = dict(zip(AXES, self.sizes, strict=True))
        shown = self.active() or ("dp_replicate",)
        counts = " x ".join(f"{name} {sizes[name]}" for name in shown)
        *outer, inner = shown
        plural = "s" if self.num_ranks > 1 else ""
        lines = [f"A mesh of {self.num_ranks} rank{plural}: {counts}", ""]
        columns = _elide(range(sizes[inner]), _MAX_COLUMNS)
        header = ["..." if place is None else f"{inner} {place}" for place in columns]
        width = max(len(str(self.num_ranks - 1)), *map(len, header))
        lines.append(_row(outer, outer, header, width))
        num_rows = self.num_ranks // sizes[inner]
        for row in _elide(range(num_rows), _MAX_ROWS):
            if row is None:
                lines.append("...")
                continue
            first = row * sizes[inner]
            cells = ["..." if place is None else str(first + place) for place in columns]
            places = [str(self.coordinate(first, name)) for name in outer]
            lines.append(_row(outer, places, cells, width))
        lines.append("")
        named = (*shown, "ep") if self.ep_size > 1 else shown
        lines.extend(
            f"{name}: {_MEANINGS[name]}. Group of rank 0: {_list_ranks(self.group(0, name))}."
            for name in named
        )
        batches = self.size("dp")
        lines.append(
            f"Batches per step: {batches}; "
            + (
                "each rank reads its own."
                if batches == self.num_ranks
                else f"ranks {_list_ranks(self.group(0, 'pp', 'cp', 'sp', 'tp'))} share one."
            )
        )
        return "\n".join(line.rstrip() for line in lines)


def _row(outer: Sequence[str], places: Sequence[str], cells: Sequence[str], width: int) -> str:
    left = "  ".join(place.rjust(len(name)) for name, place in zip(outer, places, strict=True))
    right = "  ".join(cell.rjust(width) for cell in cells)
    return f"{left}  |  {right}" if outer else right


def _elide(places: range, most: int) -> list[int | None]:
    if len(places) <= most:
        return list(places)
    return [*places[: most - 2], None, places[-1]]


def _list_ranks(ranks: Sequence[int]) -> str:
    return " ".join(
        "..." if rank is None else str(ranks[rank]) for rank in _elide(range(len(ranks)), _MAX_NAMED)
    )


def _expand(axes: Sequence[str]) -> frozenset[str]:
    names: list[str] = []
    for axis in axes:
        if axis not in AXES and axis not in JOINED and axis not in ("ep", "edp"):
            raise ConfigurationError(
                f"a mesh has no axis {axis!r}. Its axes are {', '.join(AXES)}; joined ones are "
                f"{', '.join(JOINED)}; ep and edp are the parts of dp_shard."
            )
        names.extend(JOINED.get(axis, (axis,)))
    return frozenset(part for name in names for part in (("edp", "ep") if name == "dp_shard" else (name,)))


def plan_mesh(config: ParallelismConfig | None, num_processes: int) -> MeshPlan:
    """Plan the mesh of ``num_processes`` ranks. Pure.

    Args:
        config: Sizes of the axes; pure data parallelism if it is None or has only default sizes.
        num_processes: Number of ranks.

    Raises:
        ConfigurationError: The product of the sizes isn't the number of ranks; suggests sizes.

    >>> print(plan_mesh(ParallelismConfig(dp_replicate_size=2, dp_shard_size=2), 4))
    A mesh of 4 ranks: dp_replicate 2 x dp_shard 2
    <BLANKLINE>
    dp_replicate  |  dp_shard 0  dp_shard 1
               0  |           0           1
               1  |           2           3
    <BLANKLINE>
    dp_replicate: copies of the model, which average their gradients. Group of rank 0: 0 2.
    dp_shard: ranks that share the parameters of one copy. Group of rank 0: 0 1.
    Batches per step: 4; each rank reads its own.
    """
    if config is None or config.total_size == 1:
        return MeshPlan(tuple(num_processes if axis == "dp_replicate" else 1 for axis in AXES))
    config.check_size(num_processes)
    sizes = tuple(cast(int, getattr(config, f"{axis}_size")) for axis in AXES)
    return MeshPlan(sizes, config.ep_size)


@dataclass(frozen=True, slots=True)
class _Groups:
    """The groups of a mesh, which all restrictions of it share."""

    plan: MeshPlan
    world: World
    parts: Mapping[tuple[str, ...], tuple[World, Part]]  # by MeshPlan.parts
    adopted: DeviceMesh | None = None
    device_meshes: dict[tuple[str, ...], DeviceMesh] = field(
        default_factory=dict["tuple[str, ...]", DeviceMesh]
    )


@dataclass(frozen=True, slots=True, eq=False)
class Mesh:
    """The groups of a mesh that contain this rank. Created by :func:`build_mesh`.

    Attributes:
        plan: The coordinates of the ranks.
    """

    plan: MeshPlan
    _groups: _Groups

    def __reduce__(self) -> tuple[Callable[..., Mesh], tuple[Any, ...]]:
        """Pickle the coordinates, without the groups."""
        groups = self._groups
        worlds = {axes: world for axes, (world, _) in groups.parts.items()}
        return _without_groups, (self.plan, groups.plan, groups.world, worlds)

    def device_mesh(self, *dims: str) -> DeviceMesh:
        """Return torch's mesh with these dimensions, whose groups are those of :meth:`Context.along`.

        Meshes over ``"pp"``, ``"dp_replicate"``, ``"shard"`` and ``"tp"`` are slices of one root, so that
        torch can combine them; so are those over several of :data:`AXES`, and those of experts, over
        ``"dp_replicate"``, ``"eshard"`` and ``"ep"``. An adopted mesh is returned for its own dimensions, and
        its groups are used for single axes in other meshes.

        Ranks: local.

        Args:
            *dims: Axes, outermost first; a joined axis is one dimension.

        Raises:
            NotAvailableError: The ranks aren't processes with an initialised torch.distributed.
            ConfigurationError: No axis has that name, or no mesh has all of these axes.
        """
        for dim in dims:
            self.plan.size(dim)
        meshes, adopted = self._groups.device_meshes, self._groups.adopted
        if adopted is not None and dims == adopted.mesh_dim_names:
            return adopted
        if dims in meshes:
            return meshes[dims]
        for names in (_ROOT, AXES, _EXPERTS):
            if set(dims) <= set(names):
                root = meshes.get(names) or meshes.setdefault(names, self._torch_mesh(names))
                return root if dims == names else meshes.setdefault(dims, root[dims])
        if len(dims) > 1:
            raise ConfigurationError(
                f"no mesh has the dimensions {', '.join(dims)}: use some of {', '.join(_ROOT)}, some of "
                f"{', '.join(AXES)}, some of {', '.join(_EXPERTS)}, or a single joined axis."
            )
        return meshes.setdefault(dims, self._torch_mesh(dims))

    def _torch_mesh(self, names: tuple[str, ...]) -> DeviceMesh:
        groups = self._groups
        world_group = groups.world.group
        if world_group is None or not is_registered(world_group):
            raise NotAvailableError(
                "torch's DeviceMesh needs processes with an initialised torch.distributed, but "
                'these are threads or a single process. In a test, use run_ranks(..., on="processes").'
            )
        members = [self._torch_group(name) for name in names]
        kind = groups.world.device.type
        if len(names) == 1:
            return DeviceMesh.from_group(members[0], kind, mesh_dim_names=names)
        order = torch.tensor(dist.get_process_group_ranks(world_group), device="cpu")
        sizes = [groups.plan.size(part) for part in _PARTS]
        # The parts of a joined axis needn't be adjacent: "ep" is between those of "eshard".
        parts = [index for name in names for index, part in enumerate(_PARTS) if part in _expand((name,))]
        order = order.view(sizes).permute(parts).reshape([groups.plan.size(name) for name in names])
        return DeviceMesh.from_group(members, kind, mesh=order, mesh_dim_names=names)

    def _torch_group(self, name: str) -> dist.ProcessGroup:
        groups = self._groups
        axes = groups.plan.active(name)
        key = groups.plan.parts(name)
        if groups.adopted is not None and len(axes) == 1 and groups.plan.parts(*axes) == key:
            return groups.adopted.get_group(axes[0])
        group = groups.world.group if key == groups.plan.parts(*AXES) else groups.parts[key][0].group
        assert group is not None
        return group

    def sequence_group(self) -> dist.ProcessGroup | None:
        """Return the group of the ranks that share sequences; None if there are none, or they are threads.

        It isn't the world's, even if all ranks share sequences: in a backward pass, attention communicates
        between the reductions of gradients, at a place that differs between ranks whose models compute
        differently, and operations of one group pair by their order.
        """
        key = self._groups.plan.parts("seq")
        return self._groups.parts[key][0].group if key in self._groups.parts and key else None

    def groups(self) -> list[dist.ProcessGroup | None]:
        """Return the groups along axes that torch knows."""
        return [world.group for world, _ in self._groups.parts.values()]

    def along(self, axes: tuple[str, ...]) -> tuple[World, Collectives, Mesh]:
        """Return the ranks along ``axes``, in the form of :meth:`MeshPlan.parts`, as a world with a mesh."""
        world, part = self._groups.parts[axes]
        return world, part.collectives, Mesh(self.plan.restrict(*axes), self._groups)

    def leave(self, *, announce: bool) -> None:
        """Release all groups, and with ``announce`` notify the other ranks."""
        self._groups.device_meshes.clear()
        for world, part in self._groups.parts.values():
            if announce and world.size > 1:
                announce_end(part.collectives.board, part.collectives.call_log, world.rank)
            part.collectives.board.close()
            if part.group_owner is not None:
                part.group_owner.release()
            group = world.group
            if group is not None and is_registered(group):
                dist.destroy_process_group(group)


def _without_groups(
    plan: MeshPlan, whole: MeshPlan, world: World, worlds: dict[tuple[str, ...], World]
) -> Mesh:
    parts = {axes: (part, Part(disconnected(part.size))) for axes, part in worlds.items()}
    return Mesh(plan, _Groups(whole, world, parts))


def build_mesh(
    world: World,
    collectives: Collectives,
    plan: MeshPlan,
    adopted: DeviceMesh | None = None,
    *,
    timeout: timedelta,
) -> Mesh:
    """Create the groups of ``plan``: one for each set of axes that doesn't cover the world, and for "seq".

    Ranks: every rank of ``world``.

    Args:
        world: The ranks.
        collectives: Between them.
        plan: For the same number of ranks.
        adopted: Torch's mesh of the plan's axes of more than one rank. :meth:`Mesh.device_mesh` uses its
            groups, which stay the caller's.
        timeout: How long the operations of a group wait.

    Raises:
        ConfigurationError: The plan is for another number of ranks, or the mesh has other ranks than the
            world, another order of ranks, or another type of device.
        NotAvailableError: The context is itself a part of a mesh.
        DistributedError: Ranks could not be reached.
    """
    if plan.num_ranks != world.size:
        raise ConfigurationError(
            f"build_mesh: the plan is for {plan.num_ranks} ranks, but the context has {world.size}. Use "
            f"plan_mesh(config, {world.size})."
        )
    if adopted is not None:
        _check_adopted(adopted, world)
    names = plan.parts(*AXES)
    keys = [key for count in range(len(names)) for key in itertools.combinations(names, count)]
    if names and plan.parts("seq") == names:  # see Mesh.sequence_group
        keys.append(names)
    members = [plan.group(world.rank, *key) for key in keys]
    parts = collectives.split(members, timeout)
    nodes = [0] * world.size
    if world.num_nodes > 1:
        nodes = gather_number(collectives.all_gather_bytes, world.node_rank)
    worlds = [_world_of(world, ranks, nodes, part) for ranks, part in zip(members, parts, strict=True)]
    by_key = dict(zip(keys, zip(worlds, parts, strict=True), strict=True))
    return Mesh(plan, _Groups(plan, world, by_key, adopted))


def _check_adopted(mesh: DeviceMesh, world: World) -> None:
    group = world.group
    if group is None or not is_registered(group):
        raise NotAvailableError(
            "ParallelismConfig.device_mesh needs processes, but these ranks are threads or a single process. "
            'Leave it out; in a test, use run_ranks(..., on="processes").'
        )
    ranks = [int(rank) for rank in mesh.mesh.flatten()]
    expected = dist.get_process_group_ranks(group)
    if ranks != expected or mesh.device_type != world.device.type:
        kind = world.device.type
        raise ConfigurationError(
            f"ParallelismConfig.device_mesh has ranks {_list_ranks(ranks)} on {mesh.device_type!r}, but the "
            f"context has ranks {_list_ranks(expected)} on {kind!r}. Create it with "
            f"init_device_mesh({kind!r}, config.mesh_shape, mesh_dim_names=config.mesh_dim_names)."
        )


def _world_of(world: World, members: Sequence[int], nodes: Sequence[int], part: Part) -> World:
    return World(
        **numbers_among(members.index(world.rank), [nodes[rank] for rank in members]),
        device=world.device,
        backend=world.backend if len(members) > 1 else None,
        group_ref=part.group,
        group_owner=part.group_owner,
        identity=WorldIdentity(),
    )
