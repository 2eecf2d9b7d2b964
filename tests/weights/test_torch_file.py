import contextlib
import io
import os
import pickle
import sys
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accelfn.errors import CheckpointError, DamagedCheckpointError
from accelfn.weights.torch_file import RefusedPickleError, read_pickle, read_torch_file, read_torch_stream
from tests.checkpoint.small import Bomb
from tests.checkpoint.trees import same

np = cast("Any", numpy)  # partly untyped

DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16),
    *(torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn),
    *(torch.uint16, torch.uint32, torch.uint64),
)


def saved(value: Any) -> io.BytesIO:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream


def make(dtype: torch.dtype, shape: list[int]) -> torch.Tensor:
    return torch.randint(0, 2, shape).to(dtype)


TENSORS = st.builds(make, st.sampled_from(DTYPES), st.lists(st.integers(0, 3), max_size=3))
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(), st.complex_numbers()
)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    dicts = st.dictionaries(st.text() | st.integers(), inner)
    return st.lists(inner) | st.tuples(inner, inner) | dicts | dicts.map(OrderedDict)


@given(st.recursive(PLAIN | TENSORS, containers, max_leaves=12))
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
    parameter, tagged = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    cast("Any", tagged).tag = "stored with it"
    for read in read_torch_stream(saved([parameter, tagged]), "file"):
        assert type(read) is torch.Tensor
        assert not read.requires_grad


def test_code_is_named_and_not_run(tmp_path: Path) -> None:
    path = tmp_path / "optimizer.bin"
    torch.save({"state": [Bomb(tmp_path / "crater")]}, path)
    with pytest.raises(CheckpointError, match=r"optimizer\.bin .* asks for posix\.mkdir, which was not run"):
        read_torch_file(path)
    assert not (tmp_path / "crater").exists()
    torch.load(path, weights_only=False)
    assert (tmp_path / "crater").exists()  # the bomb works


@pytest.mark.parametrize(
    "call", [os.kill, eval, exec, __import__, getattr, pickle.loads, torch.load, zipfile.ZipFile, Path, type]
)
def test_other_functions_are_refused(call: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="asks for"):
        read_torch_stream(saved(Bomb(tmp_path / "crater", call)), "file")


def test_torchs_list_of_safe_globals_has_no_effect_and_is_not_changed(tmp_path: Path) -> None:
    serialization: Any = torch.serialization
    with serialization.safe_globals([os.mkdir, np.ndarray]):
        before = set(serialization.get_safe_globals())
        with pytest.raises(CheckpointError, match="mkdir"):
            read_torch_stream(saved(Bomb(tmp_path / "crater")), "file")
        read_torch_stream(saved({"key": np.arange(3, dtype=np.uint32)}), "file")
        assert set(serialization.get_safe_globals()) == before
    assert not (tmp_path / "crater").exists()


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


class WithState:
    """A tensor with a state. BUILD would call ``Tensor.__setstate__``, which sets hooks and memory."""

    def __reduce__(self) -> Any:
        rebuild: Any = getattr(torch, "_utils")._rebuild_parameter  # noqa: B009 -- untyped
        return rebuild, (torch.ones(2), False, OrderedDict()), (True, None, {0: None})


def test_a_state_for_a_tensor_is_refused() -> None:
    with pytest.raises(CheckpointError, match="a state for an object that has none"):
        read_torch_stream(saved(WithState()), "file")


MALFORMED = (b"", b"N", b"a.", b"(.", b"]]s.", b"t.", b"ctorch\nfloat32\n)R.", b"h\x05.", b"K\x01}b.")


@pytest.mark.parametrize("data", [*MALFORMED, SIZE + b"K\x05R."])
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


def rewritten(
    ending: str = "?",
    instead: Callable[[bytes], bytes] | None = None,
    *,
    compression: int = zipfile.ZIP_STORED,
) -> io.BytesIO:
    """Write the example with valid checksums, and one entry changed or left out."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(BYTES)) as old, zipfile.ZipFile(out, "w", compression) as new:
        for name in old.namelist():
            content = old.read(name)
            if not name.endswith(ending):
                new.writestr(name, content)
            elif instead is not None:
                new.writestr(name, instead(content))
    return out


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (rewritten(compression=zipfile.ZIP_DEFLATED), "compressed"),
        (rewritten("byteorder", lambda data: b"big"), "endian"),
        (rewritten("data.pkl"), r"no data\.pkl"),
        (rewritten("data/0", lambda data: data[:4]), "beyond its storage"),
        (rewritten("data/0"), "data/0"),
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
