"""Checkpoints and weights in a real S3 server, which may be killed, lose its bucket, or see programs die."""

import time
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import accelfn as af
from accelfn.bigmodel import load_checkpoint_and_dispatch
from accelfn.checkpoint import Keep, find_checkpoints, find_files, folder_for_files, verify_checkpoint
from accelfn.context import Context
from accelfn.errors import DamagedCheckpointError, RemoteRankError
from accelfn.storage.disk import list_names
from accelfn.storage.object_store import disk_at, open_binary
from accelfn.testing import run_ranks
from tests.checkpoint.campaign import Program, kill_while_saving
from tests.storage.s3 import Server, s3_server

pytest.importorskip("s3fs")
pytest.importorskip("moto")
pytestmark = pytest.mark.slow

# More than two parts of a multipart upload.
SIZE = 18_000_000


@pytest.fixture
def server() -> Generator[Server, None, None]:
    with s3_server() as found:
        yield found


def tree(step: int) -> dict[str, Any]:
    return {"x": torch.arange(SIZE) + step, "y": torch.full((5,), float(step)), "step": step}


def empty() -> dict[str, Any]:
    return {"x": torch.zeros(SIZE, dtype=torch.int64), "y": torch.zeros(5), "step": 0}


def loaded(place: str) -> int:
    found = cast("Any", af.load_latest(Context(), place, empty()))
    step = int(found["step"])
    assert torch.equal(found["x"], tree(step)["x"])
    assert torch.equal(found["y"], tree(step)["y"])
    return step


def test_checkpoints_are_saved_loaded_verified_and_removed(server: Server) -> None:
    place = f"{server.address}/runs"
    for step in (1, 2, 3):
        saved: Any = af.save_state(
            Context(), f"{place}/{step}", tree(step), step == 2, step=step, keep=Keep(last=2)
        )
        assert str(saved.result() if step == 2 else saved) == f"{place}/{step}"
    assert loaded(place) == 3
    assert [path.name for path in find_checkpoints(place)] == ["2", "3"]
    assert verify_checkpoint(place).num_bytes > 8 * SIZE
    af.save_state(Context(), f"{place}/3", tree(4), step=4)  # in place of the other one
    assert loaded(place) == 4
    file, *_ = (name for name in list_names(disk_at(place), f"{place}/3") if "tensors" in name)
    disk = disk_at(place)
    disk.remove_file(f"{place}/3/{file}")
    with pytest.raises(DamagedCheckpointError, match=file):
        verify_checkpoint(f"{place}/3")


def test_ranks_are_processes_that_share_it(server: Server) -> None:
    place = f"{server.address}/runs"

    def run(ctx: Context) -> float:
        model = nn.Linear(300, 300)
        model, optimizer = af.prepare(ctx, model, torch.optim.AdamW(model.parameters()))
        model(torch.ones(2, 300)).sum().backward()
        optimizer.step()  # pyright: ignore[reportUnknownMemberType]
        value: dict[str, Any] = {"model": model, "optimizer": optimizer, "own": torch.tensor(float(ctx.rank))}
        before = [one.detach().clone() for one in model.parameters()]
        with folder_for_files(ctx, f"{place}/1") as folder:
            if ctx.is_main_process:
                (folder / "notes.txt").write_text("the best")
            af.save_state(ctx, f"{place}/1", value, files=folder)
        for one in model.parameters():
            one.data.zero_()
        back: Any = af.load_latest(ctx, place, {**value, "own": torch.tensor(-1.0)})
        assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
        with open_binary(find_files(ctx, place) / "notes.txt") as file:
            assert file.read() == b"the best"
        return float(back["own"])

    mesh = af.ParallelismConfig(dp_shard_size=2)
    assert run_ranks(run, 2, on="processes", parallelism_config=mesh) == [0, 1]


@pytest.mark.parametrize(("size", "safe"), [("10GB", True), ("20MB", True), ("20MB", False)])
def test_weights(size: str, safe: bool, server: Server, tmp_path: Path) -> None:
    place = f"{server.address}/net"
    model, other = nn.Sequential(nn.Linear(3000, 3000), nn.Linear(3000, 3)), nn.Linear(3, 3)
    af.save_model(Context(), other, place, "1KB")
    files = af.save_model(Context(), model, place, size, safe)
    assert sorted(path.name for path in files) == sorted(list_names(disk_at(place), place))
    again = nn.Sequential(nn.Linear(3000, 3000), nn.Linear(3000, 3))
    af.load_model(again, place)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), again.parameters(), strict=True))
    with af.bigmodel.init_empty_weights():
        again = nn.Sequential(nn.Linear(3000, 3000), nn.Linear(3000, 3))
    again = load_checkpoint_and_dispatch(
        again, place, device_map={"0": "disk", "1": "cpu"}, offload_folder=tmp_path
    )
    assert torch.equal(again(torch.ones(3000)), model(torch.ones(3000)))


def test_a_bucket_that_is_missing_or_vanishes_is_an_error(server: Server) -> None:
    with pytest.raises(FileNotFoundError, match="s3://nosuch/run"):
        af.save_state(Context(), "s3://nosuch/run", {"step": 1})

    def on_each_rank(ctx: Context) -> None:
        with pytest.raises((FileNotFoundError, RemoteRankError), match="bucket does not exist"):
            af.save_state(ctx, "s3://nosuch/run", {"own": torch.tensor(ctx.rank)})

    run_ranks(on_each_rank, 2)
    handle = af.save_state(Context(), f"{server.address}/run", tree(1), True)
    time.sleep(0.1)
    server.reset()
    with pytest.raises(OSError, match="s3://bucket/run"):
        handle.result()
    server.make_bucket()
    af.save_state(Context(), f"{server.address}/run", tree(2))
    assert loaded(server.address) == 2


def test_a_server_that_dies_is_an_error_on_all_ranks(server: Server) -> None:
    def run(ctx: Context) -> str:
        server.process.kill()
        with pytest.raises(Exception, match="EndpointConnectionError") as caught:
            af.save_state(ctx, f"{server.address}/run", {"x": torch.ones(3), "own": torch.tensor(ctx.rank)})
        return type(caught.value).__name__

    assert {"OSError"} <= {*run_ranks(run, 2)} <= {"OSError", "RemoteRankError"}


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("place", ["replaced", "rotated"])
def test_programs_that_are_killed_while_they_upload_lose_nothing(
    place: Any, background: bool, server: Server
) -> None:
    program = Program(1, place=place, background=background)
    report = kill_while_saving(f"{server.address}/runs", 8, program)
    assert report.lost == []
    assert report.saves > 0
