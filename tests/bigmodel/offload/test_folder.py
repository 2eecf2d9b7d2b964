"""Weights written to a folder are mapped, and no file is left."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from accelfn.bigmodel import offload_folder as module
from accelfn.bigmodel.offload_folder import write_mapped
from accelfn.bigmodel.weight_files import mapped_from


def test_values_shapes_and_strides_are_kept(tmp_path: Path) -> None:
    given = {
        "plain": torch.randn(3, 4),
        "turned": torch.randn(3, 4).T,
        "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "part": torch.randn(4, 4)[:, :2],
        "none": torch.empty(0, 3),
        "scalar": torch.tensor(3),
        "bits": torch.tensor([True, False]),
        "small": torch.randn(5).to(torch.bfloat16),
    }
    found = write_mapped(tmp_path / "a" / "b", given)
    assert list(found) == list(given)
    for name, tensor in given.items():
        assert torch.equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype
        assert found[name].stride() == (tensor.contiguous() if name == "part" else tensor).stride()
        assert (mapped_from(found[name]) is None) == (name == "none")
    assert list((tmp_path / "a" / "b").iterdir()) == []


def test_tensors_are_aligned_as_in_torch(tmp_path: Path) -> None:
    given = {f"w{size}": torch.full((size,), float(size)) for size in (3, 16, 5, 1000, 7)}
    found = write_mapped(tmp_path, {**given, "last": torch.tensor(True)})
    assert [tensor.data_ptr() % 64 for tensor in found.values()] == [0] * 6
    assert all(torch.equal(found[name], tensor) for name, tensor in given.items())


def test_a_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(module, "map_stored", fail)
    with pytest.raises(OSError, match="no"):
        write_mapped(tmp_path, {"w": torch.zeros(3)})
    assert list(tmp_path.iterdir()) == []


def test_unsupported_dtypes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'w' can't be on the disk: safetensors doesn.t support"):
        write_mapped(tmp_path / "new", {"w": torch.zeros(1, dtype=torch.complex128)})
    assert not (tmp_path / "new").exists()
