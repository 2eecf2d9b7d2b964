import contextlib
import io
import os
import pickle
import random
import sys
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn.checkpoint.torch_file import (
    RefusedPickleError,
    read_pickle,
    read_torch_file,
    read_torch_stream,
)
from accelfn.errors import CheckpointError, DamagedCheckpointError

np: Any = pytest.importorskip("numpy")

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16),
    *(torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn),
    *(torch.uint16, torch.uint32, torch.uint64),
)


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal in type and every bit."""
    kind = cast("Any", type(a))
    if issubclass(kind, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and as_bytes(a) == as_bytes(b)
    if issubclass(kind, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if kind is not type(b):
        return False
    if issubclass(kind, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if issubclass(kind, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def as_bytes(tensor: Any) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def saved(value: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream


def tensors() -> st.SearchStrategy[torch.Tensor]:
    def make(dtype: torch.dtype, shape: list[int], seed: int) -> torch.Tensor:
        size = torch.Size(shape).numel() * dtype.itemsize
        data = bytearray(random.Random(seed).randbytes(size))
        if dtype == torch.bool:
            data = bytearray(byte & 1 for byte in data)
        flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
        return flat.reshape(shape)

    shapes = st.lists(st.integers(0, 3), max_size=3)
    return st.builds(make, st.sampled_from(DTYPES), shapes, st.integers(0, 99))


def trees() -> st.SearchStrategy[Any]:
    plain = (
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text()
        | st.binary()
        | st.complex_numbers()
    )
    keys = st.text() | st.integers()
    return st.recursive(
        plain | tensors(),
        lambda inner: (
            st.lists(inner)
            | st.tuples(inner, inner)
            | st.dictionaries(keys, inner)
            | st.dictionaries(keys, inner).map(OrderedDict)
        ),
        max_leaves=12,
    )


@given(trees())
def test_anything_that_torch_saves_is_read(tree: Any) -> None:
    assert same(read_torch_stream(saved(tree), "tree"), tree)


@pytest.mark.parametrize(
    "value",
    [
        *({1, 2}, frozenset({3}), bytearray(b"ab"), Counter("aab"), torch.Size([1, 2]), 2**80, -(2**80)),
        *(torch.device("cuda", 1), torch.bfloat16, "x" * 300, b"\x00\xff" * 300),
        *(np.float64(0.5), np.int64(3), np.bool_(True), np.str_("a"), np.arange(6, dtype=">u4")),
        *(np.arange(6).reshape(2, 3).T, np.array(["a", "bc"]), np.zeros((0, 2)), np.array([True])),
    ],
    ids=repr,
)
def test_other_plain_values_are_read(value: Any) -> None:
    assert same(read_torch_stream(saved([value, value]), "value"), [value, value])


def test_shared_memory_is_shared_again() -> None:
    whole: Any = torch.arange(12.0)
    read = read_torch_stream(saved({"whole": whole, "part": whole[2:8].view(2, 3).T, "again": whole}), "file")
    assert read["part"].tolist() == whole[2:8].view(2, 3).T.tolist()
    read["whole"][2] = 99.0
    assert read["part"][0, 0] == 99.0
    assert read["again"].data_ptr() == read["whole"].data_ptr()


def test_parameters_become_tensors() -> None:
    read = read_torch_stream(saved(torch.nn.Parameter(torch.ones(2))), "file")
    assert type(read) is torch.Tensor
    assert not read.requires_grad


class Bomb:
    """Makes a folder if it is unpickled."""

    def __init__(self, path: Path, call: Any = os.mkdir) -> None:
        self.path = path
        self.call = call

    def __reduce__(self) -> Any:
        return self.call, (str(self.path),)


def test_code_is_named_and_not_run(tmp_path: Path) -> None:
    path = tmp_path / "optimizer.bin"
    torch.save({"state": [Bomb(tmp_path / "crater")]}, path)
    with pytest.raises(CheckpointError, match=r"optimizer\.bin .* asks for posix\.mkdir, which was not run"):
        read_torch_file(path)
    assert not (tmp_path / "crater").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "crater").exists()  # the bomb works


@pytest.mark.parametrize(
    "call",
    [os.kill, eval, exec, __import__, getattr, pickle.loads, torch.load, zipfile.ZipFile, Path, type],
)
def test_other_functions_are_refused(call: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="asks for"):
        read_torch_stream(saved(Bomb(tmp_path / "crater", call)), "file")


def test_torchs_list_of_safe_globals_has_no_effect(tmp_path: Path) -> None:
    with torch.serialization.safe_globals([os.mkdir]):
        with pytest.raises(CheckpointError, match="mkdir"):
            read_torch_stream(saved(Bomb(tmp_path / "crater")), "file")
    assert not (tmp_path / "crater").exists()


def safe_list() -> set[Any]:
    serialization: Any = torch.serialization
    return set(serialization.get_safe_globals())


def test_reading_does_not_change_torchs_list_of_safe_globals() -> None:
    stream = saved({"key": np.arange(3, dtype=np.uint32)})
    with torch.serialization.safe_globals([np.ndarray]):
        before = safe_list()
        read_torch_stream(stream, "file")
        assert safe_list() == before


SIZE = b"ctorch\nSize\n"


@pytest.mark.parametrize(
    "data",
    [
        b"(S'touch crater'\nios\nsystem\n.",  # INST
        b"(cos\nsystem\nS'touch crater'\no.",  # OBJ
        b"\x82\x01.",  # EXT1
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",  # STACK_GLOBAL
        b"\x80\x02K\x01Q.",  # a persistent id
        b"Nr\xff\xff\xff\x7f.",  # PUT with a huge number
        SIZE + b"}b.",  # a state for the class torch.Size, which would change it globally
        SIZE + b"N}S'value'\nNs\x86b.",  # an attribute of the class
        SIZE + b"N}S'__class__'\nNs\x86b.",
        b"cbuiltins\ngetattr\n.",
        b"ctorch\n_dynamo\n.",  # a module that torch imports lazily
        b"ctorch\nload\n.",
    ],
)
def test_pickles_with_code_are_refused(data: bytes) -> None:
    before = set(sys.modules)
    with pytest.raises(RefusedPickleError):
        read_pickle(data)
    assert set(sys.modules) == before
    assert read_pickle(SIZE + b"((K\x02ttR.") == torch.Size([2])


class Stateful:
    """A tensor with a state. BUILD would call ``Tensor.__setstate__``, which sets hooks and memory."""

    def __reduce__(self) -> Any:
        rebuild: Any = getattr(torch, "_utils")._rebuild_parameter  # noqa: B009 -- untyped
        return rebuild, (torch.ones(2), False, OrderedDict()), (True, None, {0: None})


def test_a_state_for_a_tensor_is_refused() -> None:
    with pytest.raises(CheckpointError, match="a state for an object that has none"):
        read_torch_stream(saved(Stateful()), "file")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"N",
        b"a.",
        b"(.",
        b"]]s.",
        b"t.",
        SIZE + b"K\x05R.",
        b"ctorch\nfloat32\n)R.",
        b"h\x05.",
        b"K\x01}b.",
    ],
)
def test_malformed_pickles_are_value_errors(data: bytes) -> None:
    with pytest.raises(ValueError, match="is inconsistent"):
        read_pickle(data)


@given(st.binary(max_size=40))
def test_arbitrary_bytes_raise_only_these_errors(data: bytes) -> None:
    with contextlib.suppress(RefusedPickleError, ValueError):
        read_pickle(data)


EXAMPLE = {"a": torch.arange(5.0), "b": [1, "two", (3.0, None)], "c": np.arange(4, dtype=np.uint32)}
BYTES = saved(EXAMPLE).getvalue()


@given(st.integers(0, len(BYTES) - 1), st.integers(1, 255))
def test_a_changed_byte_is_detected_or_harmless(place: int, change: int) -> None:
    data = bytearray(BYTES)
    data[place] ^= change
    try:
        read = read_torch_stream(io.BytesIO(data), "file")
    except CheckpointError:
        return
    assert same(read, EXAMPLE)


@given(st.integers(0, len(BYTES) - 1))
def test_a_truncated_file_is_damaged(length: int) -> None:
    with pytest.raises(DamagedCheckpointError, match=r"optimizer\.bin") as caught:
        read_torch_stream(io.BytesIO(BYTES[:length]), "optimizer.bin")
    assert caught.value.file == "optimizer.bin"


Change = Callable[[str, bytes], bytes | None]


def unchanged(name: str, data: bytes) -> bytes:
    return data


def without(ending: str, instead: Callable[[bytes], bytes] | None = None) -> Change:
    def change(name: str, data: bytes) -> bytes | None:
        if name.endswith(ending):
            return instead(data) if instead else None
        return data

    return change


def rewritten(change: Change, compression: int = zipfile.ZIP_STORED) -> io.BytesIO:
    """Write the example with changed entries and valid checksums."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(BYTES)) as old, zipfile.ZipFile(out, "w", compression) as new:
        for name in old.namelist():
            entry = change(name, old.read(name))
            if entry is not None:
                new.writestr(name, entry)
    return out


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (rewritten(unchanged, zipfile.ZIP_DEFLATED), "compressed"),
        (rewritten(without("byteorder", lambda data: b"big")), "endian"),
        (rewritten(without("data.pkl")), r"no data\.pkl"),
        (rewritten(without("data/0", lambda data: data[:4])), "beyond its storage"),
        (rewritten(without("data/0")), "data/0"),
    ],
    ids=["compressed", "big-endian", "no pickle", "short storage", "no storage"],
)
def test_inconsistent_archives_are_damaged(stream: io.BytesIO, words: str) -> None:
    with pytest.raises(DamagedCheckpointError, match=words):
        read_torch_stream(stream, "file")


def test_arrays_without_numpy_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = saved([np.arange(6, dtype=np.float32)])
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(CheckpointError, match="NumPy, which is not installed"):
        read_torch_stream(stream, "file")
