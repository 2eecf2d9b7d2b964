"""Bytes get to their places, whatever the pieces, and files that change are noticed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn.bigmodel import weight_files as read
from accelfn.bigmodel.weight_files import Reading, open_checkpoint, read_tensors
from accelfn.errors import DamagedCheckpointError
from tests.bigmodel.load import program
from tests.bigmodel.load.layouts import write

ROOT = Path(__file__).parents[3]
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn)


@given(
    shapes=st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=5),
    stored=st.sampled_from(DTYPES),
    wanted=st.sampled_from(DTYPES),
    piece=st.sampled_from([16, 64, 1 << 23]),
    step=st.sampled_from([8, 48, 1 << 20]),
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
        readings = [Reading(opened.tensors[name], target) for name, target in targets.items()]
        read_tensors(readings, opened.file_ids, done.append)
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
    with pytest.raises(DamagedCheckpointError, match=r"m\.safetensors was modified"):
        read_tensors([Reading(opened.tensors["w"], target)], opened.file_ids)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", ["own", "bfloat16"])
def test_the_model_is_in_memory_once(dtype: str, tmp_path: Path) -> None:
    """In a process of its own (some seconds); of 160 MB, so that what libraries take is little."""
    weight = torch.zeros(program.SHAPE)
    write(tmp_path / "small.safetensors", {"0.weight": weight})
    write(tmp_path / "m.safetensors", {f"{number}.weight": weight for number in range(program.COUNT)})
    done = subprocess.run(
        (sys.executable, "-m", "tests.bigmodel.load.program", str(tmp_path), dtype),
        cwd=ROOT,
        # Freed memory is returned to the system at once; if it were reused, it wouldn't count.
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "MALLOC_MMAP_THRESHOLD_": "65536",
        },
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    once, twice = map(float, done.stdout.split())
    assert 0.95 < once < 1.1
    assert twice > 1.9  # what is held twice is seen
