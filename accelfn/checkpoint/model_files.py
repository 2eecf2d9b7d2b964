"""Write the files of a model's weights, and replace a model's files so that no crash mixes two models.

A reader opens one file first, the *entry*: the single file, or the index that names the others. A new set of
files replaces an old one in these steps, each durable before the next:

1. All new files are written in a separate folder.
2. The shards are moved to names that no existing file has; no reader knows them yet.
3. The new entry is moved to its name, by one rename.
4. Other entries of the old set are removed, beginning with those that readers prefer least. If readers prefer
   an old entry to the new one, it is therefore the last to go.
5. Files that no entry names any more are removed.

At every instant, a reader opens the old entry with all of its files, or the new one. Where there are no locks
(Windows, some network file systems, object stores), another program may be doing the same: then no two saves
use the same names for shards, and only files of the set that was found before step 1 are removed. In an
object store a file appears when it is complete, so it is written under its name at once, the entry last.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch

from accelfn.checkpoint.commit import scratch_folder
from accelfn.errors import DamagedCheckpointError, NoCheckpointError
from accelfn.storage.address import as_path
from accelfn.storage.disk import (
    Disk,
    Status,
    kind_of,
    list_names,
    make_folders,
    naming,
    write_all,
    write_file,
)
from accelfn.storage.object_store import disk_at
from accelfn.weights.dtypes import SAFETENSORS_NAMES
from accelfn.weights.index import (
    WeightNames,
    WeightNaming,
    WeightsPlan,
    entry_names,
    find_weights,
    names_of,
    parse_size,
    plan_weights,
)
from accelfn.weights.write import NewEntry, write_tensors

# --- one file ------------------------------------------------------------------------------------


def write_safetensors(
    path: Path,
    forms: Mapping[str, tuple[torch.dtype, Sequence[int]]],
    value_of: Callable[[str], torch.Tensor],
    metadata: Mapping[str, str],
    *,
    fill: bool = False,
) -> None:
    """Write a new safetensors file durably, with one tensor in memory at a time and without checksums.

    Args:
        path: Must not exist yet.
        forms: Dtype and shape of each tensor, by name.
        value_of: Returns a tensor by its name; called in the order of ``header.storage_order``.
        metadata: Texts for the header.
        fill: See ``header.format_header``.

    Raises:
        OSError: The file can't be written; the error names it.
    """
    entries = [
        NewEntry(name, SAFETENSORS_NAMES[dtype], tuple(shape), partial(value_of, name), crc32=())
        for name, (dtype, shape) in forms.items()
    ]
    write_tensors(disk_at(path), os.fspath(path), entries, metadata, fill=fill)


def write_pickled(path: Path, obj: Any) -> None:
    """Write a new file durably with ``torch.save``.

    Raises:
        OSError: The file can't be written; the error names it.
    """
    disk, place = disk_at(path), os.fspath(path)
    with naming(place):
        descriptor = disk.create(place)
        stream = _Stream(disk, descriptor)
        try:
            torch.save(obj, cast("IO[bytes]", stream))
            disk.sync(descriptor)
        except RuntimeError as error:
            raise stream.error or error from error
        finally:
            disk.close(descriptor)


class _Stream:
    """A file that ``torch.save`` writes to, from its begin to its end; torch hides its errors."""

    def __init__(self, disk: Disk, descriptor: int) -> None:
        self._disk, self._descriptor, self._size = disk, descriptor, 0
        self.error: OSError | None = None

    def write(self, content: bytes | memoryview) -> int:
        part = memoryview(content).cast("B")
        try:
            write_all(self._disk, self._descriptor, part, self._size)
        except OSError as error:
            self.error = self.error or error
            raise
        self._size += len(part)
        return len(part)

    def flush(self) -> None:
        """Do nothing: the disk is told when the file is complete."""


def compact(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU, contiguous, and with a storage that holds nothing else.

    ``torch.save`` writes the storage of a view completely.
    """
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    is_view = plain.untyped_storage().nbytes() != plain.numel() * plain.dtype.itemsize
    return plain.clone() if is_view else plain


# --- a folder for new files ----------------------------------------------------------------------


@contextlib.contextmanager
def staging(final: Path) -> Generator[Path]:
    """Make a folder next to ``final`` for new files, and remove it at the end.

    The caller renames the result to ``final`` inside the block; the rename is durable when the block ends.
    Folders that killed programs left behind are removed first. Where files appear when they are complete, it
    is the folder of ``final`` itself.
    """
    target, disk = as_path(final), disk_at(final)
    if disk.has_whole_files:
        yield target.parent
        return
    make_folders(disk, os.fspath(target.parent))
    with scratch_folder(disk, os.fspath(target)) as stage:
        yield Path(stage)
        _sync(target.parent)


@contextlib.contextmanager
def replacing(final: Path) -> Generator[Path]:
    """Yield the path for a new file that replaces ``final`` at the end of the block, by one rename.

    If the block fails, the new file is removed, and ``final`` is unchanged.
    """
    with staging(final) as stage:
        yield stage / final.name
        _move(stage / final.name, as_path(final))


def _move(path: Path, new: Path) -> None:
    if path != new:
        disk_at(new).rename(os.fspath(path), os.fspath(new))


def _sync(folder: Path) -> None:
    with naming(os.fspath(folder)):
        disk_at(folder).sync_folder(os.fspath(folder))


# --- the directory of a model --------------------------------------------------------------------


@contextlib.contextmanager
def locked_directory(folder: Path, naming: WeightNaming) -> Generator[bool]:
    """Make the directory of a model, and lock it against other saves until the end of the block.

    Yields whether it is locked: some file systems have no locks.

    Raises:
        NotADirectoryError: ``folder`` is a file.
        IsADirectoryError: A directory has the name of one of the model's files.
        BlockingIOError: Another program or rank is saving to the directory.
        OSError: The directory can't be made.
    """
    disk, place = disk_at(folder), os.fspath(folder)
    try:
        list_names(disk, place)
    except NotADirectoryError as error:
        raise NotADirectoryError(f"save_model: {folder} is a file. Pass a directory.") from error
    make_folders(disk, place)
    for name in entry_names(naming):
        if kind_of(disk, folder / name) == "directory":
            raise IsADirectoryError(
                f"save_model: {folder / name} is a directory, but the model needs a file of that name. "
                "Remove it, or save to another directory."
            )
    with _locked(folder) as is_locked:
        yield is_locked


@contextlib.contextmanager
def _locked(folder: Path) -> Generator[bool]:
    try:
        release = disk_at(folder).lock(os.fspath(folder))
    except BlockingIOError as error:
        raise BlockingIOError(
            error.errno,
            "save_model: another program or rank is saving a model here. Let one write at a time "
            "(save_on_each_node is for disks that nodes don't share)",
            os.fspath(folder),
        ) from error
    try:
        yield release is not None
    finally:
        if release is not None:
            release()


class Existing(NamedTuple):
    """The files of a model in a directory, before others replace them.

    Attributes:
        entries: The state of each file that readers open first, by name; None for those that are missing.
        shards: The generation of each shard, by name.
        removable: The shards that belong to the old model.
    """

    entries: Mapping[str, Status | None]
    shards: Mapping[str, int]
    removable: frozenset[str]


def find_existing(folder: Path, naming: WeightNaming, *, is_locked: bool) -> Existing:
    """Return a model's files in a directory, which exists; ``is_locked`` as of :func:`publish`."""
    disk = disk_at(folder)
    entries = {name: _status(disk, folder / name) for name in entry_names(naming)}
    shards = {
        name: generation
        for name in list_names(disk, os.fspath(folder))
        for names in names_of(naming)
        if (generation := names.generation(name)) is not None
    }
    # Others may belong to a save that runs.
    removable = shards.keys() if is_locked else _named_in(folder / name for name in entries) & shards.keys()
    return Existing(entries, shards, frozenset(removable))


def _status(disk: Disk, path: Path) -> Status | None:
    try:
        return disk.status(os.fspath(path))
    except FileNotFoundError:
        return None


def write_files(
    folder: Path,
    plan: WeightsPlan,
    kind: WeightNames,
    tensors: Mapping[str, torch.Tensor],
    values: Iterator[torch.Tensor] | None = None,
) -> tuple[str, ...]:
    """Write the files of a plan durably, and the index if there are several.

    Args:
        folder: Contains none of the files yet.
        plan: Which tensor is in which file.
        kind: Names of the files.
        tensors: By name, for dtypes and shapes.
        values: The complete tensors in the order of the plan. None: those in ``tensors``.

    Returns:
        Names of the files; the entry is the last.

    Raises:
        OSError: A file can't be written; the error names it.
    """
    remaining = values or (tensors[name] for _, names in plan.files for name in names)
    file_of = {name: file for file, names in plan.files for name in names}
    disk, shards = disk_at(folder), [file for file, _ in plan.files] if len(plan.files) > 1 else []
    try:
        for file, names in plan.files:
            tied = {name: stored for name, stored in plan.tied if file_of[stored] == file}
            if kind.is_safe:
                forms = {name: (tensors[name].dtype, tensors[name].shape) for name in names}
                write_safetensors(folder / file, forms, lambda _: next(remaining), {"format": "pt", **tied})
                continue
            content = {name: compact(value) for name, value in zip(names, remaining, strict=False)}
            write_pickled(folder / file, content | {name: content[stored] for name, stored in tied.items()})
            del content  # before the next file's tensors are collected
    except BaseException:
        _remove(disk, folder, shards)
        raise
    if len(plan.files) == 1:
        return (plan.files[0][0],)
    # Pickled files contain tied weights under each of their names.
    tied_files = {} if kind.is_safe else {name: file_of[stored] for name, stored in plan.tied}
    index = {"metadata": {"total_size": plan.total_bytes}, "weight_map": {**file_of, **tied_files}}
    text = json.dumps(index, indent=2, sort_keys=True) + "\n"
    try:
        write_file(disk, os.fspath(folder / kind.index), text.encode())
    except BaseException:
        _remove(disk, folder, shards)
        raise
    return (*shards, kind.index)


def _remove(disk: Disk, folder: Path, files: Iterable[str]) -> None:
    for name in files:
        with contextlib.suppress(OSError):
            disk.remove_file(os.fspath(folder / name))


def publish(folder: Path, stage: Path, files: Sequence[str], existing: Existing) -> None:
    """Replace the model in a directory by a complete set of new files; see the module.

    Args:
        folder: The model's directory.
        stage: Contains the new files.
        files: Their names. The last one is the entry; no file in ``folder`` has the other names.
        existing: The files of the old model.

    Raises:
        OSError: A step failed. Readers find either the old files or the new ones.
    """
    *shards, entry = files
    disk = disk_at(folder)
    try:
        for name in shards:
            _move(stage / name, folder / name)
        if shards:
            _sync(folder)
        _move(stage / entry, folder / entry)
    except OSError:
        _remove(disk, folder, shards)
        raise
    _sync(folder)
    for name, before in reversed([*existing.entries.items()]):
        if name != entry and before is not None and _status(disk, folder / name) == before:
            disk.remove_file(os.fspath(folder / name))
            _sync(folder)
    # The save has succeeded, with or without old files left over.
    _remove(disk, folder, existing.removable.difference(files))


def _named_in(entries: Iterable[Path]) -> set[str]:
    """Return the files that indexes name; none for other entries, and for what can't be read."""
    found: set[str] = set()
    for entry in entries:
        with contextlib.suppress(NoCheckpointError, DamagedCheckpointError):
            found.update(find_weights(entry).files)
    return found


def write_weights(
    directory: str | os.PathLike[str],
    tensors: Mapping[str, torch.Tensor],
    *,
    max_shard_size: int | str = "10GB",
) -> tuple[str, ...]:
    """Write tensors to a new directory, as ``model.safetensors`` or as several files with an index.

    Tensors that are the same data are stored once; the file's metadata has the other names.

    Ranks: local; one process writes.

    Args:
        directory: Must not exist, or be empty.
        tensors: Dense, complete tensors by name.
        max_shard_size: Largest size of a file, in bytes or a text such as ``"5GB"``.

    Returns:
        Names of the files.

    Raises:
        ValueError: safetensors lacks a tensor's dtype, or ``max_shard_size`` is malformed.
        OSError: The files can't be written, or the directory isn't empty. Nothing is left behind.
    """
    odd = [name for name, tensor in tensors.items() if tensor.dtype not in SAFETENSORS_NAMES]
    if odd:
        listed = ", ".join(f"{name} ({tensors[name].dtype})" for name in odd[:5])
        raise ValueError(f"safetensors has no dtype for {listed}. Convert to a dtype such as float32 first.")
    plan = plan_weights(tensors, parse_size(max_shard_size))
    kind, target = names_of("transformers")[0], as_path(directory)
    if disk_at(target).has_whole_files:
        return write_files(target, plan, kind, tensors)
    with staging(target) as stage:
        files = write_files(stage, plan, kind, tensors)
        _move(stage, target)
    return files
