"""Read what ``torch.save`` wrote as data: nothing that a file names is imported or called.

``torch.load(weights_only=True)`` does much the same. But what it admits is one list for the whole process,
which other threads and packages change, it reads arrays of NumPy only where that list has been changed, and
it doesn't verify the checksums of the archive.
"""

from __future__ import annotations

import functools
import importlib
import io
import pickle
import pickletools
import struct
import zipfile
import zlib
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, TypeAlias, cast

import torch

from accelfn.errors import CheckpointError, DamagedCheckpointError

TakeBytes: TypeAlias = Callable[[int, int, int], torch.Tensor]
"""Returns the bytes (uint8) of a storage in the file, by their first byte, length and CRC-32."""

# The number that a file of torch before 1.6 begins with, as any protocol of pickle from 2 on writes it.
_OLD_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
# Older names of modules and storages, which torch.save still writes.
_MODULES = MappingProxyType({"__builtin__": "builtins", "copy_reg": "copyreg"})
_STORAGES = MappingProxyType(
    {
        "FloatStorage": torch.float32,
        "DoubleStorage": torch.float64,
        "HalfStorage": torch.float16,
        "BFloat16Storage": torch.bfloat16,
        "LongStorage": torch.int64,
        "IntStorage": torch.int32,
        "ShortStorage": torch.int16,
        "CharStorage": torch.int8,
        "ByteStorage": torch.uint8,
        "BoolStorage": torch.bool,
        "ComplexFloatStorage": torch.complex64,
        "ComplexDoubleStorage": torch.complex128,
        "UntypedStorage": torch.uint8,
    }
)


class RefusedPickleError(Exception):
    """The pickle asks for something that isn't data."""


# --- pickles -------------------------------------------------------------------------------------


class _Placeholder:
    """Something that a pickle names or makes, and the value it stands for. A pickle can't change it."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __setstate__(self, state: Any) -> None:  # what BUILD calls
        raise RefusedPickleError("a state for what has none")


class _Maker(_Placeholder):
    """A function or class that a pickle names: what makes its data here."""

    __slots__ = ()

    def __call__(self, *arguments: Any) -> Any:
        return self.value(*arguments)


class Record:
    """An object of whatever class: its state, and none of its code."""

    _state: Any = ()  # of one that is made and gets none

    def __init__(self, *arguments: Any) -> None:
        """Take the arguments of the class, and forget them."""

    def __setstate__(self, state: Any) -> None:
        """Keep the state: of a class with slots that is None and a dict."""
        is_slotted = isinstance(state, tuple) and len(cast("tuple[Any, ...]", state)) == 2
        self._state = cast("tuple[Any, ...]", state)[1] if is_slotted else state

    def get(self, key: str | int) -> Any:
        """Return a field by its name, or by its place where the state is a tuple.

        Raises:
            LookupError: There is none.
        """
        return self._state[key]

    def __contains__(self, key: str) -> bool:
        """Whether there is a field of a name."""
        return key in self._state


class _Dtype(_Placeholder):
    """A dtype of NumPy that is of plain numbers or texts, such as ``"<u4"``."""

    __slots__ = ()

    def __init__(self, text: str, align: Any = False, copy: Any = True) -> None:
        if text[:1] not in "biufcUS" or not text[1:].isdecimal():
            raise RefusedPickleError(f"an array of NumPy's dtype {text!r}")
        super().__init__(text)

    def __setstate__(self, state: Any) -> None:
        _, order, *fields = state[:5]
        if any(field is not None for field in fields) or order not in ("<", ">", "|"):
            raise RefusedPickleError("an array of records")
        self.value = order + self.value

    def array(self, shape: Any, data: Any, order: Any = "C") -> Any:
        """Return an array of this dtype."""
        if not isinstance(data, bytes):
            raise RefusedPickleError("an array of objects")
        try:
            numpy: Any = importlib.import_module("numpy")
        except ImportError:
            raise RefusedPickleError(
                "an array of NumPy, which is not installed (pip install numpy)"
            ) from None
        return numpy.frombuffer(bytearray(data), dtype=self.value).reshape(shape, order=order)


class _Array(_Placeholder):
    """An array of NumPy, whose pickle makes an empty one first."""

    __slots__ = ()

    def __init__(self, *arguments: Any) -> None:
        super().__init__(None)

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state
        self.value = _plain(dtype, _Dtype).array(tuple(shape), data, "F" if is_fortran else "C")


class _Storage(_Placeholder):
    """The bytes of a storage (uint8, one dimension), and the dtype that it was declared with."""

    __slots__ = ("dtype",)

    def __init__(self, value: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__(value)
        self.dtype = dtype


def read_pickle(
    data: bytes, persistent: Callable[[Any], Any] | None = None, *, records: tuple[str, ...] = ()
) -> Any:
    """Return what a pickle holds: containers, plain values, tensors, and arrays of NumPy.

    Args:
        data: The pickle, to its end.
        persistent: Returns what a reference to outside of the pickle stands for.
        records: Modules whose classes are read as :class:`Record`, by the beginnings of their names.

    Raises:
        RefusedPickleError: It names something else, which was not run.
        ValueError: It isn't a whole pickle, or contradicts itself.
    """
    try:
        for code, argument, _ in pickletools.genops(data):
            # Classes by number may be known to the process; a place far away would take the memory up to it.
            if code.name.startswith("EXT") or ("PUT" in code.name and cast("int", argument) > len(data)):
                raise RefusedPickleError(f"the pickle instruction {code.name} {argument}")
        return _resolved(_Unpickler(data, persistent, records).load(), {})
    except (
        *(pickle.UnpicklingError, LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError),
        *(EOFError, ValueError),
    ) as error:
        raise ValueError(f"its pickle contradicts itself ({error})") from error


class _Unpickler(pickle.Unpickler):
    """Makes data of the names that are known, and refuses all others."""

    def __init__(
        self, data: bytes, persistent: Callable[[Any], Any] | None, records: tuple[str, ...]
    ) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._persistent = persistent
        self._records = records

    def find_class(self, module: str, name: str) -> Any:
        known = f"{_MODULES.get(module, module)}.{name}"
        if known in _MAKERS:
            return _Maker(_MAKERS[known])
        if module in ("torch", "torch.storage"):
            dtype = _STORAGES.get(name, vars(torch).get(name))  # not getattr, which may import
            if isinstance(dtype, torch.dtype):
                return dtype
        if module.startswith(self._records):
            return Record
        raise RefusedPickleError(known)

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise RefusedPickleError("a reference to outside of the file")
        return self._persistent(pid)


def _resolved(value: object, known: dict[int, tuple[Any, Any]]) -> Any:
    """Put values where placeholders stand, in place where that is possible."""
    if id(value) in known:
        return known[id(value)][1]
    if isinstance(value, _Placeholder):
        return value.value
    made: Any = value
    if type(value) is tuple:
        made = tuple([_resolved(one, known) for one in cast("tuple[Any, ...]", value)])
    # With the old one: as long as it is kept, no other object gets its id.
    known[id(cast("object", value))] = value, made
    if isinstance(value, (dict, list)):
        held = cast("dict[Any, Any]", value)
        for place in list(held) if isinstance(value, dict) else range(len(held)):
            held[place] = _resolved(held[place], known)
    return made


def _plain(value: Any, kind: type[Any]) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{type(value).__name__} where {kind.__name__.lstrip('_')} must be")
    return value


def _tensor(
    storage: Any,
    offset: int,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    requires_grad: bool = False,
    hooks: Any = None,
    dtype: torch.dtype | None = None,
    metadata: Any = None,
) -> _Placeholder:
    if metadata:
        raise RefusedPickleError(f"a tensor with {', '.join(map(str, metadata))}")
    held, kind = _plain(storage, _Storage).value, dtype or storage.dtype
    typed = held[: held.numel() // kind.itemsize * kind.itemsize].view(kind)
    end = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if min((offset, *shape, *stride)) < 0 or (end and offset + end > typed.numel()):
        raise ValueError("a tensor reaches over the end of its storage")
    if not end:
        return _Placeholder(torch.empty(shape, dtype=kind))
    return _Placeholder(typed.as_strided(shape, stride, typed.storage_offset() + offset))


def _untyped_tensor(*arguments: Any) -> _Placeholder:
    return cast("Any", _tensor)(*arguments[:6], None, *arguments[6:])


def _parameter(data: Any, requires_grad: bool = True, hooks: Any = None) -> Any:
    return data


def _text_as_bytes(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise RefusedPickleError(f"_codecs.encode to {encoding!r}")
    return text.encode("latin1")


def _scalar(dtype: Any, data: bytes) -> Any:
    return _plain(dtype, _Dtype).array((), data)[()]


def _empty_bytes() -> bytes:
    return b""  # the only one that old pickles write as a call of bytes


def _bytearray(data: bytes = b"") -> bytearray:
    return bytearray(memoryview(data))  # not a number, which would be a size


def _counter(items: Any = ()) -> Counter[Any]:
    return Counter(dict(items))


_MAKERS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "builtins.set": set,
        "builtins.frozenset": frozenset,
        "builtins.complex": complex,
        "builtins.bytes": _empty_bytes,
        "builtins.bytearray": _bytearray,
        "_codecs.encode": _text_as_bytes,
        "collections.OrderedDict": OrderedDict,
        "collections.Counter": _counter,
        "torch.Size": torch.Size,
        "torch.device": torch.device,
        "torch._utils._rebuild_tensor_v2": _untyped_tensor,
        "torch._utils._rebuild_tensor_v3": _tensor,
        "torch._utils._rebuild_parameter": _parameter,
        "numpy.ndarray": _Array,
        "numpy.dtype": _Dtype,
        **{
            f"numpy.{core}.multiarray.{name}": make
            for core in ("core", "_core")
            for name, make in (("_reconstruct", _Array), ("scalar", _scalar))
        },
    }
)


# --- files ---------------------------------------------------------------------------------------


def read_torch_file(path: Path, take: TakeBytes | None = None) -> Any:
    """Return what ``torch.save`` wrote into a file: containers, plain values, and tensors on the CPU.

    Tensors that shared memory share it again. Parameters come as tensors.

    Args:
        path: The file.
        take: Returns the bytes of each storage, so that they needn't be read yet; it has to verify their
            checksums itself. Without it they are read and verified here.

    Raises:
        CheckpointError: It asks for something that isn't data, or is of the format of torch before 1.6.
        DamagedCheckpointError: The file is truncated or damaged, or was not written by ``torch.save``.
    """
    with open(path, "rb") as file:
        return read_torch_stream(file, path.name, take)


def read_torch_stream(file: BinaryIO, name: str, take: TakeBytes | None = None) -> Any:
    """Return what ``torch.save`` wrote into an open file, as :func:`read_torch_file` does.

    Args:
        file: At any position.
        name: What to call it in errors.
        take: Returns the bytes of each storage.

    Raises:
        CheckpointError: As of :func:`read_torch_file`.
        DamagedCheckpointError: As of :func:`read_torch_file`.
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
            return _read_archive(archive, file, take or functools.partial(_take, file))
    except RefusedPickleError as error:
        raise refuse_pickle(name, error) from None
    except (
        *(zipfile.BadZipFile, struct.error, ValueError, LookupError, RuntimeError, EOFError, OSError),
    ) as error:
        raise DamagedCheckpointError(
            f"{name} is damaged, or was not written by torch.save: {error}. Nothing was loaded. Copy it "
            "again from where it was written.",
            name,
        ) from error


def refuse_pickle(name: str, error: RefusedPickleError) -> CheckpointError:
    """Return the error that says which file asks for what, and what to do."""
    return CheckpointError(
        f"{name} holds more than data: it asks for {error}, which was not run. If you trust the file, load "
        "it in the program that wrote it, turn that object into plain values and tensors, and save it again."
    )


def _read_archive(archive: zipfile.ZipFile, file: BinaryIO, take: TakeBytes) -> Any:
    length = file.seek(0, io.SEEK_END)
    pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise ValueError("it has no data.pkl")
    if any(one.compress_type or one.file_size > length for one in archive.infolist()):
        raise ValueError("it is compressed, which torch.save never does, or longer than the file")
    root = pickles[0].removesuffix("data.pkl")
    if f"{root}byteorder" in archive.namelist() and archive.read(f"{root}byteorder") != b"little":
        raise ValueError("its bytes are in big-endian order")
    storages: dict[str, torch.Tensor] = {}

    def persistent(reference: Any) -> _Storage:
        kind, dtype, key, _, _ = reference
        if kind != "storage":
            raise ValueError(f"it refers to {kind!r}")
        if key not in storages:
            info = archive.getinfo(f"{root}data/{key}")
            # Its bytes are behind a head of its own, whose length only that head says.
            file.seek(info.header_offset)
            magic, name, extra = struct.unpack("<4s22xHH", file.read(30))
            start = info.header_offset + 30 + name + extra
            if magic != b"PK\3\4" or info.flag_bits & 1 or start + info.file_size > length:
                raise ValueError(f"{info.filename} isn't where the directory says")
            empty = torch.empty(0, dtype=torch.uint8)
            storages[key] = take(start, info.file_size, info.CRC) if info.file_size else empty
        return _Storage(storages[key], dtype)

    return read_pickle(archive.read(pickles[0]), persistent)


def _take(file: BinaryIO, start: int, length: int, crc32: int) -> torch.Tensor:
    held = bytearray(length)
    file.seek(start)
    cast("io.BufferedIOBase", file).readinto(held)
    if zlib.crc32(held) != crc32:
        raise ValueError("bytes of a tensor don't match their checksum")
    return torch.frombuffer(held, dtype=torch.uint8)
