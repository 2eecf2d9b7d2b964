"""Read what ``torch.save`` wrote, without running anything that the file asks for.

The file is a ZIP archive of one pickle and the bytes of each storage. The pickle is read as data (see
``pickle_data``), and the archive's own checksums are verified, which ``torch.load`` doesn't do.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import struct
import sys
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple, TypeAlias, cast

import torch

from accelfn.checkpoint.accelerate.pickle_data import Maker, RefusedPickleError, read_pickle
from accelfn.errors import CheckpointError, DamagedCheckpointError

__all__ = ("TORCH_NAMES", "TakeBytes", "read_torch_file", "read_torch_stream", "refuse_pickle")

# The number that a file of torch before 1.6 begins with, as any protocol of pickle from 2 on writes it.
_OLD_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_STORAGES = (
    *(("FloatStorage", torch.float32), ("DoubleStorage", torch.float64), ("HalfStorage", torch.float16)),
    *(("BFloat16Storage", torch.bfloat16), ("LongStorage", torch.int64), ("IntStorage", torch.int32)),
    *(("ShortStorage", torch.int16), ("CharStorage", torch.int8), ("ByteStorage", torch.uint8)),
    *(("BoolStorage", torch.bool), ("ComplexFloatStorage", torch.complex64)),
    ("ComplexDoubleStorage", torch.complex128),
)
_DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "complex32", "complex64", "complex128", "bool"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
# NumPy's dtypes that are bare numbers or texts, by the letter of their kind.
_ARRAY_KINDS = "biufcUS"


TakeBytes: TypeAlias = Callable[[int, int, int], torch.Tensor]
"""Gives the bytes (uint8) of a storage that lie in the file, from their first byte, length and CRC-32."""


class _Storage(NamedTuple):
    """Bytes in memory, and what they were declared to be."""

    dtype: torch.dtype
    data: torch.Tensor  # uint8, one dimension


class _ArrayDtype(NamedTuple):
    """A dtype of NumPy, as NumPy writes it: ``"<u4"``."""

    text: str


def read_torch_file(path: Path, take: TakeBytes | None = None) -> Any:
    """Return what ``torch.save`` wrote into a file: containers, plain values, and tensors on the CPU.

    Tensors that shared memory share it again. Parameters come as tensors. Arrays of NumPy come as such where
    NumPy is installed, else as tensors.

    Args:
        path: The file.
        take: Gives the bytes of each storage, so that they needn't be read yet. It has to see to their
            checksums itself; without it they are read and verified here.

    Raises:
        CheckpointError: It asks for something that isn't data, or is of the format of torch before 1.6.
        DamagedCheckpointError: It isn't whole, or no such file.
    """
    with open(path, "rb") as file:
        return read_torch_stream(file, path.name, take)


def read_torch_stream(file: BinaryIO, name: str, take: TakeBytes | None = None) -> Any:
    """Do the same for an open file.

    Args:
        file: At any position.
        name: What to call it in errors.
        take: Gives the bytes of each storage.

    Raises:
        CheckpointError: It asks for something that isn't data, or is of the format of torch before 1.6.
        DamagedCheckpointError: It isn't whole, or no such file.
    """
    file.seek(0)
    head = file.read(2 + 9 + len(_OLD_MAGIC))  # from protocol 4 on with a frame around it
    if head[:1] == b"\x80" and head.find(_OLD_MAGIC) >= 2:
        # Other protocols of pickle than the second one torch itself only reads as a program.
        how = "with weights_only=True" if head[1] == 2 else "if you trust it, with weights_only=False"
        raise CheckpointError(
            f"{name} is of the format that torch.save had before torch 1.6 "
            f"(_use_new_zipfile_serialization=False), which isn't read here. Load it by torch.load, {how}, "
            "and save it again, as safetensors if you can."
        )
    try:
        with zipfile.ZipFile(file) as archive:
            return _read_archive(archive, file, file.seek(0, io.SEEK_END), take)
    except RefusedPickleError as error:
        raise refuse_pickle(name, error) from None
    except (
        zipfile.BadZipFile,
        struct.error,
        ValueError,
        LookupError,
        RuntimeError,
        EOFError,
        OSError,
    ) as error:
        raise DamagedCheckpointError(
            f"{name} isn't what torch.save wrote, or is damaged: {error}. Nothing was taken up. Copy it "
            "again from where it was written.",
            name,
        ) from error


def refuse_pickle(name: str, error: RefusedPickleError) -> CheckpointError:
    """Return which file wants what, and what to do."""
    return CheckpointError(
        f"{name} holds more than data: it asks for {error}, which was not run. If you trust the file, load "
        "it in the program that wrote it, turn that object into plain values and tensors, and save it again."
    )


def _read_archive(archive: zipfile.ZipFile, file: BinaryIO, length: int, take: TakeBytes | None) -> Any:
    infos = {info.filename: info for info in archive.infolist()}
    if len(infos) != len(archive.infolist()):
        raise ValueError("it has an entry twice")
    pickles = [name for name in infos if name.count("/") == 1 and name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise ValueError("it has no data.pkl")
    root = pickles[0].removesuffix("data.pkl")
    if any(info.compress_type != zipfile.ZIP_STORED for info in infos.values()):
        raise ValueError("it is compressed, which torch.save never does")
    if any(info.file_size > length for info in infos.values()):  # no memory for what can't be there
        raise ValueError("an entry is larger than the file")
    if f"{root}constants.pkl" in infos:
        raise RefusedPickleError("TorchScript, which is a program")
    order = (
        _read_entry(archive, f"{root}byteorder").decode("ascii") if f"{root}byteorder" in infos else "little"
    )
    if order != sys.byteorder:
        raise ValueError(f"its bytes are in {order}-endian order and this machine's are not")
    storages: dict[str, torch.Tensor] = {}

    def persistent(reference: Any) -> _Storage:
        kind, dtype, key, _, _ = reference
        if kind != "storage" or not isinstance(key, str):
            raise ValueError(f"it refers to {kind!r}")
        if key not in storages:
            info = archive.getinfo(f"{root}data/{key}")
            if not info.file_size:
                storages[key] = torch.empty(0, dtype=torch.uint8)
            elif take is not None:
                storages[key] = take(_start_of(file, info, length), info.file_size, info.CRC)
            else:
                storages[key] = torch.frombuffer(_read_entry(archive, info.filename), dtype=torch.uint8)
        return _Storage(dtype, storages[key])

    return read_pickle(bytes(_read_entry(archive, pickles[0])), TORCH_NAMES, persistent)


def _start_of(file: BinaryIO, info: zipfile.ZipInfo, length: int) -> int:
    """Find where the bytes of an entry begin: behind its own head, whose length only the head itself says."""
    file.seek(info.header_offset)
    head = struct.unpack("<4s22xHH", file.read(30))
    start = info.header_offset + 30 + head[1] + head[2]
    if head[0] != b"PK\3\4" or info.flag_bits & 1 or start + info.file_size > length:
        raise zipfile.BadZipFile(f"{info.filename} isn't where the directory says")
    return start


def _read_entry(archive: zipfile.ZipFile, name: str) -> bytearray:
    info = archive.getinfo(name)
    held = bytearray(info.file_size)
    view = memoryview(held)
    with archive.open(info) as entry:
        filled = 0
        # The checksum is looked at where the end is reached.
        while taken := cast("io.BufferedIOBase", entry).readinto(view[filled:]):
            filled += taken
    if filled != len(held):
        raise EOFError(f"{name} ends early")
    return held


def _tensor(
    storage: _Storage,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool = False,
    hooks: Any = None,
    metadata: Any = None,
) -> torch.Tensor:
    return _typed_tensor(storage, offset, shape, stride, requires_grad, hooks, storage.dtype, metadata)


def _typed_tensor(
    storage: _Storage,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool,
    hooks: Any,
    dtype: torch.dtype,
    metadata: Any = None,
) -> torch.Tensor:
    if not isinstance(cast("object", storage), _Storage) or not isinstance(
        cast("object", dtype), torch.dtype
    ):
        raise ValueError("a tensor has no storage or no dtype")
    if metadata:
        raise RefusedPickleError(f"a tensor with {', '.join(map(str, metadata))}")
    if min((offset, *shape, *stride), default=0) < 0:
        raise ValueError("a tensor has a negative size")
    end = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if (offset + end) * dtype.itemsize > storage.data.numel() and end:
        raise ValueError("a tensor reaches over the end of its storage")
    if not end:
        return torch.empty(shape, dtype=dtype)
    length = storage.data.numel() // dtype.itemsize * dtype.itemsize
    typed = storage.data[:length].view(dtype)
    return typed.as_strided(shape, stride, typed.storage_offset() + offset)  # the bytes may be part of others


def _parameter(data: torch.Tensor, requires_grad: bool = True, hooks: Any = None) -> torch.Tensor:
    return data


def _text_as_bytes(text: str, encoding: str) -> bytes:
    if encoding not in ("latin1", "latin-1"):
        raise RefusedPickleError(f"_codecs.encode to {encoding!r}")
    return text.encode("latin1")


def _empty_bytes() -> bytes:
    return b""  # the only one that old pickles write as a call of bytes


def _bytearray(data: bytes = b"") -> bytearray:
    return bytearray(memoryview(data))  # not a number, which would be a size


def _layout(name: str) -> torch.layout:
    if name != "torch.strided":
        raise RefusedPickleError(f"a tensor of the layout {name}")
    return torch.strided


def _ordered(items: Iterable[Any] = ()) -> OrderedDict[Any, Any]:
    return OrderedDict(items)


def _counter(items: Mapping[Any, int] = MappingProxyType({})) -> Counter[Any]:
    return Counter(dict(items))


def _array_dtype(text: str, align: Any = False, copy: Any = True) -> _ArrayDtype:
    if text[:1] not in _ARRAY_KINDS or not text[1:].isdecimal():
        raise RefusedPickleError(f"an array of NumPy's dtype {text!r}")
    return _ArrayDtype(text)


def _array_dtype_state(dtype: _ArrayDtype, state: tuple[Any, ...]) -> _ArrayDtype:
    order, *fields = state[1:5]
    if any(field is not None for field in fields) or order not in ("<", ">", "|"):
        raise RefusedPickleError("an array of records")
    return _ArrayDtype(order + dtype.text)


def _array_state(_: None, state: tuple[Any, ...]) -> Any:
    _, shape, dtype, fortran, data = state
    if not isinstance(dtype, _ArrayDtype) or not isinstance(data, bytes):
        raise RefusedPickleError("an array of objects")
    return _array(dtype.text, tuple(shape), data, "F" if fortran else "C")


def _scalar(dtype: _ArrayDtype, data: bytes) -> Any:
    array = _array(dtype.text, (), data, "C")
    return array if isinstance(array, torch.Tensor) else array[()]


def _array(dtype: str, shape: tuple[int, ...], data: bytes, order: str) -> Any:
    if importlib.util.find_spec("numpy") is not None:
        numpy: Any = importlib.import_module("numpy")
        return numpy.frombuffer(bytearray(data), dtype=dtype).reshape(shape, order=order)
    kinds = {"b": "bool", "i": "int", "u": "uint", "f": "float", "c": "complex"}
    bits = int(dtype[2:]) * 8
    name = "bool" if dtype[1] == "b" else f"{kinds.get(dtype[1], '')}{bits}"
    if name not in _DTYPES or dtype[0] not in "<|":
        raise RefusedPickleError(f"an array of NumPy's dtype {dtype!r}, and NumPy is not installed")
    native = cast("torch.dtype", getattr(torch, name))
    flat = torch.frombuffer(bytearray(data), dtype=native) if data else torch.empty(0, dtype=native)
    if order == "C":
        return flat.reshape(shape)
    return flat.reshape(shape[::-1]).permute(*range(len(shape))[::-1])


def _no_array(*arguments: Any) -> None:
    """Stand for the empty array that NumPy's pickles start from."""


# Everything that a file may name, and what it then gets.
TORCH_NAMES: Mapping[str, Any] = MappingProxyType(
    {
        "builtins.set": Maker(set),
        "builtins.frozenset": Maker(frozenset),
        "builtins.complex": Maker(complex),
        "builtins.bytes": Maker(_empty_bytes),
        "builtins.bytearray": Maker(_bytearray),
        "_codecs.encode": Maker(_text_as_bytes),
        "collections.OrderedDict": Maker(_ordered),
        "collections.Counter": Maker(_counter),
        "torch.Size": Maker(torch.Size),
        "torch.device": Maker(torch.device),
        "torch.serialization._get_layout": Maker(_layout),
        "torch._utils._rebuild_tensor_v2": Maker(_tensor),
        "torch._utils._rebuild_tensor_v3": Maker(_typed_tensor),
        "torch._utils._rebuild_parameter": Maker(_parameter),
        "torch.storage.UntypedStorage": torch.uint8,
        **{f"torch.{name}": dtype for name, dtype in _STORAGES},
        **{f"torch.{name}": getattr(torch, name) for name in _DTYPES if hasattr(torch, name)},
        "numpy.ndarray": "numpy.ndarray",
        "numpy.dtype": Maker(_array_dtype, _array_dtype_state),
        "numpy.core.multiarray._reconstruct": Maker(_no_array, _array_state),
        "numpy._core.multiarray._reconstruct": Maker(_no_array, _array_state),
        "numpy.core.multiarray.scalar": Maker(_scalar),
        "numpy._core.multiarray.scalar": Maker(_scalar),
    }
)
