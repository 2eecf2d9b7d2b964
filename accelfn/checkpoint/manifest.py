"""The manifest of a checkpoint: its files, where the tensors are in them, and the tree.

``manifest.json`` has two lines. The first is the manifest as JSON without spaces; the second is the SHA-256
of the first, in hexadecimal. So truncation and changes of the manifest are detected, and by the checksums in
it also those of every other byte of the checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias, cast

from accelfn.errors import DamagedCheckpointError, NotAvailableError
from accelfn.weights.write import CHUNK_BYTES

Json: TypeAlias = "bool | int | float | str | list[Any] | dict[str, Any] | None"

FORMAT = "accelfn-checkpoint"
VERSION = 1
MANIFEST = "manifest.json"

# The order is that of the file.
_SCALARS = ("created_by", "identity", "step", "metric", "world_size")
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_FILES = re.compile(r"files-[0-9a-f]{8}")
_OWN_NAME = re.compile(
    r"manifest(-[0-9a-f]{8})?\.json|"
    r"tensors-[0-9]{5,}(-[0-9])?(-[0-9a-f]{8})?\.safetensors|" + _FILES.pattern
)


class Part(NamedTuple):
    """A box of a tensor, and who wrote it.

    Attributes:
        rank: Of the world that saved; the part is in one of this rank's files.
        offset: Of the box in the whole tensor, by dimension.
        shape: Of the box.
    """

    rank: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]


class StoredTensor(NamedTuple):
    """A tensor. Its parts cover it, and don't overlap.

    Attributes:
        dtype: As torch names it, such as ``"float32"``.
        shape: Of the complete tensor.
        parts: The same tuple for all tensors of one layout, so that a manifest doesn't grow with tensors
            times ranks.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


class StoredFile(NamedTuple):
    """A file of tensors.

    Attributes:
        rank: That wrote it.
        size: In bytes.
        header_crc32: Of everything before the tensors: the header's length and the header.
        sums_crc32: Of its last entry, which has the checksums of all others.
    """

    rank: int
    size: int
    header_crc32: int
    sums_crc32: int


class Attachment(NamedTuple):
    """A file that the caller has put into the checkpoint.

    Attributes:
        size: In bytes.
        crc32: Of each ``CHUNK_BYTES``, in order; empty for an empty file.
    """

    size: int
    crc32: tuple[int, ...]


def entry_key(name: str, parts: Sequence[Part], part: Part) -> str:
    """Return the key of a part in its file: the tensor's name, and the offset unless it is all of it. Pure.

    >>> part = Part(1, (2, 0), (2, 3))
    >>> entry_key("w", (Part(0, (0, 0), (2, 3)), part), part), entry_key("w", (part,), part)
    ('w~@2,0', 'w')
    """
    return name if len(parts) == 1 else f"{name}~@{','.join(map(str, part.offset))}"


def leaf_path(name: str) -> str:
    """Return the readable path of a leaf: ``~1`` in a stored name is ``/``. Pure.

    >>> leaf_path("optimizer/state/model~10.weight/exp_avg")
    'optimizer/state/model/0.weight/exp_avg'
    """
    return name.replace("~1", "/").replace("~0", "~")


def is_own_name(name: str) -> bool:
    """Return whether a name in a checkpoint's directory is one that saves use, and no user may. Pure."""
    return _OWN_NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The manifest of a checkpoint.

    Attributes:
        tree: The document of the tree, see ``accelfn.checkpoint.document.encode``; values that differ between
            ranks are encoded by ``accelfn.checkpoint.by_rank``.
        random: The document of the random states, by rank; None if there are none.
        identity: A text that no other checkpoint has, so that ranks can tell whether they read the same one.
        tensors: By their names in the document.
        files: By name.
        attachments: The caller's files, by path in the checkpoint: ``files-0a1b2c3d/notes``.
        step: The caller's count, such as of optimizer steps; None if none was passed.
        metric: The caller's measure, for keeping the best; None if none was passed.
        world_size: The number of ranks that saved it.
        created_by: Name and version of the program.
    """

    tree: Json
    tensors: Mapping[str, StoredTensor]
    files: Mapping[str, StoredFile]
    attachments: Mapping[str, Attachment] = field(default_factory=dict[str, Attachment])
    random: Json = None
    identity: str = ""
    step: int | None = None
    metric: float | None = None
    world_size: int = 1
    created_by: str = ""

    @property
    def num_bytes(self) -> int:
        """The size of all files of tensors."""
        return sum(file.size for file in self.files.values())


def format_manifest(manifest: Manifest) -> bytes:
    """Write a manifest as the bytes of its file."""
    line = _line(manifest)
    return line + b"\n" + hashlib.sha256(line).hexdigest().encode() + b"\n"


def _line(manifest: Manifest) -> bytes:
    attached = dict(sorted(manifest.attachments.items()))
    layouts: list[tuple[Part, ...]] = []
    numbers: dict[int, int] = {}
    tensors: dict[str, list[Any]] = {}
    for name, (dtype, shape, parts) in sorted(manifest.tensors.items()):
        if len(parts) == 1:
            tensors[name] = [dtype, shape, parts[0].rank]
            continue
        if id(parts) not in numbers:
            numbers[id(parts)] = len(layouts)
            layouts.append(parts)
        tensors[name] = [dtype, shape, None, numbers[id(parts)]]
    head = {
        "format": FORMAT,
        "version": VERSION,
        **{name: getattr(manifest, name) for name in _SCALARS},
        "chunk_bytes": CHUNK_BYTES,
        "files": dict(sorted(manifest.files.items())),  # in JSON, records are lists of their fields
        **({"attachments": attached} if attached else {}),
        "tensors": tensors,
        "layouts": layouts,
        "random": manifest.random,
        "tree": manifest.tree,  # in its own order, which is that of the dicts in it
    }
    return json.dumps(head, separators=(",", ":"), allow_nan=False, check_circular=False).encode()


def parse_manifest(content: bytes, place: str = MANIFEST) -> Manifest:
    """Read a manifest from the bytes of its file, and check that it is sound.

    Args:
        content: Of the file.
        place: The path, for errors.

    Raises:
        DamagedCheckpointError: It isn't what was written, or its fields are invalid.
        NotAvailableError: A newer version of accelfn has written it.
    """
    return _manifest(_fields(content, place, None), place)


def parse_head(content: bytes, place: str = MANIFEST) -> Manifest:
    """Read a manifest without its tree and tensors, which is fast even if there are many.

    The checksum of the complete manifest is checked.

    Args:
        content: Of the file.
        place: The path, for errors.

    Raises:
        DamagedCheckpointError: It isn't what was written, or its fields are invalid.
        NotAvailableError: A newer version of accelfn has written it.
    """
    # In a JSON string a quote follows a backslash, so these bytes can't be inside one.
    fields = _fields(content, place, b',"tensors":')
    return _manifest({**fields, "random": None, "tree": None, "tensors": {}, "layouts": []}, place)


def _fields(content: bytes, place: str, until: bytes | None) -> dict[str, Any]:
    line, _, rest = content.partition(b"\n")
    if rest != hashlib.sha256(line).hexdigest().encode() + b"\n":
        raise DamagedCheckpointError(
            f"{place} is damaged: its checksum isn't that of its content ({len(content)} bytes). Take an "
            "older checkpoint.",
            MANIFEST,
        )
    try:
        fields = json.loads(line if until is None else line.partition(until)[0] + b"}")
        version = fields["version"] if fields["format"] == FORMAT else None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _unsound(place, "it isn't one") from error
    if isinstance(version, int) and version > VERSION:
        raise NotAvailableError(
            f"{place} is of version {version}, and this accelfn reads versions up to {VERSION}. "
            "Update accelfn."
        )
    if version != VERSION or fields.get("chunk_bytes") != CHUNK_BYTES:
        raise _unsound(place, f"format, version or chunk_bytes is {fields.get('format')!r}, {version!r}, ...")
    return cast("dict[str, Any]", fields)


def _manifest(fields: Mapping[str, Any], place: str) -> Manifest:
    try:
        layouts = [
            tuple(Part(rank, tuple(offset), tuple(shape)) for rank, offset, shape in layout)
            for layout in fields["layouts"]
        ]
        manifest = Manifest(
            tree=fields["tree"],
            tensors={name: _tensor(one, layouts) for name, one in fields["tensors"].items()},
            files={name: StoredFile(*one) for name, one in fields["files"].items()},
            attachments={
                name: Attachment(size, tuple(crc32))
                for name, (size, crc32) in fields.get("attachments", {}).items()
            },
            random=fields["random"],
            **{name: fields[name] for name in _SCALARS},
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise _unsound(place, f"a field is missing or of another form ({error})") from error
    _check(manifest, place)
    return manifest


def _tensor(fields: Any, layouts: Sequence[tuple[Part, ...]]) -> StoredTensor:
    dtype, shape, rank, *layout = fields
    if not layout:
        return StoredTensor(dtype, tuple(shape), (Part(rank, (0,) * len(shape), tuple(shape)),))
    (number,) = layout
    if rank is not None or not _is_count(number):
        raise ValueError(fields)
    return StoredTensor(dtype, tuple(shape), layouts[number])


def _unsound(place: str, why: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{place} is no sound manifest: {why}.", MANIFEST)


def _check(manifest: Manifest, place: str) -> None:
    """Check the fields: a malicious manifest can have a correct SHA-256."""
    if not _is_count(manifest.world_size) or manifest.world_size == 0:
        raise _unsound(place, f"world_size is {manifest.world_size!r}")
    if manifest.step is not None and type(cast("object", manifest.step)) is not int:
        raise _unsound(place, f"step is {manifest.step!r}")
    if manifest.metric is not None and type(cast("object", manifest.metric)) not in (int, float):
        raise _unsound(place, f"metric is {manifest.metric!r}")
    for name, file in manifest.files.items():
        if not _FILE_NAME.fullmatch(name) or name == MANIFEST:
            raise _unsound(place, f"{name!r} is no name of a file of tensors")
        if not all(map(_is_count, file)) or file.rank >= manifest.world_size:
            raise _unsound(place, f"file {name!r} has {tuple(file)}")
    _check_attachments(manifest.attachments, place)
    writers = {file.rank for file in manifest.files.values()}
    covered: set[tuple[int, tuple[int, ...]]] = set()  # layouts, and shapes that they cover
    for name, one in manifest.tensors.items():
        if not all(map(_is_count, one.shape)) or not isinstance(cast("object", one.dtype), str):
            raise _unsound(place, f"tensor {name!r} is {one.dtype!r} {one.shape}")
        if len(one.parts) > 1 and (id(one.parts), one.shape) in covered:
            continue
        _check_cover(name, one, place)
        covered.add((id(one.parts), one.shape))
        for part in one.parts:
            if not _is_count(part.rank) or part.rank not in writers:
                why = f"a part of tensor {name!r} is of rank {part.rank!r}, which has no file"
                raise _unsound(place, why)


def _check_attachments(attachments: Mapping[str, Attachment], place: str) -> None:
    for name, one in attachments.items():
        parts = name.split("/")
        inside = not {"", ".", ".."}.intersection(parts) and not {"\\", "\0"}.intersection(name)
        if not inside or len(parts) < 2 or not _FILES.fullmatch(parts[0]):
            raise _unsound(place, f"{name!r} is no path of an attached file")
        if any("/".join(parts[:count]) in attachments for count in range(1, len(parts))):
            raise _unsound(place, f"attached file {name!r} is inside another one")
        if not all(map(_is_count, (one.size, *one.crc32))) or len(one.crc32) != -(-one.size // CHUNK_BYTES):
            raise _unsound(place, f"attached file {name!r} has {one.size!r} bytes, and other checksums")


def _is_count(number: object) -> bool:
    return type(number) is int and number >= 0


def _check_cover(name: str, one: StoredTensor, place: str) -> None:
    """Check that boxes fill a tensor: they are inside, don't overlap, and have as many elements as it has."""
    for part in one.parts:
        fits = len(part.offset) == len(part.shape) == len(one.shape)
        for start, length, size in zip(part.offset, part.shape, one.shape, strict=False):
            fits = fits and _is_count(start) and _is_count(length) and start + length <= size
        if not fits:
            raise _unsound(place, f"a part of tensor {name!r} is outside of it")
    if math.prod(one.shape) != sum(math.prod(part.shape) for part in one.parts) or not one.parts:
        raise _unsound(place, f"the parts of tensor {name!r} don't fill it")
    if len(one.parts) == 1:
        return
    boxes = [part for part in one.parts if math.prod(part.shape)]
    # Sorted by the dimension that is cut most, so that a box is compared with those only that may overlap it.
    dims = range(len(one.shape))
    dim = max(dims, key=lambda dim: len({part.offset[dim] for part in boxes}), default=0)
    boxes.sort(key=lambda part: part.offset[dim])
    for index, part in enumerate(boxes):
        for other in boxes[index + 1 :]:
            if other.offset[dim] >= part.offset[dim] + part.shape[dim]:
                break
            if all(
                start < begin + length and begin < start + size
                for start, size, begin, length in zip(
                    part.offset, part.shape, other.offset, other.shape, strict=True
                )
            ):
                raise _unsound(place, f"parts of tensor {name!r} overlap")
