"""Saves in the background: what goes wrong reaches every rank, and in time."""

import os
import signal
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
from accelfn.checkpoint.background import HostMemory, SaveHandle
from accelfn.context import Context, Poll, Threads
from accelfn.errors import MissingRankError, RemoteRankError
from accelfn.testing import run_ranks


def interrupted(poll: Poll, timeout_s: float | None, what: str) -> bool:
    """Wait as somebody does who presses Ctrl-C."""
    raise KeyboardInterrupt


def test_waiting_for_an_error_can_be_interrupted(tmp_path: Path) -> None:
    handle = SaveHandle(tmp_path, Threads(wait=interrupted))
    with pytest.raises(KeyboardInterrupt):
        handle.exception()
    with pytest.raises(KeyboardInterrupt):
        handle.result()


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


@pytest.mark.parametrize("piece", [1 << 24, 256])  # with one thread, and with several
@given(rounds=st.lists(st.lists(st.sampled_from(["vector", "matrix", "half", "strided", "empty", "scalar"]))))
def test_host_memory_copies_whatever_it_held_before(piece: int, rounds: list[list[str]]) -> None:
    makes: dict[str, Callable[[], torch.Tensor]] = {
        "vector": lambda: torch.randn(100),
        "matrix": lambda: torch.randn(9, 10),
        "half": lambda: torch.randn(7).bfloat16(),
        "strided": lambda: torch.randn(4, 6).T,
        "empty": lambda: torch.empty(0, 3),
        "scalar": lambda: torch.randn((), requires_grad=True),
    }
    memory = HostMemory()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background, "_PIECE", piece)
        for names in [one for kinds in rounds for one in (kinds, kinds)]:  # each layout twice
            tensors = [makes[name]() for name in names]
            copies = memory.copies(tensors)
            for copied, tensor in zip(copies, tensors, strict=True):
                assert copied.is_contiguous()
                assert copied.dtype == tensor.dtype
                assert not copied.requires_grad
                assert torch.equal(copied, tensor)
            for tensor in tensors:
                tensor.detach().zero_()
            assert all(bool(copied.all()) for copied in copies), "a copy shares the memory of its tensor"


@pytest.mark.parametrize("asking", [0, 1])
@pytest.mark.parametrize("call", ["save_state", "load_state", "find_checkpoint"])
def test_an_error_that_one_rank_asked_for_reaches_all_at_the_next_call(
    tmp_path: Path, asking: int, call: str
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
        if ctx.rank == asking:
            with pytest.raises(kinds[ctx.rank], match="no disk"):
                handle.result()
        expected = kinds[ctx.rank] if ctx.rank != asking else RemoteRankError
        with pytest.raises(expected, match="no disk"):
            next_call(ctx)
        next_call(ctx)

    run_ranks(run, 2, on="processes")


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
