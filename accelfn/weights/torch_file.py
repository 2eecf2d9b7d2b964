"""Read the files of ``torch.save`` as data: nothing that a file names is imported or called.

``torch.load(weights_only=True)`` does nearly the same. But it accepts what is in a global list, which other
threads and packages may change; it reads NumPy arrays only if that list has been extended; and it doesn't
verify the checksums of the archive.
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
from accelfn.storage.object_store import open_binary
from accelfn.weights.header import check_no_pointer

TakeBytes: TypeAlias = Callable[[int, int, int], torch.Tensor]
"""Returns the bytes (uint8) of a storage in the file, by its offset, length and CRC-32."""

# First number in a file of torch before 1.6, as any protocol of pickle from 2 on writes it.
_OLD_MAGIC = b"\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
# Old names of modules and storages, which torch.save still writes.
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
    """The pickle requests something that isn't data."""


# --- pickles -------------------------------------------------------------------------------------


class _Placeholder:
    """Stands for a value while the pickle is read, so that the pickle can't change the value itself."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __setstate__(self, state: Any) -> None:  # called by the pickle instruction BUILD
        raise RefusedPickleError("a state for an object that has none")


class _Maker(_Placeholder):
    """Stands for a function or class that a pickle names, and calls our replacement for it."""

    __slots__ = ()

    def __call__(self, *arguments: Any) -> Any:
        return self.value(*arguments)


class Record:
    """Holds the state of an object of any class, without the class."""

    _state: Any = ()

    def __init__(self, *arguments: Any) -> None:
        """Ignore the arguments of the class."""

    def __setstate__(self, state: Any) -> None:
        """Keep the state; for a class with slots it is a pair of None and a dict."""
        is_slotted = isinstance(state, tuple) and len(cast("tuple[Any, ...]", state)) == 2
        self._state = cast("tuple[Any, ...]", state)[1] if is_slotted else state

    def get(self, key: str | int) -> Any:
        """Return a field by name, or by index if the state is a tuple.

        Raises:
            LookupError: There is no such field.
        """
        return self._state[key]

    def __contains__(self, key: str) -> bool:
        """Whether the record has a field of this name."""
        return key in self._state


class _Dtype(_Placeholder):
    """Stands for a NumPy dtype of plain numbers or texts, such as ``"<u4"``."""

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
    """Stands for a NumPy array, which a pickle first makes empty and then fills by a state."""

    __slots__ = ()

    def __init__(self, *arguments: Any) -> None:
        super().__init__(None)

    def __setstate__(self, state: Any) -> None:
        _, shape, dtype, is_fortran, data = state
        self.value = _require(dtype, _Dtype).array(tuple(shape), data, "F" if is_fortran else "C")


class _Storage(_Placeholder):
    """Stands for a storage: its bytes (uint8, one dimension), and the dtype that it was declared with."""

    __slots__ = ("dtype",)

    def __init__(self, value: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__(value)
        self.dtype = dtype


def read_pickle(
    data: bytes, persistent: Callable[[Any], Any] | None = None, *, records: tuple[str, ...] = ()
) -> Any:
    """Return the content of a pickle: containers, plain values, tensors, and NumPy arrays.

    Args:
        data: The complete pickle.
        persistent: Returns the value of a persistent id, a reference to data outside of the pickle.
        records: Prefixes of classes that are read as :class:`Record`, such as ``"package.module."``.

    Raises:
        RefusedPickleError: The pickle requests something else, which was not run.
        ValueError: The pickle is truncated or inconsistent.
    """
    try:
        for code, argument, _ in pickletools.genops(data):
            # EXT names classes by number, without find_class. PUT with a huge number allocates that much.
            if code.name.startswith("EXT") or ("PUT" in code.name and cast("int", argument) > len(data)):
                raise RefusedPickleError(f"the pickle instruction {code.name} {argument}")
        return _resolve(_Unpickler(data, persistent, records).load(), {})
    except (
        *(pickle.UnpicklingError, LookupError, TypeError, AttributeError, RuntimeError, ArithmeticError),
        *(EOFError, ValueError),
    ) as error:
        raise ValueError(f"its pickle is inconsistent ({error})") from error


class _Unpickler(pickle.Unpickler):
    """Replaces the names in ``_MAKERS`` by functions that make data, and refuses all others."""

    def __init__(
        self, data: bytes, persistent: Callable[[Any], Any] | None, records: tuple[str, ...]
    ) -> None:
        super().__init__(io.BytesIO(data), encoding="utf-8")
        self._persistent = persistent
        self._records = records

    def find_class(self, module: str, name: str) -> Any:
        full_name = f"{_MODULES.get(module, module)}.{name}"
        if full_name in _MAKERS:
            return _Maker(_MAKERS[full_name])
        if module in ("torch", "torch.storage"):
            dtype = _STORAGES.get(name, vars(torch).get(name))  # not getattr, which may import a module
            if isinstance(dtype, torch.dtype):
                return dtype
        if full_name.startswith(self._records):
            return Record
        raise RefusedPickleError(full_name)

    def persistent_load(self, pid: Any) -> Any:
        if self._persistent is None:
            raise RefusedPickleError("a reference to data outside of the file")
        return self._persistent(pid)


def _resolve(value: object, known: dict[int, tuple[Any, Any]]) -> Any:
    """Replace placeholders by their values; dicts and lists are changed in place."""
    if id(value) in known:
        return known[id(value)][1]
    if isinstance(value, _Placeholder):
        return value.value
    resolved: Any = value
    if type(value) is tuple:
        resolved = tuple([_resolve(item, known) for item in cast("tuple[Any, ...]", value)])
    # Keeping the old value alive guarantees that no other object gets its id.
    known[id(cast("object", value))] = value, resolved
    if isinstance(value, (dict, list)):
        container = cast("dict[Any, Any]", value)
        for key in list(container) if isinstance(value, dict) else range(len(container)):
            container[key] = _resolve(container[key], known)
    return resolved


# --- replacements for the functions that a pickle names ------------------------------------------


def _require(value: Any, kind: type[Any]) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{type(value).__name__} instead of {kind.__name__.lstrip('_')}")
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
    data, kind = _require(storage, _Storage).value, dtype or storage.dtype
    typed = data[: data.numel() // kind.itemsize * kind.itemsize].view(kind)
    extent = 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
    if min((offset, *shape, *stride)) < 0 or (extent and offset + extent > typed.numel()):
        raise ValueError("a tensor extends beyond its storage")
    if not extent:
        return _Placeholder(torch.empty(shape, dtype=kind))
    return _Placeholder(typed.as_strided(shape, stride, typed.storage_offset() + offset))


def _untyped_tensor(*arguments: Any) -> _Placeholder:
    return cast("Any", _tensor)(*arguments[:6], None, *arguments[6:])


def _class_only(*arguments: Any) -> Any:
    raise RefusedPickleError("a tensor from a constructor")


def _attributed_tensor(make: Any, kind: Any, arguments: tuple[Any, ...], state: Any) -> Any:
    """Return a tensor without the attributes that were set on it."""
    if _require(kind, _Maker).value is not _class_only:
        raise RefusedPickleError("a tensor of another class")
    return _require(make, _Maker)(*arguments)


def _parameter(data: Any, requires_grad: bool = True, hooks: Any = None, state: Any = None) -> Any:
    return data


def _encode(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise RefusedPickleError(f"_codecs.encode to {encoding!r}")
    return text.encode("latin1")


def _scalar(dtype: Any, data: bytes) -> Any:
    return _require(dtype, _Dtype).array((), data)[()]


def _empty_bytes() -> bytes:
    return b""  # old protocols write only the empty one as a call of bytes


def _bytearray(data: bytes = b"") -> bytearray:
    return bytearray(memoryview(data))  # refuses a number, which would be a size


def _counter(items: Any = ()) -> Counter[Any]:
    return Counter(dict(items))


_MAKERS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "builtins.set": set,
        "builtins.frozenset": frozenset,
        "builtins.complex": complex,
        "builtins.bytes": _empty_bytes,
        "builtins.bytearray": _bytearray,
        "_codecs.encode": _encode,
        "collections.OrderedDict": OrderedDict,
        "collections.Counter": _counter,
        "torch.Size": torch.Size,
        "torch.device": torch.device,
        "torch._utils._rebuild_tensor_v2": _untyped_tensor,
        "torch._utils._rebuild_tensor_v3": _tensor,
        "torch._utils._rebuild_parameter": _parameter,
        "torch._utils._rebuild_parameter_with_state": _parameter,
        "torch.Tensor": _class_only,
        "torch._tensor._rebuild_from_type_v2": _attributed_tensor,
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
    """Return the content of a file of ``torch.save``: containers, plain values, and tensors on the CPU.

    Tensors that shared memory share it again. Parameters become tensors.

    Args:
        path: The file.
        take: Returns the bytes of a storage, possibly without reading them yet, and verifies their checksum.
            None: they are read and verified here.

    Raises:
        CheckpointError: The file requests something that isn't data, or torch before 1.6 wrote it.
        DamagedCheckpointError: The file is truncated or damaged, or was not written by ``torch.save``.
    """
    with open_binary(path) as file:
        return read_torch_stream(file, path.name, take)


def read_torch_stream(file: BinaryIO, name: str, take: TakeBytes | None = None) -> Any:
    """Return the content of an open file, as :func:`read_torch_file` does.

    Args:
        file: At any position.
        name: Its name in errors.
        take: See :func:`read_torch_file`.

    Raises:
        CheckpointError: See :func:`read_torch_file`.
        DamagedCheckpointError: See :func:`read_torch_file`.
    """
    file.seek(0)
    head = file.read(2 + 9 + len(_OLD_MAGIC))  # from protocol 4 on, a frame comes before the number
    check_no_pointer(head, name)
    if head[:1] == b"\x80" and head.find(_OLD_MAGIC) >= 2:
        # torch.load(weights_only=True) supports no other protocol than 2.
        how = "with weights_only=True" if head[1] == 2 else "if you trust it, with weights_only=False"
        raise CheckpointError(
            f"{name} has the format of torch before 1.6 (_use_new_zipfile_serialization=False), which isn't "
            f"supported. Load it with torch.load, {how}, and save it again, as safetensors if you can."
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
            "again from its source.",
            name,
        ) from error


def refuse_pickle(name: str, error: RefusedPickleError) -> CheckpointError:
    """Make the error for a file that requests something that isn't data."""
    return CheckpointError(
        f"{name} holds more than data: it asks for {error}, which was not run. If you trust the file, load "
        "it in the program that wrote it, convert that object to plain values and tensors (a module by its "
        "state_dict()), and save it again."
    )


def _read_archive(archive: zipfile.ZipFile, file: BinaryIO, take: TakeBytes) -> Any:
    size = file.seek(0, io.SEEK_END)
    pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise ValueError("it has no data.pkl")
    if any(entry.compress_type or entry.file_size > size for entry in archive.infolist()):
        raise ValueError("it is compressed, which torch.save never does, or truncated")
    root = pickles[0].removesuffix("data.pkl")
    if f"{root}byteorder" in archive.namelist() and archive.read(f"{root}byteorder") != b"little":
        raise ValueError("it is big-endian")
    storages: dict[str, torch.Tensor] = {}

    def persistent(reference: Any) -> _Storage:
        kind, dtype, key, _, _ = reference
        if kind != "storage":
            raise ValueError(f"it refers to {kind!r}")
        if key not in storages:
            info = archive.getinfo(f"{root}data/{key}")
            # The data follows a local header, whose length isn't in the directory of the archive.
            file.seek(info.header_offset)
            magic, name, extra = struct.unpack("<4s22xHH", file.read(30))
            start = info.header_offset + 30 + name + extra
            if magic != b"PK\3\4" or info.flag_bits & 1 or start + info.file_size > size:
                raise ValueError(f"{info.filename} isn't at the offset in the directory")
            empty = torch.empty(0, dtype=torch.uint8)
            storages[key] = take(start, info.file_size, info.CRC) if info.file_size else empty
        return _Storage(storages[key], dtype)

    return read_pickle(archive.read(pickles[0]), persistent)


def _take(file: BinaryIO, start: int, length: int, crc32: int) -> torch.Tensor:
    data = bytearray(length)
    file.seek(start)
    cast("io.BufferedIOBase", file).readinto(data)
    _check(data, crc32)
    return torch.frombuffer(data, dtype=torch.uint8)


def _check(data: bytearray | memoryview, crc32: int) -> None:
    if zlib.crc32(data) != crc32:
        raise ValueError("the checksum of a tensor doesn't match")
