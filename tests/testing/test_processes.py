import contextlib
import gc
import multiprocessing.util
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accelfn.comm import failing_together, wait_for_everyone
from accelfn.context import Context
from accelfn.errors import DistributedError, MismatchError, MissingRankError, RemoteRankError
from accelfn.testing import Fault, run_ranks


class Odd(Exception):  # noqa: N818 -- a user may call it what they like
    """Pickles, and can't be made again from its arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def test_ranks_are_processes_with_an_initialised_world() -> None:
    def work(ctx: Context) -> Any:
        total = torch.tensor([ctx.rank + 1])
        dist.all_reduce(total)  # pyright: ignore[reportUnknownMemberType] -- untyped in torch
        return os.getpid(), dist.is_initialized(), dist.get_rank(), dist.get_world_size(), int(total)

    results = run_ranks(work, 2, "processes")
    assert [result[1:] for result in results] == [(True, 0, 2, 3), (True, 1, 2, 3)]
    assert len({result[0] for result in results} | {os.getpid()}) == 3
    assert not dist.is_initialized()


def test_what_can_not_come_back_is_an_error() -> None:
    def work(ctx: Context) -> Callable[[], int]:
        return lambda: ctx.rank

    with pytest.raises((AttributeError, TypeError), match="pickle"):
        run_ranks(work, 2, "processes", timeout_s=10)


def test_errors_keep_their_attributes() -> None:
    def work(ctx: Context) -> None:
        from accelfn.comm import gather

        gather(ctx, [torch.zeros(1 + ctx.rank)])

    with pytest.raises(MismatchError) as caught:
        run_ranks(work, 2, "processes", timeout_s=10)
    assert [(row.rank, row.path) for row in caught.value.rows] == [(1, "tree[0]")]
    assert "gather(ctx," in str(caught.value.__cause__)


@pytest.mark.parametrize("kind", [TimeoutError, ConnectionError, ModuleNotFoundError])
def test_errors_keep_their_class(kind: type[Exception]) -> None:
    def work(ctx: Context) -> None:
        raise kind("of the program")

    with pytest.raises(kind) as caught:
        run_ranks(work, 1, "processes", timeout_s=10)
    assert type(caught.value) is kind


def test_a_process_that_exits_is_named() -> None:
    def work(ctx: Context) -> None:
        if ctx.rank == 1:
            os._exit(7)

    with pytest.raises(MissingRankError, match="rank 1 exited with code 7 before it returned"):
        run_ranks(work, 2, "processes", timeout_s=10)


def test_no_process_is_left_behind(tmp_path: Path) -> None:
    def work(ctx: Context) -> None:
        (tmp_path / str(os.getpid())).touch()
        wait_for_everyone(ctx)
        if ctx.rank == 0:
            raise ValueError("first")
        wait_for_everyone(ctx)

    with pytest.raises(ValueError, match="first"):
        run_ranks(work, 3, "processes", timeout_s=10)
    ranks = [int(file.name) for file in tmp_path.iterdir()]
    assert len(ranks) == 3
    for process in ranks:  # other tests may have left children of their own
        with pytest.raises(ChildProcessError):
            os.waitpid(process, os.WNOHANG)


def test_a_killed_rank_is_named_also_when_others_wait_for_it() -> None:
    def work(ctx: Context) -> None:
        wait_for_everyone(ctx)
        wait_for_everyone(ctx)

    with pytest.raises(MissingRankError, match="rank 2 was killed by SIGKILL"):
        run_ranks(work, 3, "processes", faults=[Fault(kind="die", rank=2, at=1)])


def test_a_killed_rank_is_named_also_while_a_process_that_it_forked_lives_on() -> None:
    read, write = os.pipe()

    def work(ctx: Context) -> None:
        if ctx.rank == 1:
            if os.fork() == 0:  # holds all that its parent held, the pipe and the sentinel too
                os.close(write)
                os.read(read, 1)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        wait_for_everyone(ctx)

    try:
        with pytest.raises(MissingRankError, match="rank 1 was killed by SIGKILL") as caught:
            run_ranks(work, 2, "processes", timeout_s=10)
    finally:
        os.close(write)
        os.close(read)
    assert "raised on rank 1 of 2" in str(getattr(caught.value, "__notes__", "raised on rank 1 of 2"))


@pytest.mark.parametrize("way", ["is killed", "raises", "returns"])
def test_what_a_rank_has_left_ends_with_it(way: str) -> None:
    read, write = os.pipe()  # at its end once nobody is left who could write

    def work(ctx: Context) -> None:
        if os.fork() == 0:
            time.sleep(3600)
            os._exit(0)
        wait_for_everyone(ctx)
        if ctx.rank == 1 and way == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if ctx.rank == 1 and way == "raises":
            raise OSError("no such disk")
        wait_for_everyone(ctx)

    try:
        with contextlib.suppress(DistributedError, OSError):
            run_ranks(work, 2, "processes", timeout_s=10)
        os.close(write)
        write = -1
        ended, _, _ = select.select([read], (), (), 10.0)
        assert ended
    finally:
        os.close(read)
        if write != -1:
            os.close(write)


@pytest.mark.slow
def test_a_rank_that_lingers_after_another_has_told_why_is_not_the_cause() -> None:
    def work(ctx: Context) -> None:
        if ctx.rank == 0:
            wait_for_everyone(ctx)
        try:
            with failing_together(ctx, "reading"):
                raise OSError("no such disk")
        finally:
            time.sleep(3600)

    with pytest.raises(RemoteRankError, match="rank 1 failed in reading: OSError: no such disk") as caught:
        run_ranks(work, 2, "processes", timeout_s=60)
    for note in getattr(caught.value, "__notes__", ()):  # Python 3.11 and later
        said, _, stack = note.partition("\nStacks of rank 1:\n")
        assert said == "raised on rank 0 of 2 (processes); did not end in time: rank 1"
        assert "in work" in stack


def test_threads_of_a_world_before_leave_no_lock_behind() -> None:
    """Their libraries give memory back under locks, after Python has joined them."""

    def work(ctx: Context) -> None:
        torch.nn.Linear(8, 16)(torch.ones(8, 8))  # in MKL's buffers

    for _ in range(5):
        run_ranks(work, 4)
        run_ranks(work, 1, "processes", timeout_s=60)


@pytest.mark.parametrize("cannot", ["compute", "connect"])
def test_ranks_of_which_one_cannot_begin_are_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cannot: str
) -> None:
    """As after a fork beside a thread that held a lock of a library."""
    module: Any = torch.nn.functional if cannot == "compute" else torch.distributed
    name = "linear" if cannot == "compute" else "TCPStore"
    runs = tmp_path / "runs"
    begin: Any = getattr(module, name)
    parent = os.getpid()

    def wait_for_a_lock(*args: Any, **options: Any) -> Any:
        if os.getpid() != parent:
            with contextlib.suppress(FileExistsError):
                (tmp_path / "waits").touch(exist_ok=False)
                time.sleep(3600)
        return begin(*args, **options)

    def work(ctx: Context) -> int:
        with runs.open("ab") as file:
            file.write(b".")
        return ctx.rank

    monkeypatch.setattr(module, name, wait_for_a_lock)
    assert run_ranks(work, 3, "processes", timeout_s=60) == [0, 1, 2]
    assert (tmp_path / "waits").exists()
    assert runs.stat().st_size == 3


def test_no_rank_collects_what_its_parent_left() -> None:
    class Seen:
        collecting: bool | None = None

    seen = Seen()

    def look(one: Seen) -> None:
        one.collecting = gc.isenabled()

    # Runs in a child before anything of ours does.
    multiprocessing.util.register_after_fork(seen, look)

    def work(ctx: Context) -> tuple[bool | None, bool, bool]:
        return seen.collecting, gc.isenabled(), gc.get_freeze_count() > 0

    assert run_ranks(work, 2, "processes") == [(False, True, True)] * 2
    assert gc.isenabled()


def test_ranks_end_with_their_parent() -> None:
    told, tell = multiprocessing.Pipe(duplex=False)

    def work(ctx: Context) -> None:
        tell.send(ctx.rank)
        time.sleep(3600)

    parent = multiprocessing.get_context("fork").Process(
        target=lambda: run_ranks(work, 2, "processes", timeout_s=None)
    )
    parent.start()
    tell.close()
    assert sorted(told.recv() for _ in range(2) if told.poll(60)) == [0, 1]
    parent.kill()
    parent.join(20)
    assert told.poll(30)  # all other ends of this pipe close with the ranks
    with pytest.raises(EOFError):
        told.recv()
