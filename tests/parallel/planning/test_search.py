"""A search finds for each mesh what the plans of that mesh say, and why the others don't fit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import accelfn as af
from accelfn import Context, FullyShardedDataParallelPlugin, ParallelismConfig
from accelfn.errors import ConfigurationError
from accelfn.parallel import Layout, MeshSearch
from tests.parallel.tensor_models import GPT, LENGTH, PLAN

ALL = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")


class Planned(GPT):
    """With a plan for its layers, and blocks enough that most are like others."""

    tp_plan = PLAN

    def __init__(self) -> None:
        super().__init__(tied=False, num_blocks=8)


def make_batch(ctx: Context, rows: int) -> Any:
    ids = torch.empty(rows, LENGTH, dtype=torch.long, device="meta")
    return af.shard_sequence(ctx, (ids, ids), 1)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def search(num_ranks: int = 8, memory: int = 10**9, num_rows: int = 32, **options: Any) -> MeshSearch:
    return af.parallel.search_meshes(
        num_ranks,
        Planned(),
        memory=memory,
        num_rows=num_rows,
        make_batch=make_batch,
        loss_fn=loss_of,
        **options,
    )


def by_itself(found: Layout, **options: Any) -> tuple[af.parallel.Budget, af.parallel.Traffic]:
    """Return what the plans of one mesh say."""
    sizes = {f"{axis}_size": found.mesh.size(axis) for axis in ALL}
    rows, window = (
        found.rows,
        af.GradientAccumulationPlugin(num_steps=found.num_batches, sync_each_batch=True),
    )
    if sizes["pp_size"] > 1:
        rows, window = rows * found.num_batches, af.GradientAccumulationPlugin()
        sizes["pp_handler"] = af.config.PipelineParallelConfig(num_microbatches=found.num_batches)  # pyright: ignore[reportArgumentType]
    ctx = af.plan_context(
        found.mesh.num_ranks,
        parallelism_config=ParallelismConfig(**sizes),  # pyright: ignore[reportArgumentType]
        gradient_accumulation_plugin=window,
        **options,
    )
    batch = make_batch(ctx, rows)
    return (
        af.plan_memory(ctx, Planned(), batch=batch, loss_fn=loss_of),
        af.parallel.plan_traffic(ctx, Planned(), batch=batch, loss_fn=loss_of),
    )


def check(found: Layout, **options: Any) -> None:
    budget, traffic = by_itself(found, **options)
    assert found.budget._replace(temporary=0) == budget._replace(temporary=0)
    assert found.budget.temporary >= budget.temporary / 2  # of one row times the rows
    assert found.traffic == traffic


@pytest.mark.slow
def test_layouts_are_what_their_own_plans_say() -> None:
    found = search(mixed_precision="bf16")
    assert len(found.layouts) > 10
    assert {axis for one in found.layouts for axis in one.mesh.active()} == {*ALL} - {"cp", "sp"}
    order = [(one.between_nodes, one.traffic.received, one.budget.total) for one in found.layouts]
    assert order == sorted(order)
    check(found.layouts[0], mixed_precision="bf16")


@pytest.mark.slow
@pytest.mark.parametrize("recomputes", [False, True], ids=["kept", "recomputed"])
def test_layouts_of_each_pair_of_axes_are_what_their_own_plans_say(recomputes: bool) -> None:
    options: dict[str, Any] = {"mixed_precision": "bf16"}
    if recomputes:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=True)
    axes = ("pp", "dp_shard", "cp") if recomputes else ALL  # a search of all takes long
    found = search(4, axes=axes, **options)
    assert {axis for one in found.layouts for axis in one.mesh.active()} == {*axes}
    for one in with_each_pair(found.layouts):
        check(one, **options)


def with_each_pair(layouts: Sequence[Layout]) -> list[Layout]:
    """Return layouts that have each pair of axes of any, those of most axes first."""
    chosen: list[Layout] = []
    seen: set[tuple[str, str]] = set()
    for one in sorted(layouts, key=lambda one: -len(one.mesh.active())):
        pairs = {*itertools.combinations(one.mesh.active(), 2)}
        if not pairs <= seen:
            chosen.append(one)
            seen |= pairs
    return chosen


def test_every_mesh_is_found_or_refused_with_its_reason() -> None:
    found = search(8, ranks_per_node=2, num_rows=4)
    names = [one.name for one in (*found.layouts, *found.refused)]
    assert len(set(names)) == len(names) == math.comb(3 + 3, 3)  # 2 ** 3 over 4 axes
    reasons = {one.name: one.reason for one in found.refused}
    assert reasons["dp_shard=2,tp=4"] == "ranks of one layer would be in several nodes of 2 ranks"
    assert reasons["dp_shard=8"] == "4 rows can't be split over 8 ranks that read different ones"
    assert reasons["pp=4,dp_shard=2"] == "2 rows make fewer microbatches than 4 stages need"
    assert found.why().splitlines()[0].split("  ")[0].strip() in reasons


def test_a_batch_is_split_until_it_fits() -> None:
    everything = search(2, axes=("dp_shard",))
    (one,) = everything.layouts
    assert (one.num_batches, one.rows) == (1, 16)
    assert one.budget.activations is not None
    room = one.budget.total - one.budget.activations // 3
    (half,) = search(2, memory=room, axes=("dp_shard",)).layouts
    assert (half.num_batches, half.rows) == (2, 8)
    assert half.budget.total <= room
    check(half)
    none = search(2, memory=1000, axes=("dp_shard",))
    assert none.layouts == ()
    assert none.refused[0].needed is not None
    assert none.refused[0].needed > one.budget.held
    assert str(none).startswith("no mesh fits; 1 of 1, such as dp_shard=2: a rank needs ")


def test_a_search_prints_and_draws_the_best() -> None:
    found = search(16, axes=("pp", "dp_replicate", "dp_shard"))
    lines = str(found).splitlines()
    assert lines[0].split() == ["mesh", "batch", "memory", "received", "between", "nodes"]
    assert [line.split()[0] for line in lines[1:11]] == [one.name for one in found.layouts[:10]]
    count, others = len(found.layouts), len(found.refused)
    assert lines[11] == (
        f"32 rows a step on 16 ranks of 1.0 GB: {count} meshes fit ({count - 10} not shown), {others} don't"
    )
    texts = [one.text for one in ElementTree.fromstring(found.svg()).iter() if one.tag.endswith("text")]
    assert [one.name for one in found.layouts[:10]] == [text for text in texts if text and "=" in text]


def test_what_can_not_be_searched_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no axis 'ep'"):
        search(axes=("ep",))
    with pytest.raises(ConfigurationError, match="num_rows must be at least 1, got 0"):
        search(num_rows=0)
    with pytest.raises(ConfigurationError, match="ranks_per_node must be at least 1, got 0"):
        search(ranks_per_node=0)


def test_what_stays_in_a_node_is_not_sent_between_nodes() -> None:
    sent: list[int] = []
    for ranks_per_node in (1, 2, 4):
        found = search(4, axes=("dp_replicate", "dp_shard"), ranks_per_node=ranks_per_node)
        (one,) = (one for one in found.layouts if one.name == "dp_replicate=2,dp_shard=2")
        sent.append(one.between_nodes)
    assert sent == [one.traffic.received, one.traffic.moved["dp_replicate"], 0]
