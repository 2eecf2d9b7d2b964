"""Tensors that stay on the disk: equal to what was written, writable, and cheap to copy."""

# torch leaves some of its methods untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn.bigmodel import load_state_dict
from accelfn.storage.disk import REAL_DISK
from accelfn.weights.dtypes import STORED_DTYPES
from accelfn.weights.stored import mapped_from
from accelfn.weights.write import new_entry, write_tensors
from tests.bigmodel.load.layouts import made, same, write

shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def mapped(path: Path) -> Any:
    return load_state_dict(path, {"": "disk"})


@given(st.lists(st.tuples(st.sampled_from([*STORED_DTYPES.values()]), shapes), min_size=1, max_size=6))
def test_mapped_tensors_equal_what_was_written_and_the_file_stays(
    tmp_path_factory: pytest.TempPathFactory, kinds: list[tuple[torch.dtype, tuple[int, ...]]]
) -> None:
    tensors = {f"t{at}": made(dtype, shape, at) for at, (dtype, shape) in enumerate(kinds)}
    path = tmp_path_factory.mktemp("m") / "m.safetensors"
    write_tensors(REAL_DISK, str(path), [new_entry(*item) for item in tensors.items()], {"format": "pt"})
    before = path.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = mapped(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert same(found[name], tensor)
        assert found[name].untyped_storage().nbytes() == tensor.nbytes
        assert (mapped_from(found[name]) is not None) == bool(tensor.numel())
        found[name].view(-1).view(torch.uint8).fill_(1)
    assert path.read_bytes() == before


def test_pickles_and_copies_take_the_bytes_of_one_tensor(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write(path, {"big": torch.zeros(100_000), "small": torch.arange(3.0)})
    small = torch.nn.Parameter(mapped(path)["small"])
    data = pickle.dumps(small)
    assert len(data) < 2000
    assert b"accelfn" not in data
    saved = io.BytesIO()
    torch.save({"small": small}, saved)
    assert len(saved.getvalue()) < 4000
    saved.seek(0)
    twin = copy.deepcopy(small)
    for one in (pickle.loads(data), torch.load(saved, weights_only=True)["small"], twin):
        assert torch.equal(one, small)
        assert mapped_from(one) is None
    twin.data.add_(1)
    assert torch.equal(small, torch.arange(3.0))


def test_a_file_may_go_while_its_tensors_live(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write(path, {"w": torch.arange(1000.0)})
    one = mapped(path)["w"]
    write(tmp_path / "other.safetensors", {"w": torch.zeros(1000)})
    os.replace(tmp_path / "other.safetensors", path)
    assert torch.equal(one, torch.arange(1000.0))


def write_raw(path: Path, tensors: dict[str, Any], num_bytes: int) -> None:
    """Write a header by hand, and zeros that take no space on the disk."""
    head = json.dumps(tensors).encode()
    head += b" " * (-len(head) % 8)
    with open(path, "wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + num_bytes)


def test_misaligned_tensors_are_read(tmp_path: Path) -> None:
    byte: dict[str, Any] = {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}
    number = {**byte, "dtype": "F32", "data_offsets": [1, 5]}
    write_raw(tmp_path / "m.safetensors", {"a": byte, "b": number}, 5)
    found = mapped(tmp_path / "m.safetensors")
    assert torch.equal(found["b"], torch.zeros(1))
    assert [mapped_from(found[name]) is None for name in "ab"] == [False, True]


@pytest.mark.skipif(sys.platform != "linux", reason="other file systems may have no holes")
def test_files_larger_than_memory_are_mapped(tmp_path: Path) -> None:
    size = 1 << 40  # a hole of 1 TB, more than any machine that runs this has
    write_raw(
        tmp_path / "m.safetensors", {"w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}, size
    )
    one = mapped(tmp_path / "m.safetensors")["w"]
    one[1 << 39] = 7
    assert (int(one[1 << 39]), int(one[-1])) == (7, 0)
