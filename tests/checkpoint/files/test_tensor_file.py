"""Bytes in safetensors files: written as stock readers read them, and read back verified."""

import errno
import json
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn.checkpoint.disk import REAL_DISK, opened
from accelfn.checkpoint.files import Box, NewEntry, new_entry, read_boxes, write_tensors
from accelfn.checkpoint.header import check_safetensors_header, format_header, stored_form
from accelfn.checkpoint.manifest import CHUNK_BYTES, Manifest, parse_manifest
from accelfn.errors import DamagedCheckpointError
from tests.checkpoint.small import load_small, same_bits, save_small

DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
    *(torch.uint64, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
    *(torch.complex32, torch.float4_e2m1fn_x2),
)


def filled(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    numel = torch.Size(shape).numel()
    draw = torch.Generator().manual_seed(seed)
    high = 2 if dtype == torch.bool else 256
    content = torch.randint(0, high, (numel * dtype.itemsize,), dtype=torch.uint8, generator=draw)
    return content.view(dtype).reshape(shape)


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
trees = st.dictionaries(
    st.text(max_size=8).filter(lambda key: key != "__metadata__" and key.isprintable()),
    st.builds(filled, st.sampled_from(DTYPES), shapes, st.integers(0, 99)),
    max_size=6,
)


@given(trees, trees)
def test_any_tensors_come_back_bit_for_bit(
    tmp_path_factory: pytest.TempPathFactory, one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]
) -> None:
    other = {key: value for key, value in other.items() if key not in one}
    directory = tmp_path_factory.mktemp("made") / "here"
    save_small(directory, one, other)
    loaded = load_small(directory)
    assert loaded.keys() == {**one, **other}.keys()
    assert all(same_bits(loaded[key], value) for key, value in {**one, **other}.items())


@pytest.mark.parametrize("dtype", [one for one in DTYPES if one.itemsize > 1 and one != torch.complex32])
def test_a_tensor_that_is_not_contiguous_is_written_in_logical_order(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    base = filled(dtype, (6, 5))
    views = {"t": base.T, "step": base[::2], "part": base[1:4, 2:], "expanded": base[:1].expand(3, 5)}
    if dtype.is_complex:
        views["conjugate"] = base.conj()
    save_small(tmp_path / "here", views)
    loaded = load_small(tmp_path / "here")
    assert all(same_bits(loaded[key], value.resolve_conj()) for key, value in views.items())


def test_stock_safetensors_reads_the_file(tmp_path: Path) -> None:
    tensors = {f"{dtype}": filled(dtype, (3, 2)) for dtype in DTYPES if dtype != torch.complex128}
    path = tmp_path / "stock.safetensors"
    written = write_tensors(
        REAL_DISK, str(path), [new_entry(key, one) for key, one in tensors.items()], {"format": "pt"}
    )
    assert written.size == path.stat().st_size
    found = safetensors.torch.load_file(path)
    for key, one in tensors.items():
        assert torch.equal(
            found[key].contiguous().view(torch.uint8).flatten(), one.view(torch.uint8).flatten()
        )
    assert found["torch.float8_e5m2"].dtype == torch.float8_e5m2


def test_the_bytes_of_a_file_are_these(tmp_path: Path) -> None:
    path = tmp_path / "golden.safetensors"
    entries = [
        new_entry("b", torch.tensor([1, 2], dtype=torch.int16)),
        new_entry("a", torch.tensor([True])),
        new_entry("c", torch.tensor(1.0)),
    ]
    write_tensors(REAL_DISK, str(path), entries, {"format": "pt"})
    header = (
        b'{"__metadata__":{"format":"pt"},"c":{"dtype":"F32","shape":[],"data_offsets":[0,4]},'
        b'"b":{"dtype":"I16","shape":[2],"data_offsets":[4,8]},'
        b'"a":{"dtype":"BOOL","shape":[1],"data_offsets":[8,9]}}'
    )
    header += b" " * (-(8 + len(header)) % 64)
    assert path.read_bytes() == struct.pack("<Q", len(header)) + header + bytes.fromhex(
        "0000803f 01000200 01"
    )


def test_a_large_tensor_has_a_checksum_for_each_chunk_and_is_read_in_parts(tmp_path: Path) -> None:
    large = torch.arange(CHUNK_BYTES // 4 + 5000, dtype=torch.int32).view(-1, 4)
    save_small(tmp_path / "here", {"large": large, "small": torch.ones(3)})
    with opened(REAL_DISK, str(tmp_path / "here")) as folder:
        manifest = read_manifest(tmp_path / "here")
        piece = manifest.tensors["large"].pieces[0]
        assert len(piece.crc32) == 2
        rows = CHUNK_BYTES // 16
        box = Box("large", "int32", piece, (rows - 2, 0), (5, 4))
        assert torch.equal(read_boxes(REAL_DISK, folder, manifest, [box])[0], large[rows - 2 : rows + 3])
        # Damage in the first chunk: the second one can be read on its own.
        path = tmp_path / "here" / piece.file
        content = bytearray(path.read_bytes())
        content[-len(large) * 16] ^= 1
        path.write_bytes(content)
        last = Box("large", "int32", piece, (rows, 0), (5, 4))
        assert torch.equal(read_boxes(REAL_DISK, folder, manifest, [last])[0], large[rows : rows + 5])
        with pytest.raises(DamagedCheckpointError, match=r"tensors-00000.*bytes 0 to 67108864.*'large'"):
            read_boxes(REAL_DISK, folder, manifest, [box])


def read_manifest(directory: Path) -> Manifest:
    return parse_manifest((directory / "manifest.json").read_bytes())


@given(st.data(), st.sampled_from([torch.float32, torch.uint8, torch.complex128, torch.float4_e2m1fn_x2]))
def test_a_box_is_what_indexing_gives(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, dtype: torch.dtype
) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    offset = tuple(data.draw(st.integers(0, size)) for size in shape)
    box = tuple(data.draw(st.integers(0, size - start)) for size, start in zip(shape, offset, strict=True))
    whole = filled(dtype, shape)
    directory = tmp_path_factory.mktemp("made") / "here"
    save_small(directory, {"x": whole})
    manifest = read_manifest(directory)
    piece = manifest.tensors["x"].pieces[0]
    name = str(dtype).removeprefix("torch.")
    requests = [Box("x", name, piece, offset, box), Box("x", name, piece)]
    with opened(REAL_DISK, str(directory)) as folder:
        part, again = read_boxes(REAL_DISK, folder, manifest, requests)
    place = tuple(slice(start, start + size) for start, size in zip(offset, box, strict=True))
    plain = torch.uint8 if dtype.itemsize == 1 else dtype
    wanted = whole.view(plain)[place].clone().view(dtype)
    assert same_bits(part, wanted)
    assert same_bits(again, whole)


def memory(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.partition(f"{field}:")[2].split()[0]) << 10


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the system doesn't count memory so")
def test_a_tensor_that_is_not_contiguous_takes_little_memory(tmp_path: Path) -> None:
    large = torch.ones(4000, 4000).T
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    write_tensors(REAL_DISK, str(tmp_path / "large"), [new_entry("x", large)], {})
    assert memory("VmHWM") - before < 40 << 20 < large.nbytes


def test_known_checksums_are_taken_over(tmp_path: Path) -> None:
    entry = new_entry("x", torch.arange(5))
    first = write_tensors(REAL_DISK, str(tmp_path / "a"), [entry], {})
    again = write_tensors(REAL_DISK, str(tmp_path / "b"), [entry._replace(crc32=(7,))], {})
    assert len(first.crc32["x"]) == 1
    assert again.crc32["x"] == (7,)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (NewEntry("x", "F99", (2,), torch.ones(2)), "'x' can't be stored as 'F99'"),
        (NewEntry("x", "F4", (3,), torch.ones(2)), "'x' can't be stored as 'F4'"),
        (NewEntry("__metadata__", "F32", (2,), torch.ones(2)), "needs a unique name"),
        (NewEntry("x", "F32", (2,), torch.ones(2, device="meta")), "meta device"),
        (NewEntry("x", "F32", (2,), torch.ones(2).to_sparse()), "sparse"),
    ],
)
def test_what_cannot_be_written_is_refused_before_anything_is(
    tmp_path: Path, entry: NewEntry, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        write_tensors(REAL_DISK, str(tmp_path / "x"), [entry], {})
    assert not list(tmp_path.iterdir())


def test_a_file_is_never_written_over(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"mine")
    with pytest.raises(FileExistsError, match="x"):
        write_tensors(REAL_DISK, str(tmp_path / "x"), [], {})
    assert (tmp_path / "x").read_bytes() == b"mine"


def test_a_full_disk_is_named_with_the_file(tmp_path: Path) -> None:
    def full(descriptor: int, content: memoryview, place: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"No space left.*/weights'"):
        write_tensors(
            replace(REAL_DISK, write=full), str(tmp_path / "weights"), [new_entry("x", torch.ones(10**6))], {}
        )


def test_partial_writes_and_reads_are_continued(tmp_path: Path) -> None:
    def write(descriptor: int, content: memoryview, place: int) -> int:
        return REAL_DISK.write(descriptor, content[:1000], place)

    def read(descriptor: int, target: memoryview, place: int) -> int:
        return REAL_DISK.read(descriptor, target[:999], place)

    disk = replace(REAL_DISK, write=write, read=read)
    save_small(tmp_path / "here", {"x": torch.arange(5000)}, disk=disk)
    assert torch.equal(load_small(tmp_path / "here", disk=disk)["x"], torch.arange(5000))


def test_a_file_that_shrinks_while_it_is_read_is_damaged(tmp_path: Path) -> None:
    save_small(tmp_path / "here", {"x": torch.arange(5000)})

    def short(descriptor: int, target: memoryview, place: int) -> int:
        return REAL_DISK.read(descriptor, target[:500], place) if place < 500 else 0

    disk = replace(REAL_DISK, read=short)
    manifest = read_manifest(tmp_path / "here")
    with opened(REAL_DISK, str(tmp_path / "here")) as folder:
        piece = manifest.tensors["x"].pieces[0]
        with pytest.raises(DamagedCheckpointError, match="became shorter") as caught:
            read_boxes(disk, folder, manifest, [Box("x", "int64", piece)])
    assert caught.value.file == "tensors-00000.safetensors"


# --- headers -------------------------------------------------------------------------------------


def head(said: object) -> bytes:
    text = said if isinstance(said, bytes) else json.dumps(said).encode()
    return struct.pack("<Q", len(text)) + text


def one(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


SOUND = head({"a": one(), "b": one(offsets=[8, 16])})
# A header, and how many bytes come after it.
HOSTILE: Mapping[str, tuple[bytes, int]] = {
    "empty": (b"", 0),
    "cut in the length": (b"\1\0\0", 0),
    "no header": (struct.pack("<Q", 0), 0),
    "longer than the file": (struct.pack("<Q", 1 << 20) + b"{}", 0),
    "longer than any": (struct.pack("<Q", 100_000_001) + b"{}", 1 << 40),
    "as long as 64 bits": (struct.pack("<Q", (1 << 64) - 1) + b"{}", 0),
    "a list": (head([]), 0),
    "a number": (head(b"17"), 0),
    "spaces before": (head(b" {}"), 0),
    "text after": (head(b"{} x"), 0),
    "not UTF-8": (head(b'{"\xff":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), 0),
    "UTF-16": (head('{"a":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'.encode("utf-16")), 0),
    "half a surrogate pair": (head(b'{"\\ud800":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}'), 0),
    "cut JSON": (head(b'{"a":{"dtype":"F32"'), 8),
    "deep": (head(b"[" * 200_000), 0),
    "deep objects": (head(b'{"a":' * 200_000), 0),
    "overlapping": (head({"a": one(), "b": one(offsets=[4, 12])}), 12),
    "the same place": (head({"a": one(), "b": one()}), 8),
    "a hole": (head({"a": one(), "b": one(offsets=[12, 20])}), 20),
    "a hole before": (head({"a": one(offsets=[4, 12])}), 12),
    "bytes after": (SOUND, 17),
    "too short": (SOUND, 15),
    "no tensors, but bytes": (head({}), 1),
    "a key twice": (head(b'{"a":%s,"a":%s}' % ((json.dumps(one()).encode(),) * 2)), 8),
    "a field twice": (
        head(b'{"a":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
        8,
    ),
    "unknown dtype": (head({"a": one("F128")}), 8),
    "dtype is a list": (head({"a": one(["F32"])}), 8),
    "another dtype": (head({"a": one("F64")}), 8),
    "half a byte": (head({"a": one("F4", [1], [0, 0])}), 0),
    "negative shape": (head({"a": one(shape=[-2])}), 8),
    "two negatives": (head({"a": one(shape=[-1, -2])}), 8),
    "shape is a float": (head({"a": one(shape=[2.0])}), 8),
    "shape is a boolean": (head({"a": one(shape=[True, 2])}), 8),
    "shape is a number": (head({"a": one(shape=2)}), 8),
    "shape is missing": (head({"a": {"dtype": "F32", "data_offsets": [0, 8]}}), 8),
    "a field more": (head({"a": {**one(), "extra": 1}}), 8),
    "a tensor is a number": (head({"a": 3}), 8),
    "wraps 64 bits": (head({"a": one(shape=[1 << 62, 1 << 62], offsets=[0, 0])}), 0),
    "wraps to the right length": (head({"a": one(shape=[(1 << 62) + 2])}), 8),
    "empty but huge": (head({"a": one(shape=[0, 1 << 62, 1 << 62], offsets=[0, 0])}), 0),
    "more than 64 bits": (head({"a": one(shape=[1 << 64], offsets=[0, 1 << 66])}), 0),
    "many digits": (head(b'{"a":{"dtype":"U8","shape":[%s],"data_offsets":[0,8]}}' % (b"9" * 100_000)), 8),
    "negative offsets": (head({"a": one(offsets=[-8, 0])}), 0),
    "offsets backwards": (head({"a": one(offsets=[8, 0])}), 8),
    "three offsets": (head({"a": one(offsets=[0, 8, 8])}), 8),
    "no offsets": (head({"a": one(offsets=[])}), 8),
    "infinite": (head(b'{"a":{"dtype":"U8","shape":[Infinity],"data_offsets":[0,8]}}'), 8),
    "metadata is a list": (head({"__metadata__": [], "a": one()}), 8),
    "metadata of numbers": (head({"__metadata__": {"a": 1}, "a": one()}), 8),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_header_that_is_not_sound_is_refused_with_the_name_of_the_file(name: str) -> None:
    content, rest = HOSTILE[name]
    with pytest.raises(DamagedCheckpointError, match=r"here/x\.safetensors") as caught:
        check_safetensors_header(content, len(content) + rest, "/here/x.safetensors")
    assert caught.value.file == "x.safetensors"


def test_a_sound_header_is_read_in_the_order_of_the_file() -> None:
    said = {
        "b": one(offsets=[8, 16]),
        "a": one(),
        "e": one(shape=[0], offsets=[8, 8]),
        "__metadata__": {"k": "v"},
    }
    content = head(said)
    found = check_safetensors_header(content, len(content) + 16)
    assert list(found.entries) == ["a", "e", "b"]
    assert found.entries["b"].start == len(content) + 8
    assert found.metadata == {"k": "v"}


@given(trees, st.integers(0, 10**6), st.integers(1, 255))
def test_a_changed_header_never_reads_as_something_unsound(
    tensors: dict[str, torch.Tensor], place: int, mask: int
) -> None:
    forms = [(key, *stored_form(t.dtype, t.shape)) for key, t in tensors.items()]
    content, places = format_header(forms, {"format": "pt"})
    size = max((entry.stop for entry in places.values()), default=len(content))
    assert check_safetensors_header(content, size).entries == places
    changed = bytearray(content)
    changed[place % len(content)] ^= mask
    try:
        found = check_safetensors_header(bytes(changed), size)
    except DamagedCheckpointError:
        return
    entries: list[Any] = list(found.entries.values())
    assert [entry.start for entry in entries] == [len(content), *(entry.stop for entry in entries)][
        :-1
    ] or not entries


def test_the_forms_of_dtypes_are_those_of_stock_safetensors() -> None:
    for dtype in DTYPES:
        text, shape = stored_form(dtype, (2, 3))
        if dtype in (torch.complex128, torch.complex32):
            assert shape[:2] == (2, 3)
            continue
        content = safetensors.torch.save({"x": filled(dtype, (2, 3))})
        found = check_safetensors_header(content[: 8 + content[0] + 256 * content[1]], len(content))
        assert found.entries["x"].dtype == text
