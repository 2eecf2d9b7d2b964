"""A reader of checkpoints, written from docs/pages/checkpoint-format.md alone, without accelfn.

It shows that the page says all, and is short rather than fast. Errors are ``Damaged``, or whatever a
malformed document makes Python raise.
"""

import base64
import collections
import datetime
import decimal
import fractions
import hashlib
import json
import math
import os
import pathlib
import re
import struct
import time
import uuid
import zlib
import zoneinfo
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import numpy
import torch

__all__ = ("Damaged", "Foreign", "read", "verify")

CHUNK_BYTES = 64 << 20
SAFETENSORS = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
}
FACTORIES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (list, dict, set, tuple, frozenset, int, float, complex, bool, str)},
    "bytes": bytes,
    "OrderedDict": collections.OrderedDict,
    "deque": collections.deque,
    "None": None,
}
SPARSE = {
    "torch.sparse_coo": ("indices", "values"),
    **dict.fromkeys(("torch.sparse_csr", "torch.sparse_bsr"), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys(("torch.sparse_csc", "torch.sparse_bsc"), ("ccol_indices", "row_indices", "values")),
}


class Damaged(Exception):  # noqa: N818 -- short on purpose
    """The bytes aren't those that were written."""


class Foreign(NamedTuple):
    """What stands for a value of a class that the caller doesn't know."""

    of: str
    content: Any


def read(
    directory: str | os.PathLike[str],
    rank: int = 0,
    classes: Mapping[str, Callable[..., Any]] | None = None,
    field: str = "tree",
) -> Any:
    """Read and verify the tree of a rank.

    Args:
        directory: Of the checkpoint.
        rank: Whose tree.
        classes: By their names in the file, how values are made: of the fields of a namedtuple, of metadata
            and children of a node, of an enum's name or value.
        field: ``"tree"`` or ``"random"``.
    """
    place = resolve(pathlib.Path(directory))
    manifest, entries = _all(place)
    tensors = {
        name: _whole(dtype, shape, pieces, entries)
        for name, (dtype, shape, pieces) in manifest["tensors"].items()
    }
    return _Document(tensors, classes or {}).value(_of_rank(manifest[field], rank))


def verify(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Verify every byte of a checkpoint, and give its manifest."""
    return _all(resolve(pathlib.Path(directory)))[0]


def resolve(place: pathlib.Path) -> pathlib.Path:
    """Say where a checkpoint is: under its name, or after a crash under that of a replaced one."""
    if (place / "manifest.json").exists():
        return place
    found: list[tuple[int, pathlib.Path]] = []
    for one in place.parent.glob(f".{place.name}.replaced-*"):
        try:
            manifest = _manifest(one)
            if all((one / name).stat().st_size == size for name, (size, *_) in manifest["files"].items()):
                found.append((manifest["generation"], one))
        except (OSError, Damaged):  # noqa: PERF203
            continue
    if not found:
        raise FileNotFoundError(place)
    return max(found)[1]


# --- files ---------------------------------------------------------------------------------------


def _is(value: Any, kind: type) -> bool:
    """Check a class without telling the type checker, to which what JSON gives is anything."""
    return isinstance(value, kind)


def _check(condition: object, why: str) -> None:
    if not condition:
        raise Damaged(why)


def _manifest(place: pathlib.Path) -> dict[str, Any]:
    line, _, rest = (place / "manifest.json").read_bytes().partition(b"\n")
    _check(rest == hashlib.sha256(line).hexdigest().encode() + b"\n", "manifest.json")
    manifest = json.loads(line)
    _check(manifest["format"] == "accelfn-checkpoint" and manifest["version"] == 1, "format or version")
    _check(manifest["chunk_bytes"] == CHUNK_BYTES, "chunk_bytes")
    return manifest


def _all(place: pathlib.Path) -> tuple[dict[str, Any], dict[tuple[str, str], bytes]]:
    """Read the manifest and the bytes of all entries, by file and key."""
    manifest = _manifest(place)
    expected: dict[str, dict[str, Any]] = {name: {} for name in manifest["files"]}
    for dtype, shape, pieces in manifest["tensors"].values():
        _check(math.prod(shape) == sum(math.prod(box) for _, _, _, box, _ in pieces), "pieces don't fill")
        for file, key, _, box, sums in pieces:
            _check(key not in expected[file], "two pieces in one entry")
            expected[file][key] = (*_form(dtype, box), sums)
    here = {name for name, (_, _, node) in manifest["files"].items() if node in (None, manifest["node"])}
    there = set(os.listdir(place)) - {"manifest.json"}
    _check(here <= there <= set(manifest["files"]), "files")
    entries: dict[tuple[str, str], bytes] = {}
    for name in there:
        _check(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name), "name of a file")
        _check((place / name).is_file() and not (place / name).is_symlink(), "no plain file")
        content = (place / name).read_bytes()
        size, header_crc32, _ = manifest["files"][name]
        _check(len(content) == size, "length of a file")
        end = 8 + int.from_bytes(content[:8], "little")
        _check(end % 8 == 0 and zlib.crc32(content[:end]) == header_crc32, "header of a file")
        header = json.loads(content[8:end])
        _check(header.pop("__metadata__") == {"format": "pt"}, "metadata of a file")
        _check(header.keys() == expected[name].keys(), "entries of a file")
        place_after = 0
        for key, said in header.items():
            dtype, shape, sums = expected[name][key]
            begin, stop = said["data_offsets"]
            _check((said["dtype"], said["shape"], begin) == (dtype, shape, place_after), "entry of a file")
            entries[name, key] = taken = content[end + begin : end + stop]
            found = [zlib.crc32(taken[at : at + CHUNK_BYTES]) for at in range(0, stop - begin, CHUNK_BYTES)]
            _check(found == sums, f"tensor {key}")
            place_after = stop
        _check(end + place_after == size, "end of a file")
    return manifest, entries


def _form(dtype: str, shape: list[int]) -> tuple[str, list[int]]:
    if dtype in SAFETENSORS:
        return SAFETENSORS[dtype], shape
    if dtype == "complex128":
        return "F64", [*shape, 2]
    if dtype == "float4_e2m1fn_x2":
        return "F4", [*shape, 2]
    return "U8", [*shape, getattr(torch, dtype).itemsize]


def _tensor(content: bytes | bytearray, dtype: str, shape: list[int]) -> torch.Tensor:
    kind = getattr(torch, dtype)
    if not content:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(kind).reshape(shape)


def _whole(
    dtype: str, shape: list[int], pieces: list[Any], entries: dict[tuple[str, str], bytes]
) -> torch.Tensor:
    """Put a tensor together, byte by byte where it has several pieces."""
    if len(pieces) == 1:
        file, key, _, box, _ = pieces[0]
        return _tensor(entries[file, key], dtype, box)
    size = getattr(torch, dtype).itemsize
    whole = torch.zeros((*shape, size), dtype=torch.uint8)
    for file, key, offset, box, _ in pieces:
        part = _tensor(entries[file, key], "uint8", [*box, size])
        whole[tuple(slice(at, at + length) for at, length in zip(offset, box, strict=True))] = part
    return _tensor(_bytes(whole.flatten()), dtype, shape)


def _bytes(flat: torch.Tensor) -> bytearray:
    return bytearray(cast("list[int]", flat.tolist()))  # pyright: ignore[reportUnknownMemberType]


# --- the document --------------------------------------------------------------------------------


def _of_rank(node: Any, rank: int) -> Any:
    if _is(node, list):
        return [_of_rank(one, rank) for one in node]
    if not _is(node, dict):
        return node
    if node.get("$") == "by_rank":
        return node["values"][node["of"][rank % len(node["of"])]]
    return {key: _of_rank(one, rank) for key, one in node.items()}


class _Document:
    """One document, read in its order."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], classes: Mapping[str, Callable[..., Any]]
    ) -> None:
        self.tensors = dict(tensors)
        self.classes = classes
        self.known: dict[int, Any] = {}
        self.laid: set[str] = set()

    def value(self, node: Any) -> Any:
        if _is(node, list):
            return [self.value(one) for one in node]
        if not _is(node, dict):
            return node
        if "$" not in node:
            return {key: self.value(one) for key, one in node.items()}
        kind = node["$"]
        if kind == "again":
            return self.known[node["id"]]
        made = getattr(self, f"{kind}_")(node)
        if "id" in node:
            self.known[node["id"]] = made
        return made

    def make(self, of: str, *content: Any) -> Any:
        return self.classes[of](*content) if of in self.classes else Foreign(of, content)

    # tensors

    def tensor_(self, node: Any) -> torch.Tensor:
        name, shape, dtype = node["name"], node["shape"], getattr(torch, node["dtype"])
        tensor = self.tensors[name]
        if "offset" in node:
            stride = node.get("stride", [math.prod(shape[at + 1 :]) for at in range(len(shape))])
            flat = tensor.reshape(-1).view(torch.uint8)
            flat = flat[: len(flat) // dtype.itemsize * dtype.itemsize].view(dtype)
            tensor = flat.as_strided(shape, stride, node["offset"] // dtype.itemsize)
        elif "stride" in node and name not in self.laid:
            # Laid out by bytes, as not every dtype can be copied.
            laid = torch.zeros((tensor.numel(), tensor.itemsize), dtype=torch.uint8)
            inside = laid.as_strided(
                (*shape, tensor.itemsize), [*(step * tensor.itemsize for step in node["stride"]), 1]
            )
            inside.copy_(tensor.unsqueeze(-1).view(torch.uint8))
            tensor = self.tensors[name] = laid.view(-1).view(dtype).as_strided(shape, node["stride"])
            self.laid.add(name)
        return self.finish(tensor, node)

    def finish(self, tensor: torch.Tensor, node: Any) -> torch.Tensor:
        if node.get("parameter"):
            return torch.nn.Parameter(tensor, requires_grad=node.get("requires_grad", False))
        tensor = tensor.detach()
        return tensor.requires_grad_() if node.get("requires_grad") else tensor

    def sparse_(self, node: Any) -> torch.Tensor:
        parts = [self.value(node["fields"][name]) for name in SPARSE[node["layout"]]]
        make = cast("Any", torch)  # its constructors aren't fully typed
        if node["layout"] == "torch.sparse_coo":
            coalesced = node.get("coalesced", False)
            made = make.sparse_coo_tensor(
                *parts, node["shape"], is_coalesced=coalesced, check_invariants=True
            )
        else:
            layout = getattr(torch, node["layout"].removeprefix("torch."))
            made = make.sparse_compressed_tensor(*parts, node["shape"], layout=layout, check_invariants=True)
        return self.finish(made, node)

    def array_(self, node: Any) -> Any:
        array = self.tensor_(node).numpy()
        if not node.get("writeable", True):
            array.flags.writeable = False
        return array

    def raw_(self, node: Any) -> Any:
        content = _bytes(self.tensor_(node))
        array: Any = numpy.empty(node["sides"], _numpy_dtype(node["numpy"]), order=node.get("order", "C"))
        if content:
            array = numpy.ndarray(node["sides"], array.dtype, content, order=node.get("order", "C"))
        if not node.get("writeable", True):
            array.flags.writeable = False
        return array

    def generator_(self, node: Any) -> torch.Generator:
        generator = torch.Generator(node["device"])
        generator.set_state(self.tensor_(node))
        return generator

    # containers

    def tuple_(self, node: Any) -> tuple[Any, ...]:
        return tuple(self.value(node["items"]))

    def dict_(self, node: Any) -> dict[Any, Any]:
        return dict(zip(self.value(node["keys"]), self.value(node["values"]), strict=True))

    def ordereddict_(self, node: Any) -> Any:
        return collections.OrderedDict(self.value(node["items"]))

    def defaultdict_(self, node: Any) -> Any:
        return collections.defaultdict(FACTORIES[node["factory"]], self.value(node["items"]))

    def deque_(self, node: Any) -> Any:
        return collections.deque(self.value(node["items"]), node.get("maxlen"))

    def set_(self, node: Any) -> set[Any]:
        return set(self.value(node["items"]))

    def frozenset_(self, node: Any) -> frozenset[Any]:
        return frozenset(self.value(node["items"]))

    def namedtuple_(self, node: Any) -> Any:
        return self.make(node["of"], *self.value(node["fields"]).values())

    def structseq_(self, node: Any) -> Any:
        hidden = self.value(node.get("hidden", {}))
        if node["of"] == "time:struct_time":
            return time.struct_time(self.value(node["items"]), hidden)
        return self.make(node["of"], self.value(node["items"]), hidden)

    def node_(self, node: Any) -> Any:
        return self.make(node["of"], self.value(node["metadata"]), self.value(node["children"]))

    def object_(self, node: Any) -> Any:
        return self.value(node["state"])

    # plain values

    def int_(self, node: Any) -> int:
        return int(node["hex"], 16)

    def float_(self, node: Any) -> float:
        return struct.unpack(">d", bytes.fromhex(node["bits"]))[0]

    def str_(self, node: Any) -> str:
        return base64.b64decode(node["base64"]).decode("utf-8", "surrogatepass")

    def complex_(self, node: Any) -> complex:
        return complex(*self.value(node["parts"]))

    def bytes_(self, node: Any) -> bytes:
        return base64.b64decode(node["base64"])

    def bytearray_(self, node: Any) -> bytearray:
        return bytearray(base64.b64decode(node["base64"]))

    def decimal_(self, node: Any) -> decimal.Decimal:
        return decimal.Decimal(node["text"])

    def fraction_(self, node: Any) -> fractions.Fraction:
        return fractions.Fraction(*self.value(node["parts"]))

    def range_(self, node: Any) -> range:
        return range(*self.value(node["parts"]))

    def slice_(self, node: Any) -> slice:
        return slice(*self.value(node["parts"]))

    def uuid_(self, node: Any) -> uuid.UUID:
        return uuid.UUID(node["text"])

    def path_(self, node: Any) -> pathlib.PurePath:
        return getattr(pathlib, node["of"])(self.value(node["text"]))

    def date_(self, node: Any) -> datetime.date:
        return datetime.date.fromisoformat(node["text"])

    def time_(self, node: Any) -> datetime.time:
        moment = datetime.time.fromisoformat(node["text"])
        return moment.replace(fold=node.get("fold", 0), tzinfo=self.value(node.get("zone")))

    def datetime_(self, node: Any) -> datetime.datetime:
        moment = datetime.datetime.fromisoformat(node["text"])
        return moment.replace(fold=node.get("fold", 0), tzinfo=self.value(node.get("zone")))

    def timedelta_(self, node: Any) -> datetime.timedelta:
        return datetime.timedelta(*node["parts"])

    def timezone_(self, node: Any) -> datetime.timezone:
        return datetime.timezone(datetime.timedelta(*node["parts"]), *node["name"])

    def zoneinfo_(self, node: Any) -> zoneinfo.ZoneInfo:
        return zoneinfo.ZoneInfo(node["key"])

    def enum_(self, node: Any) -> Any:
        return self.make(node["of"], node["name"] if "name" in node else self.value(node["value"]))

    def dtype_(self, node: Any) -> torch.dtype:
        return getattr(torch, node["text"])

    def device_(self, node: Any) -> torch.device:
        return torch.device(node["text"])

    def size_(self, node: Any) -> torch.Size:
        return torch.Size(node["parts"])

    def layout_(self, node: Any) -> Any:
        return getattr(torch, node["text"].removeprefix("torch."))

    def memory_format_(self, node: Any) -> Any:
        return getattr(torch, node["text"].removeprefix("torch."))

    def numpy_(self, node: Any) -> Any:
        if "text" in node:
            text = self.value(node["text"])
            return numpy.str_(text) if isinstance(text, str) else numpy.bytes_(text)
        dtype = _numpy_dtype(node["dtype"])
        content = base64.b64decode(node["base64"])
        return numpy.ndarray((), dtype, content)[()] if content else numpy.empty((), dtype)[()]


def _numpy_dtype(described: Any) -> Any:
    return numpy.lib.format.descr_to_dtype(_tuples(described, are_fields=True))


def _tuples(described: Any, *, are_fields: bool) -> Any:
    """Bring back the tuples: a list of lists is one of fields, and all else was a tuple."""
    if not _is(described, list):
        return described
    if are_fields and all(_is(one, list) for one in described):
        return [
            (name, _tuples(kind, are_fields=True), *(tuple(sides) for sides in shape))
            for name, kind, *shape in described
        ]
    return tuple(_tuples(one, are_fields=at == 0) for at, one in enumerate(described))
