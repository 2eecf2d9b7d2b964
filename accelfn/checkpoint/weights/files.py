"""The files of a model on disk: written tensor by tensor, and put in place so that no crash tears a set.

A reader opens one file first, the *entry*: the only file, or the index that names the others. So a set of
files replaces another like this, and what is done is durable before each next step:

1. All new files are written under temporary names.
2. Shards get names that no file has. No reader knows of them yet.
3. The new entry gets its name, by one rename.
4. Entries of other names, which the old set left, go: those that readers prefer least come first. So the old
   entry is there until the last one goes, if readers prefer it to the new one.
5. What no entry names any more goes.

At every instant a reader thus opens the old entry, all files of which are there, or the new one.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import re
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from accelfn.checkpoint.files.header import format_header
from accelfn.checkpoint.files.stored_dtype import SAFETENSORS_NAMES
from accelfn.checkpoint.weights.plan import WeightNaming, entry_names, names_of

__all__ = (
    "Entry",
    "Staged",
    "holding",
    "publish",
    "replacing",
    "sync",
    "taken_generations",
    "temporary_path",
    "write_pickled",
    "write_tensors",
    "write_text",
)

_PARTIAL = re.compile(r"\.(?P<name>.+)\.\d+\.partial")
_WRITE_BYTES = 1 << 26  # at a time


class Entry(NamedTuple):
    """What the header of a safetensors file says of a tensor before its bytes are there."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Staged(NamedTuple):
    """A file that is complete on disk and waits for its name."""

    temporary: Path
    final: Path


# --- one file ------------------------------------------------------------------------------------


def write_tensors(
    path: Path,
    entries: Sequence[Entry],
    values: Iterator[torch.Tensor],
    metadata: Mapping[str, str],
    *,
    fill: bool = False,
) -> None:
    """Write a new safetensors file durably, holding one tensor at a time.

    Args:
        path: Must not exist yet.
        entries: In the order of ``header.format_header``.
        values: One tensor for each entry, in the same order; of any layout in memory, on any device.
        metadata: Of the file.
        fill: As for ``header.format_header``.

    Raises:
        OSError: The file can't be written; it names the file.
    """
    with _creating(path) as file:
        forms = [(entry.name, SAFETENSORS_NAMES[entry.dtype], entry.shape) for entry in entries]
        head, places = format_header(forms, metadata, fill=fill)
        assert list(places) == [entry.name for entry in entries]
        file.write(head)
        written = len(head)
        for entry in entries:
            file.write(bytes(places[entry.name].start - written))  # what fills
            written = places[entry.name].stop
            value = next(values)
            if (value.dtype, tuple(value.shape)) != (entry.dtype, entry.shape):
                raise ValueError(
                    f"{entry.name} was to be {entry.dtype} {entry.shape}, and is {value.dtype} "
                    f"{tuple(value.shape)}: it has changed during the save."
                )
            _write_bytes(file, value)
            del value  # before the next one comes


def write_pickled(path: Path, obj: Any) -> None:
    """Write a new file durably by ``torch.save``.

    Raises:
        OSError: The file can't be written; it names the file.
    """
    with _creating(path) as file:
        torch.save(obj, file)


def write_text(path: Path, text: str) -> None:
    """Write a new file of text durably.

    Raises:
        OSError: The file can't be written; it names the file.
    """
    with _creating(path) as file:
        file.write(text.encode())


def _write_bytes(file: BinaryIO, value: torch.Tensor) -> None:
    plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
    size = plain.numel() * plain.dtype.itemsize
    for start in range(0, size, _WRITE_BYTES):  # no copy, and no numpy
        length = min(_WRITE_BYTES, size - start)
        file.write((ctypes.c_char * length).from_address(plain.data_ptr() + start))


@contextlib.contextmanager
def _creating(path: Path) -> Generator[BinaryIO]:
    """Open a new file; on the way out it is made durable. Errors of the disk name it."""
    with _named(path), open(path, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _named(path: Path) -> Generator[None]:
    """Let errors of the disk name ``path``, where they name nothing."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, os.fspath(path)) from error
        raise


# --- a set of files ------------------------------------------------------------------------------


def temporary_path(final: Path) -> Path:
    """Where a file is written before it takes its name."""
    return final.with_name(f".{final.name}.{os.getpid()}.partial")


@contextlib.contextmanager
def replacing(final: Path) -> Generator[Path]:
    """Return the path to write a new file to, which takes the name ``final`` on the way out, in one step.

    After an error nothing of it is left, and what had the name before still has it.
    """
    temporary = temporary_path(final)
    temporary.unlink(missing_ok=True)  # of a program that was killed, and had the same number
    try:
        yield temporary
        os.replace(temporary, final)
    finally:
        temporary.unlink(missing_ok=True)
    sync(final.parent)


@contextlib.contextmanager
def holding(folder: Path, naming: WeightNaming) -> Generator[None]:
    """Make a directory for a model, and let no other program save a model in it meanwhile.

    Raises:
        NotADirectoryError: It is a file.
        IsADirectoryError: The name of a model's file is taken by a directory.
        BlockingIOError: Another program, or another rank, is saving in it.
        OSError: It can't be made.
    """
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"save_model: {folder} is a file. Pass a directory.")
    _make(folder)
    for name in entry_names(naming):
        if (folder / name).is_dir():
            raise IsADirectoryError(
                f"save_model: {folder / name} is a directory, and its name is that of a model's file. "
                "Remove it, or save elsewhere."
            )
    with _locked(folder):
        yield


def _make(folder: Path) -> None:
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in reversed(missing):
        sync(made.parent)


@contextlib.contextmanager
def _locked(folder: Path) -> Generator[None]:
    if sys.platform == "win32":  # there are no such locks for directories
        yield
        return
    fcntl: Any = importlib.import_module("fcntl")
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(
                error.errno,
                "save_model: another program or rank is saving a model here. Let one write at a time "
                "(save_on_each_node is for disks that nodes don't share)",
                os.fspath(folder),
            ) from error
        except OSError:
            pass  # this disk knows no locks; then it is left to the user, as with any other file
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for a process that was forked meanwhile
        os.close(descriptor)


def taken_generations(folder: Path, naming: WeightNaming) -> frozenset[int]:
    """Generations of shard names that files of a directory have."""
    found = (names.generation(name) for name in os.listdir(folder) for names in names_of(naming))
    return frozenset(one for one in found if one is not None)


def publish(folder: Path, naming: WeightNaming, shards: Sequence[Staged], entry: Staged) -> None:
    """Let a complete set of files take the place of the one that is there; see the module.

    Args:
        folder: Where all of them are.
        naming: Whose names they have.
        shards: Their final names are nobody's.
        entry: The index of the shards, or the only file.

    Raises:
        OSError: The disk refused a step. The set that was there or the new one is what readers see.
    """
    try:
        for one in shards:
            os.replace(one.temporary, one.final)
        if shards:
            sync(folder)
        os.replace(entry.temporary, entry.final)
    except OSError:
        for one in shards:
            one.final.unlink(missing_ok=True)
        raise
    sync(folder)
    for name in reversed(entry_names(naming)):
        if name != entry.final.name and os.path.lexists(folder / name):
            os.unlink(folder / name)
            sync(folder)
    _tidy(folder, naming, frozenset(one.final.name for one in (*shards, entry)))


def _tidy(folder: Path, naming: WeightNaming, current: frozenset[str]) -> None:
    """Remove what no entry names: shards of older saves, and what saves that were killed left behind."""
    for name in os.listdir(folder):
        partial = _PARTIAL.fullmatch(name)
        own = partial["name"] if partial else name
        is_shard = any(names.generation(own) is not None for names in names_of(naming))
        is_left = is_shard or (partial is not None and own in entry_names(naming))
        if is_left and name not in current:
            # The new set is in place: rubbish that can't be removed is no reason to call the save a failure.
            with contextlib.suppress(OSError):
                os.unlink(folder / name)


def sync(folder: Path) -> None:
    """Make sure that the names in a directory survive a power cut."""
    if sys.platform == "win32":  # directories can't be opened
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with _named(folder):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
