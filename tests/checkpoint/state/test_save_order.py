"""The order in which ``save_state`` and ``load_state`` do things, where another would lose something."""

import time
from pathlib import Path
from typing import cast

import pytest
import torch

import accelfn as af
from accelfn.checkpoint.commit import abandon, begin_save
from accelfn.context import Context
from accelfn.errors import CheckpointError, RemoteRankError
from accelfn.storage.disk import REAL_DISK
from accelfn.testing import run_ranks
from tests.checkpoint.watched_disk import installed, watched


def test_what_fails_on_one_rank_is_removed_when_the_others_write_no_more(tmp_path: Path) -> None:
    """In the background, where ranks don't meet: who fails at once waits for who is slow."""

    def run(ctx: Context) -> None:
        def watch(kind: str, path: str) -> None:
            if kind == "create" and "tensors-" in path:
                if ctx.rank == 0:
                    raise OSError(28, "full", path)
                time.sleep(0.3)

        with installed(watched(watch)):
            tree = {"a": torch.zeros(100), "b": torch.ones(100)}
            handle = af.save_state(ctx, tmp_path / "at", tree, True)
            with pytest.raises(OSError if ctx.rank == 0 else RemoteRankError, match="full"):
                handle.result()

    run_ranks(run, 2, on="processes")
    assert list(tmp_path.iterdir()) == []


def test_a_save_to_where_another_one_is_writing_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    af.save_tree(tmp_path / "at", {"step": 1})
    running = begin_save(REAL_DISK, tmp_path / "at")

    def save_in_background(ctx: Context) -> None:
        af.save_state(ctx, tmp_path / "at", {"step": 2}, True).result()

    def run(ctx: Context) -> None:
        with pytest.raises((CheckpointError, RemoteRankError), match="at is being written"):
            af.save_state(ctx, tmp_path / "at", {"step": 2})
        with pytest.raises((CheckpointError, RemoteRankError), match="at is being written"):
            save_in_background(ctx)

    run_ranks(run, 2)
    abandon(REAL_DISK, running)
    assert af.load_tree(tmp_path / "at") == {"step": 1}


def test_the_same_tensor_comes_back_as_one_and_lies_there_once(tmp_path: Path) -> None:
    base = torch.arange(6.0).reshape(2, 3)
    path = af.save_tree(tmp_path / "at", {"one": base, "same": base.view_as(base), "turned": base.clone().T})
    loaded = cast("dict[str, torch.Tensor]", af.load_tree(path))
    assert loaded["turned"].stride() == (1, 3)
    assert torch.equal(loaded["turned"], base.T)
    loaded["one"][1, 0] = 9
    assert loaded["same"][1, 0] == 9
    assert af.verify_checkpoint(path).num_tensors == 2
