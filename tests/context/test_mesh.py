from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import accelfn as af
from accelfn import Context, ParallelismConfig
from accelfn.context import AXES, JOINED, Collectives, Mesh, MeshPlan, World, build_mesh, plan_mesh
from accelfn.errors import (
    CollectiveTimeoutError,
    ConfigurationError,
    DistributedError,
    MissingRankError,
    NotAvailableError,
)
from accelfn.testing import Fault, run_ranks
from tests.comm.seam import failure

CUBE = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, tp_size=2)
SQUARE = ParallelismConfig(dp_shard_size=2, tp_size=2)
NAMES = (*AXES, *JOINED, "ep", "edp")
on_each_world = pytest.mark.parametrize("on", ["memory", "processes"])


@st.composite
def plans(draw: st.DrawFn, most: int = 96) -> MeshPlan:
    """Any sizes, in any order of axes, of ``most`` ranks at most."""
    sizes = dict.fromkeys(AXES, 1)
    for axis in draw(st.permutations(AXES)):
        sizes[axis] = draw(st.integers(1, min(4, most // prod(sizes.values()))))
    ep = draw(st.sampled_from([part for part in range(1, 5) if sizes["dp_shard"] % part == 0]))
    return MeshPlan(tuple(sizes[axis] for axis in AXES), ep)


def listed(tensor: torch.Tensor) -> Any:
    return cast("Any", tensor).tolist()


NAMED = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4).map(tuple)


# --- the plan ------------------------------------------------------------------------------------


@given(plans(), NAMED)
def test_groups_share_ranks_out_and_coordinates_number_them(plan: MeshPlan, axes: tuple[str, ...]) -> None:
    groups = {plan.group(rank, *axes) for rank in range(plan.num_ranks)}
    assert sorted(chain.from_iterable(groups)) == list(range(plan.num_ranks))
    for group in groups:
        assert list(group) == sorted(group)
        assert [plan.coordinate(rank, *axes) for rank in group] == list(range(plan.size(*axes)))
        assert {plan.group(rank, *axes) for rank in group} == {group}


@given(plans(), NAMED, st.data())
def test_a_restricted_plan_is_the_plan_of_a_group(plan: MeshPlan, axes: tuple[str, ...], data: Any) -> None:
    inner = plan.restrict(*axes)
    group = plan.group(data.draw(st.integers(0, plan.num_ranks - 1)), *axes)
    assert inner.num_ranks == len(group)
    assert inner.parts(*AXES) == plan.parts(*axes)
    for place, rank in enumerate(group):
        for axis in plan.parts(*axes):
            assert inner.coordinate(place, axis) == plan.coordinate(rank, axis)
            assert tuple(group[member] for member in inner.group(place, axis)) == plan.group(rank, axis)


def test_without_a_config_each_rank_is_a_copy() -> None:
    for config in (None, ParallelismConfig()):
        plan = plan_mesh(config, 6)
        assert plan == plan_mesh(ParallelismConfig(dp_replicate_size=6), 6)
        assert plan.size("loss") == plan.size("dp") == plan.size("dp_replicate") == 6
        assert plan.size("shard") == plan.size("tp") == 1


def test_a_mesh_of_ten_thousand_ranks_is_planned_by_the_sizes_alone() -> None:
    config = ParallelismConfig(pp_size=2, dp_replicate_size=5, dp_shard_size=125, tp_size=8, ep_size=25)
    plan = plan_mesh(config, 10_000)
    assert plan.parts(*AXES) == ("pp", "dp_replicate", "edp", "ep", "tp")
    assert (len(plan.group(9_999, "shard")), plan.group(9_999, "tp")) == (125, tuple(range(9_992, 10_000)))
    assert len(str(plan).splitlines()) < 40


def test_a_plan_draws_itself() -> None:
    assert str(plan_mesh(CUBE, 8)).splitlines() == [
        "A mesh of 8 ranks: dp_replicate 2 x dp_shard 2 x tp 2",
        "",
        "dp_replicate  dp_shard  |  tp 0  tp 1",
        "           0         0  |     0     1",
        "           0         1  |     2     3",
        "           1         0  |     4     5",
        "           1         1  |     6     7",
        "",
        "dp_replicate: copies of the model, which average their gradients. Group of rank 0: 0 4.",
        "dp_shard: ranks that share the parameters of one copy. Group of rank 0: 0 2.",
        "tp: ranks that share each layer. Group of rank 0: 0 1.",
        "Batches per step: 4; ranks 0 1 share one.",
    ]


def test_what_a_plan_refuses() -> None:
    plan = plan_mesh(SQUARE, 4)
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: plan.size("tensor"), r"no axis 'tensor'. Its axes are pp, dp_replicate, .* dp, shard"),
        (lambda: plan.coordinate(4, "tp"), "has ranks 0 to 3, got 4"),
        (lambda: plan_mesh(SQUARE, 8), r"covers 4 ranks .*Fitting would be .*dp_shard_size=4"),
        (
            lambda: build_mesh(World(), Collectives(), plan, timeout=timedelta(seconds=1)),
            r"for 4 ranks, but the context has 1. .*plan_mesh\(",
        ),
    ]
    for call, message in refused:
        with pytest.raises(ConfigurationError, match=message):
            call()


# --- along ---------------------------------------------------------------------------------------


def with_plan(ctx: Context, plan: MeshPlan) -> Context:
    return replace(ctx, mesh=build_mesh(ctx.world, ctx.collectives, plan, timeout=timedelta(seconds=30)))


@settings(max_examples=12)
@given(plans(most=12), st.lists(NAMED, min_size=1, max_size=3))
def test_operations_along_an_axis_are_those_of_its_ranks(plan: MeshPlan, many: list[tuple[str, ...]]) -> None:
    def run(ctx: Context) -> None:
        ctx = with_plan(ctx, plan)
        for axes in many:
            group = plan.group(ctx.rank, *axes)
            axis = ctx.along(*axes)
            assert (axis.rank, axis.num_processes) == (ctx.coordinate(*axes), ctx.axis_size(*axes))
            assert axis is ctx.along(*axes)
            assert (axis is ctx) == (len(group) == plan.num_ranks)
            own = torch.tensor([ctx.rank])
            assert listed(af.gather(axis, own)) == list(group)
            assert af.gather_object(axis, f"rank {ctx.rank}") == [f"rank {rank}" for rank in group]
            assert listed(af.reduce(axis, own, "sum")) == [sum(group)]
            assert listed(af.broadcast(axis, own, len(group) - 1)) == [group[-1]]
            af.wait_for_everyone(axis)
            with af.main_process_first(axis):
                pass
            parts = af.scatter(axis, torch.tensor(group) if axis.rank == 0 else None)
            assert listed(parts) == [ctx.rank]

    run_ranks(run, plan.num_ranks)


@on_each_world
def test_the_axes_of_each_kind_of_world(on: Any) -> None:
    def run(ctx: Context) -> tuple[Any, ...]:
        inner, own = ctx.along("dp").along("dp_shard"), torch.tensor([ctx.rank])
        assert {
            inner.along("tp").num_processes,
            ctx.along("pp").num_processes,
            ctx.along().num_processes,
        } == {1}
        assert ctx.along(*AXES) is ctx
        assert inner.mesh is not None
        assert inner.mesh.plan == MeshPlan((1, 1, 2, 1, 1, 1))
        axes = (ctx.along("tp"), ctx.along("dp_replicate", "tp"), inner)
        return tuple(listed(af.gather(axis, own)) for axis in axes)

    plan = plan_mesh(CUBE, 8)
    for rank, groups in enumerate(run_ranks(run, 8, on, parallelism_config=CUBE)):
        names = (("tp",), ("dp_replicate", "tp"), ("dp_shard",))
        assert groups == tuple(list(plan.group(rank, *axes)) for axes in names)


def test_a_context_without_a_mesh_has_copies_only() -> None:
    def run(ctx: Context) -> None:
        assert ctx.mesh is None
        assert ctx.along("dp") is ctx.along("dp_replicate") is ctx
        assert ctx.coordinate("loss") == ctx.rank
        assert (ctx.coordinate("tp"), ctx.axis_size("tp"), ctx.axis_size("dp")) == (0, 1, 3)
        assert ctx.along("tp").num_processes == 1
        with pytest.raises(ConfigurationError, match="no axis 'data'"):
            ctx.along("data")

    run_ranks(run, 3)


def test_an_axis_knows_the_nodes_of_its_ranks() -> None:
    def run(ctx: Context) -> tuple[Any, ...]:
        dp, tp = ctx.along("dp").world, ctx.along("tp").world
        assert (tp.num_nodes, tp.local_size, tp.local_rank) == (1, 2, tp.rank)
        return dp.node_rank, dp.num_nodes, dp.local_rank, dp.local_size

    found = run_ranks(run, 8, num_nodes=2, parallelism_config=ParallelismConfig(dp_shard_size=4, tp_size=2))
    assert found == [(rank // 4, 2, rank // 2 % 2, 2) for rank in range(8)]


def test_a_variant_keeps_the_mesh_and_its_axes_have_its_options() -> None:
    def run(ctx: Context) -> None:
        tp = ctx.along("tp")
        variant = ctx.replace(mixed_precision="bf16").tagged("x")
        assert variant.mesh is ctx.mesh
        assert variant.along("tp") is not tp
        assert (variant.along("tp").mixed_precision, variant.along("tp").tag) == ("bf16", "x")
        assert tp.mixed_precision == "no"
        assert ctx.replace(parallelism_config=SQUARE).mesh is ctx.mesh
        with pytest.raises(ConfigurationError, match=r"Context.replace keeps the mesh"):
            ctx.replace(parallelism_config=ParallelismConfig(tp_size=4))

    run_ranks(run, 4, parallelism_config=SQUARE)


# --- errors --------------------------------------------------------------------------------------


@on_each_world
def test_an_error_along_one_axis_leaves_the_others_usable(on: Any) -> None:
    def run(ctx: Context) -> tuple[str, list[Any]]:
        tp, own = ctx.along("tp"), torch.tensor([ctx.rank])
        # One row of the mesh is torn, the other is not.
        shape = 2 + ctx.coordinate("tp") if ctx.coordinate("dp_shard") == 0 else 1
        error = failure(lambda ctx: af.reduce(tp, torch.ones(shape), "sum"))(ctx)
        axes = (ctx.along("dp_shard"), tp, ctx)
        return type(error).__name__, [listed(af.gather(axis, own)) for axis in axes]

    found = run_ranks(run, 4, on, parallelism_config=SQUARE)
    for rank, (error, gathered) in enumerate(found):
        assert error == ("MismatchError" if rank < 2 else "Tensor")
        first = rank // 2 * 2
        assert gathered == [[rank % 2, rank % 2 + 2], [first, first + 1], [0, 1, 2, 3]]


@on_each_world
def test_what_is_over_along_one_axis_goes_on_along_the_others(on: Any) -> None:
    def run(ctx: Context) -> list[Any]:
        tp = ctx.along("tp")
        if ctx.rank == 0:  # rank 1 doesn't come
            guard = replace(tp.guard, timeout=timedelta(seconds=0.3))
            with pytest.raises(CollectiveTimeoutError):
                af.wait_for_everyone(replace(tp, guard=guard))
            with pytest.raises(DistributedError, match="operations across ranks are no longer possible"):
                af.wait_for_everyone(tp)
        if ctx.rank > 1:
            af.wait_for_everyone(tp)
        af.wait_for_everyone(ctx)
        return listed(af.gather(ctx.along("dp_shard"), torch.tensor([ctx.rank])))

    assert run_ranks(run, 4, on, parallelism_config=SQUARE) == [[0, 2], [1, 3], [0, 2], [1, 3]]


@on_each_world
def test_a_rank_that_fails_is_named_to_those_who_wait_along_an_axis(on: Any, tmp_path: Path) -> None:
    def run(ctx: Context) -> None:
        if ctx.rank == 3:
            raise ValueError("no such file")
        if ctx.rank == 1:
            error = failure(lambda ctx: af.wait_for_everyone(ctx.along("dp_shard")))(ctx)
            (tmp_path / "told").write_text(f"{type(error).__name__}: {error}")

    with pytest.raises(ValueError, match="no such file"):
        run_ranks(run, 4, on, parallelism_config=SQUARE)
    told = (tmp_path / "told").read_text()
    assert told.startswith("RemoteRankError: rank 3 failed")
    assert "no such file" in told


@pytest.mark.parametrize("faults", [[], [Fault(kind="die", rank=3, at=0)]], ids=("ended", "dies"))
@on_each_world
def test_a_rank_that_has_ended_or_dies_is_missed_along_an_axis(on: Any, faults: list[Fault]) -> None:
    def run(ctx: Context) -> str:
        if ctx.rank == 3 and faults:
            af.wait_for_everyone(ctx)
        if ctx.rank == 1:
            with pytest.raises(MissingRankError) as caught:
                af.wait_for_everyone(ctx.along("dp_shard"))
            return str(caught.value)
        return ""

    if on == "processes" and faults:
        with pytest.raises(MissingRankError):
            run_ranks(run, 4, on, parallelism_config=SQUARE, faults=faults)
    else:
        said = run_ranks(run, 4, on, parallelism_config=SQUARE, faults=faults)[1]
        assert ("died" if faults else "has ended") in said


# --- worlds of processes -------------------------------------------------------------------------


def test_the_meshes_of_torch_have_the_axes_as_their_dimensions() -> None:
    def run(ctx: Context) -> tuple[Any, ...]:
        assert isinstance(ctx.mesh, Mesh)
        dims = [("tp",), ("loss",), ("dp_replicate", "tp"), ("pp", "shard", "tp")]
        meshes = [ctx.mesh.device_mesh(*names) for names in dims]
        assert all(ctx.mesh.device_mesh(*names) is mesh for names, mesh in zip(dims, meshes, strict=True))
        assert [mesh.mesh_dim_names for mesh in meshes] == dims
        with pytest.raises(ConfigurationError, match="no mesh has the dimensions loss, tp"):
            ctx.mesh.device_mesh("loss", "tp")
        with pytest.raises(ConfigurationError, match="no axis 'x'"):
            ctx.mesh.device_mesh("x")
        return tuple(tuple(mesh.shape) for mesh in meshes)

    for config in (SQUARE, ParallelismConfig(dp_replicate_size=2, tp_size=2)):
        found = run_ranks(run, 4, "processes", parallelism_config=config)
        assert found == [((2,), (2,), (config.dp_replicate_size, 2), (1, config.dp_shard_size, 2))] * 4


@pytest.mark.usefixtures("dtensors")
def test_a_mesh_of_the_users_own_is_adopted() -> None:
    names = SQUARE.mesh_dim_names

    def run(outer: Context) -> list[int]:
        theirs: Any = init_device_mesh("cpu", SQUARE.mesh_shape, mesh_dim_names=names)
        ctx = af.init_context(cpu=True, parallelism_config=replace(SQUARE, device_mesh=theirs))
        assert af.Accelerator(context=ctx).torch_device_mesh is theirs
        assert ctx.mesh is not None
        for name, theirs_name in (("tp", "tp"), ("shard", "dp_shard")):
            assert ctx.mesh.device_mesh(name).get_group() is theirs[theirs_name].get_group()
        mine = DTensor.from_local(torch.ones(1), theirs["tp"], [Shard(0)])
        other = DTensor.from_local(torch.ones(1), ctx.mesh.device_mesh("tp"), [Shard(0)])
        both: Any = mine + other
        assert listed(both.full_tensor()) == [2, 2]
        found = listed(af.gather(ctx.along("tp"), torch.tensor([ctx.rank])))
        af.close_context(ctx)
        assert listed(other.full_tensor()) == [1, 1]  # their groups stay
        turned = replace(SQUARE, device_mesh=DeviceMesh("cpu", theirs.mesh.T, mesh_dim_names=names))
        with pytest.raises(ConfigurationError, match=r"has ranks 0 2 1 3 on 'cpu', but the .* 0 1 2 3"):
            af.init_context(cpu=True, parallelism_config=turned)
        af.wait_for_everyone(outer)
        return found

    assert run_ranks(run, 4, "processes") == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_a_mesh_of_the_users_own_has_the_dims_of_the_sizes_and_processes_for_ranks() -> None:
    def make(*names: str) -> DeviceMesh:
        ranks = torch.arange(4).view(2, 2)
        return DeviceMesh("cpu", ranks, mesh_dim_names=names or None, _init_backend=False, _rank=0)

    for names in (("tp", "dp_shard"), ("dp_shard", "model"), ()):
        with pytest.raises(ConfigurationError, match=r"and the sizes say \{'dp_shard': 2, 'tp': 2\}"):
            replace(SQUARE, device_mesh=make(*names))
    with pytest.raises(ConfigurationError, match=r"device_mesh has the dims .*, and the sizes say one rank"):
        ParallelismConfig(device_mesh=make("dp_shard", "tp"))
    fitting = replace(SQUARE, device_mesh=make("dp_shard", "tp"))
    with pytest.raises(NotAvailableError, match="needs processes, but these ranks are threads"):
        run_ranks(lambda ctx: None, 4, parallelism_config=fitting)

    def run(ctx: Context) -> None:
        assert ctx.mesh is not None
        with pytest.raises(NotAvailableError, match='on="processes"'):
            ctx.mesh.device_mesh("tp")

    run_ranks(run, 4, parallelism_config=SQUARE)


@pytest.mark.usefixtures("dtensors")
def test_a_part_of_a_world_has_a_mesh_whatever_groups_its_ranks_have_made() -> None:
    new_group = cast("Any", dist).new_group

    def run(outer: Context) -> Any:
        group = new_group([1, 2, 3, 4])
        if outer.rank in (0, 2):  # torch counts the groups of a process, and names groups by that
            new_group([outer.rank], use_local_synchronization=True)
        if outer.rank == 0:
            return None
        before = len(groups_of_torch())
        with af.init_context(cpu=True, group=group, parallelism_config=SQUARE) as ctx:
            assert ctx.mesh is not None
            mesh = ctx.mesh.device_mesh("shard", "tp")
            tensor = DTensor.from_local(torch.tensor([float(outer.rank)]), mesh["tp"])
            assert tensor.full_tensor().numel() == 1
            own = torch.tensor([outer.rank])
            found = [listed(af.gather(ctx.along(axis), own)) for axis in ("tp", "dp_shard")]
        assert len(groups_of_torch()) <= before + 1  # groups of one may have levelled the counts
        return found, listed(mesh.mesh)

    found = run_ranks(run, 5, "processes", timeout_s=20)
    tp, shard = ([1, 2], [1, 2], [3, 4], [3, 4]), ([1, 3], [2, 4], [1, 3], [2, 4])
    assert found[1:] == [([own, other], [[1, 2], [3, 4]]) for own, other in zip(tp, shard, strict=True)]


def groups_of_torch() -> Any:
    library: Any = dist.distributed_c10d
    return library._world.pg_names


def test_a_closed_context_closes_its_axes() -> None:
    def run(outer: Context) -> tuple[str, int]:
        del outer
        before = len(groups_of_torch())
        ctx = af.init_context(cpu=True, parallelism_config=SQUARE)
        tp = ctx.along("tp")
        af.close_context(tp)  # not its own to close
        af.wait_for_everyone(tp)
        for _ in range(2):
            af.close_context(ctx)
        return str(failure(af.wait_for_everyone)(tp)), len(groups_of_torch()) - before

    said = "wait_for_everyone: operations across ranks are no longer possible"
    for text, more in run_ranks(run, 4, "processes"):
        assert text.startswith(said)
        assert more == 0


# --- what init_context makes of its arguments ----------------------------------------------------


def test_a_plugin_without_sizes_shards_over_all_ranks_that_are_left() -> None:
    plugin = af.FullyShardedDataParallelPlugin(fsdp_version=2)

    def run(ctx: Context) -> tuple[Any, ...]:
        assert ctx.strategy.fsdp == plugin
        return ctx.axis_size("dp_shard"), ctx.axis_size("tp"), ctx.mesh is not None, str(ctx.distributed_type)

    assert run_ranks(run, 4, fsdp_plugin=plugin) == [(4, 1, True, "FSDP")] * 4
    tensor = ParallelismConfig(tp_size=2)
    assert run_ranks(run, 4, fsdp_plugin=plugin, parallelism_config=tensor) == [(2, 2, True, "FSDP")] * 4
    assert run_ranks(run, 1, fsdp_plugin=plugin) == [(1, 1, True, "NO")]


def test_a_mesh_that_does_not_fit_is_refused_before_anything_is_made() -> None:
    def run(outer: Context) -> int:
        before = len(groups_of_torch())
        with pytest.raises(ConfigurationError, match=r"covers 8 ranks .*num_processes=2.*start 8 processes"):
            af.init_context(cpu=True, parallelism_config=CUBE)
        af.wait_for_everyone(outer)
        return len(groups_of_torch()) - before

    assert run_ranks(run, 2, "processes") == [0, 0]
    replicas = ParallelismConfig(dp_replicate_size=2)
    plugin = af.FullyShardedDataParallelPlugin(fsdp_version=2)
    with pytest.raises(ConfigurationError, match="fsdp_plugin has no ranks to shard over"):
        run_ranks(lambda ctx: None, 2, parallelism_config=replicas, fsdp_plugin=plugin)


def test_exact_mode_has_replicas_and_no_other_axis() -> None:
    def mean_of_product(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return (weight * rows).mean()

    def run(ctx: Context) -> float:
        with pytest.raises(ConfigurationError, match=r"shards along dp_shard.*Leave dp_shard_size out"):
            ctx.replace(reduction="canonical")
        replicas = ctx.along("dp_replicate").replace(reduction="canonical")
        step = af.value_and_grad(replicas, mean_of_product)
        return float(step(torch.ones(1), torch.tensor([1.0 + ctx.rank]))[0])

    mesh = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2)
    assert run_ranks(run, 4, parallelism_config=mesh) == [2.0, 3.0, 2.0, 3.0]
    with pytest.raises(ConfigurationError, match="shards along dp_shard, tp"):
        run_ranks(run, 4, parallelism_config=SQUARE, reduction="canonical")


# --- the Accelerator -----------------------------------------------------------------------------


@pytest.mark.usefixtures("dtensors")
def test_the_accelerator_knows_its_place_on_each_axis() -> None:
    def run(ctx: Context) -> tuple[Any, ...]:
        accelerator = af.Accelerator(context=ctx)
        mesh = accelerator.torch_device_mesh
        assert mesh is not None
        assert accelerator.parallelism_config == SQUARE
        assert (accelerator.is_fsdp2, accelerator.is_composable_parallelism_enabled) == (False, False)
        return (
            *(accelerator.data_parallel_rank, accelerator.data_parallel_shard_rank),
            *(accelerator.tensor_parallel_rank, accelerator.pipeline_parallel_rank),
            *(accelerator.context_parallel_rank, mesh.mesh_dim_names, tuple(mesh.get_coordinate() or ())),
        )

    found = run_ranks(run, 4, "processes", parallelism_config=SQUARE)
    assert found == [
        (0, *(rank // 2, rank % 2), 0, 0, ("dp_shard", "tp"), (rank // 2, rank % 2)) for rank in range(4)
    ]
