"""Who writes what: every version once, in about equal parts; and every rank's own comes back to it."""

import math
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Shard, distribute_tensor

import accelfn as af
from accelfn.context import Context
from accelfn.errors import CheckpointError
from accelfn.testing import run_ranks
from tests.checkpoint.layouts import Layout, differing, mesh_of
from tests.checkpoint.reader import read
from tests.checkpoint.small import said

VALUES = st.dictionaries(st.sampled_from(["a", "c", "c@1", "c@2"]), st.integers(0, 2))


@given(st.lists(VALUES, min_size=1, max_size=5))
def test_every_version_is_written_once_and_comes_back_to_its_ranks(world: list[dict[str, int]]) -> None:
    trees = [{name: torch.full((value,), value) for name, value in own.items()} for own in world]
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder) / "at"
        run_ranks(lambda ctx: af.save_state(ctx, at, trees[ctx.rank]), len(world))
        for rank, tree in enumerate(trees):
            assert not differing(read(at, rank), tree)
        stored = [name for name in said(at)["tensors"] if name[0] != "#"]
        assert len(stored) == len({item for own in world for item in own.items()})


@given(st.integers(1, 4), st.lists(st.integers(0, 50_000), min_size=1, max_size=20))
def test_ranks_write_about_equally_much(size: int, lengths: list[int]) -> None:
    tree = {str(number): torch.zeros(length, dtype=torch.uint8) for number, length in enumerate(lengths)}
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder) / "at"
        run_ranks(lambda ctx: af.save_state(ctx, at, tree), size)
        sizes: list[int] = []
        loads = Counter(dict.fromkeys(range(size), 0))
        for dtype, shape, rank in said(at)["tensors"].values():
            sizes.append(math.prod(shape) * getattr(torch, dtype).itemsize)
            loads[rank] += sizes[-1]
    assert max(loads.values()) - min(loads.values()) <= max(sizes)


def test_a_tensor_that_is_cut_on_some_ranks_alone_is_refused(tmp_path: Path) -> None:
    def run(ctx: Context) -> None:
        mesh, whole = mesh_of(Layout("fsdp", (2,))), torch.zeros(4)
        part, longer = (distribute_tensor(one, mesh, [Shard(0)]) for one in (whole, torch.zeros(6)))
        trees: list[tuple[Any, Any]] = [(whole, part), (part, longer)]
        for pair in trees:
            with pytest.raises(CheckpointError, match="must have one layout on all of them"):
                af.save_state(ctx, tmp_path / "at", {"w": pair[ctx.rank]})

    run_ranks(run, 2, "processes")
    assert not [*tmp_path.iterdir()]
