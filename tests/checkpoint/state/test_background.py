"""Saves in the background: what goes wrong reaches every rank, and in time."""

import dataclasses
import gc
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import accelfn as af
from accelfn.checkpoint import background
from accelfn.checkpoint.background import HostMemory
from accelfn.checkpoint.save import board_phases
from accelfn.context import Context
from accelfn.errors import MissingRankError, RemoteRankError
from accelfn.testing import run_ranks
from tests.checkpoint.small import same_bits


def test_what_fails_while_the_state_is_copied_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    def fail(memory: HostMemory, tensors: Any) -> Any:
        raise MemoryError("no memory")

    def run(ctx: Context) -> None:
        af.save_state(ctx, tmp_path / "at", {"step": 1})
        with af.checkpoint.folder_for_files(ctx, tmp_path / "at") as files:
            if ctx.is_main_process:
                (files / "config.json").write_text("{}")
            with pytest.MonkeyPatch.context() as patch:
                if ctx.rank == 1:
                    patch.setattr(HostMemory, "copies", fail)
                with pytest.raises(MemoryError if ctx.rank == 1 else RemoteRankError, match="no memory"):
                    af.save_state(ctx, tmp_path / "at", {"step": 2}, True, files=files)
        assert af.load_state(ctx, tmp_path / "at", {"step": 0}) == {"step": 1}
        assert af.save_state(ctx, tmp_path / "at", {"step": 3}, True).result() == tmp_path / "at"

    run_ranks(run, 2, on="processes")
    assert os.listdir(tmp_path) == ["at"]


@pytest.mark.parametrize("on", ["memory", "processes"])
def test_in_the_background_the_state_of_the_moment_is_saved(tmp_path: Path, on: Any) -> None:
    def run(ctx: Context) -> tuple[list[float], str]:
        weight = torch.ones(50_000)
        handle = af.save_state(ctx, tmp_path / "at", {"weight": weight, "rank": ctx.rank}, True)
        weight.add_(1)
        path = handle.result(timeout=60)
        assert handle.done()
        assert handle.exception() is None
        like: dict[str, Any] = {"weight": torch.zeros(50_000), "rank": -1}
        loaded = af.load_state(ctx, path, like)
        assert loaded["rank"] == ctx.rank
        return [loaded["weight"].min().item(), loaded["weight"].max().item()], path.name

    assert run_ranks(run, 2, on=on) == [([1.0, 1.0], "at")] * 2


MAKES: dict[str, Callable[[], torch.Tensor]] = {
    "vector": lambda: torch.rand(100) + 1,
    "matrix": lambda: torch.rand(9, 10) + 1,
    "half": lambda: (torch.rand(7) + 1).bfloat16(),
    "strided": lambda: (torch.rand(4, 6) + 1).T,
    "empty": lambda: torch.empty(0, 3),
    "scalar": lambda: (torch.rand(()) + 1).requires_grad_(),
}


@pytest.mark.parametrize("piece", [1 << 24, 256])  # with one thread, and with several
@given(st.lists(st.lists(st.sampled_from(sorted(MAKES))), max_size=3))
def test_whatever_was_saved_before_no_copy_shares_memory(piece: int, rounds: list[list[str]]) -> None:
    """The host memory of the copies is kept from save to save."""
    ctx = Context()
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(background, "_PIECE", piece)
        for kinds in [kinds for kinds in rounds for _ in range(2)]:  # each layout twice
            tensors = {f"{number}": MAKES[kind]() for number, kind in enumerate(kinds)}
            expected = {name: tensor.detach().clone() for name, tensor in tensors.items()}
            handle = af.save_state(ctx, f"{folder}/at", tensors, True)
            for tensor in tensors.values():
                tensor.detach().zero_()
            found = af.load_tree(handle.result())
            assert all(same_bits(found[name], tensor) for name, tensor in expected.items())


def test_the_programs_garbage_collector_is_left_alone(tmp_path: Path) -> None:
    tree = {f"{number}": torch.zeros(1) for number in range(3000)}
    handle = af.save_state(Context(), tmp_path / "at", tree, True)
    seen = {gc.isenabled()}
    while not handle.done():
        seen.add(gc.isenabled())
    assert seen == {True}
    handle = af.save_state(Context(), tmp_path / "at", tree, True)
    gc.disable()
    try:
        handle.result()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_one_save_at_a_time_and_the_end_of_a_context_waits(tmp_path: Path) -> None:
    def run(ctx: Context) -> None:
        for step in range(5):
            af.save_state(ctx, tmp_path / "at", {"step": step, "x": torch.zeros(10_000)}, True)
        af.close_context(ctx)

    run_ranks(run, 2, on="processes")
    assert af.load_tree(tmp_path / "at")["step"] == 4


@pytest.mark.parametrize("asking", [(), (0,), (1,), (0, 1)])
@pytest.mark.parametrize("call", ["save_state", "load_state", "find_checkpoint"])
def test_an_error_is_told_by_the_handle_or_on_all_ranks_by_the_next_call(
    tmp_path: Path, asking: tuple[int, ...], call: str
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(5, "no disk")

    def next_call(ctx: Context) -> object:
        if call == "save_state":
            return af.save_state(ctx, tmp_path / "at", {"x": torch.ones(2)})
        if call == "load_state":
            return af.load_state(ctx, tmp_path / "at", {"x": torch.zeros(2)})
        return af.checkpoint.find_checkpoint(ctx, tmp_path / "at")

    def run(ctx: Context) -> None:
        af.save_state(ctx, tmp_path / "at", {"x": torch.zeros(2)})
        with pytest.MonkeyPatch.context() as patch:
            if ctx.rank == 0:
                patch.setattr(os, "fsync", refuse)
            handle = af.save_state(ctx, tmp_path / "at", {"x": torch.ones(2)}, True)
            while not handle.done():
                time.sleep(0.001)
        kinds = (OSError, RemoteRankError)
        if ctx.rank in asking:
            with pytest.raises(kinds[ctx.rank], match="no disk"):
                handle.result()
        if len(asking) < 2:
            with pytest.raises(RemoteRankError if ctx.rank in asking else kinds[ctx.rank], match="no disk"):
                next_call(ctx)
        assert af.load_tree(tmp_path / "at")["x"].tolist() == [0, 0]
        ctx.collectives.barrier()
        next_call(ctx)

    run_ranks(run, 2, on="processes")
    assert os.listdir(tmp_path) == ["at"]


def test_a_rank_that_dies_during_the_save_is_an_error_of_the_others_at_once(tmp_path: Path) -> None:
    def die(descriptor: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def run(ctx: Context) -> None:
        af.save_state(ctx, tmp_path / "at", {"x": torch.zeros(2)})
        with pytest.MonkeyPatch.context() as patch:
            if ctx.rank == 1:
                patch.setattr(os, "fsync", die)
            handle = af.save_state(ctx, tmp_path / "at", {"x": torch.arange(2) + ctx.rank}, True)
            with pytest.raises(MissingRankError, match="the process of rank 1 has ended during a background"):
                handle.result(30)
        (tmp_path / "noticed").touch()

    with pytest.raises(MissingRankError):
        run_ranks(run, 2, on="processes")
    assert (tmp_path / "noticed").exists()
    assert af.load_tree(tmp_path / "at")["x"].tolist() == [0, 0]


def test_what_ranks_post_is_short_however_much_they_write() -> None:
    """A store of torch closes the connection on a value of 8 MiB."""

    def run(ctx: Context) -> tuple[int, int]:
        sizes: dict[str, int] = {}

        def post(key: str, text: str) -> None:
            sizes[key] = len(text)
            board.post(key, text)

        board = ctx.collectives.board
        phases = board_phases(ctx)._replace(board=dataclasses.replace(board, post=post))
        texts = [str(rank) * 1_200_000 for rank in range(3)]
        found = phases.gather("write", texts[ctx.rank])
        assert found == texts if ctx.is_main_process else found[0] == texts[0]
        assert phases.gather("commit", "")[0] == ""
        return max(sizes.values()), sum(sizes.values())

    for longest, together in run_ranks(run, 3):
        assert longest < 1 << 20
        assert together < 2_500_000
