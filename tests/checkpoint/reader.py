"""A reader of checkpoints, written from docs/pages/checkpoint-format.md alone, without accelfn.

It shows that the page says all, and is short rather than fast. Errors are ``Damaged``, or whatever a
malformed document makes Python raise.
"""

import base64
import collections
import hashlib
import json
import math
import os
import pathlib
import re
import struct
import zlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import numpy
import torch

CHUNK_BYTES = 64 << 20
SAFETENSORS = {
    **{f"float{bits}": f"F{bits}" for bits in (64, 32, 16)},
    **{f"int{bits}": f"I{bits}" for bits in (64, 32, 16, 8)},
    **{f"uint{bits}": f"U{bits}" for bits in (64, 32, 16, 8)},
    **{f"float8_{kind}": f"F8_{kind.upper()}" for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz")},
    "bfloat16": "BF16",
    "bool": "BOOL",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
}
FACTORIES: dict[str, Any] = {
    **{kind.__name__: kind for kind in (list, dict, set, tuple, int, float, bool, str)},
    "OrderedDict": collections.OrderedDict,
    "deque": collections.deque,
    "none": None,
}
# What a node of a kind says with its value alone.
PLAIN: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "complex": lambda parts: complex(*map(float, parts)),
    "bytes": base64.b64decode,
    "bytearray": lambda text: bytearray(base64.b64decode(text)),
    "path": pathlib.Path,
    "dtype": lambda name: getattr(torch, name),
    "device": torch.device,
    "size": torch.Size,
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
    place = pathlib.Path(directory)
    manifest, entries = _all(place)
    tensors = {
        name: _whole(name, dtype, shape, _parts(manifest, shape, *where), entries)
        for name, (dtype, shape, *where) in manifest["tensors"].items()
    }
    return _Document(tensors, classes or {}).value(_of_rank(manifest[field], rank))


def verify(directory: str | os.PathLike[str]) -> dict[str, Any]:
    """Verify every byte of a checkpoint, and return its manifest."""
    return _all(pathlib.Path(directory))[0]


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


def _check_attachments(place: pathlib.Path, attachments: dict[str, Any]) -> None:
    """Check the caller's files."""
    for name, (size, sums) in attachments.items():
        _check(re.fullmatch(r"files-[0-9a-f]{8}/.+", name), "path of an attached file")
        _check((place / name).is_file() and not (place / name).is_symlink(), "an attached file")
        content = (place / name).read_bytes()
        chunks = [content[start : start + CHUNK_BYTES] for start in range(0, size, CHUNK_BYTES)]
        _check(len(content) == size and [*map(zlib.crc32, chunks)] == sums, "bytes of an attached file")


def _parts(manifest: dict[str, Any], shape: list[int], rank: int | None, layout: int = -1) -> list[Any]:
    """Return the parts of a tensor: the rank that wrote each, its offset and its shape."""
    return [[rank, [0] * len(shape), shape]] if rank is not None else manifest["layouts"][layout]


def _key(name: str, parts: list[Any], offset: list[int]) -> str:
    return name if len(parts) == 1 else f"{name}~@{','.join(map(str, offset))}"


def _all(place: pathlib.Path) -> tuple[dict[str, Any], dict[tuple[int, str], bytes]]:
    """Read the manifest and the bytes of all entries, by rank and key."""
    manifest = _manifest(place)
    expected: dict[tuple[int, str], Any] = {}
    for name, (dtype, shape, *where) in manifest["tensors"].items():
        parts = _parts(manifest, shape, *where)
        _check(math.prod(shape) == sum(math.prod(box) for _, _, box in parts), "parts don't fill")
        for rank, offset, box in parts:
            _check((rank, _key(name, parts, offset)) not in expected, "two parts in one entry")
            expected[rank, _key(name, parts, offset)] = _form(dtype, box)
    _check_attachments(place, manifest.get("attachments", {}))
    _check(set(manifest["files"]) <= set(os.listdir(place)), "files")
    entries: dict[tuple[int, str], bytes] = {}
    for name, (rank, size, header_crc32, sums_crc32) in manifest["files"].items():
        _check(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", name), "name of a file")
        _check((place / name).is_file() and not (place / name).is_symlink(), "no plain file")
        content = (place / name).read_bytes()
        _check(len(content) == size, "length of a file")
        end = 8 + int.from_bytes(content[:8], "little")
        _check(end % 8 == 0 and zlib.crc32(content[:end]) == header_crc32, "header of a file")
        header = json.loads(content[8:end])
        _check(header.pop("__metadata__") == {"format": "pt"}, "metadata of a file")
        begin, stop = header.pop("~crc32")["data_offsets"]
        _check(end + stop == size and zlib.crc32(content[end + begin :]) == sums_crc32, "checksums")
        sums = iter(struct.unpack(f"<{(stop - begin) // 4}I", content[end + begin :]))
        place_after = 0
        for key, said in header.items():
            begin, stop = said["data_offsets"]
            form = said["dtype"], said["shape"]
            _check((rank, key) not in entries and form == expected[rank, key], "entry of a file")
            _check(begin == place_after, "place of an entry")
            entries[rank, key] = taken = content[end + begin : end + stop]
            for at in range(0, stop - begin, CHUNK_BYTES):
                _check(zlib.crc32(taken[at : at + CHUNK_BYTES]) == next(sums), f"tensor {key}")
            place_after = stop
    _check(entries.keys() == expected.keys(), "entries")
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
    name: str, dtype: str, shape: list[int], parts: list[Any], entries: dict[tuple[int, str], bytes]
) -> torch.Tensor:
    """Put a tensor together, byte by byte where it has several parts."""
    if len(parts) == 1:
        return _tensor(entries[parts[0][0], name], dtype, shape)
    size = getattr(torch, dtype).itemsize
    whole = torch.zeros((*shape, size), dtype=torch.uint8)
    for rank, offset, box in parts:
        part = _tensor(entries[rank, _key(name, parts, offset)], "uint8", [*box, size])
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
    """One document."""

    def __init__(
        self, tensors: Mapping[str, torch.Tensor], classes: Mapping[str, Callable[..., Any]]
    ) -> None:
        self.tensors = dict(tensors)
        self.classes = classes
        self.made: dict[Any, Any] = {}

    def value(self, node: Any) -> Any:
        if _is(node, list):
            return [self.value(one) for one in node]
        if not _is(node, dict):
            return node
        if "$" not in node:
            return {key: self.value(one) for key, one in node.items()}
        kind = node["$"]
        plain = PLAIN.get(kind)
        return getattr(self, f"{kind}_")(node) if plain is None else plain(node["value"])

    def make(self, of: str, *content: Any) -> Any:
        return self.classes[of](*content) if of in self.classes else Foreign(of, content)

    # tensors

    def tensor_(self, node: Any) -> torch.Tensor:
        key = node["name"], node.get("parameter"), node.get("requires_grad")
        if key not in self.made:
            tensor = self.laid(node)
            if node.get("parameter"):
                tensor = torch.nn.Parameter(tensor, requires_grad=node.get("requires_grad", False))
            elif node.get("requires_grad"):
                tensor = tensor.detach().requires_grad_()
            self.made[key] = tensor
        return self.made[key]

    def laid(self, node: Any) -> torch.Tensor:
        tensor = self.tensors[node["name"]]
        if "stride" in node and tensor.is_contiguous():
            # By bytes, as not every dtype can be copied.
            size, stride = tensor.itemsize, node["stride"]
            laid = torch.zeros((tensor.numel(), size), dtype=torch.uint8)
            inside = laid.as_strided((*tensor.shape, size), [*(step * size for step in stride), 1])
            inside.copy_(tensor.unsqueeze(-1).view(torch.uint8))
            tensor = laid.view(-1).view(tensor.dtype).as_strided(tensor.shape, stride)
            self.tensors[node["name"]] = tensor
        return tensor

    def array_(self, node: Any) -> Any:
        return self.laid(node).numpy()

    def generator_(self, node: Any) -> torch.Generator:
        generator = torch.Generator(node["device"])
        generator.set_state(self.laid(node))
        return generator

    # containers and classes

    def pairs(self, node: Any) -> Any:
        return zip(map(self.value, node["keys"]), self.value(node["items"]), strict=True)

    def items(self, node: Any) -> Any:
        return {"tuple": tuple, "set": set, "frozenset": frozenset}[node["$"]](self.value(node["items"]))

    tuple_ = set_ = frozenset_ = items

    def mapping(self, node: Any) -> Any:
        kinds: dict[str, Any] = {"ordereddict": collections.OrderedDict, "counter": collections.Counter}
        return kinds.get(node["$"], dict)(dict(self.pairs(node)))

    dict_ = ordereddict_ = counter_ = mapping

    def defaultdict_(self, node: Any) -> Any:
        return collections.defaultdict(FACTORIES[node["factory"]], self.pairs(node))

    def deque_(self, node: Any) -> Any:
        return collections.deque(self.value(node["items"]), node.get("maxlen"))

    def namedtuple_(self, node: Any) -> Any:
        return self.make(node["of"], *self.value(node["items"]))

    def node_(self, node: Any) -> Any:
        return self.make(node["of"], self.value(node["metadata"]), self.value(node["items"]))

    def object_(self, node: Any) -> Any:
        return self.value(node["state"])

    def enum_(self, node: Any) -> Any:
        return self.make(node["of"], node["value"])

    def numpy_(self, node: Any) -> Any:
        return numpy.frombuffer(base64.b64decode(node["value"]), node["dtype"])[0]
