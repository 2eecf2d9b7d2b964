"""Nodes with disks of their own: each has its part, and a crash leaves one that all of them have."""

import itertools
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import accelfn as af
from accelfn.checkpoint.disk import REAL_DISK
from accelfn.checkpoint.find import common, parts_at, parts_below
from accelfn.context import Context
from accelfn.context.config import ProjectConfiguration
from accelfn.errors import DamagedCheckpointError, NoCheckpointError, RemoteRankError
from accelfn.testing import run_ranks
from tests.checkpoint.watched_disk import CHANGES, installed, watched

EACH = ProjectConfiguration(save_on_each_node=True)


def on_nodes(ctx: Context, folder: Path) -> tuple[Context, Path]:
    """Return a context that writes on each node, and this node's disk."""
    disk = folder / f"node{ctx.world.node_rank}"
    disk.mkdir(exist_ok=True)
    return ctx.replace(project_config=EACH), disk


def tree_of(ctx: Context, step: int) -> dict[str, Any]:
    return {"same": torch.full((300,), step), "own": torch.tensor([ctx.rank, step]), "step": step}


def like() -> dict[str, Any]:
    return {"same": torch.zeros(300, dtype=torch.int64), "own": torch.zeros(2, dtype=torch.int64), "step": 0}


def test_each_node_has_all_that_its_ranks_need(tmp_path: Path) -> None:
    def run(ctx: Context) -> tuple[int, list[int], int]:
        ctx, disk = on_nodes(ctx, tmp_path)
        af.save_state(ctx, disk / "at", tree_of(ctx, 7))
        loaded = af.load_state(ctx, disk / "at", like())
        return int(loaded["same"][0]), loaded["own"].tolist(), loaded["step"]

    assert run_ranks(run, 4, num_nodes=2) == [(7, [rank, 7], 7) for rank in range(4)]
    reports = [af.verify_checkpoint(tmp_path / f"node{node}" / "at") for node in range(2)]
    assert [report.num_nodes for report in reports] == [2, 2]
    with pytest.raises(DamagedCheckpointError, match="disk of node 0: copy it from there"):
        af.load_tree(tmp_path / "node1" / "at")  # what rank 0 had for itself isn't there
    # Parts that are copied together are one checkpoint.
    for name in os.listdir(tmp_path / "node1" / "at"):
        if name.endswith(".safetensors"):
            shutil.copy(tmp_path / "node1" / "at" / name, tmp_path / "node0" / "at" / name)
    assert len(af.verify_checkpoint(tmp_path / "node0" / "at").files) == 4


@pytest.mark.parametrize("behind", [0, 1])
def test_a_kill_at_any_change_of_a_node_leaves_one_that_all_nodes_have(tmp_path: Path, behind: int) -> None:
    """One of two nodes ends just before each of the changes that it makes to its disk."""

    def save(ctx: Context, step: int, stop: int) -> int:
        ctx, disk = on_nodes(ctx, tmp_path)
        changes = 0

        def watch(kind: str, path: str) -> None:
            nonlocal changes
            del path
            if kind in CHANGES and ctx.rank == behind:
                if changes >= stop:  # and none of the changes after it, as after a kill
                    raise OSError(5, "no more changes")
                changes += 1

        with installed(watched(watch)):
            try:
                af.save_state(ctx, disk / "at", tree_of(ctx, step), step=step)
            except (OSError, RemoteRankError):
                return -1
        return changes

    def load(ctx: Context) -> int:
        ctx, disk = on_nodes(ctx, tmp_path)
        return af.load_state(ctx, disk / "at", like())["step"]

    def run(ctx: Context) -> list[int]:
        found: list[int] = []
        save(ctx, 0, 1000)
        for stop in itertools.count():
            done = af.gather_object(ctx, [save(ctx, 2 * stop + 1, stop)])
            found.append(load(ctx))
            assert found[-1] in (2 * stop, 2 * stop + 1), stop
            if sorted(done) == [0, stop]:
                break
            save(ctx, 2 * stop + 2, 1000)
            assert load(ctx) == 2 * stop + 2
            ctx.collectives.barrier()
        save(ctx, 1000, 1000)
        return found

    steps = run_ranks(run, 2, on="processes", num_nodes=2)[0]
    assert {step % 2 for step in steps} == {0, 1}  # the old one, and the new one
    assert [len(os.listdir(tmp_path / f"node{node}" / "at")) for node in range(2)] == [2, 2]


def test_a_node_whose_disk_is_empty_is_named(tmp_path: Path) -> None:
    def save(ctx: Context) -> None:
        ctx, disk = on_nodes(ctx, tmp_path)
        af.save_state(ctx, disk / "at", tree_of(ctx, 1))

    run_ranks(save, 2, num_nodes=2)
    shutil.rmtree(tmp_path / "node1")

    def load(ctx: Context) -> None:
        ctx, disk = on_nodes(ctx, tmp_path)
        with pytest.raises(NoCheckpointError, match="1 on node 0, 0 on node 1"):
            af.load_state(ctx, disk / "at", like())

    run_ranks(load, 2, num_nodes=2)


def test_parts_are_found_under_one_name_or_in_a_directory(tmp_path: Path) -> None:
    for step in (1, 2):
        af.save_state(Context(), tmp_path / f"step-{step}", {"step": step}, step=step)
    below = parts_below(REAL_DISK, str(tmp_path))
    assert [path for _, path in below] == [str(tmp_path / "step-1"), str(tmp_path / "step-2")]
    assert parts_at(REAL_DISK, str(tmp_path / "step-2")) == below[1:]
    assert parts_below(REAL_DISK, str(tmp_path / "step-2")) == below[1:]
    assert parts_below(REAL_DISK, str(tmp_path / "nothing")) == []


@given(st.lists(st.lists(st.sampled_from("abcd"), unique=True), min_size=1, max_size=4))
def test_what_is_chosen_is_on_every_node_and_nothing_newer_is(nodes: list[list[str]]) -> None:
    parts = [[(identity, f"at {identity}") for identity in sorted(own)] for own in nodes]
    shared = [identity for identity in "abcd" if all(identity in own for own in nodes)]
    if not any(nodes):
        assert common(parts, "at") is None
    elif not shared:
        with pytest.raises(NoCheckpointError, match="none in common"):
            common(parts, "at")
    else:
        assert common(parts, "at") == max(shared)
