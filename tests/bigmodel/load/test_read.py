"""Bytes get to their places, whatever the pieces, and files that change are noticed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn.bigmodel.load import read
from accelfn.bigmodel.load.read import Reading, read_tensors
from accelfn.bigmodel.load.source import open_checkpoint
from accelfn.errors import DamagedCheckpointError
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


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_not_much_more_than_the_model_is_in_memory(dtype: str | None, tmp_path: Path) -> None:
    """In a process of its own, of 160 MB, so that what libraries take once is little beside it."""
    write(
        tmp_path / "m.safetensors", {f"{number}.weight": torch.zeros(1 << 10, 5 << 10) for number in range(8)}
    )
    program = f"""
        import torch
        from pathlib import Path
        from torch import nn
        from accelfn.bigmodel.load.checkpoint import load_checkpoint_in_model

        def memory(field):
            lines = Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))

        def load(count, path):
            kind = dict(bias=False, device="meta")
            model = nn.Sequential(*[nn.Linear(5 << 10, 1 << 10, **kind) for _ in range(count)])
            load_checkpoint_in_model(model, path, {{"": "cpu"}}, dtype={dtype!r})
            return model

        import safetensors.torch
        folder = Path({str(tmp_path)!r})
        warm = folder / "warm.safetensors"
        safetensors.torch.save_file({{"0.weight": torch.zeros(1 << 10, 5 << 10)}}, warm)
        load(1, warm)
        before = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        model = load(8, folder / "m.safetensors")
        size = sum(one.numel() * one.element_size() for one in model.parameters())
        taken = memory("VmHWM") - before
        assert size * 0.8 < taken < size * 1.05, (taken, size)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=120)
