"""Headers of safetensors files: format them, and parse them without trusting a byte.

A file is the header's length (8 bytes, little endian), the header (JSON, padded with spaces) and the bytes of
the tensors. The header has each tensor's dtype, shape and offsets. An attacker can choose all of these, so
they are checked here before anything is allocated or read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, NoReturn, cast

from accelfn.errors import DamagedCheckpointError

# As in the stock readers. A header of 40,000 tensors with long names has about 8 MB.
MAX_HEADER_BYTES = 100_000_000

# The last bit of MKL's results depends on whether arrays begin at multiples of this, as torch's own do. So a
# weight that is used in a mapped file gives the same results as a copy.
_ALIGNMENT = 64
_LENGTH_BYTES = 8
_MAX_BYTES = (1 << 63) - 1
# Begins the first line of a file that Git LFS puts in the place of a large one.
_POINTER = b"version "
# The dtypes of safetensors, and the bits of an element.
_BITS = MappingProxyType(
    {
        **dict.fromkeys(("F4",), 4),
        **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
        **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
        **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
        **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
        **dict.fromkeys(("I32", "U32", "F32"), 32),
        **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
    }
)


class Entry(NamedTuple):
    """The dtype, shape and offsets of a tensor in a file.

    Attributes:
        dtype: As safetensors names it, such as ``"F32"``.
        shape: Of the tensor.
        start: First byte, from the file's beginning.
        stop: Byte after the last.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Header(NamedTuple):
    """The header of a safetensors file.

    Attributes:
        entries: By name, in the order of their offsets.
        metadata: Texts by name.
    """

    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]


Form = tuple[str, str, tuple[int, ...]]


def storage_order(forms: Iterable[Form]) -> list[Form]:
    """Sort tensors into the order of a file, which aligns them as well as a format without gaps allows.

    Tensors whose size is a multiple of 64 bytes come first, so that all of them begin at multiples of 64.
    Among them, and among the others, the order is by the size of an element, the largest first, so that each
    begins at a multiple of its elements' size, and then by name.

    Args:
        forms: Name, safetensors dtype and shape of each.
    """
    return [form for *_, form, _ in _in_order(forms)]


def _in_order(forms: Iterable[Form]) -> list[tuple[bool, int, str, Form, int | None]]:
    """Sort tensors as :func:`storage_order`; return by what each is sorted, then itself, and its size."""
    sized = ((form, size_of(form[1], form[2])) for form in forms)
    return sorted(
        ((size or 0) % _ALIGNMENT != 0, -_BITS.get(form[1], 0), form[0], form, size) for form, size in sized
    )


def format_header(
    forms: Iterable[Form], metadata: Mapping[str, str], *, fill: bool = False, last: Form | None = None
) -> tuple[bytes, dict[str, Entry]]:
    """Format the header of a file, up to the first tensor's bytes, which begin at a multiple of 64.

    Args:
        forms: Name, safetensors dtype and shape of each tensor, in any order.
        metadata: Texts by name.
        fill: Make all tensors begin at multiples of 64, with padding entries between them, which readers see
            as tensors (``".fill1"``; no module has such a name). So only for files that no other program
            reads.
        last: One more tensor, which comes after all others.

    Returns:
        The bytes, and the entry of each tensor by name, in the order of :func:`storage_order`.

    Raises:
        ValueError: A name occurs twice or is ``"__metadata__"``, safetensors lacks a dtype, or the header
            becomes longer than stock readers accept.
    """
    places: dict[str, Entry] = {}
    fields: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    in_order = [*_in_order(forms), *(() if last is None else _in_order([last]))]
    for _, _, _, (key, dtype, shape), size in in_order:
        if size is None or key in places or key == "__metadata__":
            raise ValueError(
                f"{key!r} can't be stored as {dtype!r} {list(shape)}: it needs a unique name, a dtype of "
                "safetensors, and a whole number of bytes."
            )
        rest = -start % _ALIGNMENT if fill else 0
        if rest:
            fields[f".fill{len(fields)}"] = {
                "dtype": "U8",
                "shape": [rest],
                "data_offsets": [start, start + rest],
            }
            start += rest
        places[key] = Entry(dtype, tuple(shape), start, start + size)
        fields[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, start + size]}
        start += size
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False, check_circular=False).encode()
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise ValueError(
            f"the header of {len(places)} tensors would have {len(text)} bytes, and readers accept "
            f"{MAX_HEADER_BYTES}. Use shorter names, or more files."
        )
    head = len(text).to_bytes(_LENGTH_BYTES, "little") + text
    return head, _moved(places.items(), len(head))


def check_length(start: bytes, file_size: int, place: str) -> int:
    """Return the number of bytes of a file before its tensors, from its first 8 bytes.

    Args:
        start: The first 8 bytes, or fewer if the file has fewer.
        file_size: In bytes.
        place: The path, for errors.

    Raises:
        DamagedCheckpointError: The number is larger than the file, or than any valid one.
    """
    length = int.from_bytes(start, "little")
    if len(start) < _LENGTH_BYTES or file_size < _LENGTH_BYTES:
        _refuse(place, f"it has {file_size} bytes, which is less than the length of a header takes")
    check_no_pointer(start, place)
    if length > MAX_HEADER_BYTES or length > file_size - _LENGTH_BYTES:
        _refuse(place, f"its header would have {length} bytes, and the file has {file_size}")
    return _LENGTH_BYTES + length


def check_no_pointer(start: bytes, place: str) -> None:
    """Refuse the small text that Git LFS puts in the place of a large file.

    Args:
        start: The first 8 bytes of the file.
        place: The path, for errors.

    Raises:
        DamagedCheckpointError: It is one.
    """
    if start.startswith(_POINTER):
        raise DamagedCheckpointError(
            f"{place} is a pointer of Git LFS, and the file itself was not downloaded. Fetch it with "
            "`git lfs pull`, or download it again.",
            place.replace("\\", "/").rpartition("/")[2],
        )


def check_safetensors_header(head: bytes, file_size: int, place: str = "the file") -> Header:
    """Parse the header of a safetensors file, and check that it is valid.

    A valid header has at most ``MAX_HEADER_BYTES`` and is one UTF-8 JSON object without duplicate keys. Each
    tensor has exactly a dtype of safetensors, a shape and data_offsets, with whole numbers that fit 64 bits,
    and as many bytes as dtype and shape need. The tensors fill the rest of the file without gaps or overlaps.

    Args:
        head: The header's length and the header, as in the file.
        file_size: Of the whole file, in bytes.
        place: The path, for errors.

    Raises:
        DamagedCheckpointError: It is invalid; with ``place`` and the reason.
    """
    if check_length(head[:_LENGTH_BYTES], file_size, place) != len(head):
        _refuse(place, "its header is truncated, or has another length")
    try:
        parsed = json.loads(head[_LENGTH_BYTES:].decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        _refuse(place, f"its header is no JSON as safetensors writes it ({error})", error)
    if not isinstance(parsed, dict) or head[_LENGTH_BYTES : _LENGTH_BYTES + 1] != b"{":
        _refuse(place, "its header is no JSON object")
    fields = cast("dict[str, Any]", parsed)
    metadata: Any = fields.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(one, str) for one in metadata.values()):  # pyright: ignore[reportUnknownVariableType]
        _refuse(place, "its metadata isn't texts by name")
    entries = sorted(
        ((key, _entry(key, one, place)) for key, one in fields.items()), key=lambda pair: pair[1][2:]
    )
    end = 0
    for key, entry in entries:
        if entry.start != end:
            _refuse(place, f"tensor {key!r} begins at {entry.start}, and the one before it ends at {end}")
        end = entry.stop
    if end != file_size - len(head):
        _refuse(place, f"its tensors have {end} bytes, and {file_size - len(head)} follow the header")
    return Header(_moved(entries, len(head)), cast("dict[str, str]", metadata))


def _moved(entries: Iterable[tuple[str, Entry]], by: int) -> dict[str, Entry]:
    """Shift entries from offsets after the header to offsets in the file."""
    return {key: Entry(dtype, shape, start + by, stop + by) for key, (dtype, shape, start, stop) in entries}


def _entry(key: str, fields: Any, place: str) -> Entry:
    try:
        dtype, shape, (start, stop) = fields["dtype"], fields["shape"], fields["data_offsets"]
        whole = True
        for number in (*shape, start, stop):  # a generator would take twice as long
            whole = whole and type(number) is int and 0 <= number <= _MAX_BYTES
        if whole and len(fields) == 3 and stop - start == size_of(dtype, shape):
            return Entry(dtype, tuple(shape), start, stop)
    except (TypeError, KeyError, ValueError):
        pass
    return _refuse(place, f"tensor {key!r} isn't a dtype, a shape and data_offsets that fit: {fields!r:.200}")


def size_of(dtype: str, shape: Sequence[int]) -> int | None:
    """Return the size of a tensor in bytes; None if that isn't a whole number or doesn't fit 64 bits."""
    if dtype not in _BITS:
        return None
    bits = largest = _BITS[dtype]
    for length in shape:
        bits *= length
        # torch multiplies the other lengths of an empty tensor too.
        largest *= max(length, 1)
        if largest > 8 * _MAX_BYTES:
            return None
    return None if bits % 8 else bits // 8


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice in it")
    "".join(found).encode()  # half of a surrogate pair can't be encoded
    return found


def _refuse(place: str, why: str, cause: Exception | None = None) -> NoReturn:
    raise DamagedCheckpointError(
        f"{place} is not a valid safetensors file: {why}. Take another copy of it, or an older checkpoint.",
        place.replace("\\", "/").rpartition("/")[2],
    ) from cause
