"""Weights that can't be used where they lie: written once in the form that is wanted, and mapped."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from accelfn.bigmodel.load.mapped import drop_pages, map_tensors
from accelfn.bigmodel.load.source import Stamp, Stored, open_unchanged, stamp_of
from accelfn.bigmodel.load.writing import writing_to
from accelfn.checkpoint.files.header import Header, format_header
from accelfn.checkpoint.files.stored_dtype import SAFETENSORS_NAMES
from accelfn.checkpoint.weights.files import Entry, replacing, write_tensors
from accelfn.checkpoint.weights.index import read_header
from accelfn.errors import DamagedCheckpointError

__all__ = ("Conversion", "convert")

_KEY = "accelfn.converted"


class Conversion(NamedTuple):
    """A tensor to write anew.

    Attributes:
        source: Where it lies.
        dtype: That it shall have.
    """

    source: Stored
    dtype: torch.dtype


def convert(
    conversions: Sequence[Conversion],
    stamps: Mapping[Path, Stamp],
    folder: str | os.PathLike[str],
    advance: Callable[[int], None] = lambda _: None,
) -> list[torch.Tensor]:
    """Write tensors into a folder in other dtypes, and map them.

    There is one file for each file that they come from, called after what it is made of: the file's path,
    size and time of change, and place and dtypes of each tensor. It says all this itself, too, and is only
    taken for the right one if every word of it is. One tensor at a time is in memory.

    Ranks: local. Several may write the same folder: a file gets its name when it is whole.

    Args:
        conversions: What to write.
        stamps: Of the files that it comes from.
        folder: Made where it isn't there.
        advance: Called with bytes that are done.

    Returns:
        The tensors, in the order given.

    Raises:
        DamagedCheckpointError: A file that they come from was changed meanwhile.
        OSError: The folder can't be written to, or is full. Nothing half is left behind.
        ValueError: safetensors has no such dtype.
    """
    found: dict[int, torch.Tensor] = {}
    by_file: dict[Path, list[int]] = {}
    for number, one in enumerate(conversions):
        by_file.setdefault(one.source.path, []).append(number)
    if not by_file:
        return []
    with writing_to(folder, "offload_folder") as place:
        for path, numbers in by_file.items():
            open_unchanged(path, stamps).close()
            # Keys of their own: what is tied, or asked for in two dtypes, may have one name.
            some = {
                f"{number}:{conversions[at].source.name}": conversions[at]
                for number, at in enumerate(numbers)
            }
            mapped = _convert_file(path, some, stamps[path], place, advance)
            found.update(zip(numbers, (mapped[key] for key in some), strict=True))
    return [found[number] for number in range(len(conversions))]


def _convert_file(
    path: Path,
    conversions: Mapping[str, Conversion],
    stamp: Stamp,
    folder: Path,
    advance: Callable[[int], None],
) -> dict[str, torch.Tensor]:
    said = _description(path, conversions, stamp)
    final = folder / f"accelfn-{hashlib.sha256(said.encode()).hexdigest()[:32]}.safetensors"
    header = _header_if_same(final, said)
    if header is None:
        # In the order of the file.
        forms = [(key, SAFETENSORS_NAMES[one.dtype], one.source.shape) for key, one in conversions.items()]
        _, places = format_header(forms, {_KEY: said}, fill=True)
        entries = [Entry(key, conversions[key].dtype, conversions[key].source.shape) for key in places]
        with replacing(final) as temporary:
            write_tensors(temporary, entries, _values(places, conversions, advance), {_KEY: said}, fill=True)
        header = read_header(final)
    else:
        advance(sum(one.source.num_bytes for one in conversions.values()))
    return map_tensors(final, header.entries)


def _description(path: Path, conversions: Mapping[str, Conversion], stamp: Stamp) -> str:
    unfit = [one for one in conversions.values() if one.dtype not in SAFETENSORS_NAMES]
    if unfit:
        raise ValueError(
            f"{unfit[0].source.name} can't be written as {unfit[0].dtype}, which safetensors lacks. Choose "
            "another dtype, or another place than the disk."
        )
    tensors = {key: [str(one.dtype), _describe(one.source)] for key, one in conversions.items()}
    said = {"file": str(path.resolve()), "stamp": list(stamp), "tensors": tensors}
    return json.dumps(said, sort_keys=True)


def _describe(source: Stored) -> list[object]:
    parts = [[str(one.path.resolve()), list(stamp_of(one.path)), _describe(one)] for one in source.made_of]
    return [str(source.dtype), list(source.shape), source.start, source.made_by, parts]


def _header_if_same(path: Path, said: str) -> Header | None:
    """Return the header of a file that is there already and says that it is what would be written."""
    with contextlib.suppress(FileNotFoundError, DamagedCheckpointError):
        header = read_header(path)
        if header.metadata.get(_KEY) == said:
            return header
    return None


def _values(
    keys: Mapping[str, object], conversions: Mapping[str, Conversion], advance: Callable[[int], None]
) -> Iterator[torch.Tensor]:
    for key in keys:
        one = conversions[key]
        value = one.source.map()
        yield value.to(one.dtype).contiguous()
        drop_pages((value,))
        advance(one.source.num_bytes)
