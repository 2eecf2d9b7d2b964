"""Bytes in safetensors files: verified, in little memory; and headers that aren't sound."""

import contextlib
import json
import math
import os
import struct
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

import accelfn as af
from accelfn.checkpoint.find import OpenCheckpoint, read_checkpoint
from accelfn.checkpoint.read import Box, copy_elements, read_boxes
from accelfn.errors import CheckpointMismatchError, DamagedCheckpointError
from accelfn.storage.disk import REAL_DISK
from accelfn.tree.digest import split_flat
from accelfn.weights.write import CHUNK_BYTES, SUMS
from tests.checkpoint.small import flip, same_bits
from tests.checkpoint.watched_disk import installed
from tests.checkpoint.weights.models import Bag

TENSORS = "tensors-00000.safetensors"


def test_stock_safetensors_reads_the_files(tmp_path: Path) -> None:
    tree = {
        "b": torch.tensor([1, 2], dtype=torch.int16),
        "a": torch.tensor([True]),
        "c": torch.ones(3).bfloat16(),
    }
    found = load_file(af.save_tree(tmp_path / "at", tree) / TENSORS)
    assert all(same_bits(found[name], tensor) for name, tensor in tree.items())


def test_a_large_tensor_has_a_checksum_for_each_chunk_and_the_damaged_one_is_named(tmp_path: Path) -> None:
    path = af.save_tree(tmp_path / "at", {"large": torch.ones(CHUNK_BYTES // 4 + 5000)})
    assert load_file(path / TENSORS)[SUMS].shape == (2,)
    flip(path / TENSORS, -5000 * 4 - 2 * 4 - 1)
    with pytest.raises(DamagedCheckpointError, match=r"tensors-00000.*bytes 0 to 67108864.*'large'"):
        af.load_tree(path)


def memory(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{field}:")[2].split()[0]) << 10


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system doesn't count memory so")
def test_a_tensor_that_is_not_contiguous_takes_little_memory(tmp_path: Path) -> None:
    large = torch.ones(4000, 4000).T
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    af.save_model(af.Context(), Bag(x=large), tmp_path)
    assert memory("VmHWM") - before < 40 << 20 < large.nbytes


def test_partial_writes_and_reads_are_continued_unless_nothing_comes(tmp_path: Path) -> None:
    def write(descriptor: int, content: memoryview, place: int) -> int:
        return REAL_DISK.write(descriptor, content[:1000], place)

    def read(descriptor: int, target: memoryview, place: int) -> int:
        return REAL_DISK.read(descriptor, target[:999], place)

    def write_nothing(descriptor: int, content: memoryview, place: int) -> int:
        return 0

    def end_early(descriptor: int, target: memoryview, place: int) -> int:
        return REAL_DISK.read(descriptor, target[:500], place) if not 20_000 <= place < 39_000 else 0

    tree = {"x": torch.arange(5000)}
    with installed(replace(REAL_DISK, write=write, read=read)):
        path = af.save_tree(tmp_path / "at", tree)
        assert torch.equal(af.load_tree(path)["x"], tree["x"])
    with installed(replace(REAL_DISK, write=write_nothing)):
        with pytest.raises(OSError, match=r"nothing could be written.*/tensors-00000"):
            af.save_tree(tmp_path / "other", tree)
    with pytest.raises(DamagedCheckpointError, match="became shorter") as caught:
        af.verify_checkpoint(path, disk=replace(REAL_DISK, read=end_early))
    assert caught.value.file == TENSORS


# --- headers -------------------------------------------------------------------------------------


def head(said: object) -> bytes:
    text = said if isinstance(said, bytes) else json.dumps(said).encode()
    return struct.pack("<Q", len(text)) + text


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


SOUND = head({"a": entry(), "b": entry(offsets=[8, 16])})
# A header, and how many bytes come after it.
HOSTILE: Mapping[str, tuple[bytes, int]] = {
    "empty": (b"", 0),
    "cut in the length": (b"\1\0\0", 0),
    "no header": (struct.pack("<Q", 0), 0),
    "longer than the file": (struct.pack("<Q", 1 << 20) + b"{}", 0),
    "longer than any": (struct.pack("<Q", 100_000_001) + b"{}", 1 << 28),
    "as long as 64 bits": (struct.pack("<Q", (1 << 64) - 1) + b"{}", 0),
    "a list": (head([]), 0),
    "spaces before": (head(b" {}"), 0),
    "text after": (head(b"{} x"), 0),
    "not UTF-8": (head(b'{"\xff":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), 0),
    "UTF-16": (head('{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'.encode("utf-16")), 0),
    "half a surrogate pair": (head(b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), 0),
    "cut JSON": (head(b'{"a":{"dtype":"F32"'), 8),
    "deep": (head(b"[" * 200_000), 0),
    "overlapping": (head({"a": entry(), "b": entry(offsets=[4, 12])}), 12),
    "a hole": (head({"a": entry(), "b": entry(offsets=[12, 20])}), 20),
    "bytes after": (SOUND, 17),
    "too short": (SOUND, 15),
    "no tensors, but bytes": (head({}), 1),
    "a key twice": (head(b'{"a":%s,"a":%s}' % ((json.dumps(entry()).encode(),) * 2)), 8),
    "unknown dtype": (head({"a": entry("F128")}), 8),
    "another dtype": (head({"a": entry("F64")}), 8),
    "half a byte": (head({"a": entry("F4", [1], [0, 0])}), 0),
    "negative shape": (head({"a": entry(shape=[-2])}), 8),
    "shape is a float": (head({"a": entry(shape=[2.0])}), 8),
    "shape is a boolean": (head({"a": entry(shape=[True, 2])}), 8),
    "shape is a number": (head({"a": entry(shape=2)}), 8),
    "shape is missing": (head({"a": {"dtype": "F32", "data_offsets": [0, 8]}}), 8),
    "a field more": (head({"a": {**entry(), "extra": 1}}), 8),
    "a tensor is a number": (head({"a": 3}), 8),
    "wraps 64 bits": (head({"a": entry(shape=[1 << 62, 1 << 62], offsets=[0, 0])}), 0),
    "wraps to the right length": (head({"a": entry(shape=[(1 << 62) + 2])}), 8),
    "empty but huge": (head({"a": entry(shape=[0, 1 << 62, 1 << 62], offsets=[0, 0])}), 0),
    "more than 64 bits": (head({"a": entry(shape=[1 << 64], offsets=[0, 1 << 66])}), 0),
    "many digits": (head(b'{"a":{"dtype":"U8","shape":[%s],"data_offsets":[0,8]}}' % (b"9" * 100_000)), 8),
    "negative offsets": (head({"a": entry(offsets=[-8, 0])}), 0),
    "offsets backwards": (head({"a": entry(offsets=[8, 0])}), 8),
    "no offsets": (head({"a": entry(offsets=[])}), 8),
    "infinite": (head(b'{"a":{"dtype":"U8","shape":[Infinity],"data_offsets":[0,8]}}'), 8),
    "metadata is a list": (head({"__metadata__": [], "a": entry()}), 8),
    "metadata of numbers": (head({"__metadata__": {"a": 1}, "a": entry()}), 8),
}


def load(folder: Path, content: bytes, rest: int) -> None:
    """Load a file of a model, with some bytes after the header."""
    file = folder / "model.safetensors"
    file.write_bytes(content)
    os.truncate(file, len(content) + rest)
    af.load_model(nn.Linear(2, 2), folder, strict=False)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_header_that_is_not_sound_is_refused_with_the_name_of_the_file(name: str, tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpointError, match=r"model\.safetensors") as caught:
        load(tmp_path, *HOSTILE[name])
    assert caught.value.file == "model.safetensors"


@given(st.integers(0, len(SOUND) - 1), st.integers(1, 255))
def test_a_changed_header_is_sound_or_refused(place: int, mask: int) -> None:
    changed = bytearray(SOUND)
    changed[place] ^= mask
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(DamagedCheckpointError, CheckpointMismatchError):
            load(Path(folder), bytes(changed), 16)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system doesn't count memory so")
def test_a_part_of_the_columns_takes_little_more_memory_than_itself(tmp_path: Path) -> None:
    size = (4096, 4096)
    path = af.save_tree(tmp_path / "at", {"weight": torch.arange(4096).repeat(4096, 1).int()})

    def read(found: OpenCheckpoint) -> torch.Tensor:
        part = found.manifest.tensors["weight"].parts[0]
        box = Box("weight", "weight", "int32", part, (0, 256), (4096, 256))
        target = torch.empty(box.shape or (), dtype=torch.int32)
        read_boxes(REAL_DISK, found.folder, found.manifest, [box], [target])
        return target

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    part = read_checkpoint(REAL_DISK, path, read)
    assert memory("VmHWM") - before < 20 << 20  # a tensor of 64 MiB is stored, of which 4 are wanted
    assert torch.equal(part, torch.arange(256, 512).expand(size[0], 256))


@given(st.data())
def test_a_box_gets_its_elements_from_a_piece_that_is_read_in_parts(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 4), max_size=4))
    piece = torch.arange(math.prod(shape)).view(shape)
    bounds = [sorted(data.draw(st.sets(st.integers(0, size), min_size=2, max_size=2))) for size in shape]
    box = piece[tuple(slice(low, high) for low, high in bounds)]
    target = torch.zeros([2 * size for size in box.shape], dtype=torch.int64)
    target = target[tuple(slice(None, None, 2) for _ in shape)]
    start, offset = 0, [low for low, _ in bounds]
    for part in split_flat(piece, data.draw(st.integers(1, 7))):
        copy_elements(target, offset, shape, start, part)
        start += len(part)
    assert torch.equal(target, box)
