"""Every operation on the disk fails once: the old checkpoint stays, all ranks hear of it, the next works."""

import errno
import itertools
import json
import os
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import accelfn as af
from accelfn.checkpoint import Keep, SaveHandle
from accelfn.context import Context
from accelfn.errors import NoCheckpointError, RemoteRankError
from accelfn.testing import run_ranks
from tests.checkpoint.small import same_bits
from tests.checkpoint.watched_disk import CHANGES, READINGS, installed, watched

ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES)
# Their errors carry no name of a file, as those of calls that take a descriptor.
BY_DESCRIPTOR = ("write", "sync", "sync_folder")


class Fault(NamedTuple):
    """What failed."""

    kind: str
    path: str


class Failing:
    """Lets one operation on a disk fail, or all from then on."""

    def __init__(self, number: int, code: int, *, for_good: bool = False) -> None:
        self.left = number
        self.code = code
        self.for_good = for_good
        self.fault: Fault | None = None

    def __call__(self, kind: str, path: str) -> None:
        assert kind in (*CHANGES, *READINGS)
        if self.left == 0:
            self.fault = Fault(kind, path)
        self.left -= 1
        if self.left == -1 or (self.for_good and self.left < 0 and self.fault is not None):
            name = () if kind in BY_DESCRIPTOR else (path,)
            raise OSError(self.code, os.strerror(self.code), *name)

    def stop(self) -> None:
        """Let everything succeed from now on."""
        self.left = -2


@contextmanager
def failing(ctx: Context, rank: int, number: int) -> Generator[Failing, None, None]:
    watcher = Failing(number if ctx.rank == rank else -1, ERRORS[number % len(ERRORS)])
    with installed(watched(watcher)):
        yield watcher


def state(step: int, size: int = 5_000) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {**{str(name): torch.randn(size, generator=generator) for name in range(3)}, "step": step}


def check(found: Any, step: int) -> None:
    wanted = state(step, found["0"].numel())
    assert found["step"] == step
    assert all(same_bits(found[str(name)], wanted[str(name)]) for name in range(3))


def error_of(act: Callable[[], object]) -> Exception | None:
    try:
        act()
    except Exception as error:  # noqa: BLE001 -- looked at by the caller
        return error
    return None


def check_error(raised: Exception | None, disk: Failing, folder: Path) -> None:
    """Check that an error, where there is one, is the disk's, and names a file."""
    if raised is not None:
        assert isinstance(raised, OSError), raised
        assert raised.errno == disk.code
        assert str(raised.filename).startswith(str(folder))


def loaded_step(ctx: Context, folder: Path) -> int:
    found = af.load_state(ctx, folder, state(0))
    check(found, found["step"])
    return found["step"]


def is_tidy(at: Path) -> bool:
    """Return whether a checkpoint's directory has no files but those that its manifest names."""
    manifest = json.loads((at / "manifest.json").read_bytes().partition(b"\n")[0])
    return set(os.listdir(at)) == {"manifest.json", *manifest["files"]}


def everywhere(ctx: Context, value: object) -> list[Any]:
    return af.gather_object(ctx, [value]) if ctx.num_processes > 1 else [value]


def fail_at_every_operation(ctx: Context, folder: Path, rank: int, *, rotated: bool, background: bool) -> int:
    """Save with the first, second, ... operation of a rank failing, until a save comes through.

    Returns:
        How many operations failed.
    """

    def save(step: int, disk: Failing | None = None) -> None:
        """Save; if ``disk`` is given, an error in the background is told by the next operation."""
        at = folder / (f"step-{step}" if rotated else "at")
        keep = Keep(last=2) if rotated else None
        handle = af.save_state(ctx, at, state(step), background, step=step, keep=keep)
        if isinstance(handle, SaveHandle):
            if disk is None:
                handle.result()
            else:
                while not handle.done():
                    time.sleep(0.001)
                disk.stop()
                af.load_state(ctx, folder, state(0))

    here = folder if rotated else folder / "at"
    old = 2
    for step in range(old + 1):
        save(step)
    for number in itertools.count():
        before = set(os.listdir(folder))
        everywhere(ctx, None)
        with failing(ctx, rank, number) as disk:
            raised = error_of(partial(save, old + 1, disk if number % 2 else None))
        (fault,) = (one for one, at in everywhere(ctx, (disk.fault, ctx.rank)) if at == rank)
        kinds = everywhere(ctx, None if raised is None else type(raised).__name__)
        if fault is None:
            assert kinds == [None] * ctx.num_processes
            return number
        where = f"{number}: {fault}"
        now = loaded_step(ctx, here)
        if None in kinds:
            # Only the removal of what isn't needed any more may fail without a word.
            assert kinds == [None] * ctx.num_processes, where
            assert fault.kind in ("remove_file", "remove_folder", *READINGS), where
            assert now == old + 1, where
        else:
            if ctx.rank == rank:
                check_error(raised, disk, folder)
            else:
                assert isinstance(raised, RemoteRankError), where
                assert raised.rank == rank, where
            assert now in (old, old + 1), where
            assert now == old + 1 or before == set(os.listdir(folder)), where
            if now == old + 1:  # nobody knows whether the disk has it, or only older ones weren't removed
                assert rotated or (fault.kind, fault.path) == ("sync_folder", str(here)), where
            assert all(map(is_tidy, af.find_checkpoints(folder))), where
        everywhere(ctx, None)  # all have looked
        old += 2
        save(old)
        assert loaded_step(ctx, here) == old, where
        everywhere(ctx, None)
        if fault.kind == "remove_folder" and ctx.rank == rank:
            for path in folder.iterdir():  # an empty directory may stay, which could be anybody's
                if not os.listdir(path):
                    path.rmdir()
        everywhere(ctx, None)
        assert len(os.listdir(folder)) == (2 if rotated else 1), where
        for path in af.find_checkpoints(folder):
            af.verify_checkpoint(path)
            assert is_tidy(path), where
        everywhere(ctx, None)
    raise AssertionError


@pytest.mark.parametrize("background", [False, True], ids=["waiting", "background"])
@pytest.mark.parametrize("rotated", [False, True], ids=["replaced", "rotated"])
@pytest.mark.parametrize(
    ("ranks", "rank"), [(1, 0), pytest.param(2, 0, marks=pytest.mark.slow), (2, 1)], ids=["1-0", "2-0", "2-1"]
)
def test_whatever_fails_the_old_one_stays_and_the_next_save_works(
    tmp_path: Path, ranks: int, rank: int, rotated: bool, background: bool
) -> None:
    def run(ctx: Context) -> int:
        return fail_at_every_operation(ctx, tmp_path / "runs", rank, rotated=rotated, background=background)

    (count, *others) = run_ranks(run, ranks, on="processes") if ranks > 1 else [run(Context())]
    assert others == [count] * (ranks - 1)
    assert count >= (15 if rank == 0 else 2)


@pytest.mark.parametrize(("ranks", "rank"), [(1, 0), (2, 0), (2, 1)])
def test_whatever_fails_in_a_first_save_there_is_none_and_the_next_one_works(
    tmp_path: Path, ranks: int, rank: int
) -> None:
    def run(ctx: Context) -> int:
        for number in itertools.count():
            at = tmp_path / str(number) / "deep" / "at"
            with failing(ctx, rank, number) as disk:
                raised = error_of(partial(af.save_state, ctx, at, state(1)))
            faults = everywhere(ctx, disk.fault)
            if faults[rank] is None:
                assert raised is None
                return number
            if ctx.rank == rank:
                check_error(raised, disk, tmp_path)
            is_new = faults[rank] == Fault("sync_folder", str(at)) and at.exists()
            if raised is not None and not is_new:
                with pytest.raises((NoCheckpointError, RemoteRankError)):
                    loaded_step(ctx, at)
            assert raised is None or is_new or not at.exists(), faults
            everywhere(ctx, None)
            af.save_state(ctx, at, state(2))
            assert loaded_step(ctx, at) == 2
        raise AssertionError

    assert run_ranks(run, ranks, on="processes")[0] >= (12 if rank == 0 else 2)


def test_a_disk_that_fails_for_good_keeps_the_old_one(tmp_path: Path) -> None:
    def run(ctx: Context) -> int:
        af.save_state(ctx, tmp_path / "at", state(1), step=1)
        for number in itertools.count():
            disk = Failing(number, errno.EIO, for_good=True)
            with installed(watched(disk)):
                raised = error_of(lambda: af.save_state(ctx, tmp_path / "at", state(2), step=2))
            check_error(raised, disk, tmp_path)
            assert loaded_step(ctx, tmp_path / "at") in (1, 2)
            af.save_state(ctx, tmp_path / "at", state(1), step=1)
            assert loaded_step(ctx, tmp_path / "at") == 1
            if disk.fault is None:
                return number
        raise AssertionError

    assert run_ranks(run, 1, on="processes")[0] > 12
    assert os.listdir(tmp_path) == ["at"]
    assert is_tidy(tmp_path / "at")


# --- a system that refuses indeed ----------------------------------------------------------------


@pytest.mark.parametrize("background", [False, True], ids=["waiting", "background"])
def test_a_rank_that_may_write_no_more_bytes(tmp_path: Path, background: bool) -> None:
    resource = pytest.importorskip("resource")
    at = tmp_path / "at"

    def save(ctx: Context, step: int, size: int) -> None:
        handle = af.save_state(ctx, at, state(step, size), background)
        if isinstance(handle, SaveHandle):
            handle.result()

    def run(ctx: Context) -> None:
        save(ctx, 1, 5_000)
        if ctx.rank == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, resource.RLIM_INFINITY))
        with pytest.raises((OSError, RemoteRankError), match=os.strerror(errno.EFBIG)):
            save(ctx, 2, 500_000)
        assert loaded_step(ctx, at) == 1
        assert is_tidy(at)
        ctx.collectives.barrier()
        save(ctx, 3, 5_000)
        assert loaded_step(ctx, at) == 3

    run_ranks(run, 2, on="processes")
    assert os.listdir(tmp_path) == ["at"]
