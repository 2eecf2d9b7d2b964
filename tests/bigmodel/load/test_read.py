"""Bytes get to their places, whatever the pieces, and files that change are noticed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accelfn.bigmodel.load import read
from accelfn.bigmodel.load.checkpoint import load_checkpoint_in_model
from accelfn.bigmodel.load.read import Reading, read_tensors
from accelfn.bigmodel.load.source import open_checkpoint
from accelfn.context import Context
from accelfn.errors import DamagedCheckpointError
from accelfn.testing import run_ranks
from tests.bigmodel.load.layouts import write

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=5),
    stored=st.sampled_from(DTYPES),
    wanted=st.sampled_from(DTYPES),
    piece=st.sampled_from([16, 64, 1 << 23]),
    step=st.sampled_from([8, 48, 1 << 20]),
    threads=st.booleans(),
    turned=st.booleans(),
    kind=st.sampled_from(["m.safetensors", "m.bin"]),
)
def test_every_element_arrives(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[tuple[int, ...]],
    stored: torch.dtype,
    wanted: torch.dtype,
    piece: int,
    step: int,
    threads: bool,
    turned: bool,
    kind: str,
) -> None:
    path = tmp_path_factory.mktemp("read") / kind
    tensors = {str(number): torch.rand(shape).to(stored) for number, shape in enumerate(shapes)}
    if turned and kind == "m.bin":  # scattered in the file
        tensors = {name: one.mT if one.dim() > 1 else one for name, one in tensors.items()}
    write(path, tensors)
    opened = open_checkpoint(path)
    targets = {name: torch.empty(one.shape, dtype=wanted) for name, one in tensors.items()}
    if turned and kind != "m.bin":  # scattered in memory
        targets = {name: one.mT.contiguous().mT if one.dim() > 1 else one for name, one in targets.items()}
    done: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "PIECE_BYTES", piece)
        patch.setattr(read, "_STEP_BYTES", step)
        patch.setattr(read, "_SMALL_BYTES", 0 if threads else 1 << 20)
        readings = [Reading(opened.tensors[name], target) for name, target in targets.items()]
        read_tensors(readings, opened.stamps, done.append)
    for name, tensor in tensors.items():
        assert torch.equal(targets[name].double(), tensor.to(wanted).double())
    assert sum(done) == sum(one.numel() * one.dtype.itemsize for one in tensors.values())


@pytest.mark.parametrize("change", ["cut", "touched", "replaced"])
def test_a_file_that_changed_is_not_read(change: str, tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write(path, {"w": torch.ones(100)})
    opened = open_checkpoint(path)
    if change == "cut":
        os.truncate(path, path.stat().st_size - 1)
    elif change == "touched":
        os.utime(path, ns=(5, 5))
    else:
        write(tmp_path / "other.safetensors", {"w": torch.zeros(100)})
        os.replace(tmp_path / "other.safetensors", path)
    target = torch.empty(100)
    with pytest.raises(DamagedCheckpointError, match=r"m\.safetensors was changed"):
        read_tensors([Reading(opened.tensors["w"], target)], opened.stamps)


def memory(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def load(count: int, path: Path, dtype: str | None) -> nn.Module:
    model = nn.Sequential(*[nn.Linear(5 << 10, 1 << 10, bias=False, device="meta") for _ in range(count)])
    load_checkpoint_in_model(model, path, {"": "cpu"}, dtype=dtype)
    return model


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_not_much_more_than_the_model_is_in_memory(dtype: str | None, tmp_path: Path) -> None:
    """Of 160 MB, so that what libraries take once is little beside it."""
    weight = torch.zeros(1 << 10, 5 << 10)
    write(tmp_path / "small.safetensors", {"0.weight": weight})
    write(tmp_path / "m.safetensors", {f"{number}.weight": weight for number in range(8)})

    def measure(ctx: Context) -> float:
        if ctx.rank:
            return 1.0
        load(1, tmp_path / "small.safetensors", dtype)
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
        model = load(8, tmp_path / "m.safetensors", dtype)
        return (memory("VmHWM") - before) / sum(one.nbytes for one in model.parameters())

    # In a process of its own, whose memory nobody else uses.
    taken = run_ranks(measure, 2, on="processes")[0]
    # It may be less than the model: memory that the libraries had given back before is used again.
    assert taken < 1.05
